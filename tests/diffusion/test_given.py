"""Given positions: which ones training draws, and what the network is shown of them."""

from itertools import pairwise

import pytest
import torch

from difflm.data.tokenizers import END, PAD, START
from difflm.diffusion.condition import FREE, HIDDEN, Condition
from difflm.diffusion.denoiser import MaskStack
from difflm.diffusion.noise import Noise
from difflm.methods.cdcd import PrefixOrSubset
from difflm.methods.sed import Spans
from difflm.models.lengths import RandomPads

MANY = 20_000


def draw(positions, length: int, width: int = 8) -> list[tuple[int, ...]]:
    lengths = torch.full((MANY,), length)
    given = positions(lengths, width, Noise(0, torch.arange(MANY)))
    assert not given[:, length:].any()  # positions that are no text are not given
    return [tuple(row) for row in given[:, :length].int().tolist()]


def shares(rows: list[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    return {row: rows.count(row) / MANY for row in {*rows}}


def test_prefixes_and_subsets_have_uniform_sizes():
    """Of three words: 0, 1 or 2 are given; half of the time they are the first ones, else any as likely. The standard
    error of a share is 0.003."""
    expected = {(0, 0, 0): 1 / 3, (1, 0, 0): 1 / 6 + 1 / 18, (0, 1, 0): 1 / 18, (0, 0, 1): 1 / 18}
    expected |= {(1, 1, 0): 1 / 6 + 1 / 18, (1, 0, 1): 1 / 18, (0, 1, 1): 1 / 18}
    found = shares(draw(PrefixOrSubset(), 3))
    assert {*found} == {*expected}
    assert all(found[row] == pytest.approx(share, abs=0.015) for row, share in expected.items())
    assert all(sorted(row, reverse=True) == list(row) for row in draw(PrefixOrSubset(prefix=1.0), 5))


def test_spans_alternate_and_one_span_is_generated():
    """Cut into 1, 2 or 3 spans: with one nothing is given; with two the first or the second, at either of two cuts;
    with three, all cuts taken, the middle or both ends."""
    found = shares(draw(Spans(most=3), 3))
    expected = {(0, 0, 0): 1 / 3, (1, 0, 1): 1 / 6, (0, 1, 0): 1 / 6}
    expected |= {(1, 0, 0): 1 / 12, (0, 1, 1): 1 / 12, (1, 1, 0): 1 / 12, (0, 0, 1): 1 / 12}
    assert {*found} == {*expected}
    assert all(found[row] == pytest.approx(share, abs=0.015) for row, share in expected.items())


def test_spans_are_no_more_than_there_are_words():
    assert {*draw(Spans(), 1)} == {(0,)} and {*draw(Spans(), 2)} == {(0, 0), (1, 0), (0, 1)}
    rows = draw(Spans(), 8)
    changes = [sum(a != b for a, b in pairwise(row)) for row in rows]
    assert [changes.count(k) / MANY for k in range(5)] == pytest.approx([0.2] * 5, abs=0.015)


def test_the_same_positions_are_drawn_on_a_wider_canvas():
    for positions in (PrefixOrSubset(prefix=0.0), Spans()):
        assert draw(positions, 5, width=5) == draw(positions, 5, width=9)


def test_the_network_reads_given_words_clean_and_nothing_else_of_them():
    from difflm.methods import METHODS, TextSpec

    model = METHODS["cdcd"](embedding_dim=4, hidden=8, layers=1, heads=2).build(TextSpec(9, 6))
    denoiser, x = model.denoiser, torch.randn(2, 6, 4)
    assert isinstance(denoiser.conditioning, MaskStack)
    given = torch.tensor([[FREE, 7, FREE, FREE, 5, FREE], [3, HIDDEN, FREE, FREE, FREE, FREE]])
    level = model.process.at(torch.full((2,), 0.5))
    read = []
    denoiser.network.forward = lambda inputs, *_: (read.append(inputs), torch.zeros(2, 6, 9))[1]
    denoiser(x, level, None, Condition(given=given), torch.ones_like(x))
    denoiser(x, level)
    state, previous, clean, here = read[0].split([4, 4, 4, 1], -1)
    told = given != FREE
    assert torch.equal(here.squeeze(-1) == 1, told)
    assert not state[told].any() and torch.equal(state[~told], x[~told] / level.scale[0])
    assert not previous[told].any() and bool((previous[~told] == 1).all())
    words = denoiser.codec.encode(given.clamp(min=0))
    assert torch.equal(clean[given >= 0], words[given >= 0]) and not clean[given < 0].any()
    assert read[1].shape == read[0].shape and not read[1][..., 4:].any()


def test_a_dropped_word_is_hidden_and_its_place_is_told():
    given = torch.tensor([[FREE, 7, 5], [6, FREE, FREE]])
    assert Condition(given=given).null().given.tolist() == [[FREE, HIDDEN, HIDDEN], [HIDDEN, FREE, FREE]]
    one = Condition(given=given).null(torch.tensor([False, True]))
    assert one.given.tolist() == [[FREE, 7, 5], [HIDDEN, FREE, FREE]]


def test_random_pads_keep_the_words_in_order_and_leave_when_a_text_is_read():
    policy, noise = RandomPads(12, share=0.4), Noise(0, torch.arange(400))
    lengths = torch.arange(400) % 10 + 1
    ids = torch.arange(4, 14).expand(400, 10)
    canvas, mask = policy.training_canvas(ids, lengths, noise)
    plain, _ = policy.canvas(ids, lengths)
    assert mask.all() and canvas.shape == (400, 12)
    pads = 0
    for row, before, length in zip(canvas.tolist(), plain.tolist(), lengths.tolist(), strict=True):
        assert row[0] == START and row.count(END) == 1 and policy.words(row) == policy.words(before)
        assert policy.words(row) == list(range(4, 4 + length))
        pads += row[: row.index(END)].count(PAD)
    # A text of n words has room for 10 − n pads; n independent chances of 0.4 give it so many, at most.
    draws = torch.distributions.Binomial(torch.arange(1.0, 11.0), 0.4).sample((4000,)).minimum(10 - torch.arange(1, 11))
    assert pads / 400 == pytest.approx(float(draws.mean()), abs=0.25)
    narrow, _ = policy.training_canvas(ids[:, :3], lengths.clamp(max=3), noise)
    assert [policy.words(row) for row in narrow.tolist()] == [list(range(4, 4 + min(n, 3))) for n in lengths.tolist()]
    assert torch.equal(RandomPads(12, share=0.0).training_canvas(ids, lengths, noise)[0], plain)
