"""Rules that write together what tells little of each other, or draw words anew: against a joint that is known."""

import math

import pytest
import torch

from difflm.diffusion.base import Belief, Order, StepState
from difflm.diffusion.processes import Absorbing, Uniform
from difflm.diffusion.samplers.discrete_steps import DISCRETE_STEPS, alternate
from tests.support.oracles import JOINT, frequencies, sample, total_variation
from tests.support.token_oracles import ExactTokens, marginals

DRAWS = 20_000
CLOSE = 0.014  # nine cells of 20,000 exact draws lie further away once in a thousand times


def fresh(*shape, seed=0):
    return lambda: torch.rand(*shape, 3, generator=torch.Generator().manual_seed(seed))


def even(steps):
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64)


# -- the entropy bound ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nats", "written"), [(0.05, 1), (0.25, 2), (0.5, 3), (9.0, 5)])
def test_places_of_least_entropy_are_written_until_the_bound(nats, written):
    """Entropies 0.1, 0.2, 0.3, 0.4 and 0.5: of the first k the sum without the largest is 0, 0.1, 0.3, 0.6 and 1."""
    process, entropies = Absorbing(2), torch.tensor([0.3, 0.5, 0.1, 0.4, 0.2], dtype=torch.float64)
    low, high = torch.zeros(5, dtype=torch.float64), torch.full((5,), 0.5, dtype=torch.float64)
    for _ in range(60):  # the probability of the second word that has this entropy
        p = (low + high) / 2
        less = -(p * p.log() + (1 - p) * (1 - p).log()) < entropies
        low, high = torch.where(less, p, low), torch.where(less, high, p)
    logits = torch.stack([1 - p, p], -1).log().unsqueeze(0)
    t, s = torch.tensor([0.9]), torch.tensor([0.8])
    order = Order(sure=math.exp(-nats))
    x, levels = torch.full((1, 5), 2), (process.at(t), process.at(s))
    now = StepState(process, x, Belief(logits), *levels, fresh(1, 5), order=order)
    there = (DISCRETE_STEPS["entropy-bound"](now) != 2)[0]
    assert torch.equal(there, entropies <= 0.1 * written + 0.01)


def test_dependent_words_are_written_one_by_one():
    """The words of the joint tell 0.26 nats of each other, and 0.105 are allowed: the rule draws from the joint."""
    tokens = sample(ExactTokens(Absorbing(3)), DISCRETE_STEPS["entropy-bound"], even(2), DRAWS)
    assert total_variation(frequencies(tokens), JOINT) < CLOSE


# -- Gibbs steps given all others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("time", [0.2, 0.7])
def test_drawing_one_place_anew_leaves_the_distribution_as_it_is(time):
    """q(x_t) of the joint, before and after four steps that stand still; each changes many texts."""
    process, n = Uniform(3), DRAWS
    exact, t = ExactTokens(process), torch.full((n,), time, dtype=torch.float64)
    cells = torch.multinomial(JOINT.flatten(), n, replacement=True, generator=torch.Generator().manual_seed(0))
    x = process.corrupt(torch.stack([cells // 3, cells % 3], 1), t, fresh(n, 2, seed=1)())
    there = marginals(process, t[:1])
    truth, began = there.T @ JOINT @ there, x
    for seed in range(2, 6):
        now = StepState(process, x, exact(x, t), process.at(t), process.at(t), fresh(n, 2, seed=seed))
        x = DISCRETE_STEPS["leave-one-out"](now)
    assert total_variation(frequencies(x), truth) < CLOSE
    assert (x != began).any(-1).float().mean() > 0.3


def test_times_stand_still_at_every_second_step():
    """The first and the last step pass; of rows of fewer steps, too."""
    assert alternate(even(5)).tolist() == pytest.approx([1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0])
    assert alternate(even(4)).tolist() == pytest.approx([1, 2 / 3, 2 / 3, 1 / 3, 0])
    rows = torch.stack([even(4), torch.tensor([0.5, 0.25, 0, 0, 0])], 1)
    assert alternate(rows)[:, 1].tolist() == pytest.approx([0.5, 0.25, 0, 0, 0])
    assert alternate(even(1)).tolist() == [1, 0]


def test_steps_that_stand_still_mend_what_few_steps_break():
    """Three steps through time leave the joint by 0.14; with two in between that draw a place anew, by 0.11."""
    exact = ExactTokens(Uniform(3))
    few = sample(exact, DISCRETE_STEPS["ancestral"], even(3), DRAWS)
    mended = sample(exact, DISCRETE_STEPS["leave-one-out"], alternate(even(5)), DRAWS)
    off, less = (total_variation(frequencies(one), JOINT) for one in (few, mended))
    assert less < off - 0.02


def test_known_words_stay():
    process, x = Uniform(3), torch.zeros(500, 2, dtype=torch.int64)
    t, free = torch.full((500,), 0.9, dtype=torch.float64), torch.tensor([[False, True]]).expand(500, 2)
    now = StepState(process, x, ExactTokens(process)(x, t), process.at(t), process.at(t), fresh(500, 2), free=free)
    moved = DISCRETE_STEPS["leave-one-out"](now)
    assert (moved[:, 0] == 0).all() and (moved[:, 1] != 0).float().mean() > 0.3
