"""Lengths that are predicted of a source, and candidates that spread over the likeliest of them."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm import Contains, Length, TextDiffusion
from difflm.data.batches import Batch
from difflm.data.tokenizers import SPECIALS, Words
from difflm.diffusion.condition import Condition
from difflm.diffusion.noise import Noise
from difflm.errors import UsageError
from difflm.fast.inference import Inference
from difflm.methods import METHODS, TextSpec
from difflm.models.batching import source_condition
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import UNSEEN, DrawnFromSource, LengthPredictor
from tests.support.recorded import Strict

WORDS, LONGEST = 12, 8
SMALL = {"embedding_dim": 8, "hidden": 32, "layers": 1, "encoder_layers": 1, "heads": 2, "dropout": 0.0}


def build(method: str = "difformer") -> DiffusionModel:
    torch.manual_seed(0)
    own = {key: value for key, value in SMALL.items() if key in METHODS[method].model_fields}
    model = METHODS[method](**own).build(TextSpec(WORDS, LONGEST, LONGEST))
    assert isinstance(model, DiffusionModel)
    return model


def build_captured() -> DiffusionModel:
    """A model that reads its sources by captured passes."""
    model = build().eval()
    Inference(model)
    return model


def prepare(model: DiffusionModel, batch: Batch) -> Condition:
    """The condition of a batch with its sources encoded."""
    return model.denoiser.prepare(model.condition_of(batch, batch.ids))


def told(logits: torch.Tensor, sources: list[int]) -> Condition:
    """What a head said of sources of these lengths."""
    mask = torch.arange(LONGEST) < torch.tensor(sources).unsqueeze(1)
    return Condition(source_mask=mask, length_logits=logits)


@given(seed=st.integers(0, 2**31), sources=st.lists(st.integers(1, LONGEST), min_size=1, max_size=5))
def test_lengths_have_the_probability_that_the_head_gives_their_offsets(seed, sources):
    policy = LengthPredictor(LONGEST, LONGEST, 4)
    logits = torch.randn(len(sources), 2 * LONGEST + 1, generator=torch.Generator().manual_seed(seed))
    condition = told(logits, sources)
    expected = torch.stack(
        [logits[b, LONGEST + 1 - n : 2 * LONGEST + 1 - n].double().softmax(0) for b, n in enumerate(sources)]
    )
    for length in range(1, LONGEST + 1):
        nats = policy.nats(torch.full((len(sources),), length), condition)
        smoothed = (1 - UNSEEN) * expected[:, length - 1] + UNSEEN / LONGEST
        assert nats.double() == pytest.approx(-smoothed.log(), abs=1e-5)
    ranked = [
        policy.rank_words(torch.full((len(sources),), k), range(1, LONGEST + 1), condition) for k in range(LONGEST)
    ]
    assert torch.equal(torch.stack(ranked, 1), expected.argsort(-1, descending=True) + 1)


def test_drawn_lengths_follow_the_head_and_stay_between_what_is_asked():
    """10,000 evenly spaced numbers: every share is right to one of them at each end."""
    policy, n = LengthPredictor(LONGEST, LONGEST, 4), 10_000
    logits = torch.full((1, 17), -30.0)
    logits[0, [LONGEST - 1, LONGEST + 2]] = torch.tensor([0.75, 0.25]).log()  # one word shorter, two words longer
    condition = told(logits.expand(n, -1), [5] * n)
    u = (torch.arange(n) + 0.5) / n
    drawn = policy.draw(u, condition)
    assert (drawn == 4).double().mean() == pytest.approx(0.75, abs=2 / n + UNSEEN)
    assert (drawn == 7).double().mean() == pytest.approx(0.25, abs=2 / n + UNSEEN)
    between = policy.draw_words(u, range(5, 8), condition)
    assert (between == 7).double().mean() > 0.999 and int(between.min()) >= 5
    ranks = torch.tensor([0, 1, 2, 9])
    few = told(logits.expand(4, -1), [5] * 4)
    assert policy.rank_words(ranks, range(1, LONGEST + 1), few)[:2].tolist() == [4, 7]
    assert policy.rank_words(ranks, range(5, 7), few).tolist() == [
        5,
        6,
        6,
        6,
    ]  # a beam wider than the lengths there are


def test_a_histogram_of_pairs_has_a_beam_too():
    policy = DrawnFromSource(20, 20)
    counts = torch.zeros(21, 21)
    counts[5, 6], counts[5, 7], counts[15, 16] = 30, 10, 40
    policy.observe(counts.sum(0))
    policy.observe_pairs(counts)
    mask = torch.arange(20) < torch.tensor([[5], [5], [15]])
    assert policy.rank_words(torch.tensor([0, 1, 0]), range(1, 21), Condition(source_mask=mask)).tolist() == [6, 7, 16]


def length_pairs(count: int, seed: int) -> Batch:
    """Sources of four words whose first one says how long the text is: 1 to 8 words."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(4, WORDS, (count, 4), generator=generator)
    lengths = source[:, 0] - 3
    ids = torch.where(torch.arange(8) < lengths.unsqueeze(1), 5, 0)
    return Batch(ids, lengths, source, torch.full((count,), 4))


def learn_lengths(model: DiffusionModel, steps: int = 60) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        batch = length_pairs(64, step + 1)
        loss = model.lengths.fit_loss(batch.lengths, prepare(model, batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_the_head_reads_what_the_source_says_and_not_how_long_it_is():
    """All sources are equally long: counts by their length know nothing. 64 unseen sources, 8 lengths."""
    model = build()
    learn_lengths(model)
    batch = length_pairs(64, 0)
    condition = source_condition(batch.source.tolist())
    noise, first = Noise(0, torch.arange(64)), torch.zeros(64, dtype=torch.int64)
    assert torch.equal(model.draw_lengths(noise, condition, first), batch.lengths)
    drawn = model.draw_lengths(noise, condition)
    assert (drawn == batch.lengths).float().mean() > 0.9
    likely = model.lengths.nats(batch.lengths, model.lengths.predict(model.denoiser, condition))
    assert float(likely.mean()) < 0.3  # log 8 = 2.08 without reading


def test_a_length_does_not_depend_on_the_sources_beside_it_and_each_is_read_once(monkeypatch):
    model = build_captured()
    model.lengths.head.weight.data.normal_()
    sources = [[5, 6, 7], [5, 6, 7], [4], [9, 9, 8, 7, 6, 5], [9, 9, 8, 7, 6, 5]]
    read = []
    encode = model.denoiser.network.encode
    monkeypatch.setattr(model.denoiser.network, "encode", lambda ids, mask: read.append(len(ids)) or encode(ids, mask))
    together = model.lengths.predict(model.denoiser, source_condition(sources)).length_logits
    assert read == [1, 1, 1]
    for source, found in zip(sources, together, strict=True):
        alone = model.lengths.predict(model.denoiser, source_condition([source])).length_logits
        assert torch.equal(alone[0], found)
    assert not torch.equal(together[0], together[2])


def test_a_gpu_reads_many_sources_at_once_in_few_sizes(monkeypatch):
    """Eleven sources of two texts each, with the rows of twelve: one captured pass serves both numbers."""
    model = build_captured()
    model.lengths.head.weight.data.normal_()
    sources = [[4 + k % 6] * (1 + k % 5) for k in range(11)]
    condition = source_condition([source for source in sources for _ in range(2)])
    alone = model.lengths.predict(model.denoiser, condition).length_logits
    monkeypatch.setattr("difflm.models.lengths.sources_at_once", lambda device: 256)
    read, encode = [], model.denoiser.network.encode
    monkeypatch.setattr(model.denoiser.network, "encode", lambda ids, mask: read.append(len(ids)) or encode(ids, mask))
    together = model.lengths.predict(model.denoiser, condition).length_logits
    assert read == [12]
    assert torch.allclose(alone, together, atol=1e-5)
    model.lengths.predict(model.denoiser, source_condition([*sources, [5, 5]]))
    assert len(model.lengths.read_lengths.pool.idle) == 2  # one of a single source, one of twelve


def test_what_was_captured_is_freed_at_once():
    """Not when garbage is collected: the memory of a GPU is needed before."""
    model = build_captured()
    model.lengths.predict(model.denoiser, source_condition([[5, 6, 7]]))
    held = weakref.ref(model.lengths.read_lengths.pool.latest)
    gc.disable()
    try:
        Inference(model).clear_recorded()
        assert not model.lengths.read_lengths.pool.idle and held() is None
    finally:
        gc.enable()


def test_a_model_that_moves_keeps_nothing_captured():
    words = Words([*SPECIALS, *"abcdefgh"])
    lm = TextDiffusion(build(), words, {"method": "difformer"})
    lm.generate(1, source="a b", steps=1)
    assert lm.model.lengths.read_lengths.pool.idle
    lm.to("cpu")
    assert not lm.model.lengths.read_lengths.pool.idle


def test_a_copy_that_is_replaced_keeps_nothing_captured():
    """Else a model that trains would hold the copies of all its last samples."""
    model = build().eval()
    inference = Inference(model, torch.bfloat16)
    inference.sync_weights()
    before = inference.denoiser
    model.lengths.predict(before, source_condition([[5, 6, 7]]))
    assert model.lengths.read_lengths.pool.idle
    with torch.no_grad():
        model.denoiser.network.head.weight.add_(1)
    inference.sync_weights()
    assert inference.denoiser is not before and not model.lengths.read_lengths.pool.idle


def test_another_head_is_captured_anew():
    model = build_captured()
    condition = source_condition([[5, 6, 7]])
    model.lengths.predict(model.denoiser, condition)
    model.lengths.head = copy.deepcopy(model.lengths.head)
    model.lengths.predict(model.denoiser, condition)
    assert len(model.lengths.read_lengths.pool.idle) == 2


def test_a_model_that_has_read_sources_can_be_pickled():
    model = build_captured()
    condition = source_condition([[5, 6, 7]])
    before = model.lengths.predict(model.denoiser, condition).length_logits
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other.lengths.predict(other.denoiser, condition).length_logits, before)
    assert len(pickle.dumps(model.lengths)) < len(pickle.dumps(model)) / 2  # the denoiser is no part of it


def test_reading_sources_can_be_captured(monkeypatch):
    """A network of another library is called as it is."""
    monkeypatch.setattr("difflm.fast.cuda_graphs.CapturedFunction", Strict)
    model = build_captured()
    model.lengths.head.weight.data.normal_()
    conditions = [source_condition([[k, 5, 6]]) for k in range(4, 8)]
    found = [model.lengths.predict(model.denoiser, one).length_logits for one in conditions]
    model.denoiser.network.capturable = False
    model.lengths.read_lengths.pool.clear()
    for one, condition in zip(found, conditions, strict=True):
        assert torch.equal(model.lengths.predict(model.denoiser, condition).length_logits, one)
    assert not model.lengths.read_lengths.pool.idle and not torch.equal(found[0], found[1])


def test_a_copy_of_a_model_reads_sources_by_its_own_weights():
    model = build_captured()
    condition = source_condition([[5, 6, 7]])
    before = model.lengths.predict(model.denoiser, condition).length_logits
    other = copy.deepcopy(model)
    other.lengths.head.weight.data.normal_()
    assert torch.equal(model.lengths.predict(model.denoiser, condition).length_logits, before)
    assert not torch.equal(other.lengths.predict(other.denoiser, condition).length_logits, before)


@pytest.mark.parametrize(("method", "teaches"), [("difformer", True), ("dinoiser", False)])
def test_the_cross_entropy_of_lengths_is_one_of_the_losses(method, teaches):
    model = build(method)
    model.lengths.head.weight.data.normal_()
    batch = replace(length_pairs(4, 0), index=torch.arange(4))
    losses = model(batch)
    condition = prepare(model, batch)
    own = model.lengths.fit_loss(batch.lengths, condition)
    expected = -model.lengths.logits(condition).log_softmax(-1)[torch.arange(4), batch.lengths - 4 + LONGEST].mean()
    assert own.item() == pytest.approx(expected.item(), rel=1e-5)
    weights = {**model.objective.weights, "length_ce": model.lengths.weight}
    means = losses.means()
    assert set(losses.terms) == set(weights) and means["length_ce"].item() == pytest.approx(own.item(), rel=1e-5)
    assert means["loss"].item() == pytest.approx(sum(w * means[name].item() for name, w in weights.items()), rel=1e-5)
    own.backward()
    assert (model.denoiser.network.encoder.head.weight.grad is not None) == teaches


@pytest.mark.parametrize("method", ["difflm", "mdlm"])
def test_a_bound_counts_what_the_head_says_of_the_length(method):
    """A head that begins with zeros finds 8 lengths equally likely; words cost the same whatever the head says."""
    model, batch, noise = build(method).eval(), length_pairs(16, 0), Noise(0, torch.arange(16))
    even = model.nats(batch, noise, 2)
    model.lengths.head.weight.data.normal_()
    logits = model.lengths.logits(prepare(model, batch)).detach().double()
    offsets = torch.arange(LONGEST + 1 - 4, 2 * LONGEST + 1 - 4)  # classes of 1 to 8 words of a source of four
    chosen = logits[:, offsets].softmax(-1)[torch.arange(16), batch.lengths - 1]
    expected = -((1 - UNSEEN) * chosen + UNSEEN / LONGEST).log() - torch.tensor(LONGEST).log()
    assert (model.nats(batch, noise, 2) - even).double().tolist() == pytest.approx(expected.tolist(), abs=1e-3)
    assert float(expected.abs().min()) > 1e-2  # of every text


def test_the_head_begins_with_the_offsets_of_the_training_pairs():
    policy = LengthPredictor(LONGEST, LONGEST, 4)
    counts = torch.zeros(LONGEST + 1, LONGEST + 1)
    counts[3, 4], counts[5, 6], counts[8, 2] = 600, 400, 1000
    policy.observe_pairs(counts)
    shares = policy.head.bias.softmax(0)
    assert shares[LONGEST + 1].item() == shares[LONGEST - 6].item() == pytest.approx(0.5, abs=0.01)


# -- candidates -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm() -> TextDiffusion:
    model = build()
    learn_lengths(model)
    return TextDiffusion(model.eval(), Words([*SPECIALS, *"abcdefgh"]), {"method": "difformer"})


def lengths_of(lm: TextDiffusion, n: int = 1, **asked) -> list[int]:
    return [row.layout.positions for row in lm.make_job(n, source="d a a a", **asked).make_rows(lm.model)]


def test_candidates_spread_over_the_likeliest_lengths(lm):
    """`d` is the fourth word: texts of four. The next lengths are whatever the head finds next."""
    ranks = torch.arange(3)
    ranked = lm.model.draw_lengths(Noise(0, ranks), source_condition([[7, 4, 4, 4]])[[0] * 3], ranks).tolist()
    assert ranked[0] == 4 and len({*ranked}) == 3
    assert lengths_of(lm, mbr=5, length_beam=3) == [*ranked, *ranked[:2]]
    assert lengths_of(lm, n=2, mbr=2, length_beam=2) == ranked[:2] * 2
    assert lengths_of(lm, n=3, length_beam=4) == [4, 4, 4]  # of one candidate: the likeliest length
    made = lm.generate(source=["d a a a", "a a a a"], mbr=4, length_beam=2, steps=2)
    assert [text.denoiser_calls for text in made] == [8, 8]


def test_a_control_bounds_the_beam(lm):
    assert lengths_of(lm, mbr=3, length_beam=3, controls=[Length(6)]) == [6, 6, 6]
    longer = lengths_of(lm, mbr=3, length_beam=3, controls=[Contains("a b c d e f")])
    assert sorted(longer) == [6, 7, 8]


@pytest.mark.long
def test_a_model_that_writes_its_own_end_has_no_beam(tiny_runs):
    for method in ("diffusion-lm", "autoregressive", "block-diffusion"):
        with pytest.raises(UsageError, match="a length beam needs a model that chooses lengths beforehand"):
            TextDiffusion.from_pretrained(tiny_runs[method]).generate(length_beam=2)
    drawn = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    (text,) = drawn.generate(mbr=3, length_beam=2, steps=2)
    ranks = torch.arange(2)
    assert len(text.tokens) in drawn.model.draw_lengths(Noise(0, ranks), ranks=ranks)
