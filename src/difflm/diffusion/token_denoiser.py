"""A network that reads noisy tokens and answers with words: the denoiser of the discrete family."""

import torch
from torch import Tensor, nn

from difflm.diffusion.belief import Belief
from difflm.diffusion.codecs import Tokens
from difflm.diffusion.denoiser import Denoiser, autocast_to
from difflm.diffusion.processes import DiscreteProcess
from difflm.diffusion.processes.discrete import one_hot_states


class TokenDenoiser(Denoiser):
    """`belief = denoiser(x_t, t, mask)`, x_t being ids [B, L]; what the process knows of them is added to the network's
    logits, or put in their place."""

    codec: Tokens
    process: DiscreteProcess  # type: ignore[assignment]

    def __init__(self, network: nn.Module, codec: Tokens, process: DiscreteProcess, step: float = 1 / 1000) -> None:
        super().__init__(network, codec, process, predicts="logits", step=step)  # type: ignore[arg-type]

    def forward(self, x: Tensor, t: Tensor, mask: Tensor | None = None, previous: Tensor | None = None) -> Belief:
        with autocast_to(x.device, self.precision):
            logits = self.network(self.codec.inputs(x), t, mask).float()
        with torch.autocast(x.device.type, enabled=False):
            return self.process.belief_from_logits(logits, x, t)

    @property
    def view_dim(self) -> int:
        return self.process.states

    def view(self, x: Tensor, t: Tensor) -> Tensor:
        """The noisy tokens as one-hot vectors, or mixtures of them as they are: guidance asks for their slopes."""
        return x if x.is_floating_point() else one_hot_states(x, self.process.states, torch.float32)

    def levels(self) -> list[float]:
        """How likely the middle word still stands at five times."""
        ids = torch.full((5, 1), self.process.words // 2, device=self.codec.bias.device)
        t = torch.linspace(0.1, 0.9, 5, device=ids.device)
        return self.process.kept(ids, t).flatten().tolist()
