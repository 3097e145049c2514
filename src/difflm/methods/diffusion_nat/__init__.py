"""Diffusion-NAT: Self-Prompting Discrete Diffusion for Non-Autoregressive Text Generation (Zhou et al., 2024).

Masked diffusion with an encoder and a decoder, trained with plain cross-entropy, without a bound. At each step the
network is called three times: with the source, and twice more with its last answer before the source. The released
noise replaces one word in a million, and the network must copy unmasked words; here the noise is masks only, and
unmasked words are copied by construction. The network starts without BART's weights, so lengths, which BART decides by
padding, are predicted from the source. The released code draws words with float32 noise that loses rare ones; here no
word is lost.
"""

from dataclasses import replace

from torch import nn

from difflm.diffusion.denoiser import CrossAttention
from difflm.diffusion.processes import Absorbing
from difflm.methods.base import TextSpec
from difflm.methods.diffusion_nat.self_prompting import SelfPrompting
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel, Sampling
from difflm.networks.transformer import TimeInput


class DiffusionNat(TokenMethod):
    name, task = "diffusion-nat", "seq2seq"
    one_canvas = True  # the encoder reads guesses of the text

    def body(self, texts: TextSpec, time: TimeInput) -> tuple[nn.Module, CrossAttention | None]:
        network, _ = super().body(replace(texts, source_longest=texts.longest + texts.source_longest), time)
        return network, CrossAttention(texts.source_longest)

    def build(self, texts: TextSpec) -> LanguageModel:
        process, sampling = Absorbing(texts.vocabulary), Sampling("truncated", steps=20)
        model = self.compose(process, texts, {"ce": 1.0}, sampling, time="none", bounded=False)
        own = model.denoiser
        model.denoiser = SelfPrompting(own.network, own.codec, own.process, own.conditioning)
        return model
