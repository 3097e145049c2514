"""What is recorded does what it did: on a CPU by being called, on a GPU by being replayed."""

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._inductor import metrics

from difflm import machine
from difflm.controls import Label, Length
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import SamplerInputs, Steering
from difflm.fast.cuda_graphs import (
    WARMUP_CALLS,
    CapturedCalls,
    CapturedFunction,
    Capturing,
    GraphPool,
    exclusive_capture,
)
from difflm.fast.inference import MAX_RECORDED
from difflm.fast.recorded import RecordedSampler
from difflm.generation.pipeline import TextDiffusion
from difflm.models.base import TextBatch
from difflm.models.batching import pad_batch


def counted(device: torch.device, calls: int) -> list[float]:
    total = torch.zeros(3, device=device)
    work = CapturedFunction(lambda: total.add_(1).mul_(2), device)  # type: ignore[func-returns-value]
    for _ in range(calls):
        work()
    return total.tolist()


@pytest.mark.parametrize("calls", [1, WARMUP_CALLS, WARMUP_CALLS + 1, WARMUP_CALLS + 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_call_does_the_work_once(device: str, calls: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    expected = 2.0 ** (calls + 1) - 2
    assert counted(torch.device(device), calls) == [expected] * 3


def test_a_captured_call_inside_another_capture_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph cannot be replayed while another is being captured: `diffusion-nat` encodes its source within a step."""
    layer = torch.nn.Linear(3, 3)
    calls, x = CapturedCalls(layer), torch.randn(2, 3)
    monkeypatch.setattr("difflm.fast.cuda_graphs.is_capturing", lambda: True)
    assert torch.equal(calls(x), layer(x)) and not calls.pool.idle
    monkeypatch.undo()
    assert torch.equal(calls(x), layer(x)) and calls.pool.idle


class Thing(Capturing):
    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False

    def close(self) -> None:
        self.closed = True


def test_a_shelf_lends_what_it_has_and_closes_what_it_lets_go() -> None:
    shelf: GraphPool[Thing] = GraphPool(2)
    made: dict[str, Thing] = {}
    for kind in ("a", "b", "a", "c"):
        with shelf.acquire(kind, lambda kind=kind: made.setdefault(kind, Thing(kind))) as thing:  # type: ignore[misc]
            assert thing.name == kind and not thing.closed
            assert shelf.latest is not thing  # which is in use
        assert shelf.latest is thing
    assert {kind: thing.closed for kind, thing in made.items()} == {"a": False, "b": True, "c": False}
    with pytest.raises(ValueError), shelf.acquire("a", lambda: Thing("another")) as thing:
        raise ValueError
    assert thing is made["a"] and thing.closed  # who knows where it stopped
    shelf.clear()
    assert made["c"].closed and shelf.latest is None


@pytest.mark.parametrize("method", ["difflm", "autoregressive"])
def test_a_model_forgets_what_it_recorded_and_writes_the_same(tiny_runs, method) -> None:
    lm = TextDiffusion.from_pretrained(tiny_runs[method], "cuda" if torch.cuda.is_available() else "cpu")
    lm.inference.record = True
    pool = lm.inference._recorded if method == "difflm" else lm.inference._decoders
    first = [text.text for text in lm.generate(3)]
    assert pool.idle
    lm.inference.clear_recorded()
    assert not pool.idle and [text.text for text in lm.generate(3)] == first


def test_nothing_is_collected_while_something_is_recorded() -> None:
    with exclusive_capture():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError), exclusive_capture():
        raise ValueError
    assert gc.isenabled()


@pytest.mark.long
def test_more_kinds_of_requests_than_are_kept_write_what_they_write_alone(tiny_runs) -> None:
    """Recordings that are let go take nothing with them."""
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], "cuda" if torch.cuda.is_available() else "cpu")
    lm.inference.record = True
    first = [lm.generate(2, steps=steps, seed=1) for steps in range(2, MAX_RECORDED + 5)]
    again = [lm.generate(2, steps=steps, seed=1) for steps in range(2, MAX_RECORDED + 5)]
    assert [[one.text for one in texts] for texts in first] == [[one.text for one in texts] for texts in again]


# -- a step compiled as one --------------------------------------------------------------------------------------------


def walk_of(lm: TextDiffusion, seed: int, **asked: Any) -> SamplerInputs:
    """The sampler inputs of the only batch of a request."""
    job = lm.make_job(2, seed, **{"steps": 4, **asked})
    rows = job.make_rows(lm.model)
    batch = pad_batch(rows, rows[0].layout.width, lm.device)
    plan, parts = job.plan, [(job.plan, slice(0, len(batch.lengths)))]
    steering = replace(plan.steer(batch, parts) if plan else Steering(batch.known, batch.begin), spans=batch.spans)
    noise = Noise(batch.seeds, batch.samples)
    asked = TextBatch(noise, batch.lengths, batch.width, job.sampling, steering)
    return lm.model.sampler_inputs(lm.inference.denoiser, asked)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.long
@pytest.mark.parametrize("how", ["guided", "free", "drawn"])
@torch.no_grad()
def test_a_step_compiled_as_one_writes_the_same_words(tiny_runs, guide, how, backend, monkeypatch):
    """Also gradients inside it, and a second walk poured into the first one's tensors. What is written down runs as it
    is, or, which takes a minute, by kernels of its own. Only GPUs compile steps, and nothing is packed there."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(machine, "_turned", {"packed_weights": False})
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], dtype=torch.float32).guided_by(guide)
    lm.model.eval()
    food = lm.labellings["food"].values[1]
    controls = [Length(9), *([Label("food", food)] if how == "guided" else [])]
    asked: dict[str, Any] = {"controls": controls, "draw": how == "drawn"}
    metrics.reset()
    compiled = RecordedSampler(walk_of(lm, 1, **asked), compiled=True)
    for seed in (1, 2):  # a walk is run once: its frames resize its counter
        plain, fused = (list(run.frames(walk_of(lm, seed, **asked))) for run in (SamplerInputs, compiled))
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(plain, fused, strict=True))
        for a, b in zip(plain, fused, strict=True):
            assert torch.allclose(a.confidence, b.confidence, atol=1e-4)
            assert a.state is not None and b.state is not None and torch.allclose(a.state, b.state, atol=1e-3)
    print(f"  {metrics.generated_kernel_count} kernels beside matrix products")


@pytest.mark.long
def test_a_text_of_one_step_compiles(tiny_runs, monkeypatch):
    """A step is run before it is traced, and there is no level behind the last."""
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], dtype=torch.float32)
    lm.model.eval()
    with torch.no_grad():
        (plain,), walk = walk_of(lm, 1, steps=1).frames(), walk_of(lm, 1, steps=1)
        (traced,) = RecordedSampler(walk, compiled=True).frames(walk)
    assert plain.state is not None and traced.state is not None
    assert torch.equal(plain.tokens, traced.tokens) and torch.equal(plain.state, traced.state)
