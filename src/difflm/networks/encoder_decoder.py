"""A Transformer that reads a source through attention. The source is encoded once a generation."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from difflm.networks.transformer import Memory, Transformer


class EncoderDecoder(Transformer):
    """Every block attends to the text, then to the source (Vaswani et al., 2017).

    `encode` turns sources into the keys and values of all layers at once, so that denoising steps compute nothing of a
    source. Key 0 is a slot of zeros that every text sees: what is left of a source that classifier-free guidance drops.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        hidden: int,
        layers: int,
        heads: int,
        dropout: float = 0.1,
        *,
        source_vocabulary: int,
        source_longest: int,
        encoder_layers: int,
        **settings: Any,
    ) -> None:
        super().__init__(in_dim, out_dim, hidden, layers, heads, dropout, reads_source=True, **settings)
        self.heads = heads
        self.embed_source = nn.Embedding(source_vocabulary, hidden)
        nn.init.normal_(self.embed_source.weight)  # as large as the places that are added
        self.encoder = Transformer(
            hidden, 2 * layers * hidden, hidden, encoder_layers, heads, dropout, time="none", positions=source_longest
        )
        self.encoder.head.reset_parameters()  # keys of zeros would see all of a source alike

    def encode(self, source: Tensor, mask: Tensor) -> Tensor:
        """Keys and values of every layer, [B, 1 + S, 2 · layers · hidden], of sources [B, S]."""
        return self.encode_states(self.embed_source(source), mask)

    def encode_states(self, states: Tensor, mask: Tensor) -> Tensor:
        """The same of vectors [B, S, hidden]."""
        memory: Tensor = self.encoder(states, None, mask)
        return F.pad(memory, (0, 0, 1, 0))

    def split_memory(self, memory: Tensor, mask: Tensor) -> list[Memory]:
        """The memory of `encode` by layer, under the mask [B, S] of the sources."""
        seen = F.pad(mask, (1, 0), value=True)[:, None, None]
        layers = memory.unflatten(-1, (len(self.blocks), 2, self.heads, -1)).permute(2, 3, 0, 4, 1, 5)
        return [(keys, values, seen) for keys, values in layers.unbind()]

    def forward(  # type: ignore[override]
        self,
        inputs: Tensor,
        t: Tensor | None,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        assert memory is not None and source_mask is not None, "an encoder-decoder reads a source"
        return super().forward(inputs, t, mask, self.split_memory(memory, source_mask))
