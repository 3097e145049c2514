"""Atomic writes, directory locks, and file errors that say what to do."""

import errno
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from difflm.errors import DifflmError, UsageError
from difflm.machine import is_on

try:
    import msvcrt
except ImportError:  # everywhere else
    msvcrt = None  # type: ignore[assignment]

Json = dict[str, Any]  # an object of a JSON file
LOCK = ".lock"
FORMAT = 2  # of JSON files that hold a checksum of their contents
CHECKSUM = "checksum"
OF_WEIGHTS = ("sha256", "next_sha256")  # checksums of the file beside a JSON file; the second while it is replaced
MOST_JSON = 1 << 28  # bytes of a JSON file that is read at once: tokenizers have some ten million
AGAIN, INSTALL = "Copy or train it again.", "Install difflm again."  # what to do with a damaged file
TEMPORARY = ".difflm-tmp"  # the end of the names of files that are being written
_locks: dict[Path, int] = {}  # open handles of the lock files of directories that this process has locked
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


def check_place(path: Path, option: str = "--out", new_folder: bool = False) -> None:
    """Refuse a path that cannot be written, before any work; `option` named it. `new_folder`: whether directories are
    created for it."""
    if path.is_dir():
        raise UsageError(f"{path} is a directory. Give {option} the name of a file.")
    parents = path.absolute().parents
    folder = next(parent for parent in parents if parent.exists())
    if folder != parents[0] and not new_folder and folder.is_dir():
        raise UsageError(f"{path.parent} does not exist, so {path} cannot be in it. Make it, or give another {option}.")
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


def sync_path(path: Path) -> None:
    """Make the lines of a file outlive a power cut, and its name."""
    with explain_write_errors(path), path.open("rb+") as file:
        sync_file(file.fileno())
    sync_directory(path.parent)


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
        _locks[directory] = _acquire_lock(directory)
    for folder in created:
        sync_directory(folder.parent)
    try:
        for left in directory.glob(f".*{TEMPORARY}"):  # by a process that was killed while it wrote
            with suppress(OSError):
                left.unlink()
        yield
    finally:
        handle = _locks.pop(directory)
        with suppress(PermissionError):  # Windows removes no open file; what counts is the lock, not the file
            if _is_lock(directory, handle):
                (directory / LOCK).unlink(missing_ok=True)  # before it is released: the next holder creates its own
        os.close(handle)
        with suppress(OSError):  # not empty
            for folder in created:
                folder.rmdir()


def keep_lock(directory: Path) -> None:
    """Lock a directory again if somebody has removed its lock file; raise an error if another process has locked it in
    between."""
    if (handle := _locks.get(directory)) is not None and not _is_lock(directory, handle):
        with explain_write_errors(directory):
            _locks[directory] = _acquire_lock(directory)
        os.close(handle)


def _is_lock(directory: Path, handle: int) -> bool:
    """Whether an open file is the lock file of a directory, and not one that was removed."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), (directory / LOCK).stat())
    return False


def _acquire_lock(directory: Path) -> int:
    """Lock the lock file of a directory, and return its open handle, which is the lock."""
    path = directory / LOCK
    missing = 0
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except (FileNotFoundError, FileExistsError):  # the last holder removes it, or it cannot be made (/proc)
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
            if _is_lock(directory, handle):
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


def refuse_links(directory: Path, names: Iterable[str]) -> None:
    """Refuse a directory in which some of the names that will be written are links: writing would follow them."""
    if found := [directory / name for name in names if (directory / name).is_symlink()]:
        raise UsageError(f"{found[0]} is a link, which writing there would follow. Remove it, or choose another --out.")


def check_regular(path: Path) -> None:
    """Refuse a named pipe or a device, which may never answer or never end. The pipe of a shell's `<(command)` has no
    name, and is fine."""
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file() and not real.is_dir():
        raise DifflmError(f"{path} is not a regular file but a pipe or a device.")


def write_json(path: Path, value: object) -> None:
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    check_regular(path)
    try:
        if path.stat().st_size > MOST_JSON:
            raise ValueError(f"it has more than {MOST_JSON:,} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DifflmError(f"{path} does not exist.") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a number of 5,000 digits
        raise DifflmError(f"{path} is not a readable JSON file ({error}).") from None


def read_own_table(name: str, beside: str) -> Any:
    """A YAML file of the package `beside` a module. libyaml reads it thirty times as fast as Python alone."""
    import yaml

    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    return yaml.load(Path(beside).with_name(name).read_text(encoding="utf-8"), loader)


def write_checked(path: Path, value: Mapping[str, object]) -> None:
    """Write a JSON object with its format and a checksum of its contents, which `read_checked` compares."""
    whole = json.loads(json.dumps({**value, "format": FORMAT}))
    write_json(path, {"format": FORMAT, **whole, CHECKSUM: hash_json(whole)})


def read_checked(path: Path, advice: str = AGAIN) -> Any:
    """Read a JSON file without its checksum; a wrong or missing one is refused. Files of earlier versions (format 1, or
    none) have no checksum and are not checked, nor are those whose checksum somebody has set to null."""
    value = read_json(path)
    if isinstance(value, dict) and (CHECKSUM in value or value.get("format") == FORMAT):
        found = value.pop(CHECKSUM, "")
        if found is not None and found != hash_json(value):
            own = f"If you changed it yourself, set its {CHECKSUM} to null."
            raise DifflmError(f"{path} is damaged: its checksum is wrong. {advice} {own}")
    return value


def hash_json(value: Mapping[str, object]) -> str:
    """SHA-256 of the contents of a JSON object, whatever the order of its keys and its white space."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_sha256(path: Path, config: Mapping[str, Any], advice: str = AGAIN) -> None:
    """Refuse a file that is not the one its JSON file was written for; those of earlier versions have no checksum."""
    known = [config[key] for key in OF_WEIGHTS if key in config]
    if (known or config.get("format") == FORMAT) and sha256_of(path) not in known:
        raise DifflmError(f"{path} is damaged: its checksum is not the one that was saved with it. {advice}")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_ends(path: Path, size: int) -> bytes:
    """So many bytes of both ends of a file, by which it is recognised without reading all of it."""
    with path.open("rb") as file:
        start = file.read(size)
        file.seek(max(0, path.stat().st_size - size))
        return start + file.read(size)


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


def parse_record(line: str) -> Json:
    """Parse a line of a log; {} where a crash truncated it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
