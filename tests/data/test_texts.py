"""Reading texts: what is there comes out, and what is wrong is named."""

import csv
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from difflm.data.corpora import E2EPair, corpus, corpus_path, e2e_path, read_e2e
from difflm.data.texts import read_chunks, read_texts
from difflm.errors import DifflmError, UsageError

LINE = "name : The Mill | price : £ 20 - 25 | customer rating : 5 out of 5||The Mill costs £ 20 - 25 . \n"
some_text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1).filter(str.strip)
texts_of_a_csv = st.text(st.sampled_from('ab,"\n é;'), min_size=1).filter(str.strip)
use_tmp_path = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_are_stripped_and_blank_ones_skipped(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, "\ufeffone \r\n\n   \n two\nlast")
    assert list(read_texts(path)) == ["one", "two", "last"]


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_file_larger_than_a_read_chunk_is_read_whole(packed: str, tmp_path: Path) -> None:
    texts = [f"text {i} " + "é" * (i % 500) for i in range(4000)]  # about 2 MB, letters of two bytes across all edges
    assert list(read_texts(write(tmp_path / f"a.txt{packed}", "\n".join(texts)))) == [text.strip() for text in texts]


@use_tmp_path
@given(rows=st.lists(st.tuples(texts_of_a_csv, texts_of_a_csv), min_size=1))
def test_csv_with_quoted_commas_and_newlines_comes_back(rows: list[tuple[str, str]], tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "text"), *rows])
    assert list(read_texts(tmp_path / "a.csv")) == [text.strip() for _, text in rows]
    assert list(read_texts(tmp_path / "a.csv", column="id")) == [text.strip() for text, _ in rows]


@use_tmp_path
@given(texts=st.lists(some_text, min_size=1), escaped=st.booleans())
def test_jsonl_comes_back(texts: list[str], escaped: bool, tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"story": text}, ensure_ascii=escaped) for text in texts)
    path = write(tmp_path / "a.jsonl.gz", lines + "\n\n")
    assert list(read_texts(path, column="story")) == [text.strip() for text in texts]


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.txt", b"fine\nfine\ncaf\xe9\n", None, "line 3 .*UTF-8"),
        ("a.csv", b"text\ncaf\xe9\n", None, "line 2 .*UTF-8"),
        ("a.txt", "", None, "no text"),
        ("a.txt.gz", " \n\n", None, "no text"),
        ("a.csv", "", None, "no text"),
        ("a.csv", "text\n", None, "no text"),
        ("a.csv", "id,texts\n1,a\n", None, "no column 'text'.*Did you mean 'texts'.*id, texts"),
        ("a.csv", "id;text\n1;a\n", None, "separated by ';': save it with commas"),
        ("a.jsonl", '{"src": "a", "trg": "b"}\n', None, "It has pairs: train with task=seq2seq"),
        ("a.csv", "a,text\n1\n", None, "line 2 .*1 of 2 columns"),
        ("a.csv", 'text\n"open', None, "not CSV"),
        ("a.jsonl", '{"sumary": "a"}\n', "summary", "Did you mean 'sumary'"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', None, "line 2 .*not JSON"),
        ("a.jsonl", '["text"]\n', None, "line 1 .*not an object"),
        ("a.jsonl", '{"text": 3}\n', None, "line 1 .*not a text"),
        ("a.jsonl", '{"text": "\\ud800"}\n', None, "line 1 .*not a text"),
        ("a.pdf", "x", None, r"\.csv, \.tsv or \.jsonl"),
        ("a.txt", "x", "text", "no columns"),
    ],
)
def test_what_is_wrong_is_named(
    name: str, content: str | bytes, column: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DifflmError, match=message):
        list(read_texts(write(tmp_path / name, content), column))


def test_suffixes_may_be_capitals_and_chunks_have_no_carriage_returns(tmp_path: Path) -> None:
    path = write(tmp_path / "MY.TXT", b"one\r\ntwo\r\n")
    assert list(read_texts(path)) == ["one", "two"]
    assert "".join(read_chunks(path, 3)) == "one\ntwo\n"
    (tmp_path / "A.TXT.GZ").write_bytes(gzip.compress(b"packed\n"))
    assert list(read_texts(tmp_path / "A.TXT.GZ")) == ["packed"]


def test_a_cut_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a text\n" * 10_000)[:-20])
    with pytest.raises(DifflmError, match="not a complete gzip file"):
        list(read_texts(path))
    path.write_bytes(b"plain")
    with pytest.raises(DifflmError, match="not a complete gzip file"):
        list(read_texts(path))


def test_a_missing_file_is_wrong_usage_before_the_first_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_texts(tmp_path / "none.txt")
    with pytest.raises(UsageError, match="directory"):
        read_texts(tmp_path)


def test_e2e_lines_are_fields_and_text(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt.gz", LINE * 2)
    fields = {"name": "The Mill", "price": "£ 20 - 25", "customer rating": "5 out of 5"}
    assert list(read_e2e(path)) == [E2EPair(fields, "The Mill costs £ 20 - 25 .")] * 2


@pytest.mark.parametrize("line", ["no bars\n", "name : a||\n", "name a||text\n", ""])
def test_a_line_that_is_not_e2e_is_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(DifflmError, match=r"line 2|no text"):
        list(read_e2e(write(tmp_path / "train.txt", (LINE + line) if line else "")))


@pytest.mark.parametrize("name", ["e2e/valid.txt.gz", "e2e/valid.txt", "e2e/src1_valid.txt", "e2e_data/src1_valid.txt"])
def test_e2e_is_found_under_each_of_its_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).parent.mkdir()
    path = write(tmp_path / name, LINE)
    assert e2e_path(tmp_path, "valid") == path
    monkeypatch.setenv("DIFFLM_DATA", str(tmp_path))
    assert e2e_path(None, "valid") == path
    assert list(corpus("e2e", None, "valid")) == ["The Mill costs £ 20 - 25 ."]


def test_missing_e2e_says_where_to_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFLM_DATA", raising=False)
    for root in (None, tmp_path):
        with pytest.raises(UsageError, match=r"(?s)DIFFLM_DATA.* data|data or DIFFLM_DATA"):
            e2e_path(root, "train")


def test_a_corpus_is_a_name_or_a_path(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\ntwo\n")
    assert list(corpus(str(path), None)) == ["one", "two"]
    assert corpus_path(path, None) == path
    with pytest.raises(UsageError, match="Did you mean 'e2e'"):
        corpus("e2", None)
