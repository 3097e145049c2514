"""Diff-GLAT: Diffusion Glancing Transformer for Parallel Sequence to Sequence Learning (Qian et al., 2024).

Words are written in parallel, in as many steps as the decoder has stages: a text costs one pass over its layers. What a
stage is shown in training follows the errors of the one before, as in GLAT (Qian et al., 2021), so that no schedule of
noise is needed, and there is no bound. No code was released: how many layers make a stage is our choice, and so is the
order of words, the surest first. They are drawn at temperature 0.2, where GLAT takes the likeliest. Lengths are
predicted of the source.
"""

from pydantic import Field

from difflm.diffusion.codecs import Tokens
from difflm.diffusion.denoiser import CrossAttention
from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.timesteps import LowDiscrepancy
from difflm.methods.base import TextSpec
from difflm.methods.diff_glat.model import GlancingModel
from difflm.methods.parts import build_lengths
from difflm.methods.tokens import CONTINUOUS, TokenMethod
from difflm.models.base import LanguageModel, Sampling
from difflm.networks import StagedDecoder


class DiffGlat(TokenMethod):
    name, task = "diff-glat", "seq2seq"

    stage_layers: int = Field(default=2, ge=1)
    settled_at: int = Field(default=4000, ge=1)  # half of the wrong words are shown at first, 30 % from this update on

    def build(self, texts: TextSpec) -> LanguageModel:
        process, hidden = Absorbing(texts.vocabulary), self.hidden
        network = StagedDecoder(
            hidden,
            texts.vocabulary,
            hidden,
            self.layers,
            self.heads,
            self.dropout,
            stage_layers=self.stage_layers,
            source_vocabulary=texts.source_vocabulary or texts.vocabulary,
            source_longest=texts.source_longest,
            encoder_layers=self.encoder_layers,
            time="none",
            positions=texts.longest,
        )
        return GlancingModel(
            shares=(0.5, 0.3),
            settled_at=self.settled_at,
            codec=Tokens(process.words, hidden, process.states),
            process=process,
            network=network,
            objective=Objective({"ce": 1.0}),
            times=LowDiscrepancy(limits=CONTINUOUS),
            lengths=build_lengths(texts, hidden, self.lengths),
            sampling=Sampling("confidence", steps=len(network.stages), temperature=0.2),
            conditioning=CrossAttention(texts.source_longest),
        )
