"""Blocks from left to right, each denoised given the clean ones before it, by any process: masks (Arriola et al.,
2025), points of a simplex (Han et al., 2023), word vectors.

It is the same loop on a staircase of times: t is 0 in finished blocks, and 1 in those to come. Keys and values of
finished blocks are cached, and are exactly those of a pass over the whole text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Unpack, cast

import torch
from torch import Tensor, nn

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.base import Belief, Codec, Levels, Network, Process, Times
from difflm.diffusion.condition import FREE, UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Conditioning, Denoiser, autocast_to, clean_state
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import cross_entropy
from difflm.diffusion.samplers.loop import Denoise, Frame, Steering, impose_tokens
from difflm.diffusion.timesteps import BlockTimes
from difflm.models.base import Runner, Sampling, TextBatch
from difflm.models.diffusion import DiffusionModel, ModelParts
from difflm.models.lengths import DrawnLength, LengthPolicy, observed_counts, put_between_ends
from difflm.networks import EncoderDecoder, Transformer
from difflm.networks.cache import Cache, Memory
from difflm.networks.rotary import compute_rotations
from difflm.runtime.delayed_flag import DelayedFlag


class BlockLengths(DrawnLength):
    """Words, END, and PAD to the end of END's block: the model itself writes END."""

    forbidden: tuple[int, ...] = (START, UNK)

    def __init__(self, longest: int, size: int, most: int) -> None:
        super().__init__(longest, most)
        self.size = size

    def positions(self, words: int) -> int:
        return (words // self.size + 1) * self.size

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        width = self.positions(ids.shape[1])
        mask = torch.arange(width, device=ids.device) < (lengths.unsqueeze(1) // self.size + 1) * self.size
        return put_between_ends(ids, lengths, 0, width), mask

    @property
    def widest(self) -> int:
        """Positions of the longest texts of training."""
        return self.positions(self.longest)

    def draw(self, u: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        return torch.full(u.shape, self.widest, device=u.device)

    def draw_words(
        self, u: Tensor, words: Sequence[int], condition: Condition = UNCONDITIONAL, shares: Sequence[float] = ()
    ) -> Tensor:
        """Observed lengths, unless more words are needed."""
        if words[0] > self.longest:
            return torch.full(u.shape, words[0], device=u.device)
        seen = sum(n <= self.longest for n in words)
        return super().draw_words(u, words[:seen], condition, shares[:seen])

    @property
    def seen_back(self) -> Tensor:
        """How far back a text attends that is longer than those of training: two blocks less than their median length.
        In training, a block that attended farther was mostly followed by the end of the text."""
        longer = observed_counts(self.counts).flip(0).cumsum(0).flip(0)  # texts of at least 1 word, of at least 2 …
        median = (2 * longer >= longer[0]).sum()
        return ((median // self.size - 2) * self.size).clamp(min=self.size)

    def settled(self, words: int) -> tuple[int, dict[int, int]]:
        positions = self.positions(words)
        return positions, {words: END} | dict.fromkeys(range(words + 1, positions), PAD)

    nats = LengthPolicy.nats  # END is on the canvas like a word


class BlockDenoiser(Denoiser):
    """Reads noisy blocks together with the clean text, which the condition provides: each block sees itself and the
    clean blocks before it within `window` words, so that no distance is longer than in training."""

    network: Transformer

    def __init__(
        self,
        network: Network,
        codec: Codec,
        process: Process,
        conditioning: Conditioning | None,
        size: int,
        window: int,
    ) -> None:
        super().__init__(network, codec, process, conditioning)
        self.size, self.window = size, window
        # Rotary embeddings tell positions apart by their contents; among masks alone, all positions look the same.
        self.places = nn.Parameter(self.draw_places())

    def draw_places(self) -> Tensor:
        """What is first added to the network's inputs at each position of a block, [size, D]."""
        return 0.5 * torch.randn(self.size, self.network.input.in_features)

    def read_state(self, x: Tensor, level: Levels) -> Tensor:
        """The network's input for whole blocks, including the positions within them."""
        with torch.autocast(x.device.type, enabled=False):
            vectors = torch.cat(self.codec.inputs(x, level, self.codec.evidence(x, level)), -1)
            vectors = vectors + self.places.repeat(x.shape[1] // self.size, 1)
        return self.network.input(vectors)

    def read_words(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The same for clean words, and their times, which are 0."""
        level = self.process.at(torch.zeros(ids.shape, device=ids.device))
        return self.read_state(clean_state(self, ids), level), level.t

    def words_of(self, x: Tensor) -> Tensor:
        """The words of a finished state."""
        return x if self.codec.holds_tokens else self.codec.nearest(x)

    def forward(
        self,
        x: Tensor,
        t: Times,
        mask: Tensor | None = None,
        condition: Condition = UNCONDITIONAL,
        previous: Tensor | None = None,
        read: Callable[[Tensor], Belief] | None = None,
    ) -> Belief:
        """Predict all blocks at once, as training and the bound need it."""
        clean = condition.given
        assert clean is not None, "blocks are denoised given the clean text before them"
        level = self.process.at(t)
        level = level if level.t.dim() == 2 else self.process.at(level.t.unsqueeze(1).expand(x.shape[:2]))
        with autocast_to(x.device, self.precision):
            hidden = self.read_blocks(x, level, clean, self.memory_of(condition))
            if read is not None:
                return read(hidden)
            logits = self.network.answer(hidden).float()
        with torch.autocast(x.device.type, enabled=False):
            return self.codec.belief(logits, x, level, self.codec.evidence(x, level), self.process)

    def read_blocks(self, x: Tensor, level: Levels, clean: Tensor, memory: list[Memory] | None) -> Tensor:
        """The network's last states of all noisy blocks, read together with the clean text."""
        length = x.shape[1]
        cos, sin = compute_rotations(length, self.network.head_dim, x.device)
        turn = torch.cat([cos, cos]), torch.cat([sin, sin])
        words, zeros = self.read_words(clean)
        inputs, times = torch.cat([self.read_state(x, level), words], 1), torch.cat([level.t, zeros], 1)
        hidden, _ = self.network.run(inputs, times, self.seen_by(length, x.device), None, 0, turn, memory)
        return hidden[:, :length]

    def memory_of(self, condition: Condition) -> list[Memory] | None:
        """Every layer's keys and values of the sources; None without sources."""
        if condition.memory is None or condition.source_mask is None:
            return None
        return cast(EncoderDecoder, self.network).split_memory(condition.memory, condition.source_mask)

    def seen_by(self, length: int, device: torch.device) -> Tensor:
        """The attention mask of [noisy; clean], [1, 2L, 2L]."""
        block = torch.arange(length, device=device) // self.size
        row, column = block.unsqueeze(1), block.unsqueeze(0)
        near = (row - column) * self.size < self.window
        own, before, up_to = row == column, (column < row) & near, (column <= row) & near
        return torch.cat([torch.cat([own, before], 1), torch.cat([torch.zeros_like(own), up_to], 1)]).unsqueeze(0)

    @property
    def kept(self) -> int:
        """How many words before a block it may attend to."""
        return max(0, -(-self.window // self.size) - 1) * self.size

    def block_logits(
        self,
        block: Tensor,
        level: Levels | None,
        start: int,
        caches: Sequence[Cache | None],
        back: Tensor | None = None,
        memory: list[Memory] | None = None,
        before: Tensor | None = None,
    ) -> tuple[Tensor, Sequence[Cache | None]]:
        """Logits of one block [B, size, …] that begins at `start`, given the cached blocks; and the caches with this
        block. Without a level the block is clean words. `back` [B]: how far each text attends, if less than the window.
        `before` [B]: the word before the block, which some networks need to predict its first one."""
        caches, near = self.see_back(block, start, caches, back)
        with autocast_to(block.device, self.precision):
            inputs, t = self.read_words(block) if level is None else (self.read_state(block, level), level.t)
            hidden, grown = self.network.run(inputs, t, near, caches, start, memory=memory)
            return self.network.answer(hidden).float(), grown

    def see_back(
        self, block: Tensor, start: int, caches: Sequence[Cache | None], back: Tensor | None
    ) -> tuple[Sequence[Cache | None], Tensor | None]:
        """The caches within the window, and which of their words and of the block each text attends to, [B, words]."""
        kept = self.kept
        caches = [None if c is None else (c[0][:, :, -kept:], c[1][:, :, -kept:]) if kept else None for c in caches]
        if back is None:
            return caches, None
        words = min(start, kept)
        return caches, torch.arange(-words, block.shape[1], device=block.device) >= -back.unsqueeze(1)


class BlockDiffusion(DiffusionModel):
    denoiser: BlockDenoiser
    lengths: BlockLengths
    times: BlockTimes
    can_hide_known = False  # finished blocks are cached with their known words

    def __init__(self, denoiser: BlockDenoiser, **parts: Unpack[ModelParts]) -> None:
        super().__init__(denoiser, **parts)
        rules = tuple(name for name in denoiser.process.steps if name != "heun")  # which calls the network twice a step
        own = replace(self.capabilities, step_rules=rules, mixed_steps=False, whole_canvas=False)
        self.capabilities = replace(own, syncs_with_device=True)

    def condition_of(self, batch: Batch, ids: Tensor) -> Condition:
        """Each block is denoised given the clean ones before it."""
        return replace(super().condition_of(batch, ids), given=ids)

    @torch.no_grad()
    def nats_and_error(self, batch: Batch, noise: Noise, draws: int) -> tuple[Tensor, Tensor]:
        """Blocks of one masked word have an exact likelihood: there is nothing to draw."""
        if not self.is_exact:
            return super().nats_and_error(batch, noise, draws)
        ids, mask = self.lengths.canvas(batch.ids, batch.lengths)
        hidden, t = torch.full_like(ids, self.process.mask_id), torch.ones(len(ids), device=ids.device)
        condition = self.denoiser.prepare(self.condition_of(batch, ids))
        logits = self.denoiser(hidden, t, mask, condition).logits
        nats = (cross_entropy(logits, ids) * mask).sum(-1)
        return nats, torch.zeros_like(nats)

    @property
    def is_exact(self) -> bool:
        return self.denoiser.size == 1 and self.denoiser.codec.holds_tokens

    def nats_calls(self, draws: int) -> int:
        return 1 if self.is_exact else super().nats_calls(draws)

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        tokens = tokens.clone()
        tokens[END], tokens[PAD] = lengths.sum(), lengths.sum() * (self.denoiser.size - 1) // 2
        super().observe(lengths, tokens)

    # -- generation ---------------------------------------------------------------------------------------------

    def bind_denoiser(self, denoiser: Denoiser, mask: Tensor, sampling: Sampling, steering: Steering) -> Denoise:
        denoiser = cast(BlockDenoiser, denoiser)
        usual, back = self.lengths.widest, None
        if mask.shape[1] > usual:  # by the text's length, not its batch's: a text does not depend on its neighbours
            back = torch.where(mask.sum(-1) > usual, self.lengths.seen_back, denoiser.window)
        condition = denoiser.prepare(Condition(steering.source, steering.source_mask))
        steps = steering.spans[0].steps if steering.spans else sampling.steps
        return BlockwiseDenoiser(denoiser, steps, back, denoiser.memory_of(condition))

    def frames(self, sampling: Sampling, words: int) -> int:
        return self.lengths.positions(words) // self.denoiser.size * sampling.steps

    def calls(self, sampling: Sampling, words: int) -> int:
        blocks = self.lengths.positions(words) // self.denoiser.size
        return blocks * (sampling.steps + 1) - 1  # one more call for the cache of each block except the last

    def follow_frames(self, frames: Iterator[Frame], batch: TextBatch, runner: Runner) -> Iterator[Frame]:
        """Yield the frames until the last block that is needed; blocks not reached yet are shown as PAD."""
        size, steps, lengths = self.denoiser.size, batch.sampling.steps, batch.lengths
        ended, calls = torch.zeros_like(lengths, dtype=torch.bool), torch.zeros_like(lengths)
        waiting = ~ended  # texts with masks
        all_ended, tokens = DelayedFlag(), torch.zeros(0)
        for frame in frames:
            assert frame.state is not None
            calls = calls + (waiting & ~ended)
            if self.denoiser.codec.holds_tokens:
                waiting = (frame.state == self.process.mask_id).any(-1)
            reached = frame.step // steps * size + size
            # Words of finished blocks are kept as written, whatever rules make of them later.
            tokens = (
                torch.cat([tokens[:, : reached - size], frame.tokens[:, reached - size :]], 1)
                if frame.step
                else frame.tokens
            )
            if (frame.step + 1) % steps == 0:  # a block is finished
                ended = ended | (tokens[:, :reached] == END).any(-1) | (lengths <= reached)
                calls = calls + ~ended
            # In a text without masks all later words are known, so it is shown to its end.
            shown = torch.where(waiting, reached, tokens.shape[1]).unsqueeze(1)
            over = ((tokens == END).cumsum(-1) - (tokens == END).long()) > 0
            over = over | (torch.arange(tokens.shape[1], device=tokens.device) >= shown)
            yield replace(frame, tokens=tokens.masked_fill(over, PAD), calls=calls)
            if all_ended(ended.all()):
                return


@dataclass
class BlockwiseDenoiser:
    """The denoiser of one batch while its blocks are written, in `steps` calls each; it caches finished blocks."""

    denoiser: BlockDenoiser
    steps: int
    back: Tensor | None = None  # [B], how far back each text attends, if less than the window
    memory: list[Memory] | None = None

    syncs_with_device: ClassVar[bool] = True  # its work differs between calls: see `RecordedBlocks`

    def __post_init__(self) -> None:
        self.calls = self.done = 0
        self.caches: Sequence[Cache | None] = [None] * len(self.denoiser.network.equal_blocks())
        self.written: list[Tensor] = []  # words of finished blocks

    def __call__(self, x: Tensor, level: Levels, previous: Tensor | None) -> Belief:
        """A belief about the whole canvas, on which rules may act; in blocks to come it is the frequency of words."""
        denoiser, size = self.denoiser, self.denoiser.size
        codec, asked = denoiser.codec, (self.back, self.memory)
        now = min(self.calls // self.steps, x.shape[1] // size - 1)  # the times would tell, but are on the device
        self.calls += 1
        while self.done < now:
            words = denoiser.words_of(x[:, self.done * size : (self.done + 1) * size])
            _, self.caches = denoiser.block_logits(words, None, self.done * size, self.caches, *asked)
            self.written.append(words)
            self.done += 1
        here = slice(now * size, (now + 1) * size)
        frequent = denoiser.network.head.bias.detach().float()[: codec.vocabulary]  # a copied head may be padded
        logits = frequent.expand(*x.shape[:2], -1).clone()
        before = self.written[-1][:, -1] if self.written else None
        logits[:, here], _ = denoiser.block_logits(x[:, here], level[:, here], now * size, self.caches, *asked, before)
        belief = codec.belief(logits, x, level, codec.evidence(x, level), denoiser.process)
        if not self.written or codec.holds_tokens:
            return belief
        rest = torch.full((len(x), x.shape[1] - now * size), FREE, device=x.device)
        written = torch.cat([*self.written, rest], 1)
        return impose_tokens(belief, codec, written >= 0, written.clamp(min=0))
