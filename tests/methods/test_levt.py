"""The Levenshtein Transformer: the fewest edits, against enumeration, and rounds of editing until nothing changes."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Steering
from difflm.methods import METHODS, TextSpec
from difflm.methods.levt import LevenshteinModel, align, between_ends, insert_holes, keep_words
from difflm.models.batching import pad_token_rows
from tests.support.oracles import longest_common
from tests.support.pairs import reversals

WORDS, LENGTH, HOLE = 12, 6, 99
SMALL = {"hidden": 32, "layers": 1, "encoder_layers": 1, "heads": 2, "dropout": 0.0}
TEXT = st.lists(st.integers(4, 7), max_size=7)
PAIRS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6)


def padded(rows, more: int = 1) -> tuple[Tensor, Tensor]:
    """Texts on a canvas with room for some words `more` than the longest has, and where their words are."""
    ids, _ = pad_token_rows([*rows, [PAD] * (max(map(len, rows)) + more)])
    return ids[:-1], torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows]).unsqueeze(1)


@given(pairs=PAIRS, more=st.integers(1, 3))
def test_the_oracle_makes_the_fewest_edits_and_they_lead_to_the_target(pairs, more):
    texts, targets = zip(*pairs, strict=True)
    (text, mask), (target, target_mask) = padded(texts, more), padded(targets)
    found = align(text, mask, target, target_mask)
    for row, one, other in zip(found.tolist(), texts, targets, strict=True):
        kept = [(k, at) for k, at in enumerate(row) if at >= 0]
        assert len(kept) == longest_common(one, other) and all(one[k] == other[at] for k, at in kept)
        assert [at for _, at in kept] == sorted({at for _, at in kept})
    # Deleted, opened and filled, each text is its target.
    room = text.shape[1] + target.shape[1] + 2
    opened = torch.full((len(texts), room), PAD)
    opened[:, 0] = START
    opened[:, 1 : text.shape[1] + 1] = keep_words(text, found >= 0, PAD)
    kept = [[at for at in row if at >= 0] for row in found.tolist()]
    ends = [[-1, *row, len(other)] for row, other in zip(kept, targets, strict=True)]
    counts = torch.zeros_like(opened)
    for k, row in enumerate(ends):
        counts[k, : len(row) - 1] = torch.tensor([b - a - 1 for a, b in pairwise(row)])
    holes = insert_holes(opened, opened != PAD, counts, HOLE, PAD)[:, 1:]
    target = torch.nn.functional.pad(target, (0, room - 1 - target.shape[1]), value=PAD)
    assert torch.equal(torch.where(holes == HOLE, target, holes), target.where(target != PAD, holes))
    assert torch.equal(holes != PAD, target != PAD)


@given(text=TEXT, target=TEXT)
def test_of_equal_edits_the_earliest_words_are_kept(text, target):
    """No other longest common subsequence begins earlier in the text, nor at the same places and then earlier."""
    found = align(*padded([text]), *padded([target]))[0, : len(text)].tolist()
    kept = tuple(k for k, at in enumerate(found) if at >= 0)

    def occurs(places: tuple[int, ...]) -> bool:
        rest = iter(target)
        return all(text[k] in rest for k in places)

    assert kept == min(places for places in combinations(range(len(text)), len(kept)) if occurs(places))


@given(text=TEXT, counts=st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_holes_stand_behind_their_words_as_far_as_there_is_room(text, counts):
    wanted = [token for word, n in zip(text, counts, strict=False) for token in [word, *[HOLE] * n]]
    ids, mask = padded([text], more=12 - len(text))
    made = insert_holes(ids, mask, torch.tensor([[*counts, *[2] * 5]]), HOLE, PAD)[0].tolist()
    made = made[: made.index(PAD)] if PAD in made else made
    assert [token for token in made if token != HOLE] == text and len(made) == min(12, len(wanted))
    if len(wanted) <= 12:
        assert made == wanted


def build(**changes) -> LevenshteinModel:
    torch.manual_seed(0)
    model = METHODS["levt"](**{**SMALL, **changes}).build(TextSpec(WORDS, 8, 8))
    assert isinstance(model, LevenshteinModel)
    return model


def test_texts_stand_between_start_and_end():
    batch = Batch(torch.tensor([[5, 6, 7], [8, PAD, PAD]]), torch.tensor([3, 1]))
    assert between_ends(batch).tolist() == [[START, 5, 6, 7, END], [START, 8, END, PAD, PAD]]


def test_every_head_learns_from_a_batch():
    model = build().train()
    model.network.head.weight.data.normal_(std=0.1)
    losses = model(reversals(24, 0, LENGTH))
    losses.total.backward()
    assert {*losses.terms} == {"insertion", "words", "deletion"} and torch.isfinite(losses.total)
    assert int(losses.count) == sum(1 + k % LENGTH for k in range(24))
    for layer in (model.deletion, model.insertion, model.network.head, model.network.encoder.head):
        assert float(layer.weight.grad.abs().sum()) > 0


def generate(model: LevenshteinModel, batch: Batch, **changes):
    mask = torch.arange(batch.source.shape[1]) < batch.source_lengths.unsqueeze(1)
    steering, noise = Steering(source=batch.source, source_mask=mask), Noise(0, torch.arange(len(batch.ids)))
    with torch.no_grad():
        sampling = model.sampling.change(changes)
        return [*model.eval().stream(noise, torch.full((len(batch.ids),), 8), 16, sampling, steering)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_words_and_fit(temperature):
    """Whatever an untrained model says: no text is empty, too long, or holds anything but words."""
    model, batch = build(), reversals(24, 0, LENGTH)
    for layer in (model.deletion, model.insertion, model.network.head):
        layer.weight.data.normal_()
    frames = generate(model, batch, temperature=temperature)
    for frame in frames:
        written = frame.tokens != PAD
        assert frame.tokens.shape == (24, 16) and torch.equal(written, frame.mask)
        assert bool(((frame.tokens >= 4) & (frame.tokens < WORDS) | ~written).all())
        assert bool((written.sum(-1) >= 1).all()) and bool((written.sum(-1) <= 8).all())
        assert bool((written.int().diff(dim=1) <= 0).all())  # no gap
    assert len(frames) > 1 and int(frames[-1].calls.max()) <= model.calls(model.sampling, 8)


def test_a_text_that_a_round_does_not_change_is_finished():
    """It costs no more calls, and further rounds leave it as it is, whatever those beside it do."""
    model, batch = build(), reversals(24, 0, LENGTH)
    for layer in (model.deletion, model.insertion, model.network.head):
        layer.weight.data.normal_()
    frames = generate(model, batch, steps=12)
    for early, late in pairwise(frames):
        moved = (late.tokens != early.tokens).any(-1)
        assert torch.equal(moved, late.changed.any(-1))
        assert bool((late.calls - early.calls == 3)[moved].all())
    stopped = [frame.calls == frames[-1].calls for frame in frames]
    assert all(
        torch.equal(frame.tokens[done], frames[-1].tokens[done]) for frame, done in zip(frames, stopped, strict=True)
    )
    alone = generate(
        model, Batch(*(part[5:6] for part in (batch.ids, batch.lengths, batch.source, batch.source_lengths)))
    )
    assert alone[-1].tokens.tolist() == generate(model, batch)[-1].tokens[5:6].tolist()


@pytest.mark.long
def test_reversed_sequences_are_written_in_a_round_or_two():
    model = build(hidden=64, layers=2, encoder_layers=2).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(130):
        loss = model(reversals(32, step, 4)).means()["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    batch = reversals(60, 9999, 4)
    frames = generate(model, batch)
    right = torch.nn.functional.pad(batch.ids, (0, 12), value=PAD)
    assert (frames[-1].tokens == right).all(-1).float().mean().item() > 0.9
    assert float(frames[-1].calls.float().mean()) < 8  # written in one round, and found right in the next
