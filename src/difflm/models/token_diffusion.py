"""The parts of a discrete method, put together. The loop, lengths, controls and trainer are those of every model; what
is here is what only tokens can do: be known, be masked, and be written in an order."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from difflm.data.tokenizers import PAD
from difflm.diffusion.belief import Belief
from difflm.diffusion.noise import Noise, TorchNoise
from difflm.diffusion.objectives import Corrupted, Objective, cross_entropy
from difflm.diffusion.processes import Absorbing, DiscreteProcess, Hybrid, Spindle
from difflm.diffusion.samplers import Denoise, Frame, SamplerInputs, Steering
from difflm.diffusion.samplers.discrete_steps import HYBRID_STEPS, MASK_STEPS, TOKEN_STEPS, with_corrections
from difflm.diffusion.timesteps import TimeSampler
from difflm.diffusion.token_bounds import token_bound
from difflm.diffusion.token_denoiser import TokenDenoiser
from difflm.models.base import Likelihood, Sampling
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import LengthPolicy
from difflm.runtime.cuda_graphs import DelayedFlag

EARLIEST, LATEST = 1e-4, 1 - 1e-4  # times of training in continuous time: the integrand's ends are not finite


class TokenDiffusion(DiffusionModel):
    """`likelihood=None` is for objectives that are no bound."""

    denoiser: TokenDenoiser
    syncs_with_device = True  # whether all masks are gone

    def __init__(
        self,
        denoiser: TokenDenoiser,
        objective: Objective,
        times: TimeSampler,
        lengths: LengthPolicy,
        sampling: Sampling,
        likelihood: Likelihood | None = "bound",
    ) -> None:
        super().__init__(denoiser, objective, times, lengths, sampling)
        self.likelihood = likelihood
        self.rules = MASK_STEPS if isinstance(denoiser.process, Absorbing) else TOKEN_STEPS
        if isinstance(denoiser.process, Spindle):  # its words come at their own pace, in no order that a rule knows
            self.rules = TOKEN_STEPS
        if isinstance(denoiser.process, Hybrid):  # it learned to doubt words that stand
            self.rules = HYBRID_STEPS
        self.samplers = tuple(self.rules)

    @property
    def can_hide_known(self) -> bool:
        """Whether known words can be hidden from it, as a contrast does."""
        return self.process.masks

    @property
    def process(self) -> DiscreteProcess:  # type: ignore[override]
        return self.denoiser.process

    # -- training -----------------------------------------------------------------------------------------------

    def corrupt_batch(self, ids: Tensor, mask: Tensor, t: Tensor, *pairs: Tensor) -> Corrupted:
        """The clean state is the ids themselves."""
        t = t if self.times.steps else t.clamp(EARLIEST, LATEST)
        return self.corrupted_at(ids, mask, t)

    def corrupted_at(self, ids: Tensor, mask: Tensor, t: Tensor) -> Corrupted:
        with torch.autocast(ids.device.type, enabled=False):
            fresh = self.process.draw_noise(TorchNoise(ids.shape[0], ids.device), 0, ids.shape[1])
            x_t = self.process.corrupt(ids, t, fresh)
        belief = self.denoiser(x_t, t, mask, ids)  # of which blocks may see the earlier ones, and others nothing
        return Corrupted(ids, mask, ids, ids, x_t, fresh, t, belief, self.denoiser)

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        super().observe(lengths, tokens)
        self.process.observe(tokens)

    # -- likelihood ---------------------------------------------------------------------------------------------

    def bound(self, canvas: Tensor, mask: Tensor, noise: Noise, draws: int) -> Tensor:
        return token_bound(self.denoiser, canvas, mask, noise, draws, self.times.steps)

    @torch.no_grad()
    def nats(self, ids: Tensor, lengths: Tensor, noise: Noise, draws: int, *labels: Tensor) -> Tensor:
        """Where there is no bound: the cross-entropy of masked words at the time of most training, as many as there are
        words. It tells a trainer whether training helps, and nobody how likely a text is."""
        if self.likelihood is not None:
            return super().nats(ids, lengths, noise, draws, *labels)
        canvas, mask = self.lengths.canvas(ids, lengths)
        t = self.times.time_of(torch.full((len(ids),), getattr(self.times, "time", 0.5), device=ids.device))
        z = self.process.corrupt(canvas, t, self.process.draw_noise(noise, 0, canvas.shape[1], stream=11))
        ce = cross_entropy(self.denoiser(z, t, mask).logits, canvas)
        return (ce * mask).sum(-1) / t

    # -- generation ---------------------------------------------------------------------------------------------

    def calls(self, sampling: Sampling, words: int) -> int:
        return min(words, sampling.steps) if sampling.sampler == "first-hitting" else sampling.steps

    def walk(self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering) -> SamplerInputs:
        walk = super().walk(noise, lengths, width, sampling, steering)
        return replace(walk, grid=with_corrections(walk.grid)) if sampling.sampler == "self-correct" else walk

    def impose_known(self, mask: Tensor, steering: Steering) -> Callable[[Tensor], Tensor]:
        """Known words stand from the beginning; places that do not exist are no masks to be written."""
        known = torch.where(mask, -1, PAD) if steering.known is None else torch.where(mask, steering.known, PAD)
        return lambda x: torch.where(known >= 0, known, x)

    def bind_denoiser(self, mask: Tensor, sampling: Sampling, steering: Steering) -> Denoise:
        """With a contrast w, log p is moved on by w (log p(· | known words) − log p(· | none of them)): classifier-free
        guidance (Ho & Salimans, 2022; Nie et al., 2025), whose label is what is known. It costs a second call."""
        if not sampling.contrast or steering.known is None:
            return super().bind_denoiser(mask, sampling, steering)
        known = steering.known >= 0

        def ask(x: Tensor, t: Tensor, previous: Tensor | None) -> Belief:
            hidden = torch.where(known, self.process.mask_id, x)
            told, untold = (self.denoiser(z, t, mask) for z in (x, hidden))
            return apply_contrast(told, untold, sampling.contrast)

        return ask

    def stream(
        self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering | None = None
    ) -> Iterator[Frame]:
        ordered = sampling.sampler in ("first-hitting", "confidence", "threshold")
        calls = torch.zeros_like(lengths)
        cost = 2 if sampling.contrast and steering and steering.known is not None else 1
        waiting, all_written = torch.ones_like(lengths, dtype=torch.bool), DelayedFlag()
        for frame in super().stream(noise, lengths, width, sampling, steering):
            calls = calls + cost * waiting
            assert frame.state is not None
            if ordered:  # a text without masks is done
                waiting = (frame.state == self.process.mask_id).any(-1)
            yield replace(frame, calls=calls)
            if ordered and all_written(~waiting.any()):
                return


def apply_contrast(told: Belief, untold: Belief, weight: float) -> Belief:
    """Log-probabilities moved on from `untold` past `told`; what is settled stays."""
    here, there = (belief.logits.log_softmax(-1) for belief in (told, untold))
    moved = here + weight * (here - there)
    logits = torch.where(torch.isfinite(here) & torch.isfinite(there), moved, told.logits)
    return replace(told, logits=logits, clean=logits)
