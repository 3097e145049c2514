"""A left-to-right model of the Hugging Face kind as a body: any that `AutoModelForCausalLM` knows.

Words keep the run's own vocabulary, so that figures compare and words can be counted: a word's vector is the mean of
its pieces' vectors, and so is what the answer is compared with.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from difflm.errors import UsageError
from difflm.networks.cache import Cache
from difflm.networks.head import WordHead
from difflm.networks.hf_encoder import LOCAL, explained, library_config, transformers
from difflm.runtime.files import read_json


def read_decoder(folder: str) -> dict[str, Any]:
    """The config of a local directory."""
    path = Path(folder) / "config.json"
    decoder = read_json(path) if path.is_file() else None
    if not isinstance(decoder, dict) or "model_type" not in decoder:
        raise UsageError(f"{folder}: no config.json of a language model there. Give the directory of one.")
    with explained(f"{folder}: config.json does not describe a language model"):
        config, library = library_config(decoder), transformers()
        sees_all = type(config) in library.MODEL_FOR_MASKED_LM_MAPPING and not config.is_decoder
    if sees_all or type(config) not in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f"{folder}: {decoder['model_type']} does not write from left to right.")
    return decoder


class PretrainedDecoder(WordHead):
    """Vectors of words through the library's layers; `head` gives logits of our words. It answers to the calls of
    `Transformer` that reading takes. Training may compile the library's layers, but nothing captures them: the library
    asks the device for masks at every call."""

    capturable = False

    def __init__(self, decoder: dict[str, Any], vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        with explained(f"model.pretrained: no model of the kind {decoder.get('model_type')} is known"):
            config = library_config(decoder)
        if width > (most := getattr(config, "max_position_embeddings", width)):
            raise UsageError(f"model.pretrained: it reads {most} words at most; texts and prompts may have {width}.")
        for key, value in config.to_dict().items():
            if ("dropout" in key or key.endswith("pdrop")) and type(value) in (int, float):
                setattr(config, key, dropout)
        with explained(f"model.pretrained: no {decoder['model_type']} can be made of its config.json"):
            self.body = transformers().AutoModel.from_config(config, trust_remote_code=False)
        self.body.set_input_embeddings(nn.Embedding(1, config.hidden_size))  # never called: words come as vectors
        self.input, self.norm = nn.Identity(), nn.Identity()
        self.head = nn.Linear(config.hidden_size, vocabulary)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    @property
    def blocks(self) -> list[nn.Module]:
        """The library's layers, which it names as those that devices do not share."""
        names = self.body._no_split_modules or ()
        return [part for part in self.body.modules() if type(part).__name__ in names]

    def run(
        self, x: Tensor, t: None, mask: Tensor | None, caches: Sequence[Cache | None] | None, start: int, **_: Any
    ) -> tuple[Tensor, list[Cache | None]]:
        """Hidden states of words that follow those of the caches; with None, nothing is cached. Of a mask [B, L, K] the
        library takes what the last word sees: it reads from left to right anyway."""
        if caches is None:
            return self.body(inputs_embeds=x, use_cache=False).last_hidden_state, []
        seen: dict[str, Tensor] = {}
        if mask is not None and len(mask) == len(x):
            places = mask[:, -1].long().cumsum(1) - 1
            seen = {"attention_mask": mask[:, -1].long(), "position_ids": places[:, -x.shape[1] :].clamp(min=0)}
        kept = transformers().DynamicCache()
        for layer, cache in enumerate(caches):
            if cache is not None:
                kept.update(*cache, layer)
        out = self.body(inputs_embeds=x, past_key_values=kept, use_cache=True, **seen)
        return out.last_hidden_state, [(one[0], one[1]) for one in out.past_key_values]


@torch.no_grad()
def take_weights(
    network: PretrainedDecoder, table: Tensor, folder: str, words: Sequence[str], ids: Sequence[int] = ()
) -> None:
    """Weights of a directory, in place; `table` [words, hidden] gets the vectors of words. The first two words are
    START and END, which begin as the library's own. With `ids`, words are pieces of the model itself: their numbers
    there, behind the four special words."""
    library = transformers()
    with explained(f"pretrained={folder} cannot be read"):
        source = library.AutoModelForCausalLM.from_pretrained(folder, **LOCAL, use_safetensors=True)
        pieces = library.AutoTokenizer.from_pretrained(folder, **LOCAL)
    end = pieces.eos_token_id
    if end is None:
        raise UsageError(f"pretrained={folder}: its tokenizer lacks an end token.")
    vectors, output = (part.weight.float() for part in (source.get_input_embeddings(), source.get_output_embeddings()))
    own = network.body.state_dict()
    theirs = source.base_model.state_dict()
    network.body.load_state_dict({k: v for k, v in theirs.items() if own[k].shape == v.shape}, strict=False)
    # A word inside a text is spelt with the space before it.
    spelt = [pieces(f" {word.strip()}", add_special_tokens=False)["input_ids"] or [end] for word in words]
    if ids:
        spelt = [[end]] * 4 + [[number] for number in ids]
    spelt[:2] = [[end if pieces.bos_token_id is None else pieces.bos_token_id], [end]]
    for into, rows in ((table, vectors), (network.head.weight, output)):
        into.copy_(torch.stack([rows[ids].mean(0) for ids in spelt]))
    network.head.bias.zero_()  # its logits include how frequent words are
