"""One recipe for a laptop trains every method that reads sources, and what it trains translates."""

import numpy as np
import pytest

from difflm.app.cli import main
from difflm.data.corpora import plain_texts
from difflm.data.tokenfile import TokenFile
from difflm.methods import METHODS
from difflm.training.recipe import load_recipe
from difflm.training.run import load_run
from tests.support.corpora import write_lines

SMALL = ["model.hidden=16", "model.layers=1", "model.heads=2", "vocabulary=270", "longest=24", "source_longest=24"]
QUICK = ["steps=2", "batch_size=4", "warmup=0"]


def call(*argv: object) -> int:
    return main([str(arg) for arg in argv])


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name in ("mdlm", "diffuseq", "cdcd", "encoder-decoder") else pytest.mark.long)
        for name, method in METHODS.items()
        if method.task != "text" and method.kind != "adapter"
    ],
)
def test_every_method_with_sources_learns_from_it_and_translates(method, multi30k, capsys):
    run, asked = multi30k / "run", multi30k / "asked.txt"
    small = [f"method={method}", *SMALL, *QUICK]
    assert call("train", "multi30k-laptop", *small, "--data", multi30k, "--out", run, "--device", "cpu") == 0
    model, _, config = load_run(run)
    assert model.capabilities.source_limit == 24 and config["texts"] == 12 and config["held_out"] == 3
    asked.write_text("dog 1 train\ndog 2 train\n")
    settings = [] if METHODS[method].family == "autoregressive" else ["--steps", 2]
    assert capsys.readouterr().out.endswith(f"Next: difflm translate {run} sources.txt\n")
    assert "difflm translate run sources.txt" in (run / "README.md").read_text()
    assert call("translate", run, asked, *settings, "--device", "cpu") == 0
    assert capsys.readouterr().out.count("\n") == 2


def test_a_method_keeps_what_is_its_own():
    """Its word vectors are as wide as its paper's; a schedule that moves does so within the recipe's steps."""
    for name in ("difflm", "cdcd", "dinoiser", "ar-diffusion"):
        sizes = load_recipe("multi30k-laptop", [f"method={name}"]).build_method().model_dump()
        assert sizes["embedding_dim"] == METHODS[name].model_fields["embedding_dim"].default and sizes["hidden"] == 128
    recipe = load_recipe("multi30k-laptop", ["method=seqdiffuseq"])
    sizes = recipe.build_method().model_dump()
    assert sizes["adapt_first"] + 2 * sizes["adapt_every"] < recipe.steps  # three moves suffice: docs/log
    assert not load_recipe("e2e-mdlm-laptop", ["method=sed"]).has_sources


def test_plain_texts_of_a_corpus_of_pairs_are_both_of_its_sides(multi30k):
    """Pre-training by the recipe of GENIE, and what follows it, on the corpus by its name."""
    common = [*QUICK, "--data", multi30k, "--device", "cpu"]
    assert call("train", "multi30k-genie", "task=span-denoising", *SMALL, *common, "--out", multi30k / "pre") == 0
    tokens, tokenizer = TokenFile.open(multi30k / "pre" / "data" / "train"), load_run(multi30k / "pre")[1]
    cut = {tokens.key(i) for i in range(len(tokens))}
    sides = [[tokenizer.encode(f"{word} {k} train") for k in range(12)] for word in ("dog", "Hund")]
    assert len(tokens) == 24 and cut == {np.array(ids, "<u2").tobytes() for side in sides for ids in side}
    assert call("train", "multi30k-genie", f"init={multi30k / 'pre'}", *common, "--out", multi30k / "run") == 0
    assert len(TokenFile.open(multi30k / "run" / "data" / "train")) == 12


def test_no_plain_text_is_held_out_and_trained_on(tmp_path):
    """ASSET's files hold both splits: sources and simplifications of every fourth line are held out."""
    write_lines(tmp_path, "asset/asset.valid.orig", *(f"source {k}" for k in range(8)))
    for j in range(10):
        write_lines(tmp_path, f"asset/asset.valid.simp.{j}", *(f"simple {k} {j}" for k in range(8)))
    trained, held_out = (list(plain_texts("asset", tmp_path, split)) for split in ("train", "valid"))
    assert len(trained) == 6 * 11 and len(held_out) == 2 * 11 and not {*trained} & {*held_out}
