"""The variational bound of token diffusion, in nats: in continuous time, or of a chain of so many steps.

−log p(x) ≤ KL(q(x_1 | x) ‖ prior) + ∫ E[ℓ_t] dt, or + Σ_i E[KL_i], whose step to t = 0 is the reconstruction.
"""

import math

import torch
from torch import Tensor

from difflm.diffusion.noise import Noise
from difflm.diffusion.token_denoiser import TokenDenoiser

EDGE = 1e-7  # of u: t = sin²(πu²/2) then begins at 2e-28 and ends where float64 still tells α from 0


def token_bound(
    denoiser: TokenDenoiser, ids: Tensor, mask: Tensor, noise: Noise, draws: int, levels: int | None = None
) -> Tensor:
    """Estimates of each text's nats, one for each of its strata of times, [B, draws]; their mean is unbiased."""
    prior = (denoiser.process.prior_nats(ids) * mask).sum(-1).double()
    offset = noise.uniform(0, stream=10).double()
    strata = ((k, (k + offset) / draws) for k in range(draws))
    return torch.stack([prior + _draw(denoiser, ids, mask, noise, u, k, levels) for k, u in strata], 1)


def _draw(
    denoiser: TokenDenoiser, ids: Tensor, mask: Tensor, noise: Noise, u: Tensor, k: int, levels: int | None
) -> Tensor:
    process = denoiser.process
    if levels is None:
        # Both ends of time are steep, the early one of hybrid noise so much that t = sin²(πu/2) has no finite variance:
        # wrong words are there with the share √t, and weigh 1/t. The map takes the steepness away.
        u = u.clamp(EDGE, 1 - EDGE)
        angle = u**2 * (math.pi / 2)
        t, weight = torch.sin(angle) ** 2, torch.sin(2 * angle) * u * math.pi
    else:
        t, weight = (torch.floor(u * levels) + 1).clamp(max=levels) / levels, torch.full_like(u, levels)
    with torch.autocast(ids.device.type, enabled=False):
        z = process.corrupt(ids, t, process.draw_noise(noise, k, ids.shape[1], stream=11))
    belief = denoiser(z, t.float(), mask, ids)  # of which blocks may see the earlier ones, and others nothing
    with torch.autocast(ids.device.type, enabled=False):
        if levels is None:
            nats = process.rate_nats(ids, z, belief, t)
        else:
            nats = process.step_nats(ids, z, belief, t, (t - 1 / levels).clamp(min=0))
        return weight * (nats.double() * mask).sum(-1)
