"""Diffusion-NAT: Self-Prompting Discrete Diffusion for Non-Autoregressive Text Generation (Zhou et al., 2024).

Masked diffusion with an encoder and a decoder, trained with plain cross-entropy, without a bound. At each step the
network is called three times: with the source, and twice more with its last answer before the source. The released
noise replaces one word in a million, and the network must copy unmasked words; here the noise is masks only, and
unmasked words are copied by construction. The network starts without BART's weights, so lengths, which BART decides by
padding, are predicted from the source. The released code draws words with float32 noise that loses rare ones; here no
word is lost."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from difflm.diffusion import UNCONDITIONAL, Absorbing, Belief, Condition, Objective, Times
from difflm.diffusion.denoiser import CrossAttention, Denoiser, require_source
from difflm.methods.base import TextSpec
from difflm.methods.tokens import TokenMethod
from difflm.models.autoregressive import join_rows
from difflm.models.base import LanguageModel, Sampling
from difflm.networks.transformer import TimeInput


def join_texts(first: Tensor, lengths: Tensor, second: Tensor, second_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate two texts of these lengths [B] without a gap, on a canvas that holds both, and return its mask: where
    the second begins does not depend on the padding of the first."""
    joined = join_rows(first, lengths, second)
    place = torch.arange(joined.shape[1], device=joined.device)
    return joined, place < (lengths + second_lengths).unsqueeze(1)


class SelfPrompting(Denoiser):
    """The encoder reads a guess of the text and then the source, and the decoder predicts again; in sampling this is
    done twice. In training every second text has such a prompt; no gradient flows through the guess."""

    passes = 3

    def forward(
        self,
        x: Tensor,
        t: Times,
        mask: Tensor | None = None,
        condition: Condition = UNCONDITIONAL,
        previous: Tensor | None = None,
        read: Callable[[Tensor], Belief] | None = None,
    ) -> Belief:
        lengths = torch.full_like(x[:, 0], x.shape[1]) if mask is None else mask.sum(-1)
        if self.training:
            level, guess, shown = self.process.at(t), torch.zeros_like(x), torch.zeros_like(lengths)
            with torch.no_grad():
                half = mask if mask is None else mask[::2]
                guess[::2] = super().forward(x[::2], level[::2], half, condition[::2]).tokens
            shown[::2] = lengths[::2]
            return super().forward(x, level, mask, self.prompt(condition, guess, shown), read=read)
        belief = super().forward(x, t, mask, condition)
        for _ in range(self.passes - 1):
            belief = super().forward(x, t, mask, self.prompt(condition, belief.tokens, lengths))
        return belief

    def prompt(self, condition: Condition, guess: Tensor, lengths: Tensor) -> Condition:
        """The condition whose source begins with a guess [B, L] of the text, of this many tokens [B]."""
        source, there = require_source(condition.source, condition.source_mask)
        source, mask = join_texts(guess, lengths, source, there.sum(-1))
        return self.prepare(replace(condition, source=source, source_mask=mask))


class DiffusionNat(TokenMethod):
    name, task = "diffusion-nat", "seq2seq"
    one_canvas = True  # the encoder reads guesses of the text

    def body(self, texts: TextSpec, time: TimeInput) -> tuple[nn.Module, CrossAttention | None]:
        network, _ = super().body(replace(texts, source_longest=texts.longest + texts.source_longest), time)
        return network, CrossAttention(texts.source_longest)

    def build(self, texts: TextSpec) -> LanguageModel:
        process, sampling = Absorbing(texts.vocabulary), Sampling("truncated", steps=20)
        return self.compose(process, texts, Objective({"ce": 1.0}), sampling, "none", SelfPrompting, bound=None)
