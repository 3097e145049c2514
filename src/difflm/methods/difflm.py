"""difflm, our flagship: score interpolation on a sphere of word vectors, with the evidence of the noisy input.

Parts: word vectors on a sphere and cross-entropy alone (Dieleman et al., 2022), self-conditioning (Chen et al., 2023),
time warping (Dieleman et al., 2022), the closed-form evidence of the noisy vector in the logits (Gulrajani & Hashimoto,
2023) and at the network's input, adaptive norms for time (Peebles & Xie, 2023), and a length drawn beforehand. What was
tried, with numbers: docs/log."""

from pydantic import Field

from difflm.diffusion import GaussianBound, LearnedEmbedding, LearnedWarp, Logits, LowDiscrepancy, Objective
from difflm.diffusion.denoiser import CleanGiven, ConditionDrop, Denoiser, SelfConditioning
from difflm.diffusion.processes import gaussian
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.parts import Lengths, build_lengths, build_network
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel, ModelParts, Noising


class DiffLM(ReadsSources):
    name, task = "difflm", "either"

    embedding_dim: int = 64
    hidden: int = 384
    layers: int = 8
    encoder_layers: int = 4
    lengths: Lengths = "predicted"  # of texts with sources
    heads: int = 6
    log_snr_shift: float = -4.0
    evidence: bool = True
    warp: bool = True
    positions: bool = True
    context: float = Field(default=0.0, ge=0, le=1)  # share of texts learned with a gap between clean words
    coupled: bool = False  # each text is learned from the noise that a teacher made it of
    drop_source: float = Field(default=0.0, ge=0, lt=1)  # share of texts learned without their source
    behind: float = Field(default=0.0, ge=0, le=1)  # how far the last estimate may lag behind, of the whole way

    def build(self, texts: TextSpec) -> LanguageModel:
        denoiser, parts = self.choose_parts(texts)
        return DiffusionModel(denoiser, **parts)

    @property
    def schedule(self) -> gaussian.Schedule:
        return gaussian.LogSnrShift(gaussian.Cosine(), self.log_snr_shift)

    def choose_parts(self, texts: TextSpec) -> tuple[Denoiser, ModelParts]:
        # A tiny start lets the first updates choose the directions (Dieleman et al., 2022, table 5).
        prediction, dim = Logits(self.evidence), self.embedding_dim
        codec = LearnedEmbedding(texts.vocabulary, dim, norm="sphere", init_std=1e-3, prediction=prediction)
        read = 3 if self.evidence else 2  # the state, the last estimate, and the mean word of the evidence
        places = texts.longest if self.positions else 0
        network, reads = build_network(self, texts, read * dim, texts.vocabulary, positions=places)
        process = gaussian.Gaussian(self.schedule)
        reads_words = reads or (CleanGiven() if self.context else None)
        denoiser = Denoiser(network, codec, process, reads_words, SelfConditioning("half", lag=self.behind))
        return denoiser, ModelParts(
            objective=Objective({"ce": 1.0}),
            times=LearnedWarp() if self.warp else LowDiscrepancy(),
            lengths=build_lengths(texts, self.hidden, self.lengths),
            sampling=Sampling("ddim", steps=10) if self.coupled else Sampling("ancestral", steps=50),
            bound=GaussianBound(),
            drop=ConditionDrop(self.drop_source) if reads else None,
            noising=Noising(self.context, reflow=self.coupled),
        )
