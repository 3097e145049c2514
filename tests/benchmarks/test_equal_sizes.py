"""Rows of a benchmark are compared at equal parameters."""

import pytest

from difflm.methods import TextSpec
from difflm.runtime.tensors import SkipInit
from difflm.training.recipe import load_recipe

language = pytest.importorskip("benchmarks.tables.language", reason="run from the repository's root")
seq2seq = pytest.importorskip("benchmarks.tables.seq2seq")
WORDS = 821  # of E2E
TWINS = {"multi30k": 12.14e6, "e2e": 8.17e6}  # parameters of the left-to-right twin
# Sized for many words, and so in docs/seq2seq.md: where words are few, these are larger than the others.
LARGER = {
    "diff-glat",
    "difformer",
    "dinoiser",
    "seqdiffuseq",
    "genie",
    "ar-diffusion",
    "diffuseq",
    "diffuseq-v2",
    "sed",
}


def is_sized(name: str) -> bool:
    """Students are as large as their teachers' rows, and a pretrained model has its own size."""
    return not seq2seq.ROWS[name].distilled and name != seq2seq.FINE_TUNED


def count_parameters(recipe: str, changes: list[str]) -> int:
    made = load_recipe(recipe, changes)
    vocabulary = WORDS if made.tokenizer == "words" else made.vocabulary
    with SkipInit():
        model = made.build_method().build(TextSpec(vocabulary, made.longest, made.source_longest * made.has_sources))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, row in language.E2E.items() if not row.needs])
def test_rows_without_a_source_have_about_the_same_parameters(name):
    row = language.E2E[name]
    found = count_parameters(row.recipe, [*language.SHARED["e2e"], *row.changes])
    assert found == pytest.approx(16.8e6, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("task", TWINS)
@pytest.mark.parametrize("name", [name for name in seq2seq.ROWS if is_sized(name)])
def test_rows_from_a_source_have_about_the_same_parameters(name, task):
    if task == "e2e" and name in LARGER:
        pytest.skip("sized for many words")
    changes = [*seq2seq.ROWS[name].changes, *seq2seq.SIZES.get(task, {}).get(name, []), "task=seq2seq"]
    found = count_parameters(seq2seq.ROWS[name].recipe, [*changes, *seq2seq.TASKS[task]])
    assert found == pytest.approx(TWINS[task], rel=0.12)
