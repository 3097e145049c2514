"""The catalogue's facts hold together, E2E's tables become what `--data` reads, and the two verbs tell it all."""

import csv
import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from difflm.app.commands.data import data_app
from difflm.data import fetch as fetching
from difflm.data.catalogue import CATALOGUE, CONVERSIONS, E2E_FIELDS, LINE, convert_e2e, cut_lines, e2e_lines
from difflm.data.corpora import NAMES, corpus, e2e_path, read_e2e
from difflm.data.fetch import fetch_corpus
from difflm.data.texts import read_texts
from difflm.data.words import join_words, split_words
from difflm.errors import DifflmError
from difflm.training.recipe import load_recipe
from tests.support.corpora import DATA, needs_e2e
from tests.support.web import Page, Web, served

# A line that Diffusion-LM released, after the row of the challenge that it stands for; then one of our own.
MR = "name[The Mill], eatType[coffee shop], food[French], priceRange[£20-25], area[riverside], near[The Sorrento]"
REF = (
    "Located near The Sorrento is a French Theme eatery and coffee shop called The Mill, with a price range at £20-£25 "
    "it is in the riverside area."
)
LINE_OF_IT = (
    "name : The Mill | Type : coffee shop | food : French | price : £ 20 - 25 | area : riverside | near : The Sorrento"
    "||Located near The Sorrento is a French Theme eatery and coffee shop called The Mill , with a price range at "
    "£ 20- £ 25 it is in the riverside area . "
)
OTHER_MR = "name[Loch Fyne], eatType[restaurant], familyFriendly[yes], customer rating[5 out of 5]"
OTHER_LINE = (
    "name : Loch Fyne | Type : restaurant | family friendly : yes | customer rating : 5 out of 5||It isn ' t far . "
)


def table(*rows: tuple[str, ...], head: tuple[str, ...] = ("mr", "ref")) -> bytes:
    file = io.StringIO()
    csv.writer(file).writerows([head, *rows])
    return file.getvalue().encode()


# -- facts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=CATALOGUE)
def test_an_entry_holds_together(entry):
    assert re.fullmatch(r"[a-z0-9-]+", entry.name)
    assert all((entry.title, entry.purpose, entry.licence))
    assert urlsplit(entry.home).scheme in ("http", "https")
    assert bool(entry.downloads) != bool(entry.obtain)  # it is fetched, or one is told how to get it
    files = [one.file for one in entry.files]
    assert len(set(files)) == len(files)
    assert all(Path(file).name == file for file in files)
    for download in entry.downloads:
        assert urlsplit(download.url).scheme == "https"
        assert any(one.inside for one in download.files) == all(one.inside for one in download.files)
    for one in entry.files:
        assert one.sha256 is None or (re.fullmatch("[0-9a-f]{64}", one.sha256) and one.size)


@pytest.mark.parametrize("entry", [c for c in CATALOGUE.values() if c.train], ids=lambda c: c.name)
def test_what_is_said_to_train_does(entry, tmp_path):
    """The recipe exists, and difflm reads the very file that a fetch leaves."""
    recipe, rest = entry.train.split(" ", 1)
    if rest.endswith("--data {out}"):
        named = load_recipe(recipe, rest.split()[:-2])
        assert named.data in NAMES
        return  # their files: test_e2e_is_fetched_…, tests/data/test_stories.py, tests/data/test_pair_corpora.py
    load_recipe(recipe, [rest.format(out=tmp_path)])
    path = Path(rest.removeprefix("data=").format(out=tmp_path))
    path.parent.mkdir()
    raw = b"First line.\nSecond line.\n"
    if not entry.downloads:  # one is told where to save it
        path.write_bytes(raw)
    for one in entry.files:
        (path.parent / one.file).write_bytes(gzip.compress(raw) if one.file.endswith(".gz") else raw)
    if entry.convert:
        assert path in CONVERSIONS[entry.convert](path.parent)
    assert next(iter(read_texts(path))) == "First line."


# -- what is made of them ---------------------------------------------------------------------------------------------


def test_e2e_is_fetched_into_the_layout_that_data_reads(web: Web, tmp_path):
    e2e = CATALOGUE["e2e"]
    train, valid, test = (urlsplit(download.url).path for download in e2e.downloads)
    web.give(Page(table((MR, REF))), test)
    web.give(Page(table((MR, REF), (OTHER_MR, "It isn't\nfar."))), train)
    web.give(Page(b"\xef\xbb\xbf" + table((OTHER_MR, "It isn't far."))), valid)
    fetch_corpus(served(e2e, web.base), tmp_path)
    assert gzip.decompress((tmp_path / "e2e" / "train.txt.gz").read_bytes()).decode() == f"{LINE_OF_IT}\n{OTHER_LINE}\n"
    [pair] = read_e2e(e2e_path(tmp_path, "valid"))
    assert pair.fields["Type"] == "restaurant" and pair.fields["customer rating"] == "5 out of 5"
    assert list(corpus("e2e", tmp_path, "valid")) == ["It isn ' t far ."]
    assert e2e_path(tmp_path, "test").name == "test.txt.gz" and len(list(corpus("e2e", tmp_path, "test"))) == 1


def test_lines_that_are_there_stay(tmp_path):
    """Who has Diffusion-LM's own files keeps them."""
    for name in ("trainset.csv", "devset.csv", "testset_w_refs.csv"):
        (tmp_path / name).write_bytes(table((MR, REF)))
    (tmp_path / "train.txt.gz").write_bytes(b"mine")
    train, valid, _ = convert_e2e(tmp_path)
    assert train.read_bytes() == b"mine"
    assert gzip.decompress(valid.read_bytes()).decode() == f"{LINE_OF_IT}\n"


@pytest.mark.parametrize(
    "data, said",
    [
        (table((MR, REF), head=("id", "text")), "columns mr and ref"),
        (b"", "columns mr and ref"),
        (table((MR, REF), ("The Mill", REF)), "line 3 of .* is not 'name"),
        (table((MR + "]", REF)), "line 2 of"),
        (table(("name[a|b]", REF)), "line 2 of"),
        (table((MR, " ")), "line 2 of"),
        (table((MR,)), "line 2 of"),
        (b'mr,ref\n"open', "is not CSV"),
        (b"mr,ref\n\xff", "is not UTF-8"),
    ],
)
def test_a_table_that_is_not_e2e_is_refused(tmp_path, data, said):
    (tmp_path / "trainset.csv").write_bytes(data)
    with pytest.raises(DifflmError, match=said):
        convert_e2e(tmp_path)
    assert not (tmp_path / "train.txt.gz").exists()


def naturally(text: str) -> str:
    """A released text as people write: "£ 20- £ 25" is £20-£25, and "£ 20 - £ 25" is £20 - £25."""
    pieces = (join_words(split_words(piece)) for piece in text.split(" - £"))
    return re.sub(r"(?<=\d)- £", "-£", " - £".join(pieces))


@needs_e2e
def test_the_released_pairs_come_back(tmp_path):
    """Each released pair of a split, written as a row of the challenge, becomes the same fields and the same words."""
    pairs = list(read_e2e(e2e_path(DATA, "valid")))
    back = {new: old for old, new in E2E_FIELDS.items()}
    rows = [
        (
            ", ".join(f"{back.get(name, name)}[{join_words(value.split())}]" for name, value in pair.fields.items()),
            naturally(pair.text),
        )
        for pair in pairs
    ]
    (tmp_path / "devset.csv").write_bytes(table(*rows))
    (tmp_path / "valid.txt").write_text("".join(f"{line}\n" for line in e2e_lines(tmp_path / "devset.csv")))
    again = list(read_e2e(tmp_path / "valid.txt"))
    assert [pair.fields for pair in again] == [pair.fields for pair in pairs]
    assert [split_words(pair.text) for pair in again] == [split_words(pair.text) for pair in pairs]


@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1).map(" ".join), st.integers(9, 20))
def test_cut_lines_hold_every_word(text, width):
    lines = [line.decode() for line in cut_lines(text.encode(), width)]
    assert " ".join(lines) == text
    assert all(0 < len(line) <= width for line in lines)


def test_a_word_longer_than_a_line_is_cut():
    lines = list(cut_lines(b"x" * (2 * LINE + 1), LINE))
    assert [len(line) for line in lines] == [LINE, LINE, 1]


# -- the verbs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(capsys) -> Callable[..., tuple[int, str, str]]:
    """Run `difflm data …`; its exit code, what it prints and what it says beside."""

    def run(*argv: object) -> tuple[int, str, str]:
        command = typer.main.get_command(data_app)
        code = command.main([str(arg) for arg in argv], prog_name="difflm data", standalone_mode=False)
        return code, *capsys.readouterr()

    return run


def test_list_tells_home_licence_and_what_is_not_known(data):
    code, out, _ = data("list")
    assert code == 0
    for entry in CATALOGUE.values():
        assert entry.name in out and entry.home in out and entry.licence in out
    assert "size and sha256 not known" in out and "sha256 known" in out
    assert "cannot be fetched" in out and "research only" in out
    assert "difflm train e2e --data DIR" in out


def test_a_corpus_with_a_recipe_is_not_said_to_have_no_reader(data):
    _, out, _ = data("list")
    told = {block.split()[0]: block for block in re.split(r"\n(?=\S)", out.strip())}
    unread = {name for name, block in told.items() if "does not read it yet" in block}
    assert unread == {"qqp", "wiki-auto"}
    assert "difflm train roc --data DIR" in told["rocstories"] and "difflm train ptb data=" in told["ptb"]
    assert "--task infill" in told["anlg"]


def test_list_for_machines(data):
    _, out, _ = data("list", "--json")
    entries = {entry["name"]: entry for entry in map(json.loads, out.splitlines())}
    assert list(entries) == list(CATALOGUE)
    assert entries["tinyshakespeare"]["files"][0]["size"] == 1_115_394
    assert entries["e2e"]["files"][0]["sha256"] is None
    assert not entries["rocstories"]["fetched"] and entries["rocstories"]["obtain"]


@pytest.fixture
def loopback(web: Web, monkeypatch) -> Web:
    """The verb's corpora come from the test's server."""
    monkeypatch.setattr(
        fetching, "fetch_corpus", lambda corpus, *rest, **more: fetch_corpus(served(corpus, web.base), *rest, **more)
    )
    for download in CATALOGUE["e2e"].downloads:
        web.give(Page(table((MR, REF))), urlsplit(download.url).path)
    return web


def test_fetch_says_what_came_and_what_to_do_next(data, loopback, tmp_path):
    code, out, err = data("fetch", "e2e", "--out", tmp_path)
    assert code == 0
    assert f"{tmp_path / 'e2e' / 'train.txt.gz'}: " in out
    assert f"Next: difflm train e2e --data {tmp_path} --out run" in out
    assert "CC BY-SA 4.0" in err
    _, out, _ = data("fetch", "e2e", "--out", tmp_path, "--json")
    files = [json.loads(line) for line in out.splitlines()]
    tables = ["trainset.csv", "devset.csv", "testset_w_refs.csv"]
    assert [Path(file["file"]).name for file in files] == [*tables, "train.txt.gz", "valid.txt.gz", "test.txt.gz"]
    assert all(Path(file["file"]).stat().st_size == file["size"] for file in files)


def test_fetch_goes_where_data_is_read(data, loopback, tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFLM_DATA", str(tmp_path / "all"))
    assert data("fetch", "e2e")[0] == 0
    assert e2e_path(None, "train") == tmp_path / "all" / "e2e" / "train.txt.gz"


@pytest.mark.parametrize(
    "name, code, said",
    [
        ("e2", 2, "Did you mean 'e2e'?"),
        ("rocstories", 2, "cannot be fetched: its authors"),
        ("tinyshakespeare", 1, "answered 404"),
    ],
)
def test_fetch_that_cannot_be_done(data, loopback, tmp_path, name, code, said):
    found, out, err = data("fetch", name, "--out", tmp_path)
    assert (found, out) == (code, "")
    assert said in err and err.startswith("difflm: ") and err.count("\n") <= 2
