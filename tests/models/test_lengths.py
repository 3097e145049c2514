"""How long a text is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.models.lengths import DrawnLength, PadTokens


def drawn(counts: list[int]) -> DrawnLength:
    policy = DrawnLength(len(counts) - 1)
    policy.observe(torch.tensor(counts))
    return policy


def test_lengths_are_drawn_without_asking_the_device_again(monkeypatch):
    """A copy from a GPU waits for all that it is doing, and a server draws a length for every request."""
    policy, copies, u = drawn([0, 3, 1, 0, 4]), [], torch.tensor([0.1, 0.5, 0.9])
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *a, **k: (copies.append(t is policy.counts), to(t, *a, **k))[1])
    assert all(policy.draw(u).tolist() == [1, 2, 4] for _ in range(5)) and sum(copies) == 1
    assert policy.draw_words(u, [1, 4], shares=[1.0, 1.0]).tolist() == [1, 4, 4] and sum(copies) == 1
    policy.observe(torch.tensor([0, 0, 5, 0, 0]))  # what is learned later counts
    assert policy.draw(u).tolist() == [2, 2, 2]
    policy.counts = torch.tensor([1.0, 1.0, 9.0, 1.0])  # and what is loaded
    assert policy.draw(u).tolist() == [3, 3, 3]


@given(counts=st.lists(st.integers(0, 1000), min_size=2, max_size=40))
def test_length_probabilities_sum_to_one_and_none_is_zero(counts):
    policy = drawn(counts)
    p = torch.exp(-policy.nats(torch.arange(1, len(counts))).double())
    assert float(p.sum()) == pytest.approx(1, abs=1e-5)
    expected = (torch.tensor(counts[1:], dtype=torch.float64) + 1) / (sum(counts[1:]) + len(counts) - 1)
    assert torch.allclose(p, expected, rtol=1e-5)


@given(counts=st.lists(st.integers(0, 1000), min_size=2, max_size=40))
def test_drawn_lengths_follow_the_histogram(counts):
    """Evenly spaced numbers instead of random ones: every share is right to one of them at each end. Lengths that
    were never seen are not drawn, unless nothing was seen at all."""
    policy, n = drawn(counts), 5000
    lengths = policy.draw((torch.arange(n) + 0.5) / n)
    assert int(lengths.min()) >= 1 and int(lengths.max()) <= policy.longest
    shares = torch.bincount(lengths, minlength=len(counts))[1:].double() / n
    seen = torch.tensor(counts[1:], dtype=torch.float64)
    p = seen / seen.sum() if seen.sum() else torch.full_like(seen, 1 / len(seen))
    assert float((shares - p).abs().max()) <= 2 / n


def test_room_and_forbidden_words():
    """START and END take two places of a canvas on which pads are words; a drawn length needs no specials at all."""
    assert (DrawnLength(12).max_words, PadTokens(12).max_words) == (12, 10)
    assert set(DrawnLength(12).forbidden) == {START, END, UNK, PAD} and PadTokens(12).forbidden == (UNK,)


def test_a_fresh_policy_knows_no_length_better_than_another():
    assert torch.exp(-DrawnLength(5).nats(torch.arange(1, 6))).tolist() == pytest.approx([0.2] * 5)


def test_the_histogram_is_saved_with_the_model():
    fresh = DrawnLength(3)
    fresh.load_state_dict(drawn([0, 5, 1, 9]).state_dict())
    assert fresh.counts.tolist() == [6, 2, 10]


def test_a_drawn_canvas_holds_the_words_and_nothing_else():
    ids, lengths = torch.tensor([[5, 6, 7], [8, PAD, PAD]]), torch.tensor([3, 1])
    canvas, mask = DrawnLength(9).canvas(ids, lengths)
    assert torch.equal(canvas, ids)
    assert mask.tolist() == [[True, True, True], [True, False, False]]


@given(texts=st.lists(st.lists(st.integers(4, 50), min_size=1, max_size=10), min_size=1, max_size=5))
def test_pads_as_words_round_trip(texts):
    policy, width = PadTokens(12), max(map(len, texts))
    ids = torch.tensor([text + [PAD] * (width - len(text)) for text in texts])
    canvas, mask = policy.canvas(ids, torch.tensor([len(text) for text in texts]))
    assert canvas.shape == (len(texts), 12) and bool(mask.all())
    for row, text in zip(canvas.tolist(), texts, strict=True):
        assert row == [START, *text, END] + [PAD] * (10 - len(text))
        assert policy.words(row) == text


def test_what_stands_behind_the_end_of_a_text_does_not_reach_the_canvas():
    canvas, _ = PadTokens(6).canvas(torch.tensor([[7, 9, 9, 9]]), torch.tensor([1]))
    assert canvas.tolist() == [[START, 7, END, PAD, PAD, PAD]]


def test_a_row_without_an_end_is_read_to_its_own_end():
    assert PadTokens(5).words([START, 7, PAD, 8, 9]) == [7, 8, 9]


def test_pads_as_words_pay_for_length_in_the_canvas():
    """Where to end is part of the text itself: nothing is added for it, and every sample has the whole canvas."""
    policy = PadTokens(12)
    assert not policy.nats(torch.tensor([3, 7])).any()
    assert policy.draw(torch.tensor([0.1, 0.9])).tolist() == [12, 12]
