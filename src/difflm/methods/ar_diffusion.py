"""AR-Diffusion: Auto-Regressive Diffusion Model for Text Generation (Wu et al., 2023).

Each position has its own time, the left ones ahead; twenty steps of the two-time posterior write a text. The
state at time 0 keeps the noise that the network learned there; the released code turns it off."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion import Denoiser, Gaussian, LearnedEmbedding, Noise, NoisyWords, Sqrt, cross_entropy
from difflm.diffusion.bounds import Bound, ScoredTexts
from difflm.diffusion.timesteps import LowDiscrepancy, StepSpan
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.diffusion_lm import CERTAIN, CHAIN, X0_STD, compose_chain
from difflm.methods.parts import build_reader
from difflm.models.base import LanguageModel, Sampling
from difflm.networks.cache import Cache, Memory, Slots
from difflm.networks.encoder_decoder import EncoderDecoder, SourceSizes
from difflm.networks.rotary import compute_rotations, rotate_vectors
from difflm.networks.transformer import Attention, Block, Blocks, Context, Sizes, additive


@dataclass(frozen=True)
class TimeContext(Context):
    """`told` are the embedded times [B, L or 1, hidden] and the two biases [2, heads, 1, head_dim]."""

    told: tuple[Tensor, ...] = ()


class TimeAttention(Attention):
    """Attention with scores (q + b₁)·k + (q + b₂)·W τ_k, where τ_k is the embedded time of position k (Wu et al., 2023,
    in the manner of Dai et al., 2019). Rotations of positions enter the first product alone."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__(hidden, heads, dropout)
        self.time_key = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        (told, biases), mask, turn = cast(TimeContext, context).told, context.mask, context.turn
        assert turn is not None
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        by_time = self.time_key(told).unflatten(-1, (self.heads, -1)).transpose(1, 2).expand_as(k)
        content, time = (q + bias for bias in biases.to(q.dtype))
        y = F.scaled_dot_product_attention(
            torch.cat([rotate_vectors(content, *turn), time], -1),
            torch.cat([rotate_vectors(k, *turn), by_time], -1),
            v,
            attn_mask=None if mask is None else mask[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
            scale=q.shape[-1] ** -0.5,
        )
        return self.out(y.transpose(1, 2).flatten(2))


class TimeAttentionBlock(Block):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__(hidden, heads, dropout, condition=0, reads_source=True)
        self.attention = TimeAttention(hidden, heads, dropout)


class TimeAttentionDecoder(EncoderDecoder):
    """Nothing else depends on the time. All layers share the two biases."""

    def __init__(self, in_dim: int, out_dim: int, sizes: Sizes, source: SourceSizes, positions: int = 0) -> None:
        super().__init__(in_dim, out_dim, sizes, source, time="layers", positions=positions)
        own = sizes.hidden, sizes.heads, sizes.dropout
        self.blocks = Blocks(TimeAttentionBlock(*own) for _ in range(sizes.layers))
        self.biases = nn.Parameter(torch.zeros(2, sizes.heads, 1, self.head_dim))

    def run(
        self,
        x: Tensor,
        t: Tensor | None,
        mask: Tensor | None,
        caches: Sequence[Cache | Slots | None] | None,
        start: int,
        turn: tuple[Tensor, Tensor] | None = None,
        memory: Sequence[Memory] | None = None,
    ) -> tuple[Tensor, list[Cache]]:
        assert t is not None and memory is not None
        told, turn = self.embed_time(t), turn or compute_rotations(x.shape[1], self.head_dim, x.device, start)
        if mask is not None and (mask.is_cuda or not self.training):
            mask = additive(mask, self.head.weight.dtype)
        for block, source in zip(self.blocks, memory, strict=True):
            x = block(x, TimeContext(mask, turn, memory=source, told=(told, self.biases)))
        return x, []


LEVELS = 5000  # of a bound, in each of the two parts of the way


class TwoLevelTimes(LowDiscrepancy):
    """One index i for a text gives a time to every position of its canvas (Wu et al., 2023, section 3.1).

    Times of neighbours lie on a line that ends at (2N, T − 1), far to the right of a canvas of N positions. Its other
    end moves with i: from the last position to the first one along time 0, then up along time."""

    def __init__(self, canvas: int, steps: int) -> None:
        super().__init__(steps)
        self.canvas, self.chain = canvas, steps

    @property
    def last(self) -> int:
        """The index at which every position is pure noise; at 0 every one is clean."""
        return self.canvas + self.chain - 1

    def levels_of(self, index: Tensor, width: int) -> Tensor:
        """f(n, i): levels 0 … T − 1 of positions 0 … width − 1, [..., width], for whole numbers i."""
        return self.between_levels(index, width).round()

    def between_levels(self, index: Tensor, width: int) -> Tensor:
        """f(n, i) before it is rounded, for any i."""
        place = torch.arange(width, device=index.device, dtype=torch.float64)
        i, noisiest = index.unsqueeze(-1).double(), self.chain - 1
        start, time = (self.canvas - 1 - i).clamp(min=0), (i - (self.canvas - 1)).clamp(0, noisiest)
        slope = (time - noisiest) / (start - 2 * self.canvas)
        return ((place - 2 * self.canvas) * slope + noisiest).clamp(0, noisiest)

    def times_at(self, u: Tensor, width: int) -> Tensor:
        """Times [..., width] at a share u ∈ [0, 1] of all indices."""
        return (self.levels_of((u.double() * self.last).round(), width) / (self.chain - 1)).float()

    def sample(self, noise: Noise, mask: Tensor) -> tuple[Tensor, Tensor]:
        """One index for every text, the same at all positions: times [B, L]."""
        index = (self.draw(noise).double() * (self.last + 1)).floor().clamp(max=self.last)
        t = (self.levels_of(index, mask.shape[1]) / (self.chain - 1)).float()
        return t, torch.ones_like(t)

    def grid(self, spans: Sequence[StepSpan], width: int, device: torch.device) -> Tensor:
        """Times at evenly spaced indices, [N + 1, 1, W], or [N + 1, B, W] where the spans of rows differ."""
        u = super().grid(spans, width, device)
        return self.times_at(u.unsqueeze(1) if u.dim() == 1 else u, width)


@dataclass(frozen=True)
class TwoLevelBound(Bound):
    """−log p(w) ≤ KL(q(x_I | w) ‖ prior) + Σ_i Σ_n ½ (SNR(f(n, i⁻)) − SNR(f(n, i))) ‖e_n − ê_n‖² + E[−log p(w | x_0)].

    Indices i are finer than whole numbers, the next lower one is i⁻: on a small canvas one whole step takes the last
    word from clean to a quarter of all noise. SNRs are those of the word's vector, around which x_0 is spread; the last
    step leads from index 0 to x_0. Before the time `certain_below` the nearest word stands for the estimate."""

    certain_below: float = 0.0

    def __call__(self, texts: ScoredTexts, draws: int) -> Tensor:
        """With one index from each of `draws` strata, [B, draws]."""
        codec, times, noise = texts.denoiser.codec, cast(TwoLevelTimes, texts.times), texts.noise
        words, vectors = NoisyWords.of(texts.denoiser), codec.encode(texts.ids)
        # Indices from text to noise: evenly while the first word is clean, then evenly while none is.
        ways = (0, times.canvas - 1), (times.canvas - 1, times.last)
        first, second = (torch.linspace(*way, LEVELS + 1, dtype=torch.float64, device=vectors.device) for way in ways)
        every = times.between_levels(torch.cat([first[:-1], second]), vectors.shape[1]) / (times.chain - 1)
        alpha, sigma = words.noise_at(every)  # [I, L]
        snr = torch.cat([torch.full_like(every[:1], codec.x0_std**-2), (alpha / sigma) ** 2])
        lost = -snr.diff(dim=0)  # SNR that each step loses, [I, L]
        # Half evenly in log-SNR, half in proportion to what a squared error counts.
        shares = torch.stack([part.sum(-1) / part.sum() for part in (-snr.log().diff(dim=0), lost)]).mean(0)
        below = shares.cumsum(0)
        found = []
        for k in range(draws):
            u = (k + noise.uniform(k, stream=10).double()) / draws
            i = torch.searchsorted(below, u).clamp(max=len(every) - 1)
            a, s = (value[i].float().unsqueeze(-1) for value in (alpha, sigma))
            x = a * vectors + s * noise.normal(k, *vectors.shape[1:], stream=11)
            clean = texts.ask(x, every[i].float()).clean
            word = words.expected_vector(clean, x, a, s, (every[i] < self.certain_below).unsqueeze(-1))
            squares = (vectors - word).square().sum(-1).double()
            found.append(texts.sum_words(squares * lost[i]) / (2 * shares[i]))
        last = torch.ones(1, device=vectors.device)
        spread = codec.x0_std * noise.normal(0, *vectors.shape[1:], stream=12)
        rounding = cross_entropy(words.codec.readout(vectors + spread), texts.ids)
        ends = texts.sum_words(words.prior_nats(vectors, last) + rounding).double()
        return (ends.unsqueeze(1) + torch.stack(found, 1)).float()


class ArDiffusion(ReadsSources):
    name, task = "ar-diffusion", "seq2seq"

    embedding_dim: int = 64
    hidden: int = 256
    heads: int = 4

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, longest = self.embedding_dim, texts.longest
        codec = LearnedEmbedding(texts.vocabulary, dim, x0_std=X0_STD)
        network, reads = build_reader(TimeAttentionDecoder, self, texts, dim, dim, positions=longest)
        denoiser = Denoiser(network, codec, Gaussian(Sqrt()), reads)
        sampling = Sampling("ancestral", steps=20, clamp=True)
        return compose_chain(texts, denoiser, sampling, TwoLevelTimes(longest, CHAIN), TwoLevelBound(CERTAIN))
