"""What `difflm train … --dry-run` says of the cost of a training, and what benchmarks count as needed work."""

import numpy as np
import pytest

from difflm.app.cli import main
from difflm.data.batches import Batch
from difflm.methods import METHODS, TextSpec
from difflm.training.estimate import estimate_training
from difflm.training.recipe import load_recipe

large = pytest.importorskip("benchmarks.speed.large", reason="run from the repository's root")
speed_rows = pytest.importorskip("benchmarks.speed.rows")

CHANGES = ["data=my.txt", "model.layers=2", "model.hidden=32", "model.heads=2", "vocabulary=300", "longest=16"]


def estimate(*changes, kind="cpu"):
    return estimate_training(load_recipe("own-text", [*CHANGES, *changes]), kind)


@pytest.mark.long
@pytest.mark.parametrize("method", ["mdlm", "autoregressive"])
def test_operations_are_those_of_the_products(method):
    """Of a whole step, but for the rows that the head is asked of beyond half of the positions."""
    size = large.Size(2, 64, 2, 500, 32, 64)
    recipe = size.recipe(method).model_copy(update={"vocabulary": 500})
    model = recipe.build_method().build(TextSpec(500, 64))
    ids = np.full((32, 64 - (method == "autoregressive")), 7)  # START is read, too
    step = 32 * speed_rows.count_flops(model, Batch(ids, np.full(32, ids.shape[1])))
    found = 1e9 * estimate_training(recipe, "cpu").gflop / recipe.steps
    needed = 32 * 64 * size.needed_flops(method == "autoregressive")
    assert needed <= found <= 1.1 * needed  # the input layer, which a large vocabulary outweighs
    assert 0.9 * found <= step <= 1.2 * found


def test_more_of_anything_costs_more():
    base = estimate()
    own = METHODS["difflm"](**load_recipe("own-text", CHANGES).model).build(TextSpec(300, 16))
    assert base.parameters == sum(p.numel() for p in own.parameters())
    assert estimate("steps=10").gflop * load_recipe("own-text", CHANGES).steps == pytest.approx(10 * base.gflop)
    assert estimate("batch_size=128").gib["activations"] == pytest.approx(2 * base.gib["activations"])
    assert estimate("recompute=true").gib["activations"] < base.gib["activations"] / 10
    light = estimate("recompute=light", kind="cuda").gib["activations"]
    assert 0.5 < light / estimate(kind="cuda").gib["activations"] < 0.8
    assert estimate(kind="cuda").gib["activations"] < base.gib["activations"]  # in bfloat16
    assert estimate("method=mdlm", "vocabulary=30000", "batch_size=4096").gib["logits"] < 1
    assert estimate("method=udlm", "vocabulary=30000", "batch_size=4096").gib["logits"] > 20
    fast, slow = (float(base.describe(rate).rsplit("about ", 1)[1].split()[0].replace(",", "")) for rate in (2.0, 1.0))
    assert slow == pytest.approx(2 * fast, rel=0.1)


def test_a_dry_run_says_what_it_would_cost(capsys):
    assert main(["train", "own-text", *CHANGES, "--dry-run", "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("estimate for 300 words and texts of 16 tokens: ") and "GiB" in said and "minutes" in said
