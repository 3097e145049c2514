"""Hard rules by themselves: where phrases go, what is never completed, and how known words form."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from difflm.controls.gaps import fits_between
from difflm.controls.rules import ban_at, best_starts, rule_out
from difflm.diffusion.base import Belief, expand_levels
from difflm.diffusion.codecs import FixedEmbedding
from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Clamp, ImposeTokens, Sampler
from difflm.diffusion.samplers.steps import STEPS
from tests.support.oracles import DIM, GRIDS, cosine, denoise, word_vectors


@given(
    gains=st.lists(st.lists(st.integers(-9, 0), min_size=9, max_size=9), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    blocked=st.sets(st.integers(0, 8), max_size=3),
)
def test_phrases_are_placed_where_together_they_are_likeliest(gains, sizes, blocked):
    """Against all placements, tried one by one."""
    sizes = sizes[: len(gains)]
    allowed = [
        [g if i + size <= 9 and not blocked & set(range(i, i + size)) else None for i, g in enumerate(row)]
        for row, size in zip(gains, sizes, strict=True)
    ]

    def totals(n, taken):
        if n == len(sizes):
            yield 0
        for i, g in enumerate(allowed[n]) if n < len(sizes) else ():
            mine = set(range(i, i + sizes[n]))
            if g is not None and not mine & taken:
                yield from (g + rest for rest in totals(n + 1, taken | mine))

    free = "".join(" " if i in blocked else "x" for i in range(9)).split()
    best = max(totals(0, set()), default=None)
    assert (best is not None) == fits_between(sizes, [len(run) for run in free])
    assume(best is not None)
    rows = [torch.tensor([[float("-inf") if g is None else float(g) for g in row]] * 2) for row in allowed]
    starts = [int(s[1]) for s in best_starts(rows, sizes, range(len(sizes)))]
    assert sum(gains[n][s] for n, s in enumerate(starts)) == best
    places = [p for s, size in zip(starts, sizes, strict=True) for p in range(s, s + size)]
    assert len(set(places)) == len(places) and not blocked & set(places)


def test_a_clamped_belief_stays_clamped_where_nothing_is_ruled_out():
    codec = FixedEmbedding(word_vectors(5))
    logits = torch.randn(2, 6, 5)
    clamped = Clamp(codec)(Belief(logits, codec=codec), torch.zeros(2, 6, DIM), torch.zeros(2))
    banned = clamped.tokens == 0
    after = rule_out(clamped, ban_at(logits, torch.ones(2, 6, dtype=torch.bool), [0]), codec)
    assert torch.equal(after.clean[~banned], clamped.clean[~banned])
    assert torch.equal(after.clean, codec.encode(after.tokens)) and not (after.tokens == 0).any()


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize("rule", STEPS)
def test_known_positions_follow_the_posterior_of_their_words(rule, grid):
    """After each step to s a known position is N(α_s e_w, σ_s²), though the denoiser says something else: to five
    standard errors, σ/√N for the mean and σ/√(2N) for the spread."""
    process, draws = cosine(), 10_000
    codec = FixedEmbedding(word_vectors(4, 2)).double()
    known = torch.tensor([2, FREE, 0])
    walked = []

    def recorded(now):
        walked.append((STEPS[rule](now), now))
        return walked[-1][0]

    nothing, state = torch.zeros(draws, 3, 4, dtype=torch.float64), torch.full((draws, 3, 2), 5.0, dtype=torch.float64)
    lie = Belief(nothing, state=state)
    settle = ImposeTokens(codec, known.expand(draws, -1))
    noise, mask = Noise(3, torch.arange(draws)), torch.ones(draws, 3, dtype=torch.bool)
    frames = list(denoise(lambda *_: lie, process, grid, Sampler(recorded, [settle]), noise, mask, (3, 2)))
    assert all((frame.tokens[:, [0, 2]] == known[[0, 2]]).all() for frame in frames)
    vectors = codec.encode(known.clamp(min=0))
    assert len(walked) == len(grid) - 1
    for x, now in walked:
        assert torch.equal(now.belief.clean[:, 1], lie.clean[:, 1])
        there = now.s[0].expand(3)
        alpha, sigma = (expand_levels(v, vectors) for v in (process.at(there).alpha, process.at(there).sigma))
        z = ((x - alpha * vectors) / sigma)[:, [0, 2]]
        assert float(z.mean((0, 2)).abs().max()) < 5 / (2 * draws) ** 0.5 + 1e-3
        assert float((z.std((0, 2)) - 1).abs().max()) < 5 / (4 * draws) ** 0.5 + 1e-3


def test_settled_words_are_certain():
    codec = FixedEmbedding(word_vectors(4))
    logits = torch.randn(2, 3, 4)
    belief = ImposeTokens(codec, torch.tensor([[1, FREE, 3]] * 2))(
        Belief(logits, state=codec.expectation(logits)), None, None
    )
    assert belief.tokens[:, [0, 2]].tolist() == [[1, 3]] * 2
    assert belief.confidence_in(belief.tokens)[:, [0, 2]].tolist() == [[1, 1]] * 2
    assert torch.equal(belief.logits[:, 1], logits[:, 1])
