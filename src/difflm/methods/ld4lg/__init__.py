"""LD4LG: Latent Diffusion for Language Generation (Lovelace et al., 2023).

The latents of an autoencoder diffuse; its decoder writes the text from them and decides where it ends. The paper trains
the autoencoder first; here both are trained in one run, and no gradient of the diffusion reaches the latents. The
paper's autoencoder is a frozen BART or T5 between two small networks: `pretrained` names its directory; without it a
small autoencoder is trained. The network is the Transformer of the other methods, without the paper's skips, and with
zeros instead of a learned vector for a missing last estimate. A class is a source of one word. The released
second-order solver is actually first-order, because its history stays empty.
"""

from pydantic import Field

from difflm.diffusion.denoiser import ConditionDrop, Denoiser, SelfConditioning
from difflm.diffusion.processes.gaussian import Cosine, Gaussian
from difflm.diffusion.timesteps import LowDiscrepancy
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.ld4lg.autoencoder import Autoencoder, Latents
from difflm.methods.ld4lg.base import LatentMethod
from difflm.methods.ld4lg.model import LatentDiffusion
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling


class Ld4lg(LatentMethod, ReadsSources):
    name = "ld4lg"

    layers: int = 12
    autoencoder_layers: int = 3
    drop: float = Field(default=0.1, ge=0, lt=1)  # share of texts learned without their source

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, guided = self.latent_dim, bool(texts.source_longest and self.drop)
        sampling = Sampling("ancestral", steps=250, temperature=0.0, contrast=1.0 if guided else 0.0)
        encoder, decoder, width = self.build_halves(texts, dim, self.autoencoder_layers, reads_source=False)
        network, reads = build_network(self, texts, 2 * dim, dim, positions=self.latents)
        return LatentDiffusion(
            Autoencoder(encoder, decoder, texts, width, sampling, self.latents, dim),
            Denoiser(network, Latents(self.latents, dim), Gaussian(Cosine()), reads, SelfConditioning("coin")),
            LowDiscrepancy(),
            sampling,
            ConditionDrop(self.drop if reads else 0.0),
        )
