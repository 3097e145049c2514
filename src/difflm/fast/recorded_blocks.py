"""Blocks of tokens with identical work in every step, so that one captured step serves all blocks.

A step reads two blocks: the previous, finished one as clean words, and the current one. Keys and values have a slot for
every position. Those of the finished block are rewritten by every step of the next one, which costs a GPU little and
saves a separate step; those of the current block are in the slots of the finished ones to come. Masks determine what
each position attends to.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from difflm.data.tokenizers import PAD
from difflm.diffusion.base import Belief, Levels
from difflm.diffusion.denoiser import autocast_to
from difflm.diffusion.samplers.discrete_steps import gibbs
from difflm.diffusion.samplers.loop import BanTokens, ImposeTokens, SamplerInputs, Temperature
from difflm.fast.recorded import RecordedSampler, can_capture
from difflm.models.block_diffusion import BlockwiseDenoiser
from difflm.networks.cache import Slots
from difflm.networks.rotary import compute_rotations
from difflm.networks.transformer import Transformer


def recorder_of(inputs: SamplerInputs) -> type[RecordedSampler] | None:
    """The class that captures the steps of these inputs; None if they cannot be captured."""
    if can_capture(inputs):
        return RecordedSampler
    bound, sampler = inputs.denoise, inputs.sampler
    if not isinstance(bound, BlockwiseDenoiser) or not bound.denoiser.codec.holds_tokens:
        return None
    if not isinstance(bound.denoiser.network, Transformer):  # other networks cache keys and values differently
        return None
    # What acts on the whole canvas at once needs a belief about all of it.
    apart = all(isinstance(one, BanTokens | Temperature | ImposeTokens) for one in sampler.transforms)
    return RecordedBlocks if apart and sampler.guide is None and sampler.step is not gibbs else None


class RecordedBlocks(RecordedSampler):
    def __init__(self, inputs: SamplerInputs, compiled: bool = False, other: RecordedSampler | None = None) -> None:
        denoiser, device = cast(BlockwiseDenoiser, inputs.denoise).denoiser, inputs.mask.device
        size, network, (texts, width) = denoiser.size, denoiser.network, inputs.mask.shape
        self.block = torch.arange(size, device=device)
        # Slot j is that of position j − size: before the first block there is another, which is never attended to.
        self.position = torch.arange(-size, width, device=device)
        self.angles = compute_rotations(width + size, network.head_dim, device, -size)
        self.slot = torch.zeros(2 * size, dtype=torch.int64, device=device)  # slots of the two blocks
        heads = network.input.out_features // network.head_dim
        dtype = network.input.weight.dtype  # of all linear layers
        empty = torch.zeros(texts, heads, width + size, network.head_dim, dtype=dtype, device=device)
        self.slots = [Slots(empty.clone(), empty.clone(), self.slot) for _ in network.blocks]
        super().__init__(inputs, compiled, other)

    def _step(self) -> None:
        inputs, counter = self.inputs, self.inputs.step_counter
        bound, size = cast(BlockwiseDenoiser, inputs.denoise), len(self.block)
        assert inputs.known is not None
        place = torch.div(counter, bound.steps, rounding_mode="floor") * size + self.block
        self.slot.copy_(torch.cat([place, place + size]))
        here, there = (
            self.levels.index_select(0, at).squeeze(0).index_select(-1, place) for at in (counter, counter + 1)
        )
        level, next_level = (self.kind(*row.unbind()) for row in (here, there))
        x, known, fresh = (one.index_select(1, place) for one in (self.x, inputs.known, self._noise()))
        others = [one for one in inputs.sampler.transforms if not isinstance(one, ImposeTokens)]
        sampler = replace(inputs.sampler, transforms=[*others, ImposeTokens(bound.denoiser.codec, known)])
        part = replace(inputs, denoise=self._believe, known=known, sampler=sampler)
        x, belief = part.take_step(x, level, next_level, None, None, lambda: fresh, guided=False)
        shown = inputs.process.display_tokens(x, belief.tokens, next_level)
        self.x.index_copy_(1, place, x)
        self.tokens.copy_(torch.where(self.x == inputs.process.mask_id, PAD, self.x).index_copy(1, place, shown))
        self.sure.fill_(1.0).index_copy_(1, place, belief.confidence_in(shown))
        counter.add_(1)

    def _believe(self, x: Tensor, level: Levels, previous: Tensor | None) -> Belief:
        """The belief about the current block, [B, size], after reading the finished block before it."""
        bound, size = cast(BlockwiseDenoiser, self.inputs.denoise), len(self.block)
        denoiser, codec = bound.denoiser, bound.denoiser.codec
        before = self.x.index_select(1, (self.slot[:size] - size).clamp(min=0))
        turn = self.angles[0].index_select(0, self.slot), self.angles[1].index_select(0, self.slot)
        with autocast_to(x.device, denoiser.precision):
            words, zeros = denoiser.read_words(before)
            read, t = torch.cat([words, denoiser.read_state(x, level)], 1), torch.cat([zeros, level.t], 1)
            hidden, _ = denoiser.network.run(read, t, self._seen(bound), self.slots, 0, turn, bound.memory)
            logits = denoiser.network.answer(hidden[:, size:]).float()
        return codec.belief(logits, x, level, codec.evidence(x, level), denoiser.process)

    def _seen(self, bound: BlockwiseDenoiser) -> Tensor:
        """The attention mask, [B or 1, 2 size, slots]: a block attends to itself and to finished ones within reach. The
        placeholder before the first block attends to itself: attention to nothing would give NaN."""
        size = len(self.block)
        first = (self.slot - size - self.block.repeat(2)).unsqueeze(1)  # of the block of each position
        reach = bound.denoiser.kept if bound.back is None else bound.back.clamp(max=bound.denoiser.kept).view(-1, 1, 1)
        low = torch.maximum(first - reach, first.clamp(max=0))
        seen = (self.position >= low) & (self.position < first + size)
        return seen if seen.dim() == 3 else seen.unsqueeze(0)
