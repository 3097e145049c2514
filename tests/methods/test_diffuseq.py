"""DiffuSeq and data with sources: a model that learns to reverse sequences reads its source, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from difflm.app.cli import main
from difflm.data.tokenfile import TokenFile
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Steering
from difflm.errors import UsageError
from difflm.methods import METHODS, TextSpec
from difflm.models.base import LanguageModel
from difflm.training.recipe import check
from difflm.training.run import load_run, read_config
from tests.support import pairs
from tests.support.pairs import sequences, write_reversals
from tests.support.tiny import train_quietly

LENGTH, TEXTS = 8, 64
SIZES = {"embedding_dim": 16, "hidden": 64, "layers": 2, "heads": 2, "dropout": 0.0}
RECIPE = {**pairs.RECIPE, "method": "diffuseq", "model": SIZES, "longest": LENGTH + 2, "steps": 100}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reverse")
    data = write_reversals(folder / "pairs.jsonl", 4000, LENGTH)
    return train_quietly({**RECIPE, "data": data}, folder / "run")


def generate(model: LanguageModel, source: Tensor, mask: Tensor | None = None) -> list[list[int]]:
    noise = Noise(0, torch.arange(len(source)))
    there = torch.ones_like(source, dtype=torch.bool) if mask is None else mask
    sampling = replace(model.sampling, sampler="ddim", steps=5)
    steering = Steering(source=source, source_mask=there)
    *_, last = model.stream(noise, model.draw_lengths(noise), model.longest, sampling, steering)
    return [model.lengths.words(row) for row in last.tokens.tolist()]


@pytest.mark.long
def test_unseen_sequences_are_reversed_and_only_the_source_says_how(run):
    """The paper's objective, 100 steps. 64 sequences of 8^8 possible ones: none was trained on."""
    model, tokenizer, config = load_run(run)
    unseen = sequences(TEXTS, 1, LENGTH)
    source = torch.tensor(tokenizer.encode_batch([" ".join(words) for words in unseen]))
    expected = source.flip(1).tolist()
    exact = sum(found == right for found, right in zip(generate(model, source), expected, strict=True))
    assert exact >= 0.95 * TEXTS
    shuffled = source[torch.randperm(TEXTS, generator=torch.Generator().manual_seed(0))]
    assert sum(found == right for found, right in zip(generate(model, shuffled), expected, strict=True)) <= 0.1 * TEXTS
    assert config["recipe"]["source_longest"] == LENGTH
    assert config["trained"]["validation"]["likelihood"] == "bound"


@pytest.mark.long
def test_a_text_does_not_depend_on_the_width_of_its_batch(run):
    """Sources are padded to the longest that the model reads: a longer source beside it changes no text."""
    model, tokenizer, _ = load_run(run)
    short = torch.tensor(tokenizer.encode_batch(["a b c d"]))
    wide = torch.nn.functional.pad(short, (0, 3))
    assert generate(model, short) == generate(model, wide, torch.arange(7).unsqueeze(0) < 4)
    assert generate(model, short) == generate(
        model, torch.nn.functional.pad(short, (0, 12)), torch.arange(16)[None] < 4
    )
    with pytest.raises(UsageError, match="the sources have 9 tokens; at most 8 fit"):
        generate(model, torch.full((1, 9), 5))
    noise = Noise(0, torch.arange(1))
    with pytest.raises(UsageError, match="from a source, and none is given"):
        list(model.stream(noise, model.draw_lengths(noise), model.longest, model.sampling))


def test_the_losses_are_a_function_of_the_source():
    torch.manual_seed(0)
    model = METHODS["diffuseq"](**RECIPE["model"]).build(TextSpec(12, 10, 8)).eval()
    from difflm.data.batches import Batch

    ids, lengths = torch.randint(4, 12, (4, 8)), torch.full((4,), 8)
    batch = Batch(ids, lengths, ids.flip(1), lengths, index=torch.arange(4))
    same, other = model(batch), model(replace(batch, source=ids))
    assert torch.equal(same.total, model(batch).total) and not torch.equal(same.total, other.total)
    assert set(same.terms) == {"mse", "rounding_ce", "terminal_norm"} and int(same.count) == 40


# -- data -------------------------------------------------------------------------------------------------------------

SMALL = ["model.hidden=16", "model.layers=1", "model.heads=2", "model.embedding_dim=16", "steps=2", "batch_size=4"]
SMALL += ["warmup=0", "validate_every=99", "more_than=0", "save_every=99", "longest=16", "source_longest=0"]


def train(out: Path, *changes: str) -> int:
    return main(["train", "e2e-diffuseq", *SMALL, *changes, "--out", str(out)])


def test_parallel_files_train_a_run_that_names_both(tmp_path, capsys):
    pairs = [(f"number {i} please", f"here is {i}") for i in range(20)]
    (tmp_path / "train.en").write_text("".join(f"{source}\n" for source, _ in pairs))
    (tmp_path / "train.de").write_text("".join(f"{target}\n" for _, target in pairs))
    assert train(tmp_path / "run", f"data={tmp_path}/train.en,{tmp_path}/train.de") == 0
    out = capsys.readouterr().out
    assert "source_longest=8, since 99% of the sources have at most 3" in out
    tokens = TokenFile.open(tmp_path / "run" / "data" / "train")
    assert tokens.sources is not None and len(tokens) == 20 and set(tokens.sources.lengths.tolist()) == {3}
    assert "train.en,train.de (" in (tmp_path / "run" / "README.md").read_text()
    assert load_run(tmp_path / "run")[0].longest == read_config(tmp_path / "run")["longest"] == 16


def test_long_sources_are_left_out_and_counted(tmp_path, capsys):
    rows = [{"source": "w " * (20 if i == 7 else 3), "target": f"t{i}"} for i in range(40)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train(tmp_path / "run", f"data={tmp_path}/my.jsonl", "source_longest=8") == 0
    assert "1 of 40 sources have more than 8 tokens and are left out" in capsys.readouterr().out
    assert read_config(tmp_path / "run")["left_out"] == 1
    assert train(tmp_path / "other", f"data={tmp_path}/my.jsonl", "source_longest=2") == 1
    assert (
        "all 40 sources have more than 2 tokens, the shortest 3. Raise source_longest by 1" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("files", "changes", "code", "said"),
    [
        ({"a.en": "x\ny\n", "a.de": "x\n"}, ["data=a.en,a.de"], 1, "a.en has 2 lines and a.de has 1"),
        ({"a.en": "x\n\n", "a.de": "x\ny\n"}, ["data=a.en,a.de"], 1, "line 2 of a.en: the source is empty"),
        ({"a.en": "x\ny\n", "a.de": "x\n \n"}, ["data=a.en,a.de"], 1, "line 2 of a.de: the target is empty"),
        ({"a.en": "x\n", "a.de": "x\n"}, ["data=a.en,a.de", "column=x,y"], 2, "leave column=x,y out"),
        ({"a.en": "x\n"}, ["data=a.en,a.fr"], 2, "a.fr does not exist"),
        ({"a.txt": "x\n"}, ["data=a.txt"], 2, "a.txt has no sources for its texts"),
        ({"a.jsonl": '{"src": "x", "text": "y"}\n'}, ["data=a.jsonl"], 2, "no column 'trg' in line 1 of a.jsonl"),
        ({"a.csv": "q,a\nx,y\n"}, ["data=a.csv"], 2, "no column 'src' in line 1 of a.csv. It has: q, a."),
        ({"a.csv": "q,a\nx,y\n"}, ["data=a.csv", "column=q,b"], 2, "no column 'b' in line 1 of a.csv"),
        ({"a.csv": "q,a\nx,y\n"}, ["data=a.csv", "column=q"], 2, "column=q does not name two columns"),
        ({"a.jsonl": '{"src": " ", "trg": "y"}\n'}, ["data=a.jsonl"], 1, "line 1 of a.jsonl: the source is empty"),
        ({"a.jsonl": '{"src": 3, "trg": "y"}\n'}, ["data=a.jsonl"], 1, "'src' in line 1 of a.jsonl is not a text"),
        ({"a.jsonl": ""}, ["data=a.jsonl"], 1, "there is no text in a.jsonl"),
        ({}, ["data=roc"], 2, "the texts of roc have no sources"),
        ({}, ["data=a.txt", "chunk=8"], 2, "pieces of a file have no source"),
        ({}, ["data=a.txt", "longest=400", "source_longest=200"], 2, "at most 512 together"),
    ],
)
def test_wrong_pairs_get_one_line(files, changes, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roc").mkdir()
    (tmp_path / "roc" / "train.json").write_text('["It rained."]\n')
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["train", "e2e-diffuseq", *SMALL, *changes, "--out", "run", "--data", str(tmp_path)]) == code
    err = capsys.readouterr().err.replace(f"{tmp_path}/", "")
    errors = [line for line in err.splitlines() if "is the licence of the recipe's own data" not in line]
    assert said in err and len(errors) == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", [{"data": "a.en,a.de"}, {"data": "a.txt", "source_longest": 8}])
def test_methods_without_a_source_are_given_none(change):
    with pytest.raises(UsageError, match=r"recipe: (data|source_longest): diffusion-lm reads no sources\."):
        check({"method": "diffusion-lm", "steps": 1, **change})


def test_columns_of_a_table_are_named_in_order(tmp_path):
    from difflm.data.corpora import corpus_examples
    from difflm.data.texts import Example

    (tmp_path / "my.csv").write_text('answer,question\n"Yes, it is.",Is it?\n,\n')
    found = list(corpus_examples(str(tmp_path / "my.csv"), None, column="question, answer"))
    assert found == [Example(target="Yes, it is.", source="Is it?")]
