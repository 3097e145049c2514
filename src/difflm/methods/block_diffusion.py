"""Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models (Arriola et al., 2025).

Masked diffusion inside blocks of a few words, left to right between them: one word is the twin, all words are MDLM.
Training masks shares of which losses vary least, as the paper found for small blocks; the bound takes all of them. It
may begin as a model that writes from left to right."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from difflm.data.tokenizers import START
from difflm.diffusion import Absorbing, Levels, Objective, autocast_to
from difflm.diffusion.timesteps import BlockTimes
from difflm.methods.base import TextSpec
from difflm.methods.parts import build_network
from difflm.methods.tokens import DecoderStart
from difflm.models.base import LanguageModel, Sampling
from difflm.models.block_diffusion import BlockDenoiser, BlockDiffusion, BlockLengths
from difflm.networks.cache import Cache, Growing, Memory
from difflm.networks.open_transformer import OpenTransformer


class OpenBlockDenoiser(BlockDenoiser):
    """The denoiser of a network that started as an open left-to-right model (`models/open_start.py`). If its outputs
    predict the next position (`shift`), the word before a noisy block is repeated in front of it (START for the first
    block): there the network sees the whole block and predicts its first word. No other position sees this copy, so
    that no word counts twice, except START, which occurs nowhere else."""

    @property
    def shift(self) -> int:
        return int(cast(OpenTransformer, self.network).shape.shift)

    def draw_places(self) -> Tensor:
        return torch.zeros(self.size, cast(OpenTransformer, self.network).shape.hidden)

    def read_blocks(self, x: Tensor, level: Levels, clean: Tensor, memory: list[Memory] | None) -> Tensor:
        network, (words, _) = cast(OpenTransformer, self.network), self.read_words(clean)
        noisy = self.read_state(x, level).unflatten(1, (-1, self.size))
        if self.shift:
            before = torch.cat([self.read_start(x), words[:, self.size - 1 : -1 : self.size]], 1)
            noisy = torch.cat([before.unsqueeze(2), noisy], 2)
        place = torch.arange(x.shape[1], device=x.device)
        first = place[:: self.size].unsqueeze(1)
        read_at = (first + torch.arange(-self.shift, self.size, device=x.device)).flatten()
        seen, places = self.seen_by(x.shape[1], x.device), torch.cat([read_at, place]) + self.shift
        hidden = network.run(torch.cat([noisy.flatten(1, 2), words], 1), seen, None, places)
        spoken = hidden[:, : len(read_at)].unflatten(1, (-1, self.size + self.shift))[:, :, : self.size]
        return spoken.flatten(1, 2)

    def read_start(self, x: Tensor) -> Tensor:
        """The network's input for START, [B, 1, hidden]."""
        start, zero = x.new_full((len(x), 1), START, dtype=torch.int64), torch.zeros(len(x), 1, device=x.device)
        (vectors,) = self.codec.inputs(start, self.process.at(zero), None)
        return vectors

    def seen_by(self, length: int, device: torch.device) -> Tensor:
        """The attention mask of [noisy; clean], where each noisy block has its copy in front, [1, T, T]."""
        plain = super().seen_by(length, device)
        if not self.shift:
            return plain
        place, size = torch.arange(length, device=device), self.size
        blocks = place.view(-1, size)
        rows = torch.cat([torch.cat([blocks[:, :1], blocks], 1).flatten(), place + length])  # copies see as their block
        seen = plain[0][rows][:, rows]
        copy = torch.zeros(len(rows), dtype=torch.bool, device=device)
        copy[size + 1 : length + len(blocks) : size + 1] = True  # except START
        return (seen & ~copy).unsqueeze(0)

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
        network, noisy = cast(OpenTransformer, self.network), level is not None
        caches, near = self.see_back(block, start, caches, back)
        kept = [Growing(*cache or ()) for cache in caches]
        with autocast_to(block.device, self.precision):
            inputs = self.read_words(block)[0] if level is None else self.read_state(block, level)
            seen = None if near is None else near.unsqueeze(1).expand(-1, inputs.shape[1], -1)
            copies = self.shift if noisy else 0
            if copies:
                inputs = torch.cat([self.read_copy(before, block), inputs], 1)
                old, width = kept[0].size, inputs.shape[1]
                there = torch.ones(1, old + width - 1, dtype=torch.bool, device=block.device) if near is None else near
                copy = torch.full((len(there), 1), before is None, device=block.device)
                seen = torch.cat([there[:, :old], copy, there[:, old:]], 1).unsqueeze(1).expand(-1, width, -1)
            places = torch.arange(start - copies, start + block.shape[1], device=block.device) + self.shift
            hidden = network.run(inputs, seen, kept, places)
            logits = network.answer(hidden[:, : block.shape[1]]).float()
        return logits, caches if noisy else [one.cache for one in kept]

    def read_copy(self, before: Tensor | None, block: Tensor) -> Tensor:
        """The network's input for the word before a block, the last of the previous block, [B, 1, hidden]."""
        if before is None:
            return self.read_start(block)
        level = self.process.at(torch.zeros(len(before), 1, device=before.device))
        (vectors,) = self.codec.inputs(before.unsqueeze(1), level, None)
        return vectors + self.places[-1]


CLIPS = {1: (1.0, 1.0), 2: (0.5, 1.0), 4: (0.45, 0.95), 8: (0.4, 0.9), 16: (0.3, 0.8)}  # 2 and 8 lie between theirs


class BlockDiffusionMethod(DecoderStart):
    name = "block-diffusion"

    block: Literal[1, 2, 4, 8, 16] = 4

    def body(self, texts: TextSpec, time: Any) -> tuple[nn.Module, Any]:
        if self.decoder:
            return super().body(texts, time)
        return build_network(self, texts, self.hidden, texts.vocabulary, time=time)

    def positions(self, texts: TextSpec) -> int:
        return BlockLengths(texts.longest, self.block, self.most_words).widest + self.shift

    def build(self, texts: TextSpec) -> LanguageModel:
        lengths = BlockLengths(texts.longest, self.block, self.most_words)
        kind = OpenBlockDenoiser if self.decoder else BlockDenoiser
        return self.compose(
            Absorbing(texts.vocabulary),
            texts,
            Objective({"elbo": 1.0}),
            Sampling("first-hitting", steps=self.block),
            time="none",
            denoiser=partial(kind, size=self.block, window=lengths.widest),
            model=BlockDiffusion,
            times=BlockTimes(self.block, *CLIPS[self.block]),
            lengths=lengths,
        )
