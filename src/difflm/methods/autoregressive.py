"""The twin: a left-to-right Transformer on the same parts (Vaswani et al., 2017; Radford et al., 2018), or a pretrained
one; by itself, or behind a source."""

from pathlib import Path
from typing import cast

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.data.tokenizers import START, PretrainedTokenizer, Tokenizer, is_pretrained
from difflm.diffusion.denoiser import require_source
from difflm.diffusion.samplers.loop import Caches, Memory
from difflm.methods.base import ReadsSources, Sized, TextSpec
from difflm.methods.parts import read_sizes, read_source_sizes
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import LanguageModel, Sampling
from difflm.networks import SourceSizes, Transformer
from difflm.networks.pretrained import PretrainedDecoder, read_decoder, sizes_of
from difflm.runtime.files import Json


class PromptedModel(Autoregressive):
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


class AutoregressiveTwin(Sized):
    keeps = ("decoder", read_decoder, sizes_of)
    name = "autoregressive"
    reads_prompts, one_canvas, packs = True, True, True

    hidden: int = 384
    layers: int = 9
    heads: int = 6
    pretrained: str = ""
    "The directory of a Hugging Face model that writes from left to right; the sizes are its own."
    decoder: Json = {}  # noqa: RUF012 (pydantic copies it)
    "Its config, which a run keeps."

    def build(self, texts: TextSpec) -> LanguageModel:
        return self._compose(Autoregressive, texts)

    def _compose(self, kind: type[Autoregressive], texts: TextSpec, source: SourceSizes | None = None) -> LanguageModel:
        """The model; around a pretrained network, without its weights."""
        width, network = 1 + texts.longest + texts.source_longest, None
        if self.decoder:
            network = cast(Transformer, PretrainedDecoder(self.decoder, texts.vocabulary, width, self.dropout))
        sampling = Sampling("autoregressive", steps=max(1, texts.longest))
        return kind(texts.vocabulary, texts.longest, read_sizes(self), sampling, source, network=network)

    def start(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        if self.decoder:
            ids = numbers_in(Path(self.pretrained), tokenizer)
            words = [] if ids else ["".join(tokenizer.tokens([i])) for i in range(tokenizer.size)]
            twin = cast(Autoregressive, model)
            cast(PretrainedDecoder, twin.network).take_weights(twin.embedding.weight, self.pretrained, words, ids)


def numbers_in(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """The numbers of a tokenizer's pieces in the tokenizer of this directory, if it is the same one; else none."""
    if tokenizer.kind != PretrainedTokenizer.kind or not is_pretrained(folder):
        return []
    same = PretrainedTokenizer.read(folder).pieces == tokenizer.pieces
    return cast(PretrainedTokenizer, tokenizer).theirs if same else []


class DecoderOnly(AutoregressiveTwin):
    """The same behind a source, which it reads as a prompt (Radford et al., 2019)."""

    name, task = "decoder-only", "seq2seq"
    reads_prompts, packs = False, False

    def build(self, texts: TextSpec) -> LanguageModel:
        return self._compose(PromptedModel, texts, SourceSizes(texts.vocabulary, texts.source_longest, layers=0))


class EncoderDecoderTwin(ReadsSources):
    """The same behind an encoder of a source, as in the paper, with its beam search and the length penalty of Wu et al.
    (2016). Its parts are those of the other methods, so that it differs from them in nothing but its direction: blocks
    are normalised before and not after, and words turn by rotary positions."""

    name, task = "encoder-decoder", "seq2seq"

    hidden: int = 384
    encoder_layers: int = 4
    heads: int = 6
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        sampling = Sampling("autoregressive", steps=max(1, texts.longest))
        own = texts.vocabulary, texts.longest, read_sizes(self), sampling
        return Autoregressive(*own, read_source_sizes(self, texts), self.label_smoothing)
