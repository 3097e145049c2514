"""What only Linux has is absent elsewhere, and nothing needs it. Windows has no fcntl, opens no directories, removes no
open file and knows few signals; macOS keeps what is synchronised in the disk's own buffer."""

import ast
import asyncio
import mmap
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import difflm
from difflm.data.texts import Example
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import Words
from difflm.errors import DifflmError
from difflm.machine import turn
from difflm.runtime import files
from difflm.runtime.files import LOCK, locked, sync_directory, sync_file, write_atomic
from difflm.runtime.stop_signals import catch_stop_signals
from tests.support.tiny import tiny_run

SOURCE = Path(difflm.__file__).parent
POSIX = {"fcntl", "resource", "termios", "pty", "tty", "pwd", "grp", "posix", "syslog"}
CALLS = {
    "fork", "forkpty", "mkfifo", "geteuid", "getuid", "getpgid", "killpg", "setsid", "openpty", "sched_getaffinity",
    "pread", "pwrite", "posix_fadvise", "sendfile", "uname", "nice", "chown",
}  # fmt: skip
FAKE_LOCK = 2


def fake_msvcrt() -> Any:
    """Windows' locks: of one byte where the handle stands, and held by one process or handle alone."""
    holders: dict[tuple[int, int], int] = {}

    def lock(handle: int, mode: int, count: int) -> None:
        found = os.fstat(handle)
        key = found.st_ino, os.lseek(handle, 0, os.SEEK_CUR)
        assert (mode, count) == (FAKE_LOCK, 1) and key[1] > 1000, "a locked byte cannot be read"
        if holders.get(key, handle) != handle and is_open(holders[key], found.st_ino):
            raise PermissionError(13, "Permission denied")
        holders[key] = handle

    return SimpleNamespace(locking=lock, LK_NBLCK=FAKE_LOCK)


def is_open(handle: int, inode: int) -> bool:
    try:
        return os.fstat(handle).st_ino == inode
    except OSError:
        return False


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The calls of Linux are not there, or refuse what Windows refuses; on Windows itself nothing need be changed."""
    with turn(posix=False, full_sync=False, exclusive_ports=True):
        if os.name != "nt":
            remove_posix(monkeypatch)
        yield


def remove_posix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "msvcrt", fake_msvcrt())
    for name in ("SIGHUP", "SIGUSR1", "SIGALRM"):
        monkeypatch.delattr(signal, name)
    monkeypatch.delattr(mmap, "MADV_DONTNEED", raising=False)
    monkeypatch.delattr(os, "fork", raising=False)
    open_file, sync, unlink = os.open, os.fsync, Path.unlink

    def refuse_directories(path: Any, *args: Any, **kwargs: Any) -> int:
        if os.path.isdir(path) and not kwargs:  # the standard library's own calls give a dir_fd
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *args, **kwargs)

    def refuse_read_only(handle: int) -> None:
        import fcntl

        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        sync(handle)

    def refuse_open(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == LOCK:
            raise PermissionError(13, "in use", str(path))
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse_directories)
    monkeypatch.setattr(os, "fsync", refuse_read_only)
    monkeypatch.setattr(Path, "unlink", refuse_open)


def test_a_folder_is_locked_without_fcntl(windows: None, tmp_path: Path) -> None:
    for _ in range(2):  # the file of the lock stays there, the lock does not
        with locked(tmp_path / "run"):
            assert "process" in (tmp_path / "run" / LOCK).read_text()
            with pytest.raises(DifflmError, match=f"in use: process {os.getpid()}"), locked(tmp_path / "run"):
                pass


def test_a_folder_is_written_without_any_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "msvcrt", None)
    with turn(posix=False), locked(tmp_path / "run"):
        write_atomic(tmp_path / "run" / "file", "text")


def test_files_are_written_where_directories_cannot_be_opened(windows: None, tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", "text")
    write_atomic(tmp_path / "file", "other text")
    sync_directory(tmp_path)
    assert (tmp_path / "file").read_text() == "other text" and len(list(tmp_path.iterdir())) == 1


def test_signals_that_are_not_there_are_not_caught(windows: None) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with catch_stop_signals() as asked_to_stop:
        signal.raise_signal(signal.SIGTERM)
        assert asked_to_stop()
    assert signal.getsignal(signal.SIGTERM) is before


def test_tokens_are_read_and_built_anew_without_madvise(windows: None, tmp_path: Path) -> None:
    tokenizer = Words.build(["a b c"] * 2, 0)
    for texts in (["a b", "c"], ["a", "b", "c a"]):
        tokens = TokenFile.build(tmp_path / "tokens", map(Example, texts), tokenizer, {})
        tokens.release_pages()
        assert tokens.lengths.tolist() == [len(text.split()) for text in texts]


def test_what_is_synchronised_leaves_the_buffer_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has a call of its own for that; where a file system refuses it, `fsync` is better than nothing."""
    asked: list[Any] = []
    full = SimpleNamespace(F_FULLFSYNC=51, fcntl=lambda handle, call: asked.append(call))
    monkeypatch.setitem(sys.modules, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda handle: asked.append("fsync"))
    with turn(full_sync=True), (tmp_path / "file").open("wb") as file:
        sync_file(file.fileno())
        assert asked == [51]

        def refuse(handle: int, call: int) -> None:
            raise OSError(45, "Operation not supported")

        full.fcntl = refuse
        sync_file(file.fileno())
        assert asked == [51, "fsync"]
        with turn(full_sync=False):
            sync_file(file.fileno())
        assert asked == [51, "fsync", "fsync"]


@pytest.mark.long
def test_two_servers_do_not_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows SO_REUSEADDR would let them; another option stands for the one that it has instead."""
    pytest.importorskip("uvicorn")
    from difflm.app.studio.server import listen

    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_KEEPALIVE, raising=False)
    with turn(exclusive_ports=True), listen("127.0.0.1", 0) as listening:
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert not listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def test_a_request_waits_while_the_server_starts() -> None:
    """The address is shown, and a browser opened, before the server accepts connections."""
    pytest.importorskip("uvicorn")
    from difflm.app.studio.server import listen

    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname(), timeout=5):
        pass


@pytest.mark.parametrize("named", [True, False])
def test_an_answer_leaves_at_once(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the second part of an answer waits, over a kept connection, until the client acknowledges the first.
    Windows does not name the protocol of an address."""
    pytest.importorskip("uvicorn")
    from difflm.app.studio.server import listen

    look_up = socket.getaddrinfo

    async def accepted() -> int:
        found = asyncio.get_running_loop().create_future()

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            own = writer.get_extra_info("socket")
            found.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with monkeypatch.context() as patch:
            if not named:
                patch.setattr(
                    socket, "getaddrinfo", lambda *a, **k: [(f, t, 0, *r) for f, t, _, *r in look_up(*a, **k)]
                )
            listening = listen("127.0.0.1", 0)
        async with await asyncio.start_server(answer, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            writer.close()
            return await found

    assert asyncio.run(accepted())


@pytest.mark.long
def test_a_run_is_trained_the_same_without_what_only_linux_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    settings: dict[str, Any] = {"steps": 4, "save_every": 2}
    here = tiny_run(tmp_path / "here", "autoregressive", **settings)
    request.getfixturevalue("windows")
    there = tiny_run(tmp_path / "there", "autoregressive", **settings)
    assert (here / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()
    assert stat.S_IMODE((there / "model.safetensors").stat().st_mode) == 0o644


@pytest.mark.long
def test_nothing_is_imported_or_called_that_only_linux_has() -> None:
    """But for fcntl and resource, each in a file that does without it."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found |= {(path.name, name) for name in names if name in POSIX}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                found |= {(path.name, node.attr)} if node.attr in CALLS else set()
    assert found == {("files.py", "fcntl"), ("template_process.py", "resource")}
