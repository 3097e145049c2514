"""The Transformer that SEDD, MDLM, BD3-LM, UDLM and DUO share (Lou et al., 2024; Sahoo et al., 2024): norms without
bias, shifted, scaled and gated by an embedding of the noise σ. Modules have the released names.

Shapes: vectors of tokens [B, L, hidden], time [B] or [B, L], mask as in `open_transformer.py` → logits [B, L, words].
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.base import Network
from difflm.diffusion.precision import avoid_onednn
from difflm.diffusion.processes.gaussian import Gumbel
from difflm.networks.open_transformer import WideNorm, who_sees_whom
from difflm.networks.rotary import compute_rotations, rotate_vectors
from difflm.networks.transformer import sinusoid

FREQUENCIES = 256  # of σ
EPSILON = 1e-3  # of their log-linear noise, σ(t) = −log(1 − (1 − ε) t), which is finite at t = 1


@dataclass(frozen=True)
class DitShape:
    """Without `timed` the network's input is σ = 0, whatever the time is. `classes`: rows of a table of labels, 0:
    none. `block` as in `Shape`. With `gumbel`, loc and scale, its input is −λ of that schedule instead of σ, and it
    reads its last estimate after the state."""

    hidden: int
    layers: int
    heads: int
    condition: int
    timed: bool = False
    classes: int = 0
    block: int = 0
    gumbel: tuple[float, float] | None = None

    def count_kept(self, length: int) -> int:
        """How many positions of a prompt are read once: none."""
        return 0

    def build(self, words: int) -> "Dit":
        return Dit(self, words)


class SigmaEmbedding(nn.Module):
    """Cosines then sines of σ → Linear → SiLU → Linear."""

    def __init__(self, condition: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, condition), nn.SiLU(), nn.Linear(condition, condition))

    def forward(self, sigma: Tensor) -> Tensor:
        return self.mlp(sinusoid(sigma, FREQUENCIES, 1.0).to(next(self.mlp.parameters()).dtype))


class DitBlock(nn.Module):
    def __init__(self, shape: DitShape) -> None:
        super().__init__()
        hidden, self.heads = shape.hidden, shape.heads
        self.norm1, self.norm2 = WideNorm(hidden, bias=False), WideNorm(hidden, bias=False)
        self.attn_qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attn_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden, hidden)
        )
        self.adaLN_modulation = nn.Linear(shape.condition, 6 * hidden)

    def forward(self, x: Tensor, c: Tensor, turn: tuple[Tensor, Tensor], seen: Tensor | None) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.adaLN_modulation(c).chunk(6, -1)
        qkv = self.attn_qkv(torch.addcmul(shift_1, self.norm1(x), 1 + scale_1))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate_vectors(q, *turn), rotate_vectors(k, *turn), v, attn_mask=seen)
        x = torch.addcmul(x, gate_1, self.attn_out(y.transpose(1, 2).flatten(2)))
        return torch.addcmul(x, gate_2, self.mlp(torch.addcmul(shift_2, self.norm2(x), 1 + scale_2)))


class OutputNorm(nn.Module):
    def __init__(self, shape: DitShape) -> None:
        super().__init__()
        self.norm_final = WideNorm(shape.hidden, bias=False)
        self.adaLN_modulation = nn.Linear(shape.condition, 2 * shape.hidden)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, -1)
        return torch.addcmul(shift, self.norm_final(x), 1 + scale)


class Dit(Network):
    def __init__(self, shape: DitShape, words: int) -> None:
        super().__init__()
        self.shape, self.head_dim = shape, shape.hidden // shape.heads
        self.sigma_map = SigmaEmbedding(shape.condition)
        labels = {"embedding_table": nn.Embedding(shape.classes, shape.condition)} if shape.classes else {}
        self.cond_map = nn.ModuleDict(labels)
        self.self_cond_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False) if shape.gumbel else None
        self.blocks = nn.ModuleList(DitBlock(shape) for _ in range(shape.layers))
        self.output_layer = OutputNorm(shape)
        self.head = nn.Linear(shape.hidden, words)

    def forward(
        self,
        inputs: Tensor,
        t: Tensor,
        mask: Tensor | None = None,
        classes: Tensor | None = None,
        turn: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`classes` [B] are labels. `turn` are rotations of positions that do not simply follow each other."""
        with avoid_onednn(inputs.device, self.head.weight.dtype):
            c = F.silu(self.sigma_map(self.sigma_of(t)))
            if classes is not None:
                c = c + F.silu(self.cond_map["embedding_table"](classes))
            c = c if c.dim() == 3 else c.unsqueeze(1)
            length, device = inputs.shape[1], inputs.device
            turn = turn or compute_rotations(length, self.head_dim, device)
            seen = who_sees_whom(mask, length, self.shape.block, device)
            x = inputs.to(self.head.weight.dtype)
            x = x if self.self_cond_proj is None else self.self_cond_proj(x)
            for one in self.blocks:
                x = one(x, c, turn, seen)
            return self.head(self.output_layer(x, c))

    def sigma_of(self, t: Tensor) -> Tensor:
        """The total noise σ at time t; α = e^−σ."""
        if self.shape.gumbel:
            return -Gumbel(*self.shape.gumbel).log_snr(t)
        return -torch.log1p(-(1 - EPSILON) * t) if self.shape.timed else torch.zeros_like(t)
