"""A Transformer that reads a source through attention. The source is encoded once per generation."""

from dataclasses import dataclass, replace
from typing import Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from difflm.networks.cache import Memory
from difflm.networks.rotary import compute_rotations
from difflm.networks.transformer import Context, Settings, Sizes, Transformer, additive


@dataclass(frozen=True)
class SourceSizes:
    """What an encoder of sources depends on beside the decoder's sizes: their token ids, the longest source, and its
    layers; without layers, there is none."""

    vocabulary: int
    longest: int
    layers: int


class EncoderDecoder(Transformer):
    """Every block attends to the text, then to the source (Vaswani et al., 2017).

    `encode` turns sources into the keys and values of all layers at once, so that denoising steps compute nothing of a
    source. Key 0 is a slot of zeros that every text sees: what is left of a source that classifier-free guidance drops.
    """

    encodes_sources = True

    def __init__(
        self, in_dim: int, out_dim: int, sizes: Sizes, source: SourceSizes, **settings: Unpack[Settings]
    ) -> None:
        super().__init__(in_dim, out_dim, sizes, reads_source=True, **settings)
        self.heads, hidden = sizes.heads, sizes.hidden
        self.embed_source = nn.Embedding(source.vocabulary, hidden)
        nn.init.normal_(self.embed_source.weight)  # as large as the places that are added
        told, own = 2 * sizes.layers * hidden, replace(sizes, layers=source.layers)
        self.encoder = Transformer(hidden, told, own, time="none", positions=source.longest)
        self.encoder.head.reset_parameters()  # keys of zeros would attend to all of a source equally

    def encode(self, source: Tensor, mask: Tensor) -> Tensor:
        """Keys and values of every layer, [B, 1 + S, 2 · layers · hidden], of sources [B, S]."""
        return self.encode_states(self.embed_source(source), mask)

    def encode_states(self, states: Tensor, mask: Tensor) -> Tensor:
        """The same for vectors [B, S, hidden]."""
        memory: Tensor = self.encoder(states, None, mask)
        return F.pad(memory, (0, 0, 1, 0))

    def split_memory(self, memory: Tensor, mask: Tensor) -> list[Memory]:
        """The memory of `encode` by layer, under the mask [B, S] of the sources."""
        seen = F.pad(mask, (1, 0), value=True)[:, None, None]
        layers = memory.unflatten(-1, (len(self.blocks), 2, self.heads, -1)).permute(2, 3, 0, 4, 1, 5)
        return [(keys, values, seen) for keys, values in layers.unbind()]

    def forward(  # type: ignore[override]
        self, inputs: Tensor, t: Tensor | None, mask: Tensor | None, memory: Tensor, seen: Tensor, answers: bool = True
    ) -> Tensor:
        """`memory` is that of `encode`, under the mask `seen` of the sources."""
        return super().forward(inputs, t, mask, self.split_memory(memory, seen), answers)


class StagedDecoder(EncoderDecoder):
    """A decoder in stages of `per_stage` blocks each. A stage reads the text again together with the states of the
    previous stage, and each stage can predict words; the last stage may have fewer blocks."""

    def __init__(
        self, per_stage: int, in_dim: int, out_dim: int, sizes: Sizes, source: SourceSizes, **settings: Unpack[Settings]
    ) -> None:
        super().__init__(in_dim, out_dim, sizes, source, **settings)
        self.stages = [slice(first, first + per_stage) for first in range(0, len(self.blocks), per_stage)]

    def run_stage(
        self, stage: int, states: Tensor | None, inputs: Tensor, mask: Tensor | None, memory: list[Memory]
    ) -> Tensor:
        """The states after a stage, from which `answer` reads the words."""
        x, part = self.embed(inputs, mask), self.stages[stage]
        # States grow from block to block: without a norm they would drown the words.
        x = x if states is None else x + F.layer_norm(states, states.shape[-1:])
        turn = compute_rotations(x.shape[1], self.head_dim, x.device)
        if mask is not None and (mask.is_cuda or not self.training):
            mask = additive(mask, self.head.weight.dtype)
        return self.blocks(x, [Context(mask, turn, memory=source) for source in memory[part]], part)

    def forward(  # type: ignore[override]
        self, inputs: Tensor, t: Tensor | None, mask: Tensor | None, memory: Tensor, seen: Tensor
    ) -> Tensor:
        """The words of the last stage, where all of them read the same text."""
        states, layers = None, self.split_memory(memory, seen)
        for stage in range(len(self.stages)):
            states = self.run_stage(stage, states, inputs, mask, layers)
        assert states is not None
        return self.answer(states)
