"""What the methods of the discrete family have in common: sizes, a Transformer over tokens, and a drawn length."""

from typing import TYPE_CHECKING

from difflm.methods.base import Method

if TYPE_CHECKING:
    from torch import nn

    from difflm.diffusion.processes import DiscreteProcess
    from difflm.diffusion.timesteps import TimeSampler
    from difflm.models.base import Likelihood, Sampling
    from difflm.models.token_diffusion import TokenDiffusion
    from difflm.networks.transformer import TimeInput


class TokenMethod(Method):
    hidden: int = 384
    layers: int = 8
    heads: int = 6
    dropout: float = 0.1

    @property
    def word_width(self) -> int:
        """Of the vectors that the body reads."""
        return self.hidden

    def body(self, vocabulary: int, longest: int, time: "TimeInput") -> "nn.Module":
        """From vectors of tokens to logits of words."""
        from difflm.networks import Transformer

        sizes = (self.hidden, vocabulary, self.hidden, self.layers, self.heads, self.dropout)
        return Transformer(*sizes, time, positions=longest)

    def compose(
        self,
        process: "DiscreteProcess",
        longest: int,
        objective: dict[str, float],
        sampling: "Sampling",
        times: "TimeSampler | None" = None,
        time: "TimeInput" = "adaptive",
        likelihood: "Likelihood | None" = "bound",
    ) -> "TokenDiffusion":
        """The parts that a paper chooses among, on the body that all share."""
        from difflm.diffusion.codecs import Tokens
        from difflm.diffusion.objectives import Objective
        from difflm.diffusion.timesteps import LowDiscrepancy
        from difflm.diffusion.token_denoiser import TokenDenoiser
        from difflm.models.lengths import DrawnLength
        from difflm.models.token_diffusion import TokenDiffusion

        times = times or LowDiscrepancy()
        codec = Tokens(process.words, self.word_width, process.states)
        network = self.body(process.words, longest, time)
        step = 1 / times.steps if times.steps else 1 / 1000
        return TokenDiffusion(
            TokenDenoiser(network, codec, process, step),
            Objective(objective),
            times,
            DrawnLength(longest),
            sampling,
            likelihood,
        )
