"""What is asked of a model and what comes back: lengths, settings, precision, costs."""

from types import SimpleNamespace

import pytest
import torch

import difflm
from difflm.controls import Length
from difflm.data.tokenizers import Bpe
from difflm.data.words import split_words
from difflm.diffusion.noise import Noise
from difflm.errors import UsageError
from difflm.generation.checks import check_device, check_dtype
from difflm.generation.loops import LoopShape
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.scheduler import Scheduler
from difflm.machine import is_on
from difflm.methods import TextSpec
from difflm.methods.difflm import DiffLM
from difflm.models.batching import GPU_BATCH, max_batch_rows, pad_batch, plan_batches

METHODS = ["difflm", "diffusion-lm", "autoregressive", "mdlm", "block-diffusion"]


@pytest.fixture(scope="module")
def models(tiny_runs):
    return {method: TextDiffusion.from_pretrained(tiny_runs[method]) for method in METHODS}


def settings(method):
    return {} if method == "autoregressive" else {"steps": 3}


@pytest.mark.parametrize("length", [1, 7, 24])
def test_candidates_and_drafts_have_the_length_that_was_asked(models, length):
    lm, controls = models["difflm"], [Length(length)]
    assert {len(g.tokens) for g in lm.generate(5, controls=controls, steps=3)} == {length}
    assert len(lm.generate(1, controls=controls, steps=3, mbr=3)[0].tokens) == length
    assert all(len(draft.tokens) == length for drafts in lm.stream(2, controls=controls, steps=2) for draft in drafts)


@pytest.mark.parametrize("length", [0, -3, 25])
def test_a_length_without_room_is_refused_at_every_door(models, length):
    for ask in (models["difflm"].generate, lambda **asked: next(models["difflm"].stream(**asked))):
        with pytest.raises(UsageError, match="between 1 and 24"):
            ask(controls=[Length(length)])


def test_room_is_what_encode_accepts(models):
    assert {method: lm.model.max_words for method, lm in models.items()} == {
        "difflm": 24,
        "diffusion-lm": 22,
        "autoregressive": 24,
        "mdlm": 24,
        "block-diffusion": 512,
    }
    for lm in models.values():
        assert len(lm.encode(["pub " * lm.model.max_words])[0]) == lm.model.max_words
        with pytest.raises(UsageError, match=f"reads at most {lm.model.max_words}"):
            lm.encode(["pub " * (lm.model.max_words + 1)])


@pytest.mark.parametrize("method", [pytest.param(METHODS[0], marks=pytest.mark.long), *METHODS[1:]])
@pytest.mark.native
def test_half_width_arithmetic_writes_and_scores(models, tiny_runs, method):
    """bfloat16 has eight bits: a text's nats agree to a few percent, and the weights stay as they were."""
    half = TextDiffusion.from_pretrained(tiny_runs[method], dtype=torch.bfloat16)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    assert all(g.text for g in half.generate(2, **settings(method)))
    text = ["The old pub near the river serves French food."]
    full, narrow = models[method].score(text)[0], half.score(text)[0]
    assert narrow != full and narrow == pytest.approx(full, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.native
def test_half_width_arithmetic_leaves_that_of_others_as_it_was(tiny_runs, method):
    """On ARM without bfloat16, torch gives oneDNN up for the whole process at the first such product."""
    x, weight, bias = torch.randn(192, 32), torch.randn(96, 32), torch.randn(96)
    enabled = torch._C._get_mkldnn_enabled()
    before = torch.nn.functional.linear(x, weight, bias)
    half = TextDiffusion.from_pretrained(tiny_runs[method], dtype=torch.bfloat16)
    half.generate(5, **settings(method))
    half.score(["The old pub serves French food."])
    assert torch._C._get_mkldnn_enabled() == enabled
    assert torch.equal(torch.nn.functional.linear(x, weight, bias), before)


def test_arithmetic_that_a_device_lacks_is_refused():
    for dtype in (torch.float16, torch.float64, torch.int16):
        with pytest.raises(UsageError, match="bfloat16"):
            check_dtype(dtype, torch.device("cpu"))
    check_dtype(torch.float16, torch.device("cuda"))


def test_devices():
    assert check_device("auto").type == ("cuda" if is_on("gpu") else "cpu")
    for device in ("mps", "meta"):
        with pytest.raises(UsageError, match="cpu"):
            check_device(device)


def test_a_misspelt_setting_is_named_with_its_neighbour(models):
    with pytest.raises(UsageError, match=r"'stepz'\. Did you mean 'steps'"):
        models["difflm"].generate(stepz=3)
    with pytest.raises(UsageError, match="Known: sampler"):
        models["difflm"].generate(qqqq=3)
    with pytest.raises(UsageError, match=r"'visual'\. Known: sampler"):  # not an argument that only the command gives
        models["difflm"].generate(visual=3)


def test_a_sampler_of_another_family_is_refused(models):
    with pytest.raises(UsageError, match="Known: autoregressive"):
        models["autoregressive"].generate(sampler="ddim")
    with pytest.raises(UsageError, match="Known: ancestral"):
        models["difflm"].generate(sampler="autoregressive")
    with pytest.raises(UsageError, match="temperature"):
        models["difflm"].generate(temperature=0)
    for setting in ({"top_k": 5}, {"beams": 4}, {"length_penalty": 1.0}):
        with pytest.raises(UsageError, match="is for autoregressive models"):
            models["difflm"].generate(**setting)


def test_the_cost_of_a_text_is_its_own(models):
    texts = models["autoregressive"].generate(6, seed=2)
    assert [g.denoiser_calls for g in texts] == [min(len(g.tokens) + 1, 24) for g in texts]
    assert models["difflm"].generate(steps=3, sampler="heun")[0].denoiser_calls == 6
    assert models["difflm"].generate(steps=3, mbr=5)[0].denoiser_calls == 15


def test_the_clock_of_a_chosen_text_counts_all_candidates(models, monkeypatch):
    """Ticks of a clock that moves by one at every look: a tile takes one, nine candidates of a length are three,
    and the choice takes another."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("difflm.generation.loops.time.perf_counter", lambda: next(ticks))
    assert models["difflm"].generate(steps=2, mbr=9, controls=[Length(5)])[0].seconds == 4


def test_drafts_end_as_the_text(models):
    for method, lm in models.items():
        *_, last = lm.stream(3, seed=4, **settings(method))
        numbers = {draft.sample: [word for word in draft.tokens if word] for draft in last}
        written = lm.generate(3, seed=4, **settings(method))
        if method != "autoregressive":
            assert all(numbers[k] == written[k].tokens for k in numbers)
        assert all(len(d.tokens) == len(d.confidence) == len(d.changed) for d in last)
        assert all(0 <= p <= 1 + 1e-6 for d in last for p in d.confidence)


def test_words_of_a_byte_pair_text_are_those_of_its_print():
    pieces = Bpe.build(["The old pub near Café Sicilia"] * 3, 300)
    model = DiffLM(hidden=16, layers=1, heads=2, embedding_dim=16).build(TextSpec(pieces.size, 80))
    for g in TextDiffusion(model, pieces, {"method": "difflm"}).generate(2, steps=2):
        assert g.tokens == split_words(g.text)


def test_looking_at_a_frame_leaves_gradients_on(models):
    lm = models["difflm"]
    tile = pad_batch(lm.make_job(1).make_rows(lm.model), 32, lm.device)
    noise, sampling = Noise(tile.seeds, tile.samples), lm.sampling(steps=2)
    for frame in lm.inference.stream(noise, tile.lengths, tile.width, sampling):
        assert torch.is_grad_enabled() and not frame.confidence.requires_grad


class FakeLoop:
    """One batch of a GPU after the other: each step finishes one, whose words are copied, or has drafts at once."""

    only, shape, freed, taken, joining, steps_left = None, LoopShape("a", 16, 1, False), 0, 1, (), 1

    def __init__(self, made, batches):
        self.made, self.batches, self.seats = made, batches, [True]

    def step(self):
        batch = next(self.batches, None)
        if batch is None:
            self.seats = []
            return None
        self.made.append(batch)
        name, at_once = batch
        return SimpleNamespace(name=name, copied=None if at_once else "copied")


def read_in_turn(batches):
    """The names of what is read, each with all that was under way by then."""
    made, scheduler = [], Scheduler()
    scheduler.loops.append(FakeLoop(made, iter(batches)))
    return [(found.name, len(made)) for found in scheduler.work(lambda: False, step=FakeLoop.step)]


def test_words_are_read_while_the_next_batch_is_made():
    assert read_in_turn([("a", False), ("b", False), ("c", False)]) == [("a", 2), ("b", 3), ("c", 3)]
    assert read_in_turn([]) == []


def test_what_is_read_at_once_does_not_wait_for_the_next_batch():
    made = [("drafts", True), ("a", False), ("b", True), ("c", False)]
    assert read_in_turn(made) == [("drafts", 1), ("a", 3), ("b", 3), ("c", 4)]


def test_what_is_there_is_read_where_the_next_batch_fails():
    scheduler, batches = Scheduler(), ((1 // (2 - k), False) for k in range(3))
    scheduler.loops.append(FakeLoop([], batches))
    late = scheduler.work(lambda: False, step=FakeLoop.step)
    assert [next(late).name, next(late).name] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(late)


def test_tiles_on_a_gpu_fit_their_logits():
    """Two GiB of float32 logits at most, unless sixteen texts need more."""
    assert max_batch_rows(821, 64, "cuda") == GPU_BATCH
    assert 1.9 * 2**30 < max_batch_rows(50_000, 128, "cuda") * 128 * 50_000 * 4 <= 2**31
    assert max_batch_rows(50_000, 4096, "cuda") == 16


def test_what_the_package_shows():
    assert {"DifflmError", "Draft", "Generation", "TextDiffusion", "UsageError"} <= set(difflm.__all__)
    assert all(getattr(difflm, name) for name in difflm.__all__)
    assert issubclass(difflm.UsageError, difflm.DifflmError)


def test_candidates_of_64_sources_share_one_batch_of_a_gpu():
    """Whatever their lengths, so that steps are captured for few sizes; twice as many are batches of similar width."""
    widths = [16 * (1 + k % 3) for k in range(4 * 64)]
    ((chosen, width),) = plan_batches(widths, 6000)
    assert chosen == [*range(len(widths))] and width == 48
    assert len(plan_batches(widths * 2, 6000)) > 1
