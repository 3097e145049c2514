"""SSD-LM: Semi-autoregressive Simplex-based Diffusion Language Model (Han et al., 2023).

Almost-one-hot logits are noised, and blocks of words are denoised from left to right. The paper starts from RoBERTa and
trains one block of each text, which sees the words before it in both directions; here all blocks of a text are trained
at once, begin at multiples of their size, and what they see of the words before them is kept."""

from pydantic import Field

from difflm.diffusion import Cosine, Gaussian, Objective, Simplex
from difflm.diffusion.timesteps import BlockTimes
from difflm.methods.base import TextSpec
from difflm.methods.parts import build_network
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel, Sampling
from difflm.models.block_diffusion import BlockDenoiser, BlockDiffusion, BlockLengths


class Renoised(Gaussian):
    """A process of states whose estimate is words: a step may forget x_t and noise the estimate afresh."""

    steps = ("renoise", *Gaussian.steps)


class SsdLm(TokenMethod):
    name = "ssd-lm"

    block: int = Field(default=16, ge=2, le=64)
    scale: float = Field(default=5.0, gt=0)  # K of the logits ±K

    def build(self, texts: TextSpec) -> LanguageModel:
        network, reads = build_network(self, texts, self.hidden, texts.vocabulary, time="addition")
        codec = Simplex(texts.vocabulary, self.hidden, self.scale)
        lengths = BlockLengths(texts.longest, self.block, self.most_words)
        return BlockDiffusion(
            BlockDenoiser(network, codec, Renoised(Cosine(s=1e-4)), reads, self.block, lengths.widest),
            objective=Objective({"ce": 1.0}),
            times=BlockTimes(self.block, 0.0, 1.0),
            lengths=lengths,
            sampling=Sampling("renoise", steps=50, projection="sample", projection_top_p=0.99),
        )
