"""What the methods of the discrete family have in common: sizes, a Transformer over tokens, and a drawn length."""

from typing import TYPE_CHECKING

from difflm.methods.base import DiscreteProcess, Method

if TYPE_CHECKING:
    from torch import nn

    from difflm.diffusion.timesteps import TimeSampler
    from difflm.models.base import Sampling
    from difflm.models.diffusion import DiffusionModel
    from difflm.networks.transformer import TimeInput


CONTINUOUS = (1e-4, 1 - 1e-4)  # times of training: the integrand is not finite at the ends


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
        process: DiscreteProcess,
        longest: int,
        objective: dict[str, float],
        sampling: "Sampling | None" = None,
        times: "TimeSampler | None" = None,
        time: "TimeInput" = "adaptive",
        bounded: bool = True,
    ) -> "DiffusionModel":
        """Compose the parts that a paper chooses, on the body that all share; by default 50 ancestral steps. Without
        `bounded` the model has no bound."""
        from difflm.diffusion.bounds import DiscreteBound
        from difflm.diffusion.codecs import Tokens
        from difflm.diffusion.objectives import Objective
        from difflm.diffusion.timesteps import LowDiscrepancy
        from difflm.models.base import Sampling
        from difflm.models.batching import DrawnLength
        from difflm.models.diffusion import DiffusionModel

        return DiffusionModel(
            codec=Tokens(process.words, self.word_width, process.states),
            process=process,
            network=self.body(process.words, longest, time),
            objective=Objective(objective),
            times=times or LowDiscrepancy(limits=CONTINUOUS),
            lengths=DrawnLength(longest),
            sampling=sampling or Sampling(steps=50),
            bound=DiscreteBound() if bounded else None,
        )
