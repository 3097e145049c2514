"""Reading and writing files so that a reader never sees half of one."""

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from difflm.errors import DifflmError


def explain(error: OSError, path: Path) -> DifflmError:
    """An operating-system error as a line that says what to do."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DifflmError(f"no permission to write {path}. Choose another place with --out.")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DifflmError(f"the disk is full: {path} was not written. Free some space and try again.")
    return DifflmError(f"cannot write {path}: {error.strerror or error}.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it into place only when the block succeeds."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
    except OSError as error:
        raise explain(error, path) from None
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise explain(error, path) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write the whole file or nothing."""
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


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
        raise explain(error, path) from None
