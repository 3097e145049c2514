"""The bound as it is estimated: with exact denoisers it is −log p(x), in continuous time and for a chain."""

import math

import pytest
import torch
from torch import Tensor

from difflm.diffusion.bounds import DiscreteBound, ScoredTexts
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Absorbing, Interpolating, Uniform
from difflm.diffusion.timesteps import BlockTimes, TimeSampler
from difflm.methods.gidd import Hybrid
from difflm.methods.masked_lm import MostlyAt
from tests.support.oracles import ENTROPY, JOINT
from tests.support.token_oracles import MUTUAL, AtAnyTime

EACH = 2000
CELLS = torch.arange(9).repeat_interleave(EACH)
IDS = torch.stack([CELLS // 3, CELLS % 3], dim=1)
MASK = torch.ones_like(IDS, dtype=torch.bool)


def measured(process: Interpolating, draws: int, levels: int | None = None) -> tuple[Tensor, float, float]:
    noise = Noise(0, torch.arange(len(IDS)))
    texts = ScoredTexts(AtAnyTime(process), TimeSampler(levels), IDS, MASK, noise)
    nats = DiscreteBound()(texts, draws).mean(1).view(9, EACH)
    mean, error = nats.mean(1), nats.std(1) / math.sqrt(EACH)
    p = JOINT.flatten()
    return (mean + p.log()) / error, float(p @ mean), float((p * error).square().sum().sqrt())


@pytest.mark.parametrize("process", [Absorbing(3), Uniform(3), Hybrid(3, 0.2)], ids=["masks", "uniform", "hybrid"])
def test_the_estimate_is_the_likelihood_of_every_cell(process):
    z_scores, expected, spread = measured(process, 16)
    assert spread < 0.02
    assert expected == pytest.approx(ENTROPY, abs=4 * spread)
    assert float(z_scores.abs().max()) < 4.5  # of nine cells


def test_the_estimate_of_a_chain_has_its_gap():
    _, expected, spread = measured(Absorbing(3), 16, levels=2)
    assert expected == pytest.approx(ENTROPY + MUTUAL / 2, abs=4 * spread) and 4 * spread < 0.05


def test_times_of_a_part_and_times_that_are_favoured():
    noise, mask = Noise(0, torch.arange(1000)), torch.ones(1000, 8)
    t, weight = BlockTimes(4, 0.45, 0.95).sample(noise, mask)
    assert float(t.min()) >= 0.45 and float(t.max()) <= 0.95 and bool((weight == 1).all())
    assert torch.equal(t[:, :4], t[:, :1].expand(-1, 4)) and bool((t[:, 0] != t[:, 4]).all())  # a time for each block
    t, _ = MostlyAt(0.15).sample(noise, mask)
    assert bool((t[::2] == 0.15).all()) and float(t[1::2].max()) > 0.9
