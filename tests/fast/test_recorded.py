"""A step that is recorded and replayed gives the texts of one that is not.

On a CPU nothing is recorded, but the walk is the same one over tensors that stay where they are, so that it must agree
to the bit; on a GPU the step is really replayed."""

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from difflm.controls import Avoid, Contains, Field, Infill, Label, Length, Span, Tags, Tree
from difflm.controls.gaps import Edit
from difflm.controls.guidance import ORIGINAL, GuidanceSettings
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Frame, Steering
from difflm.diffusion.samplers.steps import STEPS
from difflm.diffusion.timesteps import StepSpan
from difflm.fast.cuda_graphs import capture_key
from difflm.fast.inference import Inference, PaddedLinear, remember_times
from difflm.generation.jobs import GenerationJob
from difflm.generation.loops import Progress, Seat, loop_shape
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.scheduler import Request, Scheduler
from difflm.machine import turn
from difflm.models.base import Sampling
from difflm.models.batching import (
    CPU_BATCH,
    GUIDED_BATCH,
    Layout,
    Row,
    batch_rows,
    fill_with_narrower,
    max_batch_rows,
    pad_batch,
    plan_batches,
)
from difflm.runtime.tensors import module_tensors, submodules
from tests.support.recorded import DEVICES, Strict, assert_alike

SETTINGS: list[dict[str, Any]] = [
    *({"sampler": name} for name in STEPS),
    {"draw": True},
    {"sampler": "ddim", "told_time": 0.9},
    {"stop_at": 0.25},
    {"clamp": True, "clamp_below": 0.7},
    {"temperature": 0.7, "noise_temperature": 0.5, "noise_top_p": 0.9},
    {"steps": 1},
    {"steps": 2, "sampler": "dpm-solver"},
]


@pytest.fixture(scope="module", params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=["difflm", "diffusion-lm"])
def lm(request, device, tiny_runs) -> TextDiffusion:
    return TextDiffusion.from_pretrained(tiny_runs[request.param], device, torch.float32)


def walked(lm: TextDiffusion, records: bool, seed: int = 3, steering: Steering | None = None, **more) -> list[Frame]:
    lm.inference.record = records
    device = lm.device
    noise = Noise(torch.full((5,), seed, device=device), torch.arange(5, device=device))
    lengths = torch.tensor([3, 9, 16, 24, 24], device=device)
    if lm.config["method"] == "diffusion-lm":
        lengths = torch.full_like(lengths, 24)
    with torch.no_grad():
        return list(lm.inference.stream(noise, lengths, 24, Sampling(**{"steps": 6, **more}), steering))


@pytest.mark.parametrize("more", SETTINGS, ids=str)
def test_recorded_frames_are_those_of_the_plain_loop(lm, more):
    if "temperature" in more and not lm.model.capabilities.predicts_words:
        pytest.skip("it does not predict words")
    assert_alike(walked(lm, True, **more), walked(lm, False, **more))
    assert_alike(walked(lm, True, seed=4, **more), walked(lm, False, seed=4, **more))


def test_rows_of_their_own_ways(lm):
    for ways in (
        [StepSpan(6), StepSpan(2), StepSpan(6), StepSpan(4), StepSpan(5)],
        [StepSpan(1), StepSpan(6), StepSpan(3), StepSpan(3), StepSpan(2)],
    ):
        assert_alike(*(walked(lm, records, steering=Steering(spans=ways)) for records in (True, False)))


def test_known_words_and_texts_to_begin_with(lm):
    device = lm.device
    for shift in (0, 1):  # the second walk takes up what the first recorded
        known, begin = torch.full((5, 24), -1, device=device), torch.full((5, 24), 7 + shift, device=device)
        known[:, 1 + shift], known[2, 5] = 9, 6 + shift
        ways = [StepSpan(5, 0.5)] * 5
        for steering in (Steering(known), Steering(known, begin, ways)):
            assert_alike(*(walked(lm, records, steering=steering) for records in (True, False)))


def test_frames_are_their_own(lm):
    """A frame that is looked at late tells what it would have told at once."""
    lm.inference.record = True
    noise = Noise(torch.zeros(2, dtype=torch.int64, device=lm.device), torch.arange(2, device=lm.device))
    lengths = torch.full((2,), 24, device=lm.device)
    kept: list[tuple[Frame, list[torch.Tensor]]] = []
    for _ in range(2):
        with torch.no_grad():
            for frame in lm.inference.stream(noise, lengths, 24, Sampling(steps=5)):
                assert frame.state is not None
                at_once = [v.clone() for v in (frame.tokens, frame.confidence, frame.mask, frame.t, frame.state)]
                kept.append((frame, at_once))
        noise = Noise(noise.seed + 1, noise.samples)
        lengths = lengths - 3 if lm.config["method"] == "difflm" else lengths
    for frame, at_once in kept:
        late = (frame.tokens, frame.confidence, frame.mask, frame.t, frame.state)
        assert all(torch.equal(a, b) for a, b in zip(at_once, late, strict=True))


def test_frames_that_nobody_looks_at_change_nothing(lm):
    """Those that somebody looks at are the same, and still their own when the walk is over."""
    known = torch.full((5, 24), -1, device=lm.device)
    known[:, 2] = 9
    for steering in (Steering(), Steering(known)):
        every = walked(lm, True, steering=steering)
        some = walked(lm, True, steering=replace(steering, watched_steps={2}))
        assert [frame.step for frame in some] == [frame.step for frame in every] == list(range(6))
        for step in (2, 5):
            assert torch.equal(some[step].tokens, every[step].tokens) and torch.equal(some[step].t, every[step].t)
            assert torch.equal(some[step].confidence, every[step].confidence)
            assert torch.equal(some[step].state, every[step].state)


def test_a_request_looks_at_the_ends_of_its_texts_alone(lm, monkeypatch):
    lm.inference.record = True
    stream, asked = lm.inference.stream, []

    def noted(noise, lengths, width, sampling, steering):
        asked.append(steering.watched_steps)
        return stream(noise, lengths, width, sampling, steering)

    monkeypatch.setattr(lm.inference, "stream", noted)
    alone = [str(lm.generate(1, seed=seed, steps=steps)[0]) for seed, steps in ((1, 6), (2, 3))]
    shared = dict(lm.run_jobs([lm.make_job(1, 1, steps=6), lm.make_job(1, 2, steps=3)]))
    watched = [drafts[0].step for drafts in lm.stream(1, seed=1, steps=6)]
    assert [str(shared[k][0]) for k in range(2)] == alone and watched == list(range(6))
    assert asked[:2] == [{5}, {2}] and asked[2] == {5, 2} and asked[-1] is None


def test_walks_side_by_side_and_walks_that_are_left(lm):
    lm.inference.record = True
    alone = [[d.tokens for d in drafts] for drafts in lm.stream(1, seed=5, steps=5)]
    next(lm.stream(1, seed=6, steps=5))
    one, other = lm.stream(1, seed=5, steps=5), lm.stream(1, seed=5, steps=5)
    pairs = [([d.tokens for d in a], [d.tokens for d in b]) for a, b in zip(one, other, strict=True)]
    assert pairs == [(tokens, tokens) for tokens in alone]


ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [  # requests of one shape: the second is made by what was recorded
    ({"controls": [Length(6)]}, {"controls": [Length(7)]}),
    (
        {"controls": [Contains("pub"), Avoid("the"), Length(9)]},
        {"controls": [Contains("pub"), Avoid("the"), Length(8)]},
    ),
    ({"controls": [Contains("pub"), Contains("old inn"), Length(9)]}, {"seed": 7}),
    ({"controls": [Infill("The ___:2 is ___ .")]}, {"controls": [Infill("The ___:2 near ___ .")]}),
    ({"edit": Edit("The old pub is cheap .", 0.4)}, {"edit": Edit("A red inn is small .", 0.4)}),
    ({"edit": Edit("The old pub is cheap .", 0.9, ("pub",))}, {"edit": Edit("A red inn is small .", 0.3, ("A",))}),
]


def both(lm: TextDiffusion, **asked: Any) -> Iterator[list[str]]:
    for records in (True, False):
        lm.inference.record = records
        yield [g.text for g in lm.generate(**{"n": 3, "seed": 1, "steps": 6, **asked})]


@pytest.mark.parametrize("first, second", ASKED, ids=str)
def test_controls_act_alike(lm, first, second):
    for asked in (first, {**first, **second}, first):
        recorded, plain = both(lm, **asked)
        assert recorded == plain


@pytest.mark.long
@pytest.mark.parametrize(
    "knobs", [None, ORIGINAL, GuidanceSettings(size=2.0, inner=2)], ids=["ours", "original", "twice"]
)
def test_guidance_acts_alike(device, tiny_runs, guide, knobs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32).guided_by(guide)
    values = lm.labellings["food"].values[1:3]
    for value in values:
        recorded, plain = both(lm, controls=[Label("food", value), Length(12)], guidance=knobs)
        assert recorded == plain
    assert len(lm.inference._recorded.idle) == 1, "both values are asked by one recording"


def test_several_requests_in_one_loop(device, tiny_runs, guide):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32).guided_by(guide)
    known = lm.labellings["food"].values[1:]
    found = []
    for records in (True, False):
        lm.inference.record = records
        works = [
            lm.make_job(2, 1, controls=[Label("food", known[0])], steps=6),
            lm.make_job(1, 5, steps=4),
            lm.make_job(2, 2, controls=[Contains("pub"), Length(9)], steps=3),
        ]
        made: dict[tuple[int, int], str] = {}
        for number, texts in lm.run_jobs(works):
            made |= {(number, k): g.text for k, g in texts.items()}
        found.append(made)
    assert found[0] == found[1]


# -- what recordings are found by -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    one: torch.Tensor
    other: torch.Tensor
    submodules: Sequence[slice] = ()


def test_walks_share_a_recording_where_they_differ_in_what_tensors_hold():
    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    assert capture_key(Pair(a, b)) == capture_key(Pair(b, a)) and hash(capture_key([Pair(a, b, (slice(0, 2),))]))
    assert capture_key(Pair(a, b)) != capture_key(Pair(a, b.long())) != capture_key(Pair(a, b[:1].long()))
    assert capture_key(Pair(a, b, (slice(0, 2),))) != capture_key(Pair(a, b, (slice(0, 1),)))


def test_one_tensor_in_two_places_is_not_two_tensors():
    """A recording that reads one tensor for both would lose the other."""
    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    assert capture_key(Pair(a, a)) == capture_key(Pair(b, b)) != capture_key(Pair(a, b))


FOODS = st.sampled_from(["French", "other"])
WANTED = st.one_of(
    st.builds(lambda n: {"controls": [Length(n)]}, st.integers(4, 20)),
    st.builds(lambda n, food: {"controls": [Label("food", food), Length(n)]}, st.integers(4, 20), FOODS),
    st.builds(lambda word: {"controls": [Contains(word), Avoid("the")]}, st.sampled_from(["pub", "old inn"])),
    st.builds(lambda gap: {"controls": [Infill(f"The ___{gap} is cheap .")]}, st.sampled_from(["", ":2", ":9"])),
    st.builds(lambda keep: {"edit": Edit("The old pub is cheap .", 0.5, keep)}, st.sampled_from([(), ("pub",)])),
)
MANY = st.lists(st.tuples(WANTED, st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=4)


def run_as_gpu(lm: TextDiffusion, jobs: Sequence[GenerationJob], _: object = None) -> Iterator[Progress]:
    request = Request(lm, jobs)
    request.plan(Seat(job, row) for job in jobs for row in job.make_rows(lm.model))
    return Scheduler(requests=[request]).work(lambda: False)


def test_tiles_of_a_gpu_are_written_by_what_was_recorded_before(tiny_runs, guide, monkeypatch):
    """Whatever is asked together: tiles as a GPU has them, every step as it would be recorded there."""
    monkeypatch.setattr("difflm.fast.recorded.CapturedFunction", Strict)
    monkeypatch.setattr("difflm.generation.pipeline.run_list", run_as_gpu)
    monkeypatch.setattr("difflm.models.batching.SINGLE_BATCH_POSITIONS", 128)
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], dtype=torch.float32).guided_by(guide)

    @given(MANY)
    @settings(max_examples=6)
    def written(many: list[tuple[dict[str, Any], int, int]]) -> None:
        found = []
        for records in (True, False):
            lm.inference.record = records
            works = [lm.make_job(n, seed, steps=steps, **asked) for seed, (asked, n, steps) in enumerate(many)]
            made = [(number, k, g.text) for number, texts in lm.run_jobs(works) for k, g in texts.items()]
            assert len(made) == sum(n for _, n, _ in many)
            found.append(sorted(made))
        assert found[0] == found[1]

    written()


# -- weights ---------------------------------------------------------------------------------------------------------


def test_new_weights_are_seen_at_once(device, tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32)
    for dtype in (None, torch.bfloat16):
        lm.inference.dtype = dtype
        before = next(both(lm))
        module_tensors = copy.deepcopy(lm.model.state_dict())
        with torch.no_grad():
            for weight in lm.model.denoiser.parameters():
                weight.mul_(0.5)
        recorded, plain = both(lm)
        assert recorded == plain != before
        lm.model.load_state_dict(module_tensors)
        assert next(both(lm)) == before


def halve_behind_the_back(weight: torch.Tensor) -> None:
    weight.data.mul_(0.5)  # which torch does not count as a change of the weight


def lie_elsewhere(weight: torch.Tensor) -> None:
    weight.data = weight.data * 0.5


@pytest.mark.long
@pytest.mark.parametrize("change", [halve_behind_the_back, lie_elsewhere])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("part", ["denoiser", "times"])
def test_weights_are_followed_however_they_change(device, tiny_runs, change, dtype, part):
    """Also those that bend time: where steps go is worked out by what is recorded."""
    if device == "cpu" and part == "denoiser" and change is halve_behind_the_back:
        pytest.skip("a CPU's copy follows the changes that torch counts")
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32)
    lm.inference.dtype = dtype
    with torch.no_grad():
        lm.model.times.loss_widths.copy_(torch.linspace(-9, 3, 100))
    before = [next(both(lm)) for _ in range(3)]
    for weight in getattr(lm.model, part).parameters():
        change(weight)
    recorded, plain = both(lm)
    assert recorded == plain != before[0] == before[-1]


def test_the_writer_never_drops_out(device, tiny_runs):
    """Also where a request comes in the middle of training."""
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32)
    for part in lm.model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
    for dtype in (None, torch.bfloat16):
        lm.model.eval()
        lm.inference.dtype = dtype
        before = next(both(lm))
        lm.model.train()
        assert list(both(lm)) == [before, before]


def test_parts_and_weights_are_those_that_torch_finds(device, tiny_runs):
    model = TextDiffusion.from_pretrained(tiny_runs["difflm"], device).model
    assert {*map(id, submodules(model))} == {*map(id, model.modules())}
    assert {*map(id, module_tensors(model))} == {*map(id, [*model.parameters(), *model.buffers()])}
    copied = copy.deepcopy(model)
    assert [weight.shape for weight in module_tensors(copied)] == [weight.shape for weight in module_tensors(model)]


def test_a_head_of_an_even_width_answers_the_same(monkeypatch, device, tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32)
    lm.inference.dtype = torch.bfloat16
    x, t = torch.randn(3, 8, lm.model.denoiser.codec.dim, device=device), torch.rand(3, device=device)
    found = []
    for even in (False, True):
        monkeypatch.setattr("difflm.fast.inference.is_on_gpu", lambda network, even=even: even)
        writer = Inference(lm.model, torch.bfloat16).denoiser
        assert isinstance(writer.network.head, PaddedLinear) == even
        with torch.no_grad():
            found.append(writer(x, t, torch.ones(3, 8, dtype=torch.bool, device=device)).logits)
    assert found[0].shape == found[1].shape and torch.allclose(*found, atol=0.05)


def test_a_copied_or_moved_model_does_not_write_with_old_weights(device, tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32)
    before = next(both(lm))
    lm = TextDiffusion(copy.deepcopy(lm.model), lm.tokenizer, lm.config)
    lm.inference.record = True
    assert not lm.inference._recorded.idle
    with torch.no_grad():
        lm.model.denoiser.codec.raw.add_(torch.randn_like(lm.model.denoiser.codec.raw))
    recorded, plain = both(lm)
    assert recorded == plain != before
    lm.model.denoiser = lm.model.denoiser.to("cpu").to(device)
    assert list(both(lm)) == [recorded, plain]


def test_the_writer_is_no_part_of_the_model(device, tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32)
    names = set(lm.model.state_dict())
    lm.inference.dtype = torch.bfloat16
    next(both(lm))
    assert set(lm.model.state_dict()) == names
    assert all(weight.dtype is torch.float32 for weight in lm.model.parameters())
    assert sum(weight.requires_grad for weight in lm.inference.denoiser.parameters()) == 0


def test_a_wide_writer_is_the_denoiser_to_the_bit(tiny_runs):
    """In float32, normalising word vectors once is normalising them at every call."""
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], dtype=torch.float32)
    model = lm.model.eval()
    x, t, mask = torch.randn(3, 8, model.denoiser.codec.dim), torch.rand(3), torch.ones(3, 8, dtype=torch.bool)
    with torch.no_grad():
        own, ready = model.denoiser(x, t, mask), lm.inference.denoiser(x, t, mask)
    assert torch.equal(own.logits, ready.logits) and torch.equal(own.clean, ready.clean)


# -- tiles -----------------------------------------------------------------------------------------------------------


def test_tiles_of_a_gpu_have_few_sizes_and_little_filling():
    sizes = [batch_rows(rows) for rows in range(1, 1025)]
    assert all(rows <= size < rows * 1.25 for rows, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes) and len(set(sizes)) < 40 and sizes[-1] == 1024


counts = st.tuples(st.integers(1, 6), st.integers(1, 40))  # sixteenths of the canvas, and how many texts have it


@given(st.lists(counts, min_size=1, max_size=8))
def test_filling_of_a_gpu_is_made_of_narrower_texts(drawn):
    """Every row stands in one tile that is wide enough, and no place is lost by it."""
    widths = [16 * width for width, count in drawn for _ in range(count)]
    by_width = {width: [k for k, own in enumerate(widths) if own == width] for width in {*widths}}
    made = list(fill_with_narrower(by_width))
    assert sorted(k for chosen, _ in made for k in chosen) == list(range(len(widths)))
    assert all(widths[k] <= width for chosen, width in made for k in chosen)
    apart = sum(width * batch_rows(len(own)) for width, own in by_width.items())
    assert sum(width * batch_rows(len(chosen)) for chosen, width in made) <= apart


def test_a_width_whose_rows_were_all_taken_has_no_tile():
    """Nine wide texts leave one place of ten, and the only narrow one takes it."""
    assert list(fill_with_narrower({32: [*range(9)], 16: [9]})) == [([*range(10)], 32)]


sampled = st.tuples(st.integers(1, 100), st.integers(1, 80))  # positions, and how many texts have them


@given(st.lists(sampled, min_size=1, max_size=12), st.sampled_from([60, 821, 30_522, 4_000_000]))
def test_every_row_of_a_gpu_stands_in_one_tile_that_holds_it(drawn, vocabulary):
    """Whatever lengths and numbers of texts are asked for: no tile has more rows than fit the device, and each has one
    of the sizes that steps are captured for."""
    widths = [Layout(n).width for n, count in drawn for _ in range(count)]
    made, sizes = plan_batches(widths, vocabulary), {batch_rows(n) for n in range(1, 1025)}
    assert sorted(k for chosen, _ in made for k in chosen) == list(range(len(widths)))
    for chosen, width in made:
        assert all(widths[k] <= width for k in chosen)
        assert len(chosen) <= batch_rows(len(chosen)) <= max_batch_rows(vocabulary, width, "cuda")
        assert batch_rows(len(chosen)) in sizes


def test_guided_rows_stand_by_themselves_on_a_cpu(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    job = lm.make_job(1)
    shapes = [loop_shape(lm, job, Row(0, k, Layout(5), guided=k % 2 == 0)) for k in range(8)]
    assert [shape.most for shape in shapes] == [GUIDED_BATCH, CPU_BATCH] * 4 and len({*shapes}) == 2
    alone = [len(pad_batch([Row(0, 0, Layout(5), guided=g)], 16, torch.device("cpu")).samples) for g in (True, False)]
    assert alone == [GUIDED_BATCH, CPU_BATCH]


# -- what a recording forbids ------------------------------------------------------------------------------------------


def test_the_strict_recorder_finds_what_it_should():
    values = torch.arange(3.0)
    for work in (
        lambda: values[0].item(),
        lambda: values[values > 1],
        lambda: torch.tensor([1.0]),
        lambda: bool(values[1]),
    ):
        strict = Strict(work, values.device)
        strict(), strict()
        with pytest.raises(AssertionError, match="cannot be recorded"):
            strict()


def test_times_are_remembered_but_not_read_while_a_step_is_recorded():
    """A recorded step cannot read numbers of its device; other steps need not compute modulations again."""
    computed: list[torch.Tensor] = []

    def compute(t: torch.Tensor) -> torch.Tensor:
        computed.append(t)
        return 2 * t

    answer, t = remember_times(compute), torch.full((3,), 0.25)
    assert torch.equal(answer(t), 2 * t) and answer(t.clone()) is answer(t) and len(computed) == 1
    strict = Strict(lambda: answer(t), t.device, warmup=0)  # type: ignore[arg-type]
    strict(), strict()
    assert len(computed) == 3


@pytest.mark.parametrize("on", [True, False])
def test_steps_are_recorded_with_packed_weights_and_without(monkeypatch, tiny_runs, on):
    """The copy whose weights are packed remembers times; which only ARM's library made, and a recorder refused."""
    monkeypatch.setattr("difflm.fast.recorded.CapturedFunction", Strict)
    with turn(packed_weights=on):
        lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], dtype=torch.float32)
        assert_alike(walked(lm, True), walked(lm, False))


BUNDLED: list[list[Any]] = [
    [],
    [Field("food", "Japanese"), Length(14)],
    [Field("family friendly", "yes"), Field("area", "riverside"), Contains("coffee shop"), Avoid("the")],
    [Tags(("PROPN", "AUX", "DET", "ADJ", "NOUN", "ADP", "DET", "NOUN", "PUNCT")), Field("food", "French")],
    [Tree("(S (NP * *) (VP * (ADJP *)) *)")],
    [Span(0, 4, "NP"), Length(12)],
    [Infill("The Mill ___ near Café Sicilia.")],
]


@pytest.mark.long
@pytest.mark.parametrize("controls", BUNDLED, ids=str)
def test_every_step_of_the_bundled_model_can_be_recorded(monkeypatch, bundled, controls):
    monkeypatch.setattr("difflm.fast.recorded.CapturedFunction", Strict)
    bundled.inference._recorded.clear()
    bundled.inference.record = True
    made = [bundled.generate(2, seed=seed, controls=controls, steps=5) for seed in (1, 2)]
    bundled.inference.record = False
    plain = [bundled.generate(2, seed=seed, controls=controls, steps=5) for seed in (1, 2)]
    assert [[str(g) for g in texts] for texts in made] == [[str(g) for g in texts] for texts in plain]


@pytest.fixture(scope="module")
def bundled() -> TextDiffusion:
    return TextDiffusion.from_pretrained("e2e", dtype=torch.float32)


@pytest.mark.parametrize("more", SETTINGS[:-2], ids=str)
def test_every_setting_can_be_recorded(monkeypatch, tiny_runs, more):
    monkeypatch.setattr("difflm.fast.recorded.CapturedFunction", Strict)
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], dtype=torch.float32)
    assert [len(walked(lm, True, **more)) for _ in range(2)] == [6, 6]


def test_taking_over_weights_can_be_recorded(monkeypatch, tiny_runs):
    monkeypatch.setattr("difflm.fast.inference.CapturedFunction", Strict)
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    lm.inference.dtype = torch.bfloat16
    for _ in range(3):
        lm.inference.sync_weights()


# -- the bundled model on a GPU ----------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
REQUESTS: list[dict[str, Any]] = [
    {},
    {"controls": [Field("food", "Japanese"), Length(14)]},
    {"controls": [Tags(("PROPN", "AUX", "DET", "ADJ", "NOUN", "ADP", "DET", "NOUN", "PUNCT"))]},
    {"controls": [Infill("The Mill ___ near Café Sicilia.")]},
]


def agreement(one: list[list[str]], other: list[list[str]]) -> float:
    """The share of words that are the same in the same place."""
    same = sum(a == b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=False))
    return same / max(sum(map(len, one)), sum(map(len, other)))


def written(lm: TextDiffusion, records: bool | None, **asked: Any) -> list[list[str]]:
    lm.inference.record = records
    begun = time.perf_counter()
    made = [g.tokens for g in lm.generate(**{"n": 50, "seed": 4, **asked})]
    print(f"  {len(made)} texts, records={records}: {time.perf_counter() - begun:.3f} s")
    return made


@needs_gpu
@pytest.mark.parametrize("asked", REQUESTS, ids=str)
def test_the_bundled_model_writes_the_same_recorded(asked):
    """Bit by bit where the library cuts products alike; some words may fall otherwise where it does not."""
    lm = TextDiffusion.from_pretrained("e2e", "cuda")
    plain = written(lm, False, **asked)
    first, again = written(lm, None, **asked), written(lm, None, **asked)
    one = [text for k in range(3) for text in written(lm, None, **asked, n=1, seed=k)]
    shares = agreement(plain, first), agreement(first, again)
    print(f"  {shares[0]:.4f} of the words of the plain loop, {shares[1]:.4f} of the first time's")
    assert min(shares) > 0.98 and all(one)


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("asked", REQUESTS[:2], ids=str)
def test_the_compiled_model_writes_as_well(asked):
    """Fused sums round otherwise, and a word that falls otherwise draws others after it: most words agree, and the same
    seed gives the same texts."""
    lm, compiled = (TextDiffusion.from_pretrained("e2e", "cuda", compile=c) for c in (False, True))
    plain, fused = written(lm, None, **asked), written(compiled, None, **asked)
    assert agreement(written(compiled, None, **asked), fused) > 0.98
    share = agreement(plain, fused)
    print(f"  recorded and compiled: {share:.4f} of the words")
    assert share > 0.9


@needs_gpu
def test_nothing_waits_for_the_device_while_a_tile_is_made():
    """Once recorded, making frames never asks the device for an answer."""
    lm = TextDiffusion.from_pretrained("e2e", "cuda")
    tile = pad_batch([Row(0, k, Layout(20)) for k in range(4)], 32, lm.device)
    sampling = lm.sampling(steps=6)

    def frames() -> int:
        with torch.no_grad():
            return len(list(lm.inference.stream(Noise(tile.seeds, tile.samples), tile.lengths, 32, sampling)))

    for _ in range(2):  # the first is made as it is, the second records its beginning
        frames()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert frames() == 6
    finally:
        torch.cuda.set_sync_debug_mode("default")
