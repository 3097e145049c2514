"""Tiny models under the released names of keys and settings. Their weights follow from the names of the keys, and what
the published networks answered is in golden_checkpoints.json."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden_checkpoints.json").read_text(encoding="utf-8"))
MODELS: dict[str, Any] = {model["name"]: model for model in GOLDEN["models"]}


def draw_weight(key: str, shape: list[int]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    norm = len(shape) == 1 and re.search(r"(norm\d*|norm_final|ln_[12f])\.weight$", key)
    return (0.5 + rng.random(shape) if norm else rng.standard_normal(shape) * 0.08).astype("float32")


def draw_weights(keys: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(draw_weight(key, shape)) for key, shape in keys.items()}


def write_model(folder: Path, name: str, shards: int = 1, **changes: Any) -> Path:
    """The directory of a golden model, its config with some fields changed."""
    model = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    own = {} if model["mask_token_id"] is None else {"mask_token_id": model["mask_token_id"]}
    (folder / "config.json").write_text(json.dumps({**model["config"], **own, **changes}))
    buffers = {key: torch.tensor(value) for key, value in model["buffers"].items()}
    write_weights(folder, {**draw_weights(model["keys"]), **buffers}, shards)
    return folder


def write_weights(folder: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return
    names = [f"model-{k + 1:05}-of-{shards:05}.safetensors" for k in range(shards)]
    places = {key: names[k % shards] for k, key in enumerate(weights)}
    for name in names:
        save_file({key: weight for key, weight in weights.items() if places[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


WORDS = "the a dog cat garden house sleeps runs near in is and old small very . , ! my your"
CHAT = (
    "{% for m in messages %}<|reserved_0|>{{ m.role }} {{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|reserved_0|>assistant {% endif %}"
)


def write_tokenizer(folder: Path, rows: int = 124, template: str | None = None, marks: bool = True) -> None:
    """A byte-level tokenizer of ASCII signs and as many whole words, with a space before them, as there are rows for,
    and with `marks` special tokens like those of LLaDA behind them, the mask among them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    space = "Ġ"
    signs = [chr(code) for code in range(33, 127) if chr(code).isalnum() or chr(code) in ".,!?'"] + [space]
    pieces, merges = list(signs), []
    for word in WORDS.split():
        grown = space
        for sign in word:
            if grown + sign not in pieces:
                merges.append((grown, sign))
                pieces.append(grown + sign)
            grown += sign
    pieces = pieces[: rows - 4]
    merges = [(a, b) for a, b in merges if a + b in pieces]
    encoder = Tokenizer(models.BPE({piece: k for k, piece in enumerate(pieces)}, merges))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    filling = [f"<|reserved_{k}|>" for k in range(rows - len(pieces))]
    encoder.add_special_tokens([*filling, *(["<|mdm_mask|>", "<|endoftext|>", "<|eot_id|>"] if marks else [])])
    encoder.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>" if marks else filling[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
