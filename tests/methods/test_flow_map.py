"""Flow maps: one jump against the flow itself, by an exact denoiser; jumps that learn from shorter ones."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from difflm.app.cli import main
from difflm.data.batches import Batch
from difflm.diffusion.base import Network, StepState
from difflm.diffusion.denoiser import Denoiser, SelfConditioning, autocast_to
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes.gaussian import Cosine, LogSnrShift
from difflm.diffusion.samplers.loop import BoundDenoiser, Sampler, SamplerInputs
from difflm.diffusion.samplers.steps import euler, heun
from difflm.diffusion.timesteps import LowDiscrepancy
from difflm.fast.inference import Inference
from difflm.machine import avoid_onednn
from difflm.methods import TextSpec
from difflm.methods.flow_map import (
    FlowMap,
    FlowMapModel,
    JumpDenoiser,
    JumpLevels,
    Mapped,
    TwoJumps,
    draw_jumps,
    first_share,
    jump_levels,
)
from difflm.models.base import Sampling
from difflm.models.lengths import DrawnLength
from difflm.training.run import load_run
from tests.support.oracles import JOINT, ExactDenoiser, frequencies, sphere, total_variation
from tests.support.recorded import Strict, assert_alike, build_model, write_frames
from tests.support.tiny import assert_resumed_to_the_bit

PROCESS = Mapped(LogSnrShift(Cosine(), -3.0))
MASK = torch.ones(1, 2, dtype=torch.bool)
SMALL = {"hidden": 32, "layers": 2, "heads": 2, "dropout": 0.0, "embedding_dim": 16}


class ExactMap(ExactDenoiser):
    """The belief of a jump by the definition: the mean of all beliefs along the flow by k = α/σ, which many small steps
    follow; of one time, that of the exact denoiser."""

    steps = 100

    def walk(self, x, t, s):
        """Where the flow leads from t to s, and the mean of what was believed on the way (trapezoids in k)."""
        times = t + (s - t) * torch.linspace(0, 1, self.steps + 1).unsqueeze(1)
        levels, told = self.process.at(times), super().forward
        k, shares = (levels.log_snr / 2).exp(), []
        for i in range(self.steps):
            belief = told(x, levels[i])
            shares.append(belief.shares)
            x = heun(StepState(self.process, x, belief, levels[i], levels[i + 1], torch.Tensor, ask=told))
        shares.append(told(x, levels[-1]).shares)
        width, ends = k.diff(dim=0), torch.stack(shares)
        mean = (width[:, :, None, None] * (ends[1:] + ends[:-1]) / 2).sum(0) / width.sum(0)[:, None, None]
        return x, mean

    def forward(self, x, t, mask=None, condition=None, previous=None):
        exact = super().forward(x, t)
        if not isinstance(t, JumpLevels):
            return exact
        s = t.t - t.told[:, 0, 1]
        mean = self.walk(x, t.t, s)[1]
        return exact.with_logits(torch.where((s < t.t)[:, None, None], mean.clamp(min=1e-30).log(), exact.logits))


def noisy(n, t=1.0):
    return Noise(0, torch.arange(n)).normal(0, 2, 8), PROCESS.at(torch.full((n,), t))


# -- the map ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begin", "end"), [(1.0, 0.0), (0.6, 0.3)])
def test_one_jump_lands_where_the_flow_does(begin, end):
    """To what a hundred steps of the walk leave; one ordinary step is off by twenty times as much at least."""
    exact, (x, t) = ExactMap(PROCESS), noisy(16, begin)
    s = PROCESS.at(torch.full((16,), end))
    there, _ = exact.walk(x, t.t, s.t)
    reached = euler(StepState(PROCESS, x, exact(x, jump_levels(t, s.t)), t, s, lambda: x))
    plain = euler(StepState(PROCESS, x, exact(x, t), t, s, lambda: x))
    assert (plain - there).abs().max() > 0.1
    assert (reached - there).abs().max() < 5e-3


@pytest.mark.parametrize(("begin", "middle", "end"), [(1.0, 0.5, 0.0), (0.9, 0.6, 0.2)])
def test_two_jumps_make_one(begin, middle, end):
    exact, (x, t) = ExactMap(PROCESS), noisy(16, begin)
    u, s = (PROCESS.at(torch.full((16,), time)) for time in (middle, end))
    assert ((first_share(t, u, s) > 0) & (first_share(t, u, s) < 1)).all()
    two = TwoJumps(PROCESS, t, u, s, torch.zeros(16, dtype=torch.bool))
    shares = two.shares(BoundDenoiser(exact, MASK.expand(16, 2)), x, None)
    assert torch.allclose(shares.sum(-1), torch.ones(16, 2), atol=1e-5)
    assert (shares - exact(x, jump_levels(t, s.t)).shares).abs().max() < 5e-3


def test_the_shortest_jumps_follow_the_flow_itself():
    """Their halves are believed at one time, at the temperature of the path; longer ones are not."""
    exact, (x, t) = ExactMap(PROCESS), noisy(4, 0.5)
    u, s, asked = PROCESS.at(t.t - 0.02), PROCESS.at(t.t - 0.04), []

    def ask(x, level, previous):
        asked.append((level.told[:, 0, 1], previous))
        return ExactDenoiser.forward(exact, x, level)

    fine = torch.tensor([True, False, True, False])
    plain, calm = (TwoJumps(PROCESS, t, u, s, fine, one).shares(ask, x, x) for one in (1.0, 0.5))
    for lengths, previous in asked:
        assert torch.equal(lengths == 0, fine) and previous is not None
    assert torch.equal(plain[~fine], calm[~fine]) and (plain[fine].amax(-1) < calm[fine].amax(-1)).all()


@pytest.mark.parametrize("jumps", [1, pytest.param(2, marks=pytest.mark.long)])
def test_few_jumps_draw_from_the_joint(jumps):
    """By the real loop: one belief a jump, the likeliest words of the last, and both words agree as they should. Of
    4,000 draws, exact ones are 0.016 off in the mean."""
    n, exact = 4000, ExactMap(PROCESS)
    exact.steps = 40
    grid, counter = torch.linspace(1, 0, jumps + 1).unsqueeze(1).expand(-1, n), torch.zeros(1, dtype=torch.int64)
    mask, noise = MASK.expand(n, 2), Noise(0, torch.arange(n))
    denoise = JumpDenoiser(BoundDenoiser(exact, mask), grid, counter, True)
    *_, last = SamplerInputs(denoise, PROCESS, grid, Sampler(euler), noise, mask, (2, 8), step_counter=counter).frames()
    assert total_variation(frequencies(last.tokens), JOINT) < 0.04
    plain = SamplerInputs(BoundDenoiser(exact, mask), PROCESS, grid, Sampler(euler), noise, mask, (2, 8))
    *_, last = plain.frames()
    assert total_variation(frequencies(last.tokens), JOINT) > 0.15


def test_jumps_are_drawn_of_all_lengths():
    begin, length = draw_jumps(Noise(0, torch.arange(6000)).uniform(0, 2))
    assert (begin <= 1).all() and (begin - length >= -1e-6).all() and length.min() > 2**-5 - 1e-6
    for share in ((length == 1), (length < 0.0625)):
        assert abs(float(share.float().mean()) - 1 / 6) < 0.02
    assert (begin[length < 1] == 1).float().mean() > 0.1 < (begin == length)[length < 1].float().mean()


# -- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_map_begins_as_the_model_that_it_begins_with(tiny_runs, tmp_path):
    """All its words, weights and sizes; however long a jump is said to be, it believes what the other does, and it
    keeps the words."""
    teacher, out = tiny_runs["difflm"], tmp_path / "out"
    short = ["steps=2", "batch_size=8", "warmup=0", "lr=1e-9", "widths=[]"]
    data = f"data={teacher.parent / 'grammar.txt'}"
    assert main(["train", "e2e-flow-map", f"init={teacher}", data, *short, "--out", str(out)]) == 0
    (one, _, ours), (other, _, theirs) = load_run(out), load_run(teacher)
    assert ours["method"] == "flow-map" and ours["model"].items() >= {**theirs["model"], "dropout": 0.0}.items()
    assert torch.equal(one.denoiser.codec.table(), other.denoiser.codec.table())
    x, level = torch.randn(3, 5, 16), one.process.at(torch.tensor([0.9, 0.5, 0.1]))
    for asked in (level, jump_levels(level, level.t / 2)):
        assert torch.allclose(one.denoiser(x, asked).logits, other.denoiser(x, level).logits, atol=1e-4)
    assert (one.sampling.sampler, one.sampling.steps, one.capabilities.likelihood) == ("jump", 4, "bound")


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{}, {"remembers": False, "path_temperature": 0.9}])
def test_gradients_reach_what_is_learned(changes, narrow):
    torch.manual_seed(0)
    model = FlowMap(**SMALL, **changes).build(TextSpec(30, 12))
    for layer in (model.denoiser.network.head, *(block.modulation for block in model.denoiser.network.blocks)):
        nn.init.normal_(layer.weight)  # which else begin with zeros
    batch = Batch(ids=torch.randint(4, 30, (8, 12)), lengths=torch.randint(3, 13, (8,)))
    dtype = torch.bfloat16 if narrow else None
    with avoid_onednn(torch.device("cpu"), dtype):
        with autocast_to(torch.device("cpu"), dtype):
            losses = model(batch)
        losses.total.backward()
    assert {"ce", "jump_ce", "warp"} <= losses.terms.keys() and torch.isfinite(losses.total)
    network = model.denoiser.network
    for weight in (network.embed_time.length[2].weight, network.head.weight, model.times.time_widths):
        assert weight.grad is not None and weight.grad.abs().sum() > 0


@pytest.mark.parametrize("fault", ["context=0.5", "behind=0.2"])
def test_a_map_refuses_what_it_cannot_learn(fault, tmp_path, capsys):
    (tmp_path / "my.txt").write_text("The old pub\n" * 9)
    argv = ["train", "own-text", "method=flow-map", f"data={tmp_path}/my.txt", f"model.{fault}"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 2
    assert "a flow map has one time" in capsys.readouterr().err


@pytest.mark.long
def test_resuming_a_map_repeats_to_the_bit(tiny_runs, tmp_path, monkeypatch):
    data = f"data={tiny_runs['difflm'].parent / 'grammar.txt'}"
    short = ["steps=4", "batch_size=8", "warmup=0", "save_every=2", "validate_every=2", "widths=[]"]
    assert_resumed_to_the_bit(
        ["train", "e2e-flow-map", f"init={tiny_runs['difflm']}", data, *short], 3, tmp_path, monkeypatch
    )


@pytest.mark.long
def test_recorded_jumps_are_those_of_the_plain_loop(monkeypatch):
    """A second batch is written by what the first one recorded, and nothing on the way asks the device."""
    monkeypatch.setattr("difflm.fast.recorded.CapturedFunction", Strict)
    inference = Inference(build_model("flow-map"))
    for seed in (3, 4):
        made, plain = (write_frames(inference, record, seed) for record in (True, False))
        assert_alike(made, plain)
    assert len(inference._recorded.idle) == 1
    assert not torch.equal(made[0].state, write_frames(inference, False, 4, sampler="ddim")[0].state)


@pytest.mark.long
def test_the_benchmark_trains_and_goes_on_where_it_stopped(tiny_runs, tmp_path):
    """Pairs and a student, in processes of their own; a row for each number of steps and level of variety."""
    benchmark = pytest.importorskip("benchmarks.assets.flow_map", reason="run from the repository's root")
    teacher, root = tiny_runs["difflm"], Path(benchmark.__file__).parents[2]
    argv = ["--out", str(tmp_path), "--device", "cpu", "--teacher", str(teacher), "--only", "map-coupled"]
    argv += ["--minutes", "0.02", "--pairs", "40", "--samples", "20", "--at", "1,2", "--levels", "1,0.8:0.9"]
    argv += ["batch_size=8", "warmup=0", "widths=[]"]
    subprocess.run([sys.executable, "-m", "benchmarks.assets.flow_map", *argv], cwd=root, check=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {(row["model"], row["sampler"]) for row in rows} == {("map-coupled", "jump")} and len(rows) == 4
    assert {(row["temperature"], row["noise_temperature"]) for row in rows} == {(1.0, 1.0), (0.8, 0.9)}
    benchmark.main(argv)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 4


def test_models_are_compared_where_they_are_equally_varied():
    benchmark = pytest.importorskip("benchmarks.assets.flow_map", reason="run from the repository's root")
    rows = [{"distinct_4": d, "judge_nats_per_token": j} for d, j in ((0.4, 1.0), (0.6, 2.0), (0.5, 1.4))]
    assert benchmark.judge_at(rows, 0.45) == pytest.approx(1.2)
    assert benchmark.judge_at(rows, 0.3) is None is benchmark.judge_at(rows, 0.7)


# -- learning ---------------------------------------------------------------------------------------------------------


class TwoTimes(Network):
    """A network of two words, told a time, or a time and the length of a jump."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (2 * 24 + 4, 128, 128, 6)
        first, second, third = (nn.Linear(*pair) for pair in pairwise(sizes))
        self.layers = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), third)

    def forward(self, inputs, t, mask=None):
        told = t.squeeze(1) if t.dim() == 3 else torch.stack([t, torch.zeros_like(t)], -1)
        return self.layers(torch.cat([inputs.flatten(1), told, told.sqrt()], -1)).view(-1, 2, 3)


@pytest.mark.long
def test_one_jump_learns_to_draw_from_the_joint():
    """Words that depend on each other, of a known joint: one ordinary step writes the likeliest of each alone. One jump
    draws both, after 300 updates on draws from the joint, as well as 32 ordinary steps of the same network."""
    torch.manual_seed(0)
    lengths = DrawnLength(2)
    lengths.forbidden = ()  # the joint's words have the numbers of PAD and others
    denoiser = Denoiser(TwoTimes(), sphere(), PROCESS, self_conditioning=SelfConditioning())
    parts = {"objective": Objective({"ce": 1.0}), "times": LowDiscrepancy(), "lengths": lengths}
    model = FlowMapModel(denoiser, **parts, sampling=Sampling("jump", steps=1))
    optimiser = torch.optim.Adam(model.denoiser.network.parameters(), lr=3e-3)
    for update in range(300):
        optimiser.param_groups[0]["lr"] = 3e-3 * min(1, (300 - update) / 200)
        cell = torch.multinomial(JOINT.flatten().float(), 256, replacement=True)
        losses = model(Batch(ids=torch.stack([cell // 3, cell % 3], 1), lengths=torch.full((256,), 2)))
        optimiser.zero_grad()
        (losses.total / losses.count).backward()
        optimiser.step()

    def distance(sampler, steps):
        sampling = model.sampling.change({"sampler": sampler, "steps": steps})
        *_, last = model.eval().stream(Noise(1, torch.arange(4000)), torch.full((4000,), 2), 2, sampling)
        return total_variation(frequencies(last.tokens), JOINT)

    one, many, plain = distance("jump", 1), distance("ddim", 32), distance("ddim", 1)
    print(f"one jump {one:.3f}, 32 ordinary steps {many:.3f}, one {plain:.3f}")
    assert one < 0.15 and one < many + 0.03 and plain > 0.3
