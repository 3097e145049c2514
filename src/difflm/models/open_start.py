"""Start a denoising model from a left-to-right model of Llama's, Qwen's or GPT-2's shape."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from difflm.data.open_tokenizer import TokenizerFiles
from difflm.data.tokenizers import END, SPECIALS, START, PretrainedTokenizer, Tokenizer
from difflm.errors import UsageError
from difflm.models.base import LanguageModel
from difflm.models.open_families import CAUSAL, EMBEDDING, HEAD
from difflm.models.open_models import NOT_A_CONFIG, collect_weights, find_end, find_special, read_weights
from difflm.networks.open_transformer import OpenTransformer, Shape
from difflm.runtime.files import Json, read_json


def read_decoder(folder: str) -> Json:
    """The config in a local directory."""
    path = Path(folder) / "config.json"
    config = read_json(path) if path.is_file() else None
    if not isinstance(config, dict) or str(config.get("model_type")) not in CAUSAL:
        raise UsageError(f"{folder}: no config.json of a left-to-right model there. Known: {', '.join(CAUSAL)}.")
    return config


def sizes_of(config: Json) -> dict[str, int]:
    shape = shape_of(config)
    return {"hidden": shape.hidden, "layers": shape.layers, "heads": shape.heads}


def shape_of(config: Json) -> Shape:
    try:
        return cast(Shape, CAUSAL[config["model_type"]].read_shape(config))
    except NOT_A_CONFIG as error:
        raise UsageError(
            f"model.pretrained: its config.json describes no {config['model_type']} model ({error})."
        ) from None


def build_annealed(config: Json, words: int, longest: int, shift: bool, updates: int) -> OpenTransformer:
    """A network of that shape, with a head for our vocabulary."""
    shape = replace(shape_of(config), shift=shift, head_bias=True)
    if shape.positions and longest > shape.positions:
        raise UsageError(f"model.pretrained: it reads {shape.positions} tokens at most; texts may have {longest}.")
    return OpenTransformer(shape, words, updates)


def read_causal(folder: Path) -> tuple[Json, dict[str, Tensor]]:
    """The config of a directory, and all weights of its network under our names, including its token embedding."""
    config = read_decoder(str(folder))
    shape = shape_of(config)
    weights = {key.removeprefix("transformer."): weight for key, weight in read_weights(folder).items()}
    with torch.device("meta"):
        plain = OpenTransformer(shape, int(config["vocab_size"]))
    return config, collect_weights(folder, weights, plain, CAUSAL[config["model_type"]], config)


@torch.no_grad()
def take_weights(model: LanguageModel, folder: str, tokenizer: Tokenizer) -> None:
    """Copy the weights of a directory in place. START and END are its own special tokens; the mask, and tokens that it
    does not have, start as the mean of all tokens."""
    if tokenizer.kind != PretrainedTokenizer.kind:
        raise UsageError(f"model.pretrained={folder} knows its own tokens: give tokenizer={folder}.")
    network, table = cast(OpenTransformer, model.denoiser.network), model.denoiser.codec.get_parameter("raw")
    (config, found), files = read_causal(Path(folder)), TokenizerFiles(Path(folder))
    start, end = find_special("bos", config, files), find_end(config, files)
    marks = {START: end if start is None else start, END: end}
    chosen = {own: number for own, number in marks.items() if number is not None}
    chosen |= dict(enumerate(cast(PretrainedTokenizer, tokenizer).theirs, len(SPECIALS)))
    ours, theirs = torch.tensor([*chosen]), torch.tensor([*chosen.values()])
    if int(theirs.max()) >= len(found[EMBEDDING]):
        raise UsageError(f"model.pretrained={folder} has {len(found[EMBEDDING])} tokens; its tokenizer has more.")
    for into, rows in ((table, found.pop(EMBEDDING)), (network.head.weight, found.pop(HEAD))):
        into.copy_(rows.mean(0).expand_as(into))
        into[ours] = rows[theirs].to(into.dtype)
    network.head.bias.zero_()  # its logits include how frequent tokens are
    own = network.state_dict()
    for name, weight in found.items():
        own[name].copy_(weight)
