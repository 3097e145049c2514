"""A network that reads noisy tokens and answers with words: the denoiser of the discrete family."""

import torch
from torch import Tensor, nn

from difflm.belief import Belief
from difflm.codecs import Tokens
from difflm.denoiser import Denoiser, at_precision
from difflm.processes import TokenProcess
from difflm.processes.tokens import indicator


class TokenDenoiser(Denoiser):
    """`belief = denoiser(x_t, t, mask)`, x_t being ids [B, L]; what the process knows of them is added to the network's
    logits, or put in their place."""

    codec: Tokens
    process: TokenProcess  # type: ignore[assignment]

    def __init__(self, network: nn.Module, codec: Tokens, process: TokenProcess, step: float = 1 / 1000) -> None:
        super().__init__(network, codec, process, predicts="logits", step=step)  # type: ignore[arg-type]

    def forward(self, x: Tensor, t: Tensor, mask: Tensor | None = None, previous: Tensor | None = None) -> Belief:
        with at_precision(x.device, self.precision):
            logits = self.network(self.codec.inputs(x), t, mask).float()
        with torch.autocast(x.device.type, enabled=False):
            return self.process.believe(logits, x, t)

    @property
    def view_dim(self) -> int:
        return self.process.states

    def view(self, x: Tensor, t: Tensor) -> Tensor:
        """The noisy tokens as one-hot vectors, or mixtures of them as they are: guidance asks for their slopes."""
        return x if x.is_floating_point() else indicator(x, self.process.states, torch.float32)

    def levels(self) -> list[float]:
        """How likely the middle word still stands at five times."""
        ids = torch.full((5, 1), self.process.words // 2, device=self.codec.bias.device)
        t = torch.linspace(0.1, 0.9, 5, device=ids.device)
        return self.process.kept(ids, t).flatten().tolist()
