"""Masked sampling that computes logits only where they are needed. Which masks become words in an ancestral step
depends on random numbers alone, so only the logits of these positions are computed: in 64 steps, a 64th of them at a
time. If texts are watched while they form, guesses are shown at all positions, and all logits are computed."""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from difflm.diffusion.base import Belief, Levels
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.processes.discrete import draw_states
from difflm.diffusion.samplers.discrete_steps import ancestral
from difflm.diffusion.samplers.loop import BanTokens, BoundDenoiser, ImposeTokens, SamplerInputs, Temperature
from difflm.models.word_nats import has_linear_bound
from difflm.networks.head import WordHead

FEWEST = 8  # positions at a time: with fewer, their number would differ between batches more often
MAX_DRAWN = 2**24  # random numbers that are drawn at once


def ask_few_places(inputs: SamplerInputs) -> SamplerInputs:
    """Set `places` if steps need fewer than half of the positions at a time; otherwise return the inputs unchanged. If
    texts fill the canvas, attention needs no mask either. It synchronises once."""
    bound, sampler = inputs.denoise, inputs.sampler
    apart = all(isinstance(one, BanTokens | Temperature | ImposeTokens) for one in sampler.transforms)
    if sampler.step is not ancestral or sampler.guide is not None or not apart:
        return inputs
    if not isinstance(bound, BoundDenoiser) or bound.contrast or not has_linear_bound(bound.denoiser):
        return inputs
    most, full = torch.stack([most_moved(inputs), inputs.mask.all().long()]).tolist()
    places = max(FEWEST, 1 << (most - 1).bit_length())  # a power of two, so that few sizes are captured
    if 2 * places > inputs.mask.shape[1]:
        return inputs
    return replace(inputs, places=places, denoise=replace(bound, mask=None if full else bound.mask))


def most_moved(inputs: SamplerInputs) -> Tensor:
    """The most masks of a text that any one step writes."""
    process, levels, steps = cast(Absorbing, inputs.process), inputs.levels, len(inputs.grid) - 1
    z = inputs.start(inputs.draw_noise(0))
    most, size = z.new_zeros(()), max(1, MAX_DRAWN // (3 * z.numel()))
    for first in range(0, steps, size):
        step = torch.arange(first, min(first + size, steps), device=z.device)
        fresh = inputs.draw_noise((step + 1).unsqueeze(1))
        moved = process.moves(z, levels[step].t, levels[step + 1].t, fresh)
        new = moved & (moved.cumsum(0) == 1)
        most = torch.maximum(most, new.sum(-1).amax())
        z = torch.where(moved.any(0), 0, z)
    return most


def write_places(
    inputs: SamplerInputs, x: Tensor, level: Levels, next_level: Levels, fresh: Tensor
) -> tuple[Tensor, Tensor]:
    """x_s, where masks that are not due stay, and the probabilities of new words, 1 elsewhere, [B, L] each."""
    process, bound = cast(Absorbing, inputs.process), cast(BoundDenoiser, inputs.denoise)
    network = cast(WordHead, bound.denoiser.network)
    moves = process.moves(x, level.t, next_level.t, fresh)
    at = moves.long().argsort(dim=-1, descending=True, stable=True)[:, : inputs.places]

    def read(states: Tensor) -> Belief:
        chosen = states.gather(1, at.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        return Belief(network.answer(chosen).float(), codec=bound.denoiser.codec)

    belief = bound.denoiser(x, level, bound.mask, bound.condition, None, read)
    for transform in inputs.sampler.transforms:
        if not isinstance(transform, ImposeTokens):  # given positions are never masks
            belief = transform(belief, x, level.t)
    words = draw_states(belief.shares, fresh.gather(1, at.unsqueeze(-1).expand(-1, -1, fresh.shape[-1])))
    due = moves.gather(1, at)
    sure = torch.ones_like(x, dtype=torch.float32).scatter(1, at, torch.where(due, belief.confidence_in(words), 1.0))
    return x.scatter(1, at, torch.where(due, words, x.gather(1, at))), sure
