"""Whole training steps on made-up texts: gradients, update and average."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from difflm.app.bench.clock import Operations, Row, rounded, timed
from difflm.data.batches import Batch
from difflm.data.tokenizers import SPECIALS
from difflm.methods.base import TextSpec
from difflm.models.base import LanguageModel
from difflm.models.diffusion import DiffusionModel
from difflm.training.fit import budget_of
from difflm.training.recipe import Recipe

WORDS = 24  # of every training text: E2E's mean is 22
IN_A_ROW = 32  # steps between two waits for a GPU, which is busy while the next step is prepared
SMALL: dict[str, Any] = {
    "method": "difflm",
    "model": {"embedding_dim": 32, "hidden": 128, "layers": 4, "heads": 4, "dropout": 0.0},
    "data": "none",
    "longest": 64,
    "steps": 1000,
    "batch_size": 64,
}
SMALL_VOCABULARY = 2000


def training_speed(
    recipe: Recipe, vocabulary: int, device: torch.device, texts: int, words: int = WORDS, gflops: float | None = None
) -> Row:
    """Steps of `texts` texts of equal length; `gflops` is the rate of a matrix product to compare with."""
    with stepping(recipe, vocabulary, device, texts, words) as (model, step, batch):
        operations = flops(model, batch) * texts * recipe.accumulate
        in_a_row = IN_A_ROW if device.type == "cuda" else 1
        found = timed(device, lambda: [step() for _ in range(in_a_row)])
        seconds, all_texts = found.seconds / in_a_row, texts * recipe.accumulate
        words = batch.ids.shape[1]
    row = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "texts": all_texts,
        "words": words,
        "positions": positions_of(model, batch),
        "precision": budget_of(recipe, device).precision,
        "tokens_per_second": rounded(all_texts * words / seconds),
        "positions_per_second": rounded(all_texts * positions_of(model, batch) / seconds),
        "gflops": rounded(1e-9 * operations / seconds),
        **found._replace(seconds=seconds).figures(),
    }
    return row if gflops is None else {**row, "share_of_matrix_rate": rounded(1e-9 * operations / seconds / gflops)}


Stepping = tuple[LanguageModel, Callable[[], object], Batch]


@contextmanager
def stepping(recipe: Recipe, vocabulary: int, device: torch.device, texts: int, words: int) -> Iterator[Stepping]:
    """A fresh model, a training step of it, and the batch that it learns from."""
    from difflm.training.trainer import Trainer

    torch.manual_seed(0)
    model = recipe.build_method().build(TextSpec(vocabulary, recipe.longest))
    words = min(words, model.max_words)
    ids = np.random.default_rng(0).integers(len(SPECIALS), vocabulary, (texts, words))
    batch = Batch(ids.astype(np.int64), np.full(texts, words, dtype=np.int64))
    with tempfile.TemporaryDirectory() as nowhere:
        trainer = Trainer(model, budget_of(recipe, device), Path(nowhere), device)
        yield model, lambda: trainer.train_step([batch] * recipe.accumulate), batch


def flops(model: LanguageModel, batch: Batch) -> float:
    """Operations of the matrix products in one text's forward and backward pass, counted on two texts."""
    device = next(model.parameters()).device
    some = batch.map(lambda array: torch.from_numpy(array[:2]).to(device))
    with torch.compiler.set_stance("force_eager"), Operations() as counted:
        model(some).means()["loss"].backward()
    model.zero_grad(set_to_none=True)
    return counted.total / len(some.ids)


def positions_of(model: LanguageModel, batch: Batch) -> int:
    """That the network sees of each text: words, and whatever a method adds to them."""
    if not isinstance(model, DiffusionModel):
        return batch.ids.shape[1] + 1
    device = next(model.parameters()).device
    some = [torch.from_numpy(array[:1]).to(device) for array in (batch.ids, batch.lengths)]
    return model.lengths.canvas(*some)[0].shape[1]
