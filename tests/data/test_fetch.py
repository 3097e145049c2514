"""Downloads from a server of our own that breaks, stalls, lies and changes its mind."""

import hashlib
import io
import os
import resource
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from difflm.data.catalogue import Corpus, CorpusFile, Download
from difflm.data.fetch import check_redirect, fetch_corpus, fetch_file
from difflm.errors import DifflmError, UsageError
from tests.support.web import Page, served

DATA = bytes(range(256)) * 1200  # several blocks
PATIENCE = 30.0  # seconds: no page needs them, a busy machine may
SHORT = 1.0  # seconds until a connection that stalls on purpose is given up


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "new" / "file.txt"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def names(target: Path) -> set[str]:
    """What is in the target's directory."""
    return {path.name for path in target.parent.iterdir()}


def refusal(*args: object, timeout: float = PATIENCE) -> str:
    """What a fetch that must fail says, in a line or two."""
    with pytest.raises(DifflmError) as caught:
        fetch_file(*args, timeout=timeout)
    said = str(caught.value)
    assert said.count("\n") <= 1
    return said


# -- what must arrive -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"x", DATA], ids=["empty", "a byte", "blocks"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_file_arrives_whole_and_alone(web, target, data, chunked):
    shown: list[tuple[str, int, int | None]] = []
    page = Page(data, chunked=chunked)
    fetch_file(web.give(page), target, len(data), sha256(data), PATIENCE, lambda *now: shown.append(now))
    assert target.read_bytes() == data
    assert names(target) == {"file.txt"}
    assert shown[0] == ("file.txt", 0, len(data)) and shown[-1] == ("file.txt", len(data), len(data))
    assert [done for _, done, _ in shown] == sorted(done for _, done, _ in shown)


@given(data=st.binary(max_size=3000), breaks=st.lists(st.integers(0, 3000), max_size=4), chunked=st.booleans())
def test_a_download_that_broke_starts_anew_and_equals_the_original(serving, data, breaks, chunked):
    """Whatever the bytes, and wherever the connection breaks."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "file.txt"
        for cut in [*breaks, None]:
            try:
                fetch_file(serving.give(Page(data, chunked=chunked, cut=cut)), target, timeout=PATIENCE)
                break
            except DifflmError as error:
                assert "broke after" in str(error)
                assert names(target) == set()
        assert target.read_bytes() == data
        assert names(target) == {"file.txt"}


@given(versions=st.lists(st.binary(min_size=1, max_size=400), min_size=2, max_size=4), cut=st.integers(1, 400))
def test_a_file_that_changes_between_tries_is_never_mixed(serving, versions, cut):
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "file.txt"
        for number, data in enumerate(versions):
            serving.give(Page(data, cut=None if number == len(versions) - 1 else cut))
            try:
                fetch_file(serving.url, target, timeout=PATIENCE)
            except DifflmError:
                continue
            assert target.read_bytes() == data
            return
        raise AssertionError("the last one is whole")


def test_two_at_once_do_not_mix(web, target):
    """Each writes a file of its own; the name changes hands in one step."""
    first, second = DATA, DATA[::-1]

    def interrupt(name: str, done: int, total: int | None) -> None:
        if not done:
            fetch_file(web.give(Page(second), "/other"), target, timeout=PATIENCE)

    fetch_file(web.give(Page(first)), target, timeout=PATIENCE, progress=interrupt)
    assert target.read_bytes() == first and names(target) == {"file.txt"}


# -- what must be refused ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_stalled_connection_is_given_up(web, target):
    said = refusal(web.give(Page(DATA, cut=70_001, stall=True)), target, timeout=SHORT)
    assert "127.0.0.1 sent nothing for 1 s after" in said and "of 307,200 bytes" in said
    assert "Run the same command again" in said and names(target) == set()
    fetch_file(web.give(Page(DATA)), target)
    assert target.read_bytes() == DATA


def test_a_server_that_never_answers(web, target):
    with contextless_listener() as url:
        assert "sent nothing for 0.2 s" in refusal(url, target, timeout=0.2)
    assert names(target) == set()


@contextmanager
def contextless_listener() -> Iterator[str]:
    """A port that takes connections and says nothing."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/file"


def test_nobody_listens(target):
    with contextless_listener() as url:
        pass
    assert "127.0.0.1 refuses the connection" in refusal(url, target)


@pytest.mark.parametrize("size", [None, len(DATA)])
def test_a_wrong_checksum_leaves_nothing(web, target, size):
    spoiled = DATA[:-1] + b"?"
    said = refusal(web.give(Page(spoiled)), target, size, sha256(DATA))
    assert "wrong checksum: refused" in said and sha256(spoiled) in said and sha256(DATA) in said
    assert names(target) == set()
    fetch_file(web.give(Page(DATA)), target, size, sha256(DATA))
    assert target.read_bytes() == DATA


def test_a_bad_new_file_does_not_replace_a_good_old_one(web, target):
    target.parent.mkdir()
    target.write_bytes(b"old")
    refusal(web.give(Page(b"spoiled")), target, None, sha256(b"new"))
    assert target.read_bytes() == b"old"


def test_bytes_past_the_stated_length_are_not_part_of_the_file(web, target):
    fetch_file(web.give(Page(DATA, claimed=1000)), target)
    assert target.read_bytes() == DATA[:1000]


@pytest.mark.parametrize("faults", [{}, {"chunked": True}, {"length": False}], ids=["stated", "chunked", "until close"])
@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1], ids=["too much", "too little"])
def test_a_file_of_another_size_than_known_is_refused(web, target, faults, size):
    refusal(web.give(Page(DATA, **faults)), target, size)
    assert not target.exists()


def test_a_part_cannot_pass_for_the_whole(web, target):
    """Without a length, the end of the connection might be a break."""
    assert "does not state its length" in refusal(web.give(Page(DATA, length=False)), target)
    assert names(target) == set()
    fetch_file(web.give(Page(DATA, length=False)), target, None, sha256(DATA))
    assert target.read_bytes() == DATA


@pytest.mark.parametrize(
    "headers", [{"Content-Encoding": "gzip"}, {"Content-Type": "text/html; charset=utf-8"}], ids=["packed", "page"]
)
def test_a_login_page_is_not_a_corpus(web, target, headers):
    assert "not with the file" in refusal(web.give(Page(DATA, headers=headers)), target)
    assert names(target) == set()


@pytest.mark.parametrize(
    "url",
    ["ftp://host/file", "file:///etc/hostname", "data:,x", "/etc/hostname", "http:///x", "", "http://home.invalid/x"],
)
def test_only_https_is_fetched(target, url):
    """Or http of this machine, where the servers of these tests are."""
    with pytest.raises(UsageError, match="only https"):
        fetch_file(url, target)
    assert not target.parent.exists()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_followed_on_the_web_only(web, target, code):
    web.give(Page(DATA), "/there")
    fetch_file(web.give(Page(b"", status=code, headers={"Location": "/there"})), target)
    assert target.read_bytes() == DATA
    for place in ("file:///etc/hostname", "ftp://127.0.0.1/file", "data:,x", "http://home.invalid/x"):
        web.give(Page(b"", status=code, headers={"Location": place}))
        assert "which is not followed" in refusal(web.url, target.with_name("other"))
    assert names(target) == {"file.txt"}


def test_a_redirect_does_not_leave_https():
    answer = requests.Response()
    answer.url, answer.status_code, answer.headers["Location"] = "https://host/file", 302, "http://host/file"
    with pytest.raises(DifflmError, match="not followed"):
        check_redirect(answer)


def test_a_redirect_in_a_circle_ends(web, target):
    said = refusal(web.give(Page(b"", status=302, headers={"Location": "/file"})), target)
    assert "redirects in a circle" in said


@pytest.mark.parametrize("code, advice", [(404, "moved"), (403, "login"), (503, "later")])
def test_an_error_of_the_server_is_told(web, target, code, advice):
    said = refusal(web.give(Page(b"sorry", status=code)), target)
    assert f"answered {code}" in said and advice in said
    assert names(target) == set()


def test_a_full_disk_leaves_nothing(web, target):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # no file may grow past this
    try:
        assert "the disk is full" in refusal(web.give(Page(DATA)), target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(target) == set()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(web, target):
    target.parent.mkdir(mode=0o500)
    assert "no permission to write" in refusal(web.give(Page(DATA)), target)


def test_places_that_cannot_be(web, target):
    target.mkdir(parents=True)
    assert "is a directory" in refusal(web.give(Page(DATA)), target)
    (target.parent / "plain").write_text("")
    assert "cannot write" in refusal(web.url, target.parent / "plain" / "file.txt")


# -- corpora ----------------------------------------------------------------------------------------------------------


TINY = {"name": "tiny", "title": "Tiny", "purpose": "tests", "home": "http://home.invalid", "licence": "none"}


def corpus(*downloads: Download) -> Corpus:
    return Corpus(**TINY, downloads=downloads)


def download(path: str, **facts: object) -> Download:
    return Download(url=f"https://home.invalid/{path}", files=(CorpusFile(**facts),))


def packed(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"folder/{name}", data)
    return file.getvalue()


def test_a_corpus_comes_from_another_server_by_the_same_paths(web, tmp_path):
    tiny = corpus(*(download(f"a/{name}?raw", file=f"{name}.txt") for name in "xy"))
    web.give(Page(b"of x"), "/a/x")
    web.give(Page(b"of y"), "/a/y")
    paths = fetch_corpus(served(tiny, web.base), tmp_path)
    assert [path.read_bytes() for path in paths] == [b"of x", b"of y"]
    assert paths[0] == tmp_path / "tiny" / "x.txt"
    asked = len(web.asked)
    assert fetch_corpus(served(tiny, web.base), tmp_path) == paths
    assert len(web.asked) == asked  # what is there is not fetched again


def test_a_file_that_is_there_but_spoiled_is_fetched_again(web, tmp_path):
    tiny = corpus(download("x", file="x", size=3, sha256=sha256(b"abc")))
    web.give(Page(b"abc"), "/x")
    [path] = fetch_corpus(served(tiny, web.base), tmp_path)
    path.write_bytes(b"abd")
    fetch_corpus(served(tiny, web.base), tmp_path)
    assert path.read_bytes() == b"abc"


def zipped(**facts: object) -> Corpus:
    return corpus(download("a.zip", file="one.txt", inside="one", **facts))


def test_an_archive_is_unpacked_and_removed(web, tmp_path):
    web.give(Page(packed(one=DATA, two=b"2")), "/a.zip")
    [path] = fetch_corpus(served(zipped(size=len(DATA), sha256=sha256(DATA)), web.base), tmp_path)
    assert path.read_bytes() == DATA
    assert names(path) == {"one.txt"}


@pytest.mark.parametrize(
    "archive, facts, said",
    [
        (packed(two=b"2"), {}, "holds no one. It holds: folder/two"),
        (packed(one=b"1"), {"size": 2}, "is not 2 bytes long"),
        (packed(one=b"1"), {"sha256": sha256(b"2")}, "wrong checksum"),
        (b"no archive", {}, "not a complete zip archive"),
        (packed(one=DATA).replace(DATA[:50], DATA[50:100]), {"sha256": sha256(DATA[1:])}, "refused"),
        (packed(one=DATA)[:-30], {}, "not a complete zip archive"),
    ],
    ids=["no member", "size", "checksum", "no zip", "other bytes", "cut"],
)
def test_a_bad_archive_leaves_nothing(web, tmp_path, archive, facts, said):
    web.give(Page(archive), "/a.zip")
    with pytest.raises(DifflmError, match=said):
        fetch_corpus(served(zipped(**facts), web.base), tmp_path)
    assert not list((tmp_path / "tiny").iterdir())


def test_what_is_longer_than_any_corpus_is_refused(web, tmp_path, monkeypatch):
    """An archive of a kilobyte can hold a gigabyte of zeros."""
    monkeypatch.setattr("difflm.data.fetch.MOST_BYTES", 10_000)
    web.give(Page(packed(one=bytes(1_000_000))), "/a.zip")
    with pytest.raises(DifflmError, match="more than 10,000: refused"):
        fetch_corpus(served(zipped(), web.base), tmp_path)
    web.give(Page(DATA, chunked=True), "/x")
    with pytest.raises(DifflmError, match="longer than 10,000 bytes"):
        fetch_corpus(served(corpus(download("x", file="x")), web.base), tmp_path)
    assert not list((tmp_path / "tiny").iterdir())


def test_a_corpus_on_request_says_where_to_ask(tmp_path):
    asking = Corpus(**TINY, obtain="write to its authors.")
    with pytest.raises(UsageError, match="cannot be fetched: write to its authors"):
        fetch_corpus(asking, tmp_path)
    assert not list(tmp_path.iterdir())
