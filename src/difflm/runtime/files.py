"""Reading and writing files so that a reader never sees half of one."""

import errno
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from difflm.errors import DifflmError

try:
    import fcntl
except ImportError:  # Windows: nothing there keeps two processes from writing one run
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


def explain_os_error(error: OSError, path: Path) -> DifflmError:
    """An operating-system error as a line that says what to do."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DifflmError(f"no permission to write {path}. Choose another place with --out.")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DifflmError(f"the disk is full: {path} was not written. Free some space and try again.")
    return DifflmError(f"cannot write {path}: {error.strerror or error}.")


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it into place only when the block succeeds."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
    except OSError as error:
        raise explain_os_error(error, path) from None
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise explain_os_error(error, path) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write the whole file or nothing."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory, which is made if need be, against other processes; refuse it where another one holds it.

    The operating system keeps the lock and gives it back when its holder ends, however it ends: what a killed process
    leaves behind locks nobody out. The file only says who holds it. Empty directories that were made are removed.
    """
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        handle = _claim(directory)
    except OSError as error:
        raise explain_os_error(error, directory) from None
    try:
        yield
    finally:
        (directory / LOCK).unlink(missing_ok=True)  # before it is given back: the next holder's is another file
        os.close(handle)
        with suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()


def _claim(directory: Path) -> int:
    """Lock the lock file of a directory; gives the open file, which is the lock."""
    path = directory / LOCK
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the last holder has just removed the directory
            continue
        try:
            if not _lock(handle):
                holder = os.read(handle, 1000).decode(errors="replace") or "another process"
                raise DifflmError(
                    f"{directory} is in use: {holder} is writing there. Wait until it ends, or choose another --out."
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    return handle
            os.close(handle)  # the last holder removed this file before it was locked: others would lock a new one
        except BaseException:
            os.close(handle)
            raise


def _lock(handle: int) -> bool:
    """Whether an open file is ours alone; a file system that knows no locks cannot say, and gets the benefit."""
    try:
        if fcntl:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
    return True


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DifflmError(f"{path} does not exist.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DifflmError(f"{path} is not a readable JSON file ({error}).") from None


def append_line(path: Path, line: str) -> None:
    """Add a whole line or nothing: what a full disk cuts off is taken back."""
    data = f"{line}\n".encode()
    try:
        with path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise
    except OSError as error:
        raise explain_os_error(error, path) from None
