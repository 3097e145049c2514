"""Speed of whole training steps (gradients, update and average) on synthetic texts."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from difflm.app.bench.clock import Row, rounded, time_work
from difflm.data.batches import Batch
from difflm.data.tokenizers import SPECIALS
from difflm.methods.base import TextSpec
from difflm.models.base import LanguageModel
from difflm.training.fit import budget_of
from difflm.training.recipe import Recipe

WORDS = 24  # of every training text: E2E's mean is 22
STEPS_IN_A_ROW = 32  # between two synchronisations with a GPU, which is busy while the next step is prepared
SMALL: dict[str, Any] = {
    "method": "difflm",
    "model": {"embedding_dim": 32, "hidden": 128, "layers": 4, "heads": 4, "dropout": 0.0},
    "data": "none",
    "longest": 64,
    "steps": 1000,
    "batch_size": 64,
}
SMALL_VOCABULARY = 2000


def training_speed(recipe: Recipe, vocabulary: int, device: torch.device, texts: int, words: int = WORDS) -> Row:
    """Measure steps of `texts` texts of equal length."""
    with training_step(recipe, vocabulary, device, texts, words) as (model, step, batch):
        in_a_row = STEPS_IN_A_ROW if device.type == "cuda" else 1
        timing = time_work(device, lambda: [step() for _ in range(in_a_row)])
    seconds, texts, words = timing.seconds / in_a_row, texts * recipe.accumulate, batch.ids.shape[1]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "texts": texts,
        "words": words,
        "precision": budget_of(recipe, device).precision,
        "tokens_per_second": rounded(texts * words / seconds),
        **timing._replace(seconds=seconds).figures(),
    }


@contextmanager
def training_step(
    recipe: Recipe, vocabulary: int, device: torch.device, texts: int, words: int
) -> Iterator[tuple[LanguageModel, Callable[[], object], Batch]]:
    """Yield a new model, a function that trains it for one step, and the batch of that step."""
    from difflm.training.trainer import Trainer

    torch.manual_seed(0)
    model = recipe.build_method().build(TextSpec(vocabulary, recipe.longest))
    words = min(words, model.max_words)
    ids = np.random.default_rng(0).integers(len(SPECIALS), vocabulary, (texts, words))
    batch = Batch(ids.astype(np.int64), np.full(texts, words, dtype=np.int64))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, budget_of(recipe, device), Path(folder), device)
        yield model, lambda: trainer.train_step([batch] * recipe.accumulate), batch
