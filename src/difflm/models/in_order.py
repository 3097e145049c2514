"""The left-to-right model within a masked one: what it learned from texts that it read in order (`Noising.in_order`).

A text of which nothing is given behind a gap can be written so: each token from those before it, one a call. Keys and
values of earlier tokens are kept, in memory that stays in place."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from difflm.data.tokenizers import END, PAD, START
from difflm.diffusion.condition import FREE
from difflm.diffusion.denoiser import Denoiser, autocast_to
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import DrawingState
from difflm.diffusion.samplers.loop import UNSAID, Frame
from difflm.models.base import TextBatch
from difflm.networks.cache import Slots
from difflm.networks.open_transformer import OpenTransformer

IN_ORDER = "in-order"  # the sampler
HIDDEN = 32  # masks of a text of which nothing is known


class OrderedReader:
    """Reads the texts of one batch, which exist where the mask [B, W] says so, from left to right. A text ends where
    the rules put END."""

    start, end, pad = START, END, PAD

    def __init__(self, denoiser: Denoiser, mask: Tensor, forbidden: Sequence[int]) -> None:
        self.denoiser, self.mask, self.network = denoiser, mask, cast(OpenTransformer, denoiser.network)
        self.longest = int(mask.sum(-1).max())  # synchronises, once per batch
        self.banned = denoiser.codec.token_mask(forbidden)
        self.place = torch.arange(mask.shape[1], device=mask.device)
        self.here = self.place[:0]  # the positions that were read last
        self.slots = self.network.make_slots(*mask.shape)

    def begin(self) -> Tensor:
        """Logits of the first token, [B, V]: what the denoiser makes of masks, whatever the length will be."""
        hidden = torch.full((1, HIDDEN), self.denoiser.process.mask_id, device=self.mask.device)
        belief = self.denoiser(hidden, torch.ones(1, device=hidden.device))
        return cast(Tensor, belief.logits[:, 0].expand(len(self.mask), -1))

    def read(self, tokens: Tensor) -> Tensor:
        """Logits of the token [B, V] behind these [B, L], which follow those that were read before."""
        denoiser, codec = self.denoiser, self.denoiser.codec
        self.here = (self.here[-1:] + 1 if len(self.here) else 0) + self.place[: tokens.shape[1]]
        level = denoiser.process.at(torch.zeros(tokens.shape, device=tokens.device))
        (vectors,) = codec.inputs(tokens, level, None)
        seen = (self.place <= self.here.unsqueeze(1)).unsqueeze(0)
        slots = [Slots(one.keys, one.values, self.here) for one in self.slots]
        with autocast_to(tokens.device, denoiser.precision):
            states = self.network.run(vectors, seen, slots, self.here)
            return self.network.answer(states[:, -1]).float()[:, : codec.vocabulary]


class OrderedState(DrawingState):
    """Texts of which all tokens up to the same position are given: these are read at once."""

    def begin(self, noise: Noise, known: Tensor | None) -> None:
        super().begin(noise, known)
        given = (self.known >= 0).all(1).int().cumprod(0).sum()
        self.begun = min(int(given), self.steps - 1)  # synchronises, once per batch
        if self.begun:
            self.last = self.known[: self.begun].T
            self.tokens[:, : self.begun] = self.last
            self.position.fill_(self.begun)

    def append(self, logits: Tensor) -> None:
        self.last = self.last[:, -1:].clone()
        super().append(logits)


@torch.no_grad()
def write_in_order(
    denoiser: Denoiser, forbidden: Sequence[int], batch: TextBatch, unsaid: tuple[int, int] | None = None
) -> Iterator[Frame]:
    """Yield the frames of a batch, a token each; the second of two `unsaid` ones hardly ever behind the first."""
    steering = batch.steering
    mask = torch.arange(batch.width, device=batch.lengths.device) < batch.lengths.unsqueeze(1)
    known = torch.where(mask, FREE if steering.known is None else steering.known, PAD)
    ends = [END] if steering.prefix_rules else []
    reader = OrderedReader(denoiser, mask, [token for token in forbidden if token not in ends])
    state = OrderedState(reader, len(mask), batch.width, batch.sampling)
    state.begin(batch.noise, known)

    def step(position: int) -> None:
        logits = reader.read(state.last) if position else reader.begin()
        if unsaid and position:
            logits[:, unsaid[1]] -= UNSAID * (state.last[:, -1] == unsaid[0])
        for rule in steering.prefix_rules:
            logits = rule(state.tokens[:, :position], logits, [])
        state.append(logits)

    yield from state.frames(step)
