"""The two halves of an autoencoder of texts: words → a few latent vectors, and latents → words."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.networks import EncoderDecoder, Sizes, SourceSizes, Transformer
from difflm.networks.cache import Memory


class Resampler(nn.Module):
    """States of any number of words [B, L, in_dim] → `latents` vectors [B, latents, out_dim]: learned queries precede
    the states, and a Transformer's outputs at the queries are kept. Each query starts from the states of one span;
    together the spans cover the longest text. Otherwise less than 1 % of the first latents' variance comes from the
    text, and a decoder learns to ignore them. States of a span are multiplied by vectors of ±1, one per position,
    before they are added, so that their order is not lost."""

    def __init__(self, in_dim: int, out_dim: int, latents: int, sizes: Sizes, longest: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(latents, in_dim))
        self.signs = nn.Parameter(torch.randn(-(-longest // latents), in_dim).sign())
        self.body = Transformer(in_dim, out_dim, sizes, time="none", positions=latents + longest)
        self.body.head.reset_parameters()  # latents of zeros have no direction

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        latents, span = len(self.queries), len(self.signs)
        room = F.pad(states * mask.unsqueeze(-1), (0, 0, 0, latents * span - states.shape[1]))
        queries = self.queries + (room.unflatten(1, (latents, span)) * self.signs).sum(2)
        seen = torch.ones_like(mask[:, :1]).expand(-1, latents)
        answer: Tensor = self.body(torch.cat([queries, states], 1), None, torch.cat([seen, mask], 1))
        return answer[:, :latents]


class TextEncoder(nn.Module):
    """Words [B, L] → latents."""

    def __init__(self, vocabulary: int, out_dim: int, latents: int, sizes: Sizes, longest: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, sizes.hidden)
        self.resampler = Resampler(sizes.hidden, out_dim, latents, sizes, longest)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.resampler(self.embed(ids), mask)


class LatentDecoder(EncoderDecoder):
    """A causal decoder that attends to latents, and to the words of a source behind them where texts have sources."""

    def __init__(
        self, vocabulary: int, dim: int, latents: int, sizes: Sizes, source_vocabulary: int = 1, source_longest: int = 0
    ) -> None:
        source = SourceSizes(source_vocabulary, latents + source_longest, sizes.layers)
        super().__init__(sizes.hidden, vocabulary, sizes, source, time="none", causal=True)
        self.embed_latents = nn.Linear(dim, sizes.hidden)
        nn.init.normal_(self.embed_latents.weight, std=dim**-0.5)  # as large as the places that are added
        if not source_longest:
            del self.embed_source

    def encode_latents(self, latents: Tensor, source: Tensor | None, mask: Tensor | None) -> list[Memory]:
        """Keys and values of every layer, of latents [B, K, D] and sources [B, S]."""
        read = self.embed_latents(latents.to(self.embed_latents.weight.dtype))
        seen = torch.ones(latents.shape[:2], dtype=torch.bool, device=latents.device)
        if source is not None and mask is not None:
            read, seen = torch.cat([read, self.embed_source(source)], 1), torch.cat([seen, mask], 1)
        return self.split_memory(self.encode_states(read, seen), seen)
