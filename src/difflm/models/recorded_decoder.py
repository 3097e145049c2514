"""Left-to-right decoding whose step is captured: on a GPU one word is one replay of a CUDA graph."""

from collections.abc import Iterator

import torch
from torch import Tensor

from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers import Frame
from difflm.diffusion.samplers.left_to_right import DecodingState
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import Sampling
from difflm.networks.transformer import Slots, rotary
from difflm.runtime.cuda_graphs import CapturedFunction


class RecordedDecoder:
    """Draws batches of one shape in tensors that keep their place. Keys and values have a slot for every position;
    those of positions to come are masked, so nothing need be cleared between two batches."""

    def __init__(self, model: Autoregressive, batch: int, width: int, sampling: Sampling) -> None:
        self.model, self.state = model, DecodingState(model, batch, width, sampling)
        weight, network = model.embedding.weight, model.network
        self.angles = rotary(width, network.head_dim, weight.device)
        heads = network.input.out_features // network.head_dim
        empty = torch.zeros(batch, heads, width, network.head_dim, dtype=weight.dtype, device=weight.device)
        self.caches = [Slots(empty.clone(), empty.clone(), self.state.position) for _ in network.blocks]
        self.step = CapturedFunction(self._step, weight.device)

    @torch.no_grad()
    def frames(self, noise: Noise, known: Tensor | None) -> Iterator[Frame]:
        self.state.begin(noise, known)
        yield from self.state.frames(lambda position: self.step())

    @torch.no_grad()
    def _step(self) -> None:
        state, network = self.state, self.model.network
        angles = state.at_position(self.angles[0]), state.at_position(self.angles[1])
        visible = (state.positions <= state.position).view(1, 1, -1)
        x = network.input(self.model.embedding(state.last))
        x, _ = network.run(x, None, visible, self.caches, 0, angles)
        state.append(network.answer(x)[:, -1].float())

    def close(self) -> None:
        self.step.close()
