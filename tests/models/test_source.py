"""Texts that are written from a source: reversed sequences are, and nothing but the source says how."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from difflm import Length, TextDiffusion
from difflm.data.batches import Batch
from difflm.diffusion.condition import Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import BoundDenoiser
from difflm.errors import UsageError
from difflm.methods import METHODS, TextSpec
from difflm.models.batching import pad_batch, plan_batches
from difflm.models.lengths import DrawnFromSource
from difflm.networks import EncoderDecoder
from tests.support.pairs import SIZES, TEXTS, sequences, train_reversals


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train_reversals(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run that has learned next to nothing."""
    return train_reversals(tmp_path_factory.mktemp("begun"), steps=2)


@pytest.mark.long
@pytest.mark.parametrize("method", ["mdlm", "block-diffusion", "diff-glat"])
def test_models_of_tokens_read_a_source_too(method, tmp_path):
    sizes = {key: value for key, value in SIZES.items() if key != "embedding_dim"}
    lm = TextDiffusion.from_pretrained(train_reversals(tmp_path, method=method, model=sizes, steps=200))
    unseen = sequences(TEXTS, 1)
    made = lm.generate(source=[" ".join(words) for words in unseen])
    exact = sum(text.text == " ".join(reversed(words)) for text, words in zip(made, unseen, strict=True))
    assert exact >= 0.95 * TEXTS
    shuffled = lm.generate(source=[" ".join(words) for words in unseen[1:] + unseen[:1]])
    assert sum(a.text == b.text for a, b in zip(made, shuffled, strict=True)) <= 0.1 * TEXTS


@pytest.mark.long
def test_unseen_sequences_are_reversed_and_only_the_source_says_how(run, monkeypatch):
    lm = TextDiffusion.from_pretrained(run)
    unseen = sequences(TEXTS, 1)
    expected = [" ".join(reversed(words)) for words in unseen]
    encoded = []
    encode = EncoderDecoder.encode

    def spy(self, source, mask):
        encoded.append(len(source))
        return encode(self, source, mask)

    monkeypatch.setattr(EncoderDecoder, "encode", spy)
    made = lm.generate(source=[" ".join(words) for words in unseen], steps=10, temperature=0.5)
    assert sum(text.text == right for text, right in zip(made, expected, strict=True)) >= 0.95 * TEXTS
    assert sum(encoded) == 2 * TEXTS  # for its length and for its words, whatever the number of steps
    shuffled = lm.generate(source=[" ".join(words) for words in unseen[1:] + unseen[:1]], steps=10)
    assert sum(text.text == right for text, right in zip(shuffled, expected, strict=True)) <= 0.1 * TEXTS
    assert lm.config["recipe"]["source_longest"] == 8 and lm.model.capabilities.likelihood == "bound"


def test_a_text_is_the_same_whatever_is_written_beside_it(begun):
    lm = TextDiffusion.from_pretrained(begun)
    alone = lm.generate(source="a b c d e f", steps=4)
    beside = lm.generate(source=["a b c d e f", "a b", "h h h h h", "g f"], steps=4)
    assert alone[0].text == beside[0].text
    several = lm.generate(2, source=["a b c d e f", "g f"], steps=4)
    assert len(several) == 4 and several[0].text == alone[0].text


def test_what_cannot_be_written_from_is_refused(begun, tiny_runs):
    lm = TextDiffusion.from_pretrained(begun)
    with pytest.raises(UsageError, match=r"source 2 has 9 tokens; this model reads at most 8"):
        lm.generate(source=["a b", "a " * 9])
    with pytest.raises(UsageError, match="source 1 is empty"):
        lm.generate(source=" ")
    with pytest.raises(UsageError, match="writes each text from a source"):
        lm.generate()
    with pytest.raises(UsageError, match="was trained on texts without sources"):
        TextDiffusion.from_pretrained(tiny_runs["difflm"]).generate(source="a b")


@pytest.mark.long
def test_candidates_and_controls_work_with_a_source(run):
    lm = TextDiffusion.from_pretrained(run)
    made = lm.generate(source=["a b c d e f", "f e d c b a"], mbr=3, steps=3, controls=[Length(4)])
    assert [len(text.tokens) for text in made] == [4, 4] and {text.denoiser_calls for text in made} == {9}


def test_a_gpus_batches_hold_sources_of_several_lengths(begun):
    lm = TextDiffusion.from_pretrained(begun)
    job = lm.make_job(1, source=["a b c d e f", "a", "b c"])
    rows = job.make_rows(lm.model)
    ((chosen, width),) = plan_batches([row.layout.width for row in rows], lm.model.vocabulary)
    batch = pad_batch([rows[k] for k in chosen], width, torch.device("cpu"), len(rows))
    assert batch.condition.source.shape == batch.condition.source_mask.shape == (3, 16)
    assert batch.condition.source_mask.sum(1).tolist() == [6, 1, 2]


def build(**changes) -> torch.nn.Module:
    torch.manual_seed(0)
    return METHODS["difflm"](**{**SIZES, **changes}).build(TextSpec(12, 8, 8))


def batch(count: int = 4) -> Batch:
    ids = torch.randint(4, 12, (count, 8), generator=torch.Generator().manual_seed(0))
    lengths = torch.full((count,), 8)
    return Batch(ids.flip(1), lengths, ids, lengths, index=torch.arange(count))


def test_a_dropped_source_leaves_no_trace():
    """With every condition dropped, the losses are those of any other source; with none, they are not."""
    own, other = batch(), replace(batch(), source=batch().source.flip(0))
    dropped = build(drop_source=0.9999999).eval()
    dropped.denoiser.network.head.weight.data.normal_()  # whose zeros would hide every difference
    assert torch.equal(dropped(own).total, dropped(other).total)
    kept = build().eval()
    kept.denoiser.network.head.weight.data.normal_()
    assert not torch.equal(kept(own).total, kept(other).total)


def test_a_contrast_moves_beliefs_away_from_those_without_the_source():
    model = build(drop_source=0.1).eval()
    model.denoiser.network.head.weight.data.normal_()
    given = batch()
    mask = torch.ones(4, 8, dtype=torch.bool)
    told = Condition(source=given.source, source_mask=mask)
    condition = model.denoiser.prepare(told)
    noise, level = Noise(0, torch.arange(4)), model.process.at(torch.full((4,), 0.9))
    x = noise.normal(0, 8, 16)
    with torch.no_grad():
        told = BoundDenoiser(model.denoiser, mask, condition)(x, level, None).logits.log_softmax(-1)
        free = BoundDenoiser(model.denoiser, mask, condition.null())(x, level, None).logits.log_softmax(-1)
        moved = BoundDenoiser(model.denoiser, mask, condition, contrast=2.0)(x, level, None).logits
    assert torch.allclose(moved, told + 2 * (told - free), atol=1e-4)
    assert model.calls(model.sampling.change({"contrast": 2.0, "steps": 7}), 5) == 14


@pytest.mark.parametrize("mode", ["half", "coin", "both"])
def test_self_conditioning_trains_in_every_mode(mode):
    model = build()
    model.denoiser.network.head.weight.data.normal_()  # whose zeros would let no gradient through
    model.denoiser.self_conditioning = replace(model.denoiser.self_conditioning, mode=mode)
    losses = model(batch())
    losses.total.backward()
    assert torch.isfinite(losses.total) and int(losses.count) == 32
    assert float(model.denoiser.network.encoder.head.weight.grad.abs().sum()) > 0


def test_lengths_follow_those_of_the_source():
    policy = DrawnFromSource(20, 20)
    counts = torch.zeros(21, 21)
    counts[5, 6], counts[5, 7], counts[15, 16] = 30, 10, 40
    policy.observe(counts.sum(0))
    policy.observe_pairs(counts)
    mask = torch.arange(20) < torch.tensor([[5], [15]]).repeat_interleave(4000, 0)
    condition = Condition(source_mask=mask)
    drawn = policy.draw(Noise(0, torch.arange(8000)).uniform(0), condition)
    assert (drawn[:4000] == 6).float().mean() == pytest.approx(0.75, abs=0.03)
    assert (drawn[4000:] == 16).float().mean() > 0.95
    nats = policy.nats(torch.tensor([6, 16]), Condition(source_mask=mask[[0, -1]]))
    assert nats.exp().reciprocal() == pytest.approx([0.73, 0.97], abs=0.03)
    every = policy.chances_given(Condition(source_mask=mask[[0, -1]]), policy.counts.double())
    assert every.sum(-1) == pytest.approx([1.0, 1.0])
