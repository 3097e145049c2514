"""A left-to-right model that reads a source before it writes, as language models read a prompt: one network, no
encoder."""

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.data.tokenizers import START
from difflm.diffusion.denoiser import require_source
from difflm.diffusion.samplers.loop import Caches, Memory
from difflm.models.autoregressive import Autoregressive


class DecoderOnly(Autoregressive):
    """source START w₁ w₂ … → w₁ w₂ … END: the source has no loss. While texts are written, its keys and values are
    computed once. Sources of a batch then end at the same position, so that START follows all of them."""

    captures_words = False  # its slots would have to hold the sources

    def lay_out(self, batch: Batch, memory: Memory | None = None) -> tuple[Tensor, Tensor, Tensor, Memory | None]:
        source, lengths = require_source(batch.source, batch.source_lengths)
        prompts = F.pad(source, (0, 1)).scatter(1, lengths.unsqueeze(1), START)
        return super().lay_out(Batch(batch.ids, batch.lengths, prompts, lengths + 1))

    def encode_source(self, source: Tensor | None, mask: Tensor | None) -> Memory | None:
        """Keys and values of sources [B, S] in every layer, aligned to the right, and their mask."""
        source, mask = require_source(source, mask)
        shift = mask.sum(-1, keepdim=True) - mask.shape[1]
        place = (torch.arange(mask.shape[1], device=mask.device) + shift) % mask.shape[1]
        words, mask = source.gather(1, place), mask.gather(1, place)
        _, caches = self.read_behind(words, [], causal_mask(mask, mask.shape[1]), answers=False)
        return [(*cache, mask[:, None, None]) for cache in caches]

    def read(
        self,
        words: Tensor,
        caches: Caches | None = None,
        memory: Memory | None = None,
        answers: bool = True,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, Caches]:
        if memory is None:
            return super().read(words, caches, None, answers, documents)
        each = len(words) // len(memory[0][0])  # several texts per source, in order
        caches = caches or [(k.repeat_interleave(each, 0), v.repeat_interleave(each, 0)) for k, v, _ in memory]
        shown = memory[0][2][:, 0, 0].repeat_interleave(each, 0)
        before = caches[0][0].shape[2]
        shown = F.pad(shown, (0, before + words.shape[1] - shown.shape[1]), value=True)
        return self.read_behind(words, caches, causal_mask(shown, words.shape[1]), answers)


def causal_mask(shown: Tensor, queries: int) -> Tensor:
    """Which of the keys [B, K] each of the last `queries` may attend to, [B, Q, K]: visible ones before it, and
    itself."""
    size = shown.shape[1]
    before = torch.ones(size, size, dtype=torch.bool, device=shown.device).tril()[-queries:]
    itself = torch.eye(size, dtype=torch.bool, device=shown.device)[-queries:]
    return before & shown.unsqueeze(1) | itself
