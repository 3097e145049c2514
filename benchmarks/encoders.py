"""A pretrained BERT-shaped encoder, whole or cut down to the words of our treebanks: a quarter of its bytes or less.

    python -m benchmarks.encoders DIR_OF_MINILM --data DATA --out CUT

DIR_OF_MINILM holds config.json, vocab.txt and model.safetensors, as sentence-transformers has them. The cut keeps the
most frequent pieces (a rarer one falls into shorter ones, down to letters) and eight bits a weight: every row of a
matrix is whole numbers from -127 to 127 times one scale.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from benchmarks.treebanks import E2E_SPLITS, e2e_texts, penn_sample, whole_gum
from difflm.annotators.span_scorer import CLS, SEP, UNKNOWN, PiecesShape, wordpieces
from difflm.runtime.files import read_json, write_atomic
from difflm.runtime.tensors import load_tensors, quantise_rows

Weights = dict[str, Tensor]
POSITIONS = 256


def load_encoder(directory: Path) -> tuple[PiecesShape, Weights]:
    """Shape and weights for `networks.spans.Wordpieces`, from a cut or from the original."""
    if (directory / "encoder.json").exists():
        settings = read_json(directory / "encoder.json")
        shape = PiecesShape(**{**settings, "pieces": tuple(settings["pieces"])})
        return shape, load_tensors(directory / "encoder.safetensors")
    config = read_json(directory / "config.json")
    pieces = (directory / "vocab.txt").read_text(encoding="utf-8").splitlines()
    weights = _ours(load_file(directory / "model.safetensors"), config["num_hidden_layers"])
    shape = PiecesShape(
        tuple(pieces), config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"], POSITIONS
    )
    return shape, weights


def cut_encoder(source: Path, words: Counter[str], keep: int, out: Path) -> None:
    """Write the encoder with `keep` pieces, chosen by how often they occur among `words`."""
    shape, weights = load_encoder(source)
    index = {piece: i for i, piece in enumerate(shape.pieces)}
    kept = _most_frequent(words, shape.pieces, index, keep)
    weights["table.weight"] = weights["table.weight"][kept]
    cut = PiecesShape(tuple(shape.pieces[i] for i in kept), shape.hidden, shape.layers, shape.heads, shape.positions)
    write_atomic(out / "encoder.safetensors", save(quantise_rows(weights)))
    write_atomic(out / "encoder.json", json.dumps(asdict(cut), ensure_ascii=False) + "\n")


def _most_frequent(words: Counter[str], pieces: Iterable[str], index: dict[str, int], keep: int) -> list[int]:
    counts: Counter[int] = Counter()
    for word, count in words.items():
        counts.update(dict.fromkeys(wordpieces(word, index), count))
    letters = [i for i, piece in enumerate(pieces) if len(piece.removeprefix("##")) == 1 and piece[-1] < "\u0180"]
    always = {index[CLS], index[SEP], index[UNKNOWN], *letters}
    return sorted(always | {i for i, _ in counts.most_common(max(0, keep - len(always)))})


def _ours(weights: Weights, layers: int) -> Weights:
    """BERT's names → those of `Wordpieces`. The one token type is added to every position, so it goes into them."""
    types = weights["embeddings.token_type_embeddings.weight"][0]
    found = {
        "table.weight": weights["embeddings.word_embeddings.weight"],
        "positions.weight": weights["embeddings.position_embeddings.weight"][:POSITIONS] + types,
        "norm.weight": weights["embeddings.LayerNorm.weight"],
        "norm.bias": weights["embeddings.LayerNorm.bias"],
    }
    names = {
        "attention.output.dense": "attention.out",
        "intermediate.dense": "feed.0",
        "output.dense": "feed.2",
        "attention.output.LayerNorm": "norm_1",
        "output.LayerNorm": "norm_2",
    }
    for layer in range(layers):
        old, new = f"encoder.layer.{layer}", f"blocks.{layer}"
        for part in ("weight", "bias"):
            heads = [weights[f"{old}.attention.self.{which}.{part}"] for which in ("query", "key", "value")]
            found[f"{new}.attention.qkv.{part}"] = torch.cat(heads)
            found |= {f"{new}.{ours}.{part}": weights[f"{old}.{theirs}.{part}"] for theirs, ours in names.items()}
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("source", type=Path)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--pieces", type=int, default=8000)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    words = Counter(w for text in (t for split in E2E_SPLITS for t in e2e_texts(given.data, split)) for w in text)
    for documents in (whole_gum(given.data), penn_sample(given.data)):
        words.update(word for trees in documents.values() for tree in trees for word in tree.words())
    cut_encoder(given.source, words, given.pieces, given.out)
    size = sum(path.stat().st_size for path in given.out.iterdir())
    print(f"{given.out}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
