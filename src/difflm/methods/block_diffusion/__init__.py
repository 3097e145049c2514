"""Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models (Arriola et al., 2025).

Masked diffusion inside blocks of a few words, left to right between them: one word is the twin, all words are MDLM.
Training masks shares of which losses vary least, as the paper found for small blocks; the bound takes all of them. It
may begin as a model that writes from left to right.
"""

from typing import Any, Literal

from torch import nn

from difflm.diffusion.processes import Absorbing
from difflm.diffusion.timesteps import BlockTimes
from difflm.methods.base import TextSpec
from difflm.methods.block_diffusion.open_blocks import OpenBlockDenoiser
from difflm.methods.parts import build_network
from difflm.methods.tokens import DecoderStart
from difflm.models.base import LanguageModel, Sampling
from difflm.models.block_diffusion import BlockDenoiser, BlockDiffusion, BlockLengths

CLIPS = {1: (1.0, 1.0), 2: (0.5, 1.0), 4: (0.45, 0.95), 8: (0.4, 0.9), 16: (0.3, 0.8)}  # 2 and 8 lie between theirs


class BlockDiffusionMethod(DecoderStart):
    name = "block-diffusion"

    block: Literal[1, 2, 4, 8, 16] = 4

    def body(self, texts: TextSpec, time: Any) -> tuple[nn.Module, Any]:
        if self.decoder:
            return super().body(texts, time)
        return build_network(self, texts, self.hidden, texts.vocabulary, time=time)

    def positions(self, texts: TextSpec) -> int:
        return BlockLengths(texts.longest, self.block).positions(texts.longest) + self.shift

    def build(self, texts: TextSpec) -> LanguageModel:
        return self.compose(
            *(Absorbing(texts.vocabulary), texts, {"elbo": 1.0}),
            sampling=Sampling("first-hitting", steps=self.block),
            times=BlockTimes(self.block, *CLIPS[self.block]),
            time="none",
            lengths=BlockLengths(texts.longest, self.block),
            model=BlockDiffusion,
            denoiser=OpenBlockDenoiser if self.decoder else BlockDenoiser,
        )
