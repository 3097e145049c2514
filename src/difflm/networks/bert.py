"""The network of Diffusion-LM: a BERT-base encoder between two small tanh networks (Li et al., 2022, section 4)."""

from torch import Tensor, nn

from difflm.diffusion.base import Network
from difflm.networks.transformer import Attention, Context, FeedForward, TimeEmbedding, additive


class PostNormBlock(nn.Module):
    """Attention and feed-forward, each normalised after its sum, as BERT has it."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.feed = Attention(hidden, heads, dropout), FeedForward(hidden, 4 * hidden)
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden, eps=1e-12), nn.LayerNorm(hidden, eps=1e-12)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y = self.attention(x, context)
        # Under autocast norms answer in float32; kept so wide, sums between layers would cost three times the memory.
        x = self.norm_1(x + self.drop(y)).to(y.dtype)
        return self.norm_2(x + self.drop(self.feed(x))).to(y.dtype)


class BertLayout(Network):
    """Time is added at the input. If padding counts as words, as in the paper, there is nothing to mask."""

    def __init__(
        self, in_dim: int, out_dim: int, hidden: int = 768, layers: int = 12, heads: int = 12, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.input = nn.Sequential(nn.Linear(in_dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden))
        self.embed_time = TimeEmbedding(128, 512, hidden)
        self.positions = nn.Embedding(512, hidden)
        self.norm, self.drop = nn.LayerNorm(hidden, eps=1e-12), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(PostNormBlock(hidden, heads, dropout) for _ in range(layers))
        self.output = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, out_dim))
        for layer in self.blocks.modules():  # as BERT starts
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, inputs: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.entry(self.input(inputs), self.embed_time(t))
        context = Context(None if mask is None else additive(mask, x.dtype))
        for block in self.blocks:
            x = block(x, context)
        return self.output(x)

    def entry(self, x: Tensor, told: Tensor) -> Tensor:
        """Time and learned positions, added and normalised."""
        return self.drop(self.norm(x + self.positions.weight[: x.shape[1]] + told).to(x.dtype))
