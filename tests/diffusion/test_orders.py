"""Orders in which masks become words: which place comes first, in which block, and what is written there."""

import pytest
import torch

from difflm.diffusion.base import Belief, Order, StepState
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.samplers.discrete_steps import DISCRETE_STEPS
from difflm.diffusion.samplers.loop import TakeLikeliest

# Three places: the least entropy is that of the first, the widest margin that of the second, the third is the surest.
CHANCES = torch.tensor([[0.62, 0.38, 0, 0], [0.60, 0.14, 0.13, 0.13], [0.65, 0.30, 0.03, 0.02]])
MASK = 4


def step(rule, chances, share, x=None, order=None, free=None, t=1.0):
    """One step from t to a share of it."""
    process, batch = Absorbing(4), chances.unsqueeze(0)
    x = torch.full(batch.shape[:2], MASK) if x is None else x
    belief = TakeLikeliest()(Belief(batch.log()), x, torch.ones(1))
    at, later = process.at(torch.tensor([t])), process.at(torch.tensor([t * share]))
    state = StepState(process, x, belief, at, later, lambda: torch.rand(*x.shape, 3), free=free, order=order)
    return DISCRETE_STEPS[rule](state)


@pytest.mark.parametrize(("rule", "first"), [("entropy", 0), ("margin", 1), ("confidence", 2)])
def test_each_order_has_its_own_first_place(rule, first):
    written = step(rule, CHANCES, 2 / 3)[0] != MASK
    assert written.tolist() == [place == first for place in range(3)]


def test_the_likeliest_word_is_written_however_unsure_it_is():
    chances = torch.tensor([[0.26, 0.25, 0.25, 0.24], [0.2, 0.3, 0.25, 0.25]])
    assert step("confidence", chances, 0.0).tolist() == [[0, 1]]


def test_a_threshold_of_ones_own():
    """All above it at once, and one at least."""
    for sure, count in ((0.61, 2), (0.5, 3), (0.9, 1)):
        assert int((step("threshold", CHANCES, 0.9, order=Order(sure=sure)) != MASK).sum()) == count


def test_blocks_begin_at_the_first_free_place_or_before_the_canvas():
    """Six places in blocks of two; the surest word stands in the last block, and waits."""
    chances = torch.full((6, 4), 0.25)
    chances[5] = torch.tensor([0.97, 0.01, 0.01, 0.01])
    x = torch.full((1, 6), MASK)

    def places(**about):
        found = step("confidence", chances, 1 / 3, **{"x": x, **about})
        return (found != MASK).nonzero()[:, 1].tolist()

    assert places(order=Order(block=2)) == [0, 1]
    given = torch.tensor([[3, MASK, MASK, MASK, MASK, MASK]])
    assert places(order=Order(block=2), x=given, free=given == MASK) == [0, 1, 2]
    assert places(order=Order(block=2, before=torch.tensor([[3]]))) == [0]  # the rest of a block of the prompt
    assert 5 in places(order=Order())
    # The last step writes what is left, in whatever block.
    assert (step("confidence", chances, 0.0, x=x, order=Order(block=2)) != MASK).all()
