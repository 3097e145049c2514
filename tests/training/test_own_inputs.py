"""What `difflm train` takes as texts: files of any kind, folders, patterns and several of them; and pairs."""

import gzip
import json

import pytest

import difflm
from difflm.app.cli import main
from difflm.data.corpora import corpus, corpus_examples, corpus_paths, file_names, resolve_data
from difflm.data.texts import read_texts
from difflm.data.tokenfile import source_fingerprint
from difflm.errors import UsageError
from difflm.evaluation.corpora import corpus_for, pairs_for
from difflm.generation.pipeline import TextDiffusion
from difflm.training.own_text import default_run, is_own_text, own_recipe, split_arguments
from difflm.training.run import read_config

TINY = ["model.hidden=16", "model.layers=1", "model.heads=2", "batch_size=4", "sample_every=0", "steps=2"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of texts in subfolders, beside what is no text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("difflm.training.own_text.find_start", lambda language: None)
    monkeypatch.setattr("difflm.training.validation.VALIDATION_DRAWS", 8)
    files = {
        **{"b.txt": "b one\nb two\n", "sub/a.md": "# a\n\na one\n", "sub/deep/notes": "n one\n", ".hidden.txt": "h\n"},
        **{".git/x.txt": "no\n", "run/config.json": "{}", "run/README.md": "no text", "sub/script.py": "no text"},
    }
    for name, text in files.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "texts" / "blob").write_bytes(b"\0\1\2")
    (tmp_path / "texts" / "z.txt.gz").write_bytes(gzip.compress(b"z one\n"))
    return tmp_path


def write_pairs(path, header="", between="\t", count=40):
    rows = "".join(f"question {k}{between}this is answer {k}\n" for k in range(count))
    path.write_text(header + rows)


def resolve(name, *changes):
    told: list[str] = []
    return own_recipe(name, changes, None, "cpu", told.append), told


# -- texts ------------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_with_its_subfolders(folder):
    """In the order of the names, without runs, hidden files and what is no text; a change below it is noticed."""
    assert [*corpus("texts", None)] == ["b one", "b two", "# a", "a one", "n one", "z one"]
    before = source_fingerprint(folder / "texts")
    (folder / "texts" / "sub" / "b.txt").write_text("another b\n")
    assert source_fingerprint(folder / "texts") != before


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("texts/*.txt", ["b one", "b two"]),
        ("texts/sub/*", ["# a", "a one", "n one", "no text"]),
        ("texts/sub/*.md|texts/b.txt", ["# a", "a one", "b one", "b two"]),
        ("texts/[b]*.txt|texts/b.txt", ["b one", "b two"]),  # each file once
        ("texts/sub/deep/notes", ["n one"]),
        ("texts/z.txt.gz", ["z one"]),
    ],
)
def test_patterns_and_several_files_are_one_corpus(folder, name, texts, monkeypatch):
    assert is_own_text(name) and sorted(corpus(name, None)) == sorted(texts)
    there = resolve_data(name, None)
    monkeypatch.chdir(folder / "texts")  # the same from any directory
    assert sorted(corpus(there, None)) == sorted(texts) and len(corpus_paths(there, None)) >= 1


@pytest.mark.parametrize(
    ("words", "name", "changes"),
    [
        (["my.txt"], "my.txt", []),
        (["my.txt", "texts", "steps=2"], "my.txt|texts", ["steps=2"]),
        (["minutes=3", "my.txt"], "my.txt", ["minutes=3"]),
        (["own-text", "data=my.txt"], "own-text", ["data=my.txt"]),
        (["e2e", "my.txt"], "e2e", ["my.txt"]),
        (["a=b.txt", "lr=1"], "a=b.txt", ["lr=1"]),
        (["https://example.org/a.txt?x=1"], "https://example.org/a.txt?x=1", []),
    ],
)
def test_texts_are_told_from_settings(folder, words, name, changes):
    (folder / "a=b.txt").write_text("one\n")
    assert split_arguments(words) == (name, changes)


def test_what_exists_is_text_unless_it_is_a_recipe(folder):
    (folder / "my.yaml").write_text("method: difflm\n")
    (folder / "notes.rst").write_text("one\n")
    (folder / "e2e").mkdir()
    assert is_own_text("notes.rst") and is_own_text("texts") and is_own_text("absent.tsv") and is_own_text("*.nothing")
    assert not is_own_text("my.yaml") and not is_own_text("e2e") and not is_own_text("absent")
    assert [*read_texts(folder / "notes.rst")] == ["one"]


def test_runs_without_a_name_are_named_after_their_texts(folder):
    names = ("my.txt", "texts", "texts/", "texts/*.txt", "texts/**/*", ".", "a.b.txt|my.txt", "https://host/my.txt")
    found = [str(default_run(name, "mdlm")).removesuffix("-mdlm") for name in names]
    assert found == ["my", "texts", "texts", "texts", "texts", folder.name, "a", "my"]
    assert file_names("a.txt|x/b.txt") == "a.txt,b.txt" and file_names("a|b|c|d") == "a and 3 others"


MISTAKES = {
    "nothing*.txt": "no file of texts matches 'nothing*.txt'",
    "texts/*.png": "no file of texts matches",
    "absent.txt": "absent.txt does not exist",
    "texts absent.txt": "absent.txt does not exist",
    "e2f": "no recipe 'e2f', and no such file. Did you mean e2e",
    "textz": "no such file. Did you mean texts",
    "texts/run": "holds a model, not texts",
    "texts/picture.png": "is not a file of texts",
    "data.json": "Save JSON as .jsonl",
    "mixed": "mixed holds files of .csv and .txt: files of one kind are one corpus. Choose some with a pattern",
    "empty": "empty holds no files that end in .txt",
    "three.tsv": "It has: 1, 2, 3. Name one as the column, or two as SOURCE,TARGET.",
    "e2e texts": "To train on its texts, give data=texts",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_what_is_no_text_is_refused_in_a_line(folder, words, capsys):
    (folder / "data.json").write_text("[]")
    (folder / "three.tsv").write_text("a\tb\tc\n")
    for name in ("mixed/a.txt", "mixed/b.csv"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("text\n")
    (folder / "empty").mkdir()
    assert main(["train", *words.split(), "--out", "out"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert MISTAKES[words] in err[-1] and len(err) <= 2 and all(one.startswith("reading") for one in err[:-1])
    assert not (folder / "out").exists()


# -- pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "header", "between", "columns"),
    [
        ("my.tsv", "", "\t", "1,2"),
        ("my.tsv", "Source\tTarget\n", "\t", "Source,Target"),
        ("my.csv", "Question,Answer\n", ",", "Question,Answer"),
        ("my.csv", "src,tgt\n", ",", "src,tgt"),
    ],
)
def test_pairs_are_recognised(folder, name, header, between, columns):
    write_pairs(folder / name, header, between)
    recipe, told = resolve(name)
    assert (recipe.task, recipe.column, recipe.has_sources) == ("seq2seq", columns, True)
    assert told[0].startswith(f"task=seq2seq: {name} holds pairs; column ") and "column=NAME" in told[0]
    assert told[1].startswith(f"{name}: 40 pairs of ")
    assert next(corpus_examples(name, None, column=columns)).source == "question 0"
    alone, told = resolve(name, f"column={columns.split(',')[1]}")
    assert not alone.has_sources and "40 texts" in told[0]
    turned, _ = resolve(name, f"column={','.join(reversed(columns.split(',')))}")
    assert next(corpus_examples(name, None, column=turned.column)).target == "question 0"


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "a", "completion": "b"}, "prompt,completion"),
        ({"instruction": "a", "output": "b", "id": 3}, "instruction,output"),
        ({"id": "x", "document": "a", "summary": "b"}, "document,summary"),
        ({"text": "a", "prompt": "b", "completion": "c"}, None),
        ({"text": "a", "title": "b"}, None),
    ],
)
def test_columns_of_pairs_have_many_names(folder, row, columns):
    (folder / "my.jsonl").write_text((json.dumps(row) + "\n") * 20)
    recipe, _ = resolve("my.jsonl")
    assert (recipe.column, recipe.has_sources) == (columns, columns is not None)


def test_a_table_of_one_column_holds_texts(folder):
    (folder / "my.tsv").write_text('it "said"\nso, it is\n')
    assert [*corpus("my.tsv", None)] == ['it "said"', "so, it is"]
    assert not resolve("my.tsv")[0].has_sources


# -- runs -------------------------------------------------------------------------------------------------------------


def test_several_files_are_trained_on_and_found_again(folder, capsys):
    for name in ("one", "two"):
        (folder / f"{name}.md").write_text("".join(f"{name} is {k} of them.\n" for k in range(60)))
    words = ["one.md", "two.md", "method=autoregressive", *TINY]
    assert main(["train", *words]) == 0
    err = capsys.readouterr().err
    assert err.startswith("reading one.md,two.md …\none.md,two.md: 120 texts")
    config = read_config(folder / "one-autoregressive")
    assert config["texts"] + config["held_out"] == 120 and config["command"].startswith("difflm train one.md two.md ")
    assert len(corpus_for(TextDiffusion.from_pretrained("one-autoregressive"), None).texts) == config["held_out"]
    assert main(["train", *words, "--resume"]) == 0
    (folder / "two.md").write_text("changed\n")
    assert main(["train", *words[:-1], "steps=3", "--resume"]) == 1
    assert "changed since" in capsys.readouterr().err


def test_python_takes_the_same(folder):
    write_pairs(folder / "a.tsv")
    write_pairs(folder / "b.tsv", count=20)
    sizes = {"hidden": 16, "layers": 1, "heads": 2}
    settings = {"steps": 2, "batch_size": 4, "sample_every": 0, "progress": False, "model": sizes}
    run = difflm.train([folder / "a.tsv", "b.tsv"], "run", method="mdlm", **settings)
    config = read_config(run.folder)
    assert config["recipe"]["source_longest"] and config["texts"] + config["held_out"] == 60
    assert len(pairs_for(run.load(), None).sources) == config["held_out"]
    with pytest.raises(UsageError, match="no file of texts matches"):
        difflm.train("*.nothing")
    with pytest.raises(UsageError, match="Give recipe settings as keywords"):
        difflm.train(["a.tsv", "steps=3"])
