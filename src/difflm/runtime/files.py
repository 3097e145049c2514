"""Atomic writes, directory locks, and file errors that say what to do."""

import errno
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from difflm.errors import DifflmError, UsageError
from difflm.machine import is_on

try:
    import msvcrt
except ImportError:  # everywhere else
    msvcrt = None  # type: ignore[assignment]

LOCK = ".lock"
TEMPORARY = ".difflm-tmp"  # the end of the names of files that are being written
LOCKED_BYTE = 1 << 30  # Windows locks bytes, which then cannot be read: one after the text


@contextmanager
def explain_write_errors(path: Path, option: str = "--out") -> Iterator[None]:
    """Raise an operating-system error of the block as a line that says what to do; `option` named the path."""
    try:
        yield
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}."
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            message = f"no permission to write {path}. Choose another place with {option}."
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            message = f"the disk is full: {path} was not written. Free some space and try again."
        raise DifflmError(message) from None


def check_place(path: Path, option: str = "--out") -> None:
    """Refuse a path that cannot be written, before any work; `option` named it."""
    if path.is_dir():
        raise UsageError(f"{path} is a directory. Give {option} the name of a file.")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file, so {path} cannot be in it. Choose another place with {option}.")
    if not os.access(folder, os.W_OK):
        raise DifflmError(f"no permission to write {path}. Choose another place with {option}.")


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory as `path`; rename it only when the block succeeds."""
    path = Path(os.path.realpath(path)) if path.is_symlink() else path  # the link stays, its target is written
    if path.is_dir():
        raise DifflmError(f"cannot write {path}: it is a directory. Choose another place with --out.")
    check_regular(path)
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            with temporary.open("rb+") as file:  # Windows synchronises only what may be written
                sync_file(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync_file(handle: int) -> None:
    """Make what was written outlive a power cut. On macOS `fsync` leaves it in the disk's own buffer."""
    if is_on("full_sync"):
        with suppress(OSError, ImportError, AttributeError):  # a file system that cannot, or a system without it
            import fcntl

            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined]
            return
    os.fsync(handle)


def sync_directory(directory: Path) -> None:
    """Make a rename in a directory outlive a power cut, where the platform can."""
    with suppress(OSError):  # Windows opens no directories
        handle = os.open(directory, os.O_RDONLY)
        try:
            sync_file(handle)
        finally:
            os.close(handle)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write the whole file or nothing."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory against other processes, creating it if need be; raise an error if another one has locked it.

    The operating system releases the lock when its process ends, however it ends, so a killed process leaves no lock.
    The lock file only names the holder. Directories that were created here and are still empty are removed."""
    created = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    with explain_write_errors(directory):
        handle = _acquire_lock(directory)
    for folder in created:
        sync_directory(folder.parent)
    try:
        for left in directory.glob(f".*{TEMPORARY}"):  # by a process that was killed while it wrote
            with suppress(OSError):
                left.unlink()
        yield
    finally:
        with suppress(PermissionError):  # Windows removes no open file; what counts is the lock, not the file
            (directory / LOCK).unlink(missing_ok=True)  # before it is released: the next holder creates its own
        os.close(handle)
        with suppress(OSError):  # not empty
            for folder in created:
                folder.rmdir()


def _acquire_lock(directory: Path) -> int:
    """Lock the lock file of a directory, and return its open handle, which is the lock."""
    path = directory / LOCK
    missing = 0
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the last holder has just removed the directory, or it cannot be created (/proc)
            missing += 1
            if missing == 100:
                raise
            continue
        try:
            if not try_lock(handle):
                holder = os.read(handle, 1000).decode(errors="replace") or "another process"
                raise DifflmError(
                    f"{directory} is in use: {holder} is writing there. Wait until it ends, or choose another --out."
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    return handle
            os.close(handle)  # the last holder has removed this file: other processes would lock a new one
        except BaseException:
            os.close(handle)
            raise


def try_lock(handle: int) -> bool:
    """Whether the file could be locked; on a file system without locks it counts as locked."""
    try:
        if is_on("posix"):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif msvcrt:
            os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            os.lseek(handle, 0, os.SEEK_SET)
    except (BlockingIOError, PermissionError):
        os.lseek(handle, 0, os.SEEK_SET)
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
    return True


def check_regular(path: Path) -> None:
    """Refuse a named pipe or a device, which may never answer or never end. The pipe of a shell's `<(command)` has no
    name, and is fine."""
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file() and not real.is_dir():
        raise DifflmError(f"{path} is not a regular file but a pipe or a device.")


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    check_regular(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DifflmError(f"{path} does not exist.") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a number of 5,000 digits
        raise DifflmError(f"{path} is not a readable JSON file ({error}).") from None


def append_line(path: Path, line: str) -> None:
    """Append a whole line or nothing: a line that a full disk cuts off is removed again."""
    data = f"{line}\n".encode()
    with explain_write_errors(path), path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise


def parse_record(line: str) -> dict[str, Any]:
    """Parse a line of a log; {} where a crash truncated it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
