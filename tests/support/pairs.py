"""Sequences and their reversals, from which models learn to read a source."""

import json
import random
from pathlib import Path

import pytest
import torch

from difflm.data.batches import Batch
from difflm.data.tokenizers import PAD
from tests.support.tiny import train_quietly

LENGTH, TEXTS = 6, 48
IDS = 12  # the four specials and eight letters
SIZES = {"embedding_dim": 16, "hidden": 64, "layers": 2, "encoder_layers": 2, "heads": 2, "dropout": 0.0}
FEW = {**SIZES, "hidden": 32, "layers": 1, "encoder_layers": 1}
RECIPE = {
    "method": "difflm",
    "task": "seq2seq",
    "model": SIZES,
    "tokenizer": "words",
    "more_than": 0,
    "longest": LENGTH,
    "steps": 140,
    "batch_size": 32,
    "warmup": 20,
    "lr": 4e-3,
    "ema": 0.9,
}


def sequences(count: int, seed: int, length: int = LENGTH) -> list[list[str]]:
    draw = random.Random(seed)
    return [[draw.choice("abcdefgh") for _ in range(length)] for _ in range(count)]


def write_reversals(path: Path, count: int, length: int = LENGTH) -> str:
    rows = [{"src": " ".join(words), "trg": " ".join(reversed(words))} for words in sequences(count, 0, length)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train_reversals(folder: Path, **changes) -> Path:
    data = write_reversals(folder / "pairs.jsonl", 4000)
    return train_quietly({**RECIPE, "data": data, **changes}, folder / "run")


@pytest.fixture(scope="session")
def reverser(tmp_path_factory) -> Path:
    """A run that has begun to reverse sequences, the same for whoever asks for it."""
    folder = tmp_path_factory.mktemp("reverser")
    data = write_reversals(folder / "pairs.jsonl", 400)
    return train_quietly({**RECIPE, "model": FEW, "steps": 20, "data": data}, folder / "run")


def reversals(count: int, seed: int, longest: int) -> Batch:
    """Sequences of 1, 2 … `longest` words, and from the beginning again; every seed has others."""
    source = torch.randint(4, IDS, (count, longest), generator=torch.Generator().manual_seed(seed))
    lengths = 1 + torch.arange(count) % longest
    there = torch.arange(longest) < lengths.unsqueeze(1)
    order = (lengths.unsqueeze(1) - 1 - torch.arange(longest)).clamp(min=0)
    ids = torch.where(there, source.gather(1, order), PAD)
    return Batch(ids, lengths, torch.where(there, source, PAD), lengths, index=torch.arange(count) + count * seed)
