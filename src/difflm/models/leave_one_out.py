"""How likely each word of a finished text is given all others, by one call of a network that adds to its answer, as
evidence, what each place's own noisy state says: without it, the answer is p(word | all other places)."""

import torch
from torch import Tensor

from difflm.diffusion.codecs.embedding import Logits
from difflm.diffusion.denoiser import Denoiser
from difflm.errors import UsageError

NEARLY_WRITTEN = 0.01  # the share of the noise at which a text is read: others can still be told from it


def knows_evidence(denoiser: Denoiser) -> bool:
    prediction = getattr(denoiser.codec, "prediction", None)
    return isinstance(prediction, Logits) and prediction.evidence


def leave_one_out_log_probs(denoiser: Denoiser, t: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """log p(any word | the others), [B, L, V], of texts at times t [B]. No noise is added: it is the same each time."""
    codec, process = denoiser.codec, denoiser.process
    clean = codec.encode(ids)
    belief = denoiser(process.corrupt(clean, t, torch.zeros_like(clean)), process.at(t), mask)
    if belief.evidence is None:
        raise UsageError("this model does not tell a word's own state from its context: it cannot doubt single words.")
    return belief.context.float().log_softmax(-1)


def leave_one_out_nats(denoiser: Denoiser, t: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """−log p(word | the others), [B, L], of texts at times t [B]."""
    found = leave_one_out_log_probs(denoiser, t, ids, mask)
    return -found.gather(-1, ids.unsqueeze(-1)).squeeze(-1) * mask
