"""Public corpora of sources and targets, on small files of the same formats."""

import json
from pathlib import Path

import pytest

from difflm.data.corpora import NAMES, PAIRS, corpus, corpus_examples, corpus_paths, describe_texts
from difflm.data.texts import Example
from difflm.errors import DifflmError, UsageError
from difflm.training.recipe import check, known_recipes, load_recipe
from tests.support.corpora import write_lines


def pairs(name: str, root: Path, split: str = "train") -> list[tuple[str, str]]:
    return [(str(example.source), example.target) for example in corpus_examples(name, root, split)]


@pytest.mark.parametrize("name", ["task1.{}.{}.gz", "{}.{}.txt.gz", "task1/raw/{}.{}"])
def test_multi30k_is_read_from_english_to_german(tmp_path, name):
    for split, count in (("train", 3), ("val", 2), ("test", 1)):
        for side in ("en", "de"):
            write_lines(
                tmp_path, f"multi30k/{name.format(split, side)}", *(f"{split} {side} {k}" for k in range(count))
            )
    assert pairs("multi30k", tmp_path) == [(f"train en {k}", f"train de {k}") for k in range(3)]
    assert pairs("multi30k", tmp_path, "valid") == [("val en 0", "val de 0"), ("val en 1", "val de 1")]
    assert list(corpus("multi30k", tmp_path, "valid")) == ["val de 0", "val de 1"]
    assert pairs("multi30k", tmp_path, "test") == [("test en 0", "test de 0")]
    assert len(corpus_paths("multi30k", tmp_path)) == 2


def test_captions_are_sources_of_each_other_in_training_and_the_first_one_of_the_rest_held_out(tmp_path):
    for split in ("train", "val", "test"):
        for k in range(1, 6):
            write_lines(tmp_path, f"multi30k/task2.{split}.{k}.en.gz", f"a{k}", f"b{k}")
    trained, held_out = (pairs("multi30k-captions", tmp_path, split) for split in ("train", "valid"))
    assert held_out == [(f"{image}1", f"{image}{k}") for image in "ab" for k in range(2, 6)]
    assert pairs("multi30k-captions", tmp_path, "test") == held_out
    every = {(f"{image}{j}", f"{image}{k}") for image in "ab" for j in range(1, 6) for k in range(1, 6) if j != k}
    assert len(trained) == 40 and {*trained} == every


def test_dialogues_are_split_into_turns_and_replies(tmp_path):
    dialogues = [[f"u{k}", f"s{k}", f"v{k}", f"t{k}"] for k in range(200)]
    dialogues[7].pop()  # a turn is missing: nobody knows where
    lines = [line for turns in dialogues for line in (*turns, "")]
    write_lines(tmp_path, "sgd/sgd.txt.gz", *lines)
    held_out = pairs("sgd", tmp_path, "valid")
    assert held_out == [("u99", "s99"), ("v99", "t99"), ("u199", "s199"), ("v199", "t199")]
    with pytest.raises(UsageError, match="Schema-Guided Dialogue has no split 'test' here: train or valid"):
        pairs("sgd", tmp_path, "test")  # it would be the training dialogues
    trained = pairs("sgd", tmp_path)
    assert len(trained) == 2 * 197 and not {*trained} & {*held_out}
    assert not any(source in ("u7", "v7") for source, _ in trained)


def test_no_source_is_held_out_in_one_corpus_of_simplifications_and_learned_in_the_other(tmp_path):
    """Both have the same sources in the same order, but write them with other spaces."""
    rows = [f"sentence {k} .\tsimple {k}{j}" for k in range(12) for j in range(8)]
    write_lines(tmp_path, "simplification/wiki_auto_valid.tsv.gz", *rows)
    write_lines(tmp_path, "asset/asset.valid.orig", *(f"sentence {k}." for k in range(12)))
    for j in range(10):
        write_lines(tmp_path, f"asset/asset.valid.simp.{j}", *(f"simpler {k}{j}" for k in range(12)))
    numbers = {}
    for name, each in (("simplification", 8), ("asset", 10)):
        for split in ("train", "valid"):
            found = pairs(name, tmp_path, split)
            numbers[name, split] = {int(source.split()[1].rstrip(".")) for source, _ in found}
            assert len(found) == each * len(numbers[name, split])
    for name in ("simplification", "asset"):
        assert numbers[name, "valid"] == {3, 7, 11} and numbers[name, "train"] == {*range(12)} - {3, 7, 11}


def test_questions_and_sets_of_words_are_read(tmp_path):
    write_lines(tmp_path, "qqp/valid.jsonl.gz", json.dumps({"src": "Who is it?", "trg": "Who are they?"}))
    row = {"concept_set": "cat#sit", "scene": ["A cat sits.", "The cat is sitting."], "reason": ["", ""]}
    write_lines(tmp_path, "commongen/dev.jsonl.gz", json.dumps(row))
    assert list(corpus_examples("qqp", tmp_path, "valid")) == [Example("Who are they?", "Who is it?")]
    assert pairs("commongen", tmp_path, "valid") == [("cat sit", "A cat sits."), ("cat sit", "The cat is sitting.")]


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("multi30k", {"multi30k/task1.train.en": ["a", "b"], "multi30k/task1.train.de": ["a"]}, "not parallel"),
        ("multi30k", {"multi30k/task1.train.en": ["a", ""], "multi30k/task1.train.de": ["a", "b"]}, "source is empty"),
        ("multi30k-captions", {f"multi30k/task2.train.{k}.en": ["a"] * (k % 4 + 1) for k in range(1, 6)}, "has 3"),
        (
            "multi30k-captions",
            {f"multi30k/task2.train.{k}.en": [["a"], [""]][k == 3] for k in range(1, 6)},
            "line 1 of",
        ),
        ("simplification", {"simplification/wiki_auto_valid.tsv": ["a\tb", "a b"]}, "line 2 of .* has 1 of 2 columns"),
        (
            "commongen",
            {"commongen/train.jsonl": ['{"concept_set": "a#b", "scene": ["c", 1]}']},
            "'scene' in line 1",
        ),
        ("commongen", {"commongen/train.jsonl": ["nothing"]}, "line 1 of .* is not JSON"),
        ("sgd", {"sgd/sgd.txt": [""]}, "there is no text in"),
        ("qqp", {}, "no Quora question pairs in .* none of qqp/train.jsonl"),
    ],
)
def test_damaged_files_are_named_in_one_line(tmp_path, name, files, said):
    for path, lines in files.items():
        write_lines(tmp_path, path, *lines)
    with pytest.raises(DifflmError, match=said) as refused:
        pairs(name, tmp_path)
    assert len(str(refused.value).splitlines()) <= 2


def test_a_corpus_of_pairs_is_read_with_its_sources_by_methods_that_can():
    values = {"method": "difflm", "data": "multi30k", "steps": 1}
    assert check(values).has_sources and not check({**values, "data": "e2e"}).has_sources
    assert check({**values, "data": "e2e", "task": "seq2seq"}).has_sources
    assert not check({**values, "method": "autoregressive"}).has_sources
    assert {*PAIRS} < {*NAMES} and describe_texts("multi30k") == "German captions"


def test_recipes_of_pairs_have_sources():
    for name in known_recipes():
        if name.startswith(("multi30k", "sgd", "simplification", "e2e-data-to-text")):
            assert load_recipe(name).has_sources
    assert {"multi30k", "multi30k-laptop", "multi30k-captions", "sgd", "simplification"} <= {*known_recipes()}


@pytest.mark.long
def test_training_on_pairs_reads_their_own_held_out_split(tmp_path):
    """Through the command: the corpus's validation pairs are those that `evaluate` measures."""
    from difflm import TextDiffusion
    from difflm.app.cli import main
    from difflm.evaluation.corpora import pairs_for

    for split, count in (("train", 12), ("val", 3)):
        for side in ("en", "de"):
            write_lines(tmp_path, f"multi30k/task1.{split}.{side}", *(f"{split} {side} {k}" for k in range(count)))
    sizes = ("model.hidden=16", "model.layers=1", "model.encoder_layers=1", "model.heads=2")
    small = ("steps=2", "batch_size=4", "warmup=0", *sizes)
    argv = ["train", "multi30k-laptop", *small, "--data", tmp_path, "--out", tmp_path / "run", "--device", "cpu"]
    assert main([str(arg) for arg in argv]) == 0
    lm = TextDiffusion.from_pretrained(tmp_path / "run")
    assert list(pairs_for(lm, tmp_path).sources) == ["val en 0", "val en 1", "val en 2"]
    assert len(lm.generate(source=["val en 1"], steps=2)) == 1


def test_texts_without_sources_are_refused(tmp_path):
    write_lines(tmp_path, "roc/train.json", '["One. Two. Three. Four. Five."]')
    with pytest.raises(UsageError, match="the texts of roc have no sources"):
        list(corpus_examples("roc", tmp_path))
