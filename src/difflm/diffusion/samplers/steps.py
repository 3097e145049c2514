"""Step rules: from x_t and a belief to x_s, for any s < t, each the line of its paper."""

from collections.abc import Mapping

import torch
from torch import Tensor

from difflm.diffusion.base import StepRule, StepState, expand_levels


def ancestral(now: StepState) -> Tensor:
    """Draw x_s ~ q(x_s | x_t, x̂_0) for any s < t (Ho et al., 2020, equation 7, with two free times)."""
    process, noise = now.process, now.noise()
    mean, std = process.posterior(now.x, now.belief.clean, now.level, now.next_level)
    x_s: Tensor = mean + std * noise[..., : mean.shape[-1]]
    return process.absorb(x_s, std, noise) if process.absorbs else x_s


def ddim(now: StepState, eta: float = 0.0) -> Tensor:
    """x_s = α_s x̂_0 + √(σ_s² − ν²) ε̂ + ν z with ν = η · posterior spread (Song et al., 2021, equation 12)."""
    p, x = now.process, now.x
    level, s = p.at(now.level), p.at(now.next_level)
    sigma = expand_levels(s.sigma, x)
    _, std = p.posterior(x, now.belief.clean, level, s)
    direction = p.implied_noise(x, now.belief.clean, level)
    out = expand_levels(s.alpha, x) * now.belief.clean + (sigma**2 - (eta * std) ** 2).sqrt() * direction
    return out + eta * std * now.noise() if eta else out


def ddim_half(now: StepState) -> Tensor:
    """DDIM with η = ½: half the fresh noise of the ancestral step."""
    return ddim(now, eta=0.5)


def euler(now: StepState) -> Tensor:
    """One explicit step of the probability flow dy/dς = (y − x̂_0)/ς in y = x/α, ς = σ/α (Karras et al., 2022).

    The line it follows is the exact flow for a fixed x̂_0; in y it would subtract numbers of size 1/α. For the belief of
    a flow map, the mean of those along the way, it is a "jump", which lands where the flow does."""
    return _towards(now, now.belief.clean)


def heun(now: StepState) -> Tensor:
    """Call the network again at the end of the step and take the mean of both predictions: two calls per step.

    Heun's rule with the linear part solved exactly (DPM-Solver++ 2S with r = 1; Lu et al., 2022). The form in ς of
    Karras et al. (2022) multiplies x̂_s − x̂_t by ς_t/ς_s, which is ruinous in a first step from λ = −20."""
    assert now.ask is not None
    there = _towards(now, now.belief.clean)
    return _towards(now, (now.belief.clean + now.ask(there, now.next_level).clean) / 2)


def dpm_solver(now: StepState) -> Tensor:
    """DPM-Solver++ 2M (Lu et al., 2022): the data prediction extrapolated along half log-SNR from one step earlier."""
    p, clean = now.process, now.belief.clean
    if now.last is not None:
        before, earlier = now.last
        level = p.at(now.level)
        width, past = p.at(now.next_level).log_snr - level.log_snr, level.log_snr - p.at(earlier).log_snr
        # A position whose time has stopped has no past to extrapolate from.
        reach = torch.where(past > 0, width / (2 * past), torch.zeros_like(past))
        clean = clean + expand_levels(reach, clean) * (clean - before)
    return _towards(now, clean)


def renoise(now: StepState) -> Tensor:
    """Draw x_s ~ q(x_s | x̂_0), all noise fresh (Han et al., 2023, section 3.3): for an x̂_0 that is words, not a mean.
    The last step ends at the words that are printed. What is given or finished, its time standing still, stays."""
    x, belief, codec = now.x, now.belief, now.belief.codec
    assert codec is not None
    clean = torch.where(expand_levels(now.s > 0, x), belief.clean, codec.encode(belief.tokens))
    x_s: Tensor = now.process.corrupt(clean, now.next_level, now.noise())
    return torch.where(expand_levels(now.t > now.s, x), x_s, x)


def _towards(now: StepState, clean: Tensor) -> Tensor:
    """The probability flow from t to s, solved exactly for a clean state that stays the same on the way."""
    t, s = now.process.at(now.level), now.process.at(now.next_level)
    new = -torch.expm1((t.log_snr - s.log_snr) / 2)
    return expand_levels(s.sigma / t.sigma, now.x) * now.x + expand_levels(s.alpha * new, now.x) * clean


def clean_weight(now: StepState) -> Tensor:
    """How much further x_s goes when x̂_0 does, in units of the ancestral step: (1 + η²)/2 for short ones.

    DDIM's ∂x_s/∂x̂_0 = α_s − √(σ_s² − ν²) α_t/σ_t is α_s (1 − √(1 − η² n) √(1 − n)) with n = 1 − SNR(t)/SNR(s), and the
    ancestral one, η = 1, is α_s n. All rules without noise follow the flow, η = 0."""
    gap = now.process.at(now.level).log_snr - now.process.at(now.next_level).log_snr
    new = -torch.expm1(gap)
    kept = torch.sqrt(1 - now.eta**2 * new) * torch.exp(gap / 2)
    return torch.where(new > 0, (1 - kept) / new, 1.0)


STEPS: Mapping[str, StepRule] = {
    rule.__name__.replace("_", "-"): rule for rule in (ancestral, ddim, ddim_half, dpm_solver, euler, heun)
}
VECTOR_STEPS: Mapping[str, StepRule] = {**STEPS, "jump": euler, "renoise": renoise}
ETA: Mapping[StepRule, float] = {ancestral: 1.0, ddim_half: 0.5, renoise: 1.0}  # of each rule that draws noise
