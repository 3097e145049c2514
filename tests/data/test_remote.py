"""Texts of the web and of Hugging Face: copied whole and once, or continued."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from difflm.app.cli import main
from difflm.data import fetch, remote
from difflm.data.corpora import corpus, file_names, resolve_data, split_paths
from difflm.data.remote import fetch_remote
from difflm.errors import DifflmError, UsageError
from difflm.training.run import read_config
from tests.support.tiny import MODEL, make_story
from tests.support.web import Page, Web

HOST = "https://example.org"


@pytest.fixture
def https(web: Web, monkeypatch) -> Web:
    """A server that answers for example.org."""
    real = fetch.fetch_file

    def fetch_here(url: str, *args: object, **kwargs: object) -> None:
        real(url.replace(HOST, web.base), *args, **kwargs)

    monkeypatch.setattr(fetch, "fetch_file", fetch_here)
    return web


def test_a_web_file_is_fetched_once_and_read_like_any_other(https, tmp_path):
    https.give(Page(b'{"text": "One, two."}\n{"text": "Three."}\n'), "/a/my.jsonl")
    url = f"{HOST}/a/my.jsonl?v=1,2"
    https.pages["/a/my.jsonl?v=1,2"] = https.pages["/a/my.jsonl"]
    assert split_paths(url) == [url] and resolve_data(url, tmp_path) == url and file_names(url) == "my.jsonl?v=1,2"
    for _ in range(2):
        assert list(corpus(url, tmp_path)) == ["One, two.", "Three."]
    assert len(https.asked) == 1


@pytest.mark.parametrize(
    ("url", "page", "said"),
    [
        ("http://example.org/my.txt", None, "only https addresses are read"),
        (f"{HOST}/my.pdf", None, "does not name a file of texts"),
        (f"{HOST}/none.txt", None, "answered 404"),
        (f"{HOST}/my.txt", Page(b"word\n" * 9000, cut=20_000), "Run the same command again"),
        (f"{HOST}/my.txt", Page(b"word\n" * 9000), "is longer than 40,000 bytes: refused"),
        (f"{HOST}/my.txt", Page(b"word\n" * 9000, chunked=True), "is longer than 40,000 bytes: refused"),
    ],
)
def test_a_web_file_that_cannot_be_had_leaves_nothing_behind(url, page, said, https, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "MOST_BYTES", 40_000 if page and page.cut is None else 1 << 20)
    if page:
        https.give(page, "/my.txt")
    with pytest.raises(DifflmError, match=said) as caught:
        fetch_remote(url, tmp_path / "data")
    assert len(str(caught.value).splitlines()) <= 2 and not (tmp_path / "data").exists()


class Rows:
    """A dataset's stream, which can break off."""

    def __init__(self, rows: list[dict[str, object]], breaks_at: int | None = None) -> None:
        self.rows, self.breaks_at = rows, breaks_at

    def skip(self, count: int) -> "Rows":
        return Rows(self.rows[count:])

    def __iter__(self) -> Iterator[dict[str, object]]:
        for number, row in enumerate(self.rows):
            if number == self.breaks_at:
                raise ConnectionError("the server hung up")
            yield row


@pytest.fixture
def library(monkeypatch):
    """Stands for the package, with what it serves."""
    served: dict[str, Rows] = {}

    def load_dataset(path: str, name: str | None, split: str, streaming: bool) -> Rows:
        if path not in served:
            raise FileNotFoundError(f"Couldn't find {path}.")
        return served[path]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return served


def test_a_stream_that_breaks_off_is_continued_there(library, tmp_path):
    rows: list[dict[str, object]] = [{"text": f"Text {n}: 狗.", "stars": n, "by": "me"} for n in range(30)]
    library["org/name"] = Rows(rows, breaks_at=17)
    with pytest.raises(
        DifflmError, match=r"org/name broke off after 17 texts: the server hung up\. Run the same"
    ) as caught:
        fetch_remote("hf:org/name", tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    [part] = tmp_path.rglob("*.part")
    assert not list(tmp_path.rglob("*.jsonl"))
    part.write_bytes(part.read_bytes()[:-4])  # a process that was killed leaves half a line
    library["org/name"] = Rows(rows)
    path = fetch_remote("hf:org/name", tmp_path)
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert found == [{"text": row["text"], "by": "me"} for row in rows] and not part.exists()
    library.clear()
    assert list(corpus("hf:org/name", tmp_path, column="by")) == ["me"] * 30


@pytest.mark.parametrize(
    ("rows", "column", "said"),
    [
        (None, None, "data=hf:org/name cannot be opened: Couldn't find org/name"),
        (
            [{"body": "One."}],
            None,
            "no column of text 'text' in row 1 of hf:org/name. It has: body. Choose with column",
        ),
        ([{"text": "One.", "n": 3}], "n", "no column of text 'n' in row 1 of hf:org/name. It has: text."),
        ([], None, "there is no text in hf:org/name."),
    ],
)
def test_a_dataset_that_cannot_be_used_gets_a_line(rows, column, said, library, tmp_path):
    if rows is not None:
        library["org/name"] = Rows(rows)
    with pytest.raises(DifflmError) as caught:
        fetch_remote("hf:org/name", tmp_path / "data", column)
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1 and not (tmp_path / "data").exists()


def test_a_local_dataset_has_one_name_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_data("hf:set:part", None) == f"hf:{tmp_path / 'set'}:part"
    assert resolve_data("hf:other/set", None) == "hf:other/set"


def test_without_the_package_a_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r'pip install "\.\[hf\]"'):
        fetch_remote("hf:org/name", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def train(data: str, root: Path, *changes: str) -> int:
    sizes = [f"model.{key}={value}" for key, value in MODEL.items()]
    settings = ["method=mdlm", "steps=2", "batch_size=4", "longest=32", "rows=packed", "sample_every=0", *sizes]
    return main(
        ["train", "own-text", f"data={data}", *settings, *changes, "--data", str(root), "--out", str(root / "r")]
    )


def test_a_run_is_trained_on_a_dataset(library, tmp_path):
    import random

    draw = random.Random(0)
    library["org/name"] = Rows([{"body": make_story(draw)} for _ in range(40)])
    assert train("hf:org/name", tmp_path, "column=body", "vocabulary=300") == 0
    assert read_config(tmp_path / "r")["recipe"]["data"] == "hf:org/name"


needs_package = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the package datasets is not installed"
)


def write_dataset(folder: Path, column: str = "text", count: int = 9) -> list[str]:
    """A directory as the package reads it, with a column that holds no text."""
    texts = [f"Text {n}." for n in range(count)]
    folder.mkdir()
    rows = (json.dumps({column: text, "stars": n}) + "\n" for n, text in enumerate(texts))
    (folder / "train.jsonl").write_text("".join(rows))
    return texts


@needs_package
def test_the_package_reads_a_local_directory(tmp_path):
    texts = write_dataset(tmp_path / "set")
    assert list(corpus(f"hf:{tmp_path / 'set'}", tmp_path)) == texts


@needs_package
def test_the_package_goes_on_where_a_stream_broke_off(tmp_path, monkeypatch):
    texts, read = write_dataset(tmp_path / "set"), remote.read_dataset

    def break_off(name: str, column: str | None, start: int) -> Iterator[dict[str, str]]:
        for number, row in enumerate(read(name, column, start)):
            if number == 4:
                raise DifflmError("it broke off.")
            yield row

    with monkeypatch.context() as context, pytest.raises(DifflmError, match="broke off"):
        context.setattr(remote, "read_dataset", break_off)
        fetch_remote(f"hf:{tmp_path / 'set'}", tmp_path / "data")
    path = fetch_remote(f"hf:{tmp_path / 'set'}", tmp_path / "data")
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == texts


@needs_package
def test_what_the_package_cannot_give_gets_a_line(tmp_path):
    write_dataset(tmp_path / "set", column="body")
    (tmp_path / "empty").mkdir()
    for name, said in (("set", "no column of text 'text' in row 1"), ("empty", "cannot be opened")):
        with pytest.raises(DifflmError, match=said) as caught:
            fetch_remote(f"hf:{tmp_path / name}", tmp_path / "data")
        assert len(str(caught.value).splitlines()) == 1 and not list(tmp_path.rglob("rows.*"))


@needs_package
@pytest.mark.long
def test_a_run_is_trained_on_what_the_package_reads(tmp_path):
    write_dataset(tmp_path / "set", "body", 200)
    assert train(f"hf:{tmp_path / 'set'}", tmp_path, "column=body", "tokenizer=words") == 0
    assert read_config(tmp_path / "r")["recipe"]["data"] == f"hf:{tmp_path / 'set'}"
