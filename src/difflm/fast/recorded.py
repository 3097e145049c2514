"""Sampling that is captured once and replayed, over tensors that stay in place: on a GPU a denoising step, or one word
from left to right, is one replay of a CUDA graph."""

from collections.abc import Container, Generator, Iterator
from dataclasses import is_dataclass, replace
from typing import cast

import torch
from torch import Tensor, zeros_like

from difflm.data.tokenizers import PAD
from difflm.diffusion.base import Belief, Levels
from difflm.diffusion.denoiser import autocast_to
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.processes.discrete import draw_states
from difflm.diffusion.samplers.discrete_steps import ancestral, gibbs
from difflm.diffusion.samplers.left_to_right import decoding_state
from difflm.diffusion.samplers.loop import (
    BanTokens,
    BoundDenoiser,
    Frame,
    ImposeTokens,
    Memory,
    RowStates,
    SamplerInputs,
    Temperature,
)
from difflm.fast.cuda_graphs import (
    CapturedFunction,
    Capturing,
    clone_tensors,
    compile_whole,
    copy_into,
    paired_tensors,
)
from difflm.machine import avoid_onednn
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import Sampling
from difflm.models.block_diffusion import BlockwiseDenoiser
from difflm.models.word_nats import has_linear_bound
from difflm.networks.cache import Slots
from difflm.networks.head import WordHead
from difflm.networks.rotary import compute_rotations
from difflm.networks.transformer import Transformer

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


MAX_PREDRAWN = 2**24  # random numbers that may be drawn ahead: enough for 50 texts and 50 steps


def can_capture(inputs: SamplerInputs) -> bool:
    """Whether sampling steps can be captured: everything that takes part in them is a value whose tensors can be found,
    and does not read from the device to decide what to do."""
    sampler = inputs.sampler
    parts = [inputs.denoise, *sampler.transforms, *([] if sampler.guide is None else [sampler.guide])]
    network = inputs.denoise.denoiser.network if isinstance(inputs.denoise, BoundDenoiser) else None
    known = all(is_dataclass(part) and not getattr(part, "syncs_with_device", False) for part in parts)
    return known and (network is None or network.capturable)


class RecordedSampler(Capturing):
    """A sampler whose steps all do the same work on the same tensors; the steps and the start are captured, and
    compiled as one if requested. Temporary memory is shared with `other`, which never runs at the same time."""

    def __init__(self, inputs: SamplerInputs, compiled: bool = False, other: "RecordedSampler | None" = None) -> None:
        self.inputs: SamplerInputs = clone_tensors(inputs, {})
        self.levels, self.kind = inputs.levels.stack(), type(inputs.levels)
        self.x = inputs.start(inputs.draw_noise(0))
        # No first answer is one of zeros, and a past of no length is none: the first step is like the others. Steps of
        # tokens ask for neither.
        self.clean = zeros_like(self.x) if self.x.is_floating_point() else None
        self.last_level = self.levels[0].clone()
        self.tokens, self.sure = zeros_like(self.inputs.mask).long(), zeros_like(self.inputs.mask, dtype=torch.float32)
        self.predrawn = self._predraw() if self.x.numel() * len(self.levels) <= MAX_PREDRAWN else None
        kept = () if self.predrawn is None else (self.predrawn,)
        past = () if self.clean is None else (self.clean,)
        both = (self.x, *past, self.last_level, self.inputs.step_counter)
        begin, step = self._begin, self._step
        if compiled:
            begin = compile_whole(begin, (*both, self.levels, *kept))
            step = compile_whole(step, (*both, self.tokens, self.sure))
        self.step: CapturedFunction = CapturedFunction(
            step, self.x.device, share_pool_with=other.step if other else None
        )
        self.begin = CapturedFunction(begin, self.x.device, warmup=1, share_pool_with=self.step)

    def _predraw(self) -> Tensor:
        """The noise of the start and of all steps, drawn at once: as many small operations as for a single step."""
        return self.inputs.draw_noise(torch.arange(len(self.levels), device=self.x.device).unsqueeze(1))

    def _noise(self) -> Tensor:
        now = self.inputs.step_counter + 1
        return self.inputs.draw_noise(now) if self.predrawn is None else self.predrawn.index_select(0, now).squeeze(0)

    @torch.no_grad()
    def _begin(self) -> None:
        """Compute everything before the first step from the inputs."""
        inputs = replace(self.inputs)  # a copy that has not computed its levels yet
        self.levels.copy_(inputs.levels.stack())
        if self.predrawn is not None:
            self.predrawn.copy_(self._predraw())
        self.x.copy_(inputs.start(inputs.draw_noise(0) if self.predrawn is None else self.predrawn[0]))
        if self.clean is not None:
            self.clean.zero_()
        self.last_level.copy_(self.levels[0])
        inputs.step_counter.zero_()

    def _step(self) -> None:
        inputs, counter = self.inputs, self.inputs.step_counter
        here, there = (self.levels.index_select(0, at).squeeze(0) for at in (counter, counter + 1))
        level, next_level, last_level = (self.kind(*row.unbind()) for row in (here, there, self.last_level))
        last = None if self.clean is None else (self.clean, last_level)
        guided = counter + 1 < len(self.levels) - 1
        if inputs.places:
            x, sure = write_places(inputs, self.x, level, next_level, self._noise())
            self.tokens.copy_(x)
            self.sure.copy_(sure)
        else:
            x, belief = inputs.take_step(self.x, level, next_level, self.clean, last, self._noise, guided)
            self.tokens.copy_(inputs.process.display_tokens(x, belief.tokens, next_level))
            self.sure.copy_(belief.confidence_in(self.tokens))
            if self.clean is not None:
                self.clean.copy_(belief.clean)
        self.x.copy_(x)
        self.last_level.copy_(here)
        counter.add_(1)

    def frames(self, inputs: SamplerInputs, watched_steps: Container[int] | None = None) -> Iterator[Frame]:
        """Yield the frames of other inputs with the same capture key; those neither watched nor last are no copies."""
        copy_into(inputs, self.inputs)
        self.begin()
        times, before = self.levels[:, 0].clone(), None
        last = len(times) - 2
        for i in range(last + 1):
            self.step()
            now = [self.tokens, self.sure, self.x, *([] if self.clean is None else [self.clean])]
            if watched := watched_steps is None or i in watched_steps or i == last:
                now = [one.clone() for one in now]
            tokens, sure, x, *clean = now
            changed = None if before is None or not watched else tokens != before
            yield Frame(i, times[i + 1], tokens, sure, inputs.mask, changed, x, clean=clean[0] if clean else None)
            before = tokens if watched else None


class JoinableSampler(Capturing):
    """`SamplerInputs.join` with a captured step, over tensors that stay in place."""

    def __init__(
        self, inputs: SamplerInputs, rows: RowStates, compiled: bool = False, other: "JoinableSampler | None" = None
    ) -> None:
        self.inputs: SamplerInputs = clone_tensors(inputs, {})
        self.rows: RowStates = clone_tensors(rows, {})
        self.levels, self.times = inputs.levels.stack(), inputs.levels[0].t.clone()  # times that were reached
        self.sure = torch.zeros_like(inputs.mask, dtype=torch.float32)
        self.inputs.step_counter.copy_(rows.counter)
        step = self._step
        if compiled:
            kept = [one for one in vars(self.rows).values() if one is not None]
            step = compile_whole(step, [*kept, self.inputs.step_counter, self.sure, self.times])
        pool = None if other is None else other.step
        self.step: CapturedFunction = CapturedFunction(step, inputs.mask.device, share_pool_with=pool)

    def _step(self) -> None:
        rows, t, belief = self.inputs.step_rows(self.levels, self.rows, guided=True)
        for old, new in paired_tensors(
            (t, belief.confidence_in(rows.tokens), rows), (self.times, self.sure, self.rows)
        ):
            old.copy_(new)

    def frames(self, inputs: SamplerInputs, given: RowStates, watched: bool) -> Generator[Frame]:
        """Yield the frames of other inputs of the same capture key, whose tensors are valid until the next one."""
        with torch.no_grad():
            copy_into(inputs, self.inputs)
            copy_into((inputs.levels.stack(), given), (self.levels, self.rows))
            self.inputs.step_counter.copy_(given.counter)
        while True:
            before, rows = self.rows.tokens.clone() if watched else None, self.rows
            self.step()
            shown = rows.tokens, self.sure, self.inputs.mask, None if before is None else rows.tokens != before
            yield Frame(0, self.times, *shown, rows.x, rows.calls, rows.clean, rows=rows)


class RecordedDecoder(Capturing):
    """Decodes batches of one shape in tensors that stay in place. Keys and values have a slot for every position; those
    of later positions are masked, so nothing need be cleared between two batches. A `memory` of sources is copied to
    where the step reads it."""

    def __init__(
        self, model: Autoregressive, batch: int, width: int, sampling: Sampling, memory: Memory | None = None
    ) -> None:
        self.model, self.state = model, decoding_state(model, batch, width, sampling)
        weight, network = model.embedding.weight, model.network
        self.angles = compute_rotations(width, network.head_dim, weight.device)
        heads, rows = network.input.out_features // network.head_dim, len(self.state.last)
        empty = torch.zeros(rows, heads, width, network.head_dim, dtype=weight.dtype, device=weight.device)
        self.caches = [Slots(empty.clone(), empty.clone(), self.state.position) for _ in network.blocks]
        self.memory: Memory | None = None if memory is None else clone_tensors(list(memory), {})
        self.step = CapturedFunction(self._step, weight.device)

    @torch.no_grad()
    def frames(self, noise: Noise, known: Tensor | None, memory: Memory | None = None) -> Iterator[Frame]:
        self.state.begin(noise, known)
        if memory is not None:
            copy_into(list(memory), self.memory)
        yield from self.state.frames(lambda position: self.step())

    @torch.no_grad()
    def _step(self) -> None:
        state, network = self.state, self.model.network
        angles = state.at_position(self.angles[0]), state.at_position(self.angles[1])
        visible = (state.positions <= state.position).view(1, 1, -1)
        with avoid_onednn(visible.device, self.model.embedding.weight.dtype):
            x = network.input(self.model.embedding(state.last))
            x, _ = network.run(x, None, visible, self.caches, 0, angles, self.memory)
            state.append(network.answer(x)[:, -1].float())
        if (parents := state.parents) is not None:
            for slots in self.caches:
                slots.keys.copy_(slots.keys.index_select(0, parents))
                slots.values.copy_(slots.values.index_select(0, parents))


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
    """Blocks of tokens with identical work in every step, so that one captured step serves all blocks.

    A step reads two blocks: the previous, finished one as clean words, and the current one. Keys and values have a slot
    for every position. Those of the finished block are rewritten by every step of the next one, which costs a GPU
    little and saves a separate step; those of the current block are in the slots of the finished ones to come. Masks
    determine what each position attends to."""

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
