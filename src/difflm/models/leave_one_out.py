"""How likely each word of a finished text is given all others, by one call of a network that adds to its answer, as
evidence, what each place's own noisy state says: without it, the answer is p(word | all other places)."""

import torch
from torch import Tensor

from difflm.diffusion.denoiser import Denoiser
from difflm.errors import UsageError

NEARLY_WRITTEN = 0.01  # the share of the noise at which a text is read: others can still be told from it


def leave_one_out_nats(denoiser: Denoiser, t: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """−log p(word | the others), [B, L], of texts at times t [B]. No noise is added: it is the same each time."""
    codec, process = denoiser.codec, denoiser.process
    clean = codec.encode(ids)
    belief = denoiser(process.corrupt(clean, t, torch.zeros_like(clean)), process.at(t), mask)
    if belief.evidence is None:
        raise UsageError("this model does not tell a word's own state from its context: it cannot doubt single words.")
    nats: Tensor = -belief.context.float().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return nats * mask
