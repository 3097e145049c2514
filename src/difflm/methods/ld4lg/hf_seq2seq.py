"""A frozen encoder-decoder of the Hugging Face kind as the body of an autoencoder.

It may be any that `AutoModelForSeq2SeqLM` knows. Words keep the run's own vocabulary; their vectors begin as the means
of their pieces' and learn, as the two small networks between the body and the latents do. The body never changes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from difflm.diffusion.base import Network
from difflm.errors import UsageError
from difflm.methods.base import TextSpec
from difflm.methods.ld4lg.model import Resampler
from difflm.networks.cache import Cache, Memory
from difflm.networks.pretrained import Pretrained, build_body, explained, mean_rows, read_config, transformers
from difflm.networks.transformer import Sizes, Transformer
from difflm.runtime.files import Json


def read_seq2seq(folder: str) -> Json:
    """The config of a local directory."""
    found, config = read_config(folder, "an encoder-decoder")
    if type(config) not in transformers().MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise UsageError(f"{folder}: {found['model_type']} is not an encoder-decoder. Give the directory of one.")
    return found


class FrozenEncoder(Network):
    """Words [B, L] → latents, by the body's encoder and a resampler of its states."""

    capturable = False

    def __init__(self, body: nn.Module, vocabulary: int, width: int, resampler: Resampler) -> None:
        super().__init__()
        self.embed, self.body, self.resampler = nn.Embedding(vocabulary, width), body, resampler

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.body(inputs_embeds=self.embed(ids), attention_mask=mask.long()).last_hidden_state
        return self.resampler(states, mask)


class FrozenDecoder(Network):
    """Latents → words, by a Transformer that turns latents into what the body's decoder attends to. It has the
    interface of `LatentDecoder`. It keeps the vectors of earlier words and reads them again for every word, since each
    kind of network in the library has its own cache."""

    capturable = False

    def __init__(self, body: nn.Module, vocabulary: int, width: int, reader: Transformer) -> None:
        super().__init__()
        self.body, self.reader, self.head = body, reader, nn.Linear(width, vocabulary)

    def encode_latents(self, latents: Tensor, source: Tensor | None, mask: Tensor | None) -> list[Memory]:
        states = self.reader(latents.to(self.reader.head.weight.dtype), None)
        return [(states, states, torch.ones(states.shape[:2], dtype=torch.bool, device=states.device))]

    def input(self, vectors: Tensor) -> Tensor:
        return vectors

    def run(
        self,
        x: Tensor,
        t: Tensor | None,
        mask: Tensor | None,
        caches: Sequence[Cache] | None,
        start: int,
        memory: Sequence[Memory] = (),
    ) -> tuple[Tensor, list[Cache]]:
        whole = torch.cat([caches[0][0].squeeze(1), x], 1) if caches else x
        states = memory[0][0].repeat_interleave(len(x) // len(memory[0][0]), 0)  # of beams one after the other
        found = self.body(inputs_embeds=whole, encoder_hidden_states=states, use_cache=False).last_hidden_state
        kept = whole.unsqueeze(1)
        return found[:, start:], [] if caches is None else [(kept, kept)]

    def answer(self, x: Tensor) -> Tensor:
        return self.head(x)


def build_halves(
    found: Json, texts: TextSpec, out_dim: int, dim: int, latents: int, sizes: Sizes
) -> tuple[FrozenEncoder, FrozenDecoder, int]:
    """The two halves around a body of this shape, not yet with its weights, and the width of its words' vectors.
    `sizes` are those of the small networks."""
    body = build_body("AutoModelForSeq2SeqLM", found, 0.0)  # what is frozen is not trained
    vocabulary, longest = texts.vocabulary, texts.longest
    width, kind = body.get_input_embeddings().weight.shape[1], found["model_type"]
    for half in (body.get_encoder(), body.get_decoder()):
        half.embed_tokens = nn.Embedding(1, width)  # never called: words come as vectors
        half.requires_grad_(False)
    resampler = Resampler(width, out_dim, latents, sizes, longest)
    reader = Transformer(dim, width, sizes, time="none", positions=latents)
    reader.head.reset_parameters()
    encoder = FrozenEncoder(body.get_encoder(), vocabulary, width, resampler)
    decoder = FrozenDecoder(body.get_decoder(), vocabulary, width, reader)
    # Kinds differ in what they accept, and in how long a text may be: one that fails should fail before training.
    with explained(f"model.pretrained: {kind} does not work on texts of {longest} words here"), torch.no_grad():
        encoder(torch.zeros(1, longest, dtype=torch.int64), torch.ones(1, longest, dtype=torch.bool))
        memory = decoder.encode_latents(torch.zeros(1, latents, dim), None, None)
        decoder.run(torch.zeros(1, longest + 1, width), None, None, None, 0, memory)
    return encoder, decoder, width


@torch.no_grad()
def take_weights(
    encoder: FrozenEncoder, decoder: FrozenDecoder, embedding: nn.Embedding, folder: str, words: Sequence[str]
) -> None:
    """Weights of a directory, in place; `embedding` are the vectors of words that the decoder reads."""
    source = Pretrained.read("AutoModelForSeq2SeqLM", folder)
    for half, theirs in ((encoder.body, source.model.get_encoder()), (decoder.body, source.model.get_decoder())):
        weights = {k: v for k, v in theirs.state_dict().items() if not k.startswith("embed_tokens")}
        half.load_state_dict(weights, strict=False)
    spelt = source.spell([word.strip() for word in words], source.pieces.unk_token_id)
    encoder.embed.weight.copy_(mean_rows(source.vectors, spelt))
    embedding.weight.copy_(mean_rows(source.vectors, spelt))
    decoder.head.weight.copy_(mean_rows(source.output, spelt))
