"""How likely each word of a finished text is given all others.

If a network adds the evidence of each position's own noisy state to its prediction, one call is enough for all
positions: without the evidence, its prediction is p(word | all other positions). A masked model is called once for each
position, with that position masked."""

import torch
from torch import Tensor

from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.errors import UsageError

NEARLY_WRITTEN = 0.01  # the share of the noise at which a text is read: words can still be told apart
AT_ONCE = 64  # copies of a text, each with another position masked, that share a batch


def leave_one_out_log_probs(
    denoiser: Denoiser, t: Tensor, ids: Tensor, mask: Tensor, condition: Condition = UNCONDITIONAL
) -> Tensor:
    """log p(any word | the others), [B, L, V], of texts at times t [B]. No noise is added, so the result is
    deterministic."""
    codec, process = denoiser.codec, denoiser.process
    clean = codec.encode(ids)
    x = process.corrupt(clean, t, torch.zeros_like(clean)) if clean.is_floating_point() else clean
    belief = denoiser(x, process.at(t), mask, condition)
    if belief.evidence is None:
        raise UsageError("this model does not separate a word from its context: it cannot question single words.")
    return belief.context.float().log_softmax(-1)


def masked_logits(
    denoiser: Denoiser, ids: Tensor, mask: Tensor, condition: Condition = UNCONDITIONAL, places: slice = slice(None)
) -> Tensor:
    """Logits of p(word | the others) under a masked model, [places, V], for one text [1, L]: each position is masked in
    turn, at the time at which one word of the text is masked on average."""
    found, where = [], torch.arange(ids.shape[1], device=ids.device)[places]
    for some in where.split(AT_ONCE):
        rows, size = torch.arange(len(some), device=ids.device), len(some)
        x = ids.repeat(size, 1)
        x[rows, some] = denoiser.process.mask_id
        t = torch.full((size,), 1 / ids.shape[1], device=ids.device)
        belief = denoiser(x, denoiser.process.at(t), mask.repeat(size, 1), condition[[0] * size])
        found.append(belief.context[rows, some])
    return torch.cat(found)
