"""SeqDiffuSeq: Text Diffusion Model with an Encoder-Decoder Transformer (Yuan et al., 2022).

The released code draws the noise of a sampling step from a flattened table of posterior variances, that of another
level; here it is that of the step's own two times, which may be any distance apart. Held-out texts do not feed the
losses that move the schedule, and the schedule is saved with its weights. Sources have an embedding table of their own.
"""

from difflm.data.tokenizers import PAD
from difflm.diffusion.codecs import LearnedEmbedding
from difflm.diffusion.denoiser import SelfConditioning
from difflm.diffusion.processes.gaussian import Sqrt
from difflm.methods.base import Method, TextSpec
from difflm.methods.diffusion_lm import CHAIN, X0_STD, compose_chain
from difflm.methods.parts import build_network
from difflm.methods.seqdiffuseq.schedule import PositionGaussian, PositionLosses
from difflm.models.base import LanguageModel, Sampling


class SeqDiffuSeq(Method):
    name, task = "seqdiffuseq", "seq2seq"

    embedding_dim: int = 128
    hidden: int = 512
    layers: int = 6
    encoder_layers: int = 6
    heads: int = 8
    dropout: float = 0.1
    adapt_first: int = 800  # the update at which the schedule is first moved; 60,000 in the paper's far longer training
    adapt_every: int = 800  # 20,000 there

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, longest = self.embedding_dim, texts.longest
        network, reads = build_network(self, texts, 2 * dim, dim, time="addition", positions=longest)
        return compose_chain(
            texts,
            LearnedEmbedding(texts.vocabulary, dim, x0_std=X0_STD),
            network,
            Sampling("ancestral", steps=2000),
            process=PositionGaussian(Sqrt(), longest, CHAIN),
            times=PositionLosses(CHAIN, longest, PAD, first=self.adapt_first, every=self.adapt_every),
            conditioning=reads,
            self_conditioning=SelfConditioning("coin"),
            bound=None,
        )
