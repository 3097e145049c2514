"""Files from the web: whole under their name or not at all, and a broken download goes on where it stopped."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http.client import HTTPException, responses
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from difflm.data.catalogue import Corpus, Download, Kept
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import explain_os_error, replace_atomically, write_atomic

try:
    import fcntl
except ImportError:  # Windows: there nobody watches over two fetches of one file
    fcntl = None  # type: ignore[assignment]

CHUNK = 1 << 16
TIMEOUT = 30.0  # seconds without a byte

Tell = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all


class Damaged(DifflmError):
    """What came is not what was asked for; trying to go on with it is of no use."""


def silent(what: str, done: int, total: int | None) -> None:
    pass


# -- a corpus ---------------------------------------------------------------------------------------------------------


def fetch_corpus(
    corpus: Corpus, out: Path, base: str | None = None, timeout: float = TIMEOUT, tell: Tell = silent
) -> list[Path]:
    """Bring a corpus to `out`/name and make what difflm reads of it. `base` is another server with the same paths."""
    if not corpus.downloads:
        raise UsageError(f"{corpus.name} cannot be fetched: {corpus.obtain}")
    folder = out / corpus.name
    for download in corpus.downloads:
        _bring(download, folder, base, timeout, tell)
    made = corpus.convert(folder) if corpus.convert else []
    return [*(folder / kept.file for kept in corpus.kept), *made]


def _bring(download: Download, folder: Path, base: str | None, timeout: float, tell: Tell) -> None:
    if all(is_whole(folder / kept.file, kept.size, kept.sha256) for kept in download.kept):
        return
    url = download.address(base)
    if not download.is_archive:
        [kept] = download.kept
        fetch_file(url, folder / kept.file, kept.size, kept.sha256, timeout, tell)
        return
    archive = folder / urlsplit(url).path.rpartition("/")[2]
    if not archive.is_file():  # it stays where the disk was too full to unpack it
        fetch_file(url, archive, None, None, timeout, tell)
    try:
        for kept in download.kept:
            _unpack(archive, kept, folder / kept.file)
    except Damaged:
        archive.unlink()
        raise
    archive.unlink()


def _unpack(archive: Path, kept: Kept, target: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as packed:
            names = [name for name in packed.namelist() if name.rpartition("/")[2] == kept.inside]
            if not names:
                raise Damaged(f"{archive.name} holds no {kept.inside}. It holds: {', '.join(packed.namelist()[:8])}.")
            if kept.size not in (None, packed.getinfo(names[0]).file_size):
                raise Damaged(f"{names[0]} in {archive.name} is not {kept.size:,} bytes long: refused.")
            with replace_atomically(target) as temporary:
                with packed.open(names[0]) as source, temporary.open("wb") as file:
                    shutil.copyfileobj(source, file)
                _check(temporary, target, kept.size, kept.sha256)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: locked or packed oddly
        raise Damaged(f"{archive.name} is not a whole zip archive ({error}). Fetch it again.") from None


# -- is it whole ------------------------------------------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_whole(path: Path, size: int | None, sha256: str | None) -> bool:
    """Whether the file is there and is what is known of it."""
    return path.is_file() and size in (None, path.stat().st_size) and (sha256 is None or sha256_of(path) == sha256)


def _check(path: Path, target: Path, size: int | None, sha256: str | None) -> None:
    if not is_whole(path, size, None):
        raise Damaged(f"{target.name} came with {path.stat().st_size:,} bytes, not {size:,}: refused.")
    if sha256 is not None and (found := sha256_of(path)) != sha256:
        raise Damaged(f"{target.name} has the wrong checksum: refused.\nsha256 {found}, expected {sha256}.")


# -- one file ---------------------------------------------------------------------------------------------------------


def fetch_file(
    url: str,
    target: Path,
    size: int | None = None,
    sha256: str | None = None,
    timeout: float = TIMEOUT,
    tell: Tell = silent,
) -> None:
    """Bring `url` to `target`, through a file beside it that stays for the next try where the connection breaks."""
    _check_address(url)
    with Part(target) as part:
        if not part.is_complete(url):
            _receive(url, part, size, sha256, timeout, tell)
        try:
            _check(part.path, target, size, sha256)
        except Damaged:
            part.clear()  # more of the same would not mend it
            raise
        part.finish()


@dataclass(frozen=True)
class Source:
    """What the server said of the file that a part belongs to."""

    url: str
    validator: str  # a strong ETag or a date: the server's word for "still the same file"
    total: int | None


class Part:
    """What has come of a file so far, beside its final name."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.part")
        self.about = target.with_name(f"{target.name}.part.json")

    def __enter__(self) -> "Part":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.target.is_dir():
                raise DifflmError(f"{self.target} is a directory. Choose another place with --out.")
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise explain_os_error(error, self.target) from None
        try:
            self._claim()
        except BaseException:
            self._file.close()
            raise
        return self

    def _claim(self) -> None:
        """Two that append to one part would spoil it."""
        try:
            if fcntl:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())  # else it was just renamed
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise DifflmError(f"another command is fetching {self.target}. Wait for it, then try again.")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.closed and not self.length:
            self.path.unlink(missing_ok=True)
            self.about.unlink(missing_ok=True)
        self._file.close()

    @property
    def length(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def source(self, url: str) -> Source | None:
        """Where to go on from; None where the download begins anew."""
        if not self.length:
            return None
        try:
            source = Source(**json.loads(self.about.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        told = isinstance(source.validator, str) and source.validator.isprintable() and source.validator
        return source if told and source.url == url else None

    def is_complete(self, url: str) -> bool:
        source = self.source(url)
        return source is not None and source.total == self.length

    def clear(self) -> None:
        self._file.truncate(0)

    def begin(self, source: Source) -> None:
        self.clear()
        write_atomic(self.about, json.dumps(asdict(source)))

    def write(self, block: bytes) -> None:
        left = memoryview(block)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise explain_os_error(error, self.target) from None

    def finish(self) -> None:
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            self.path.replace(self.target)
            self.about.unlink(missing_ok=True)
        except OSError as error:
            raise explain_os_error(error, self.target) from None


def _receive(url: str, part: Part, size: int | None, sha256: str | None, timeout: float, tell: Tell) -> None:
    source = part.source(url)
    answer = _ask(url, source, part.length, timeout)
    if source and answer.status != 200 and not _continues(answer, source, part.length):
        answer.close()
        source, answer = None, _ask(url, None, 0, timeout)
    with contextlib.closing(answer):
        if source and answer.status == 206:
            total: int | None = _range(answer)[2]
        else:  # a first try, a server that knows no ranges, or a file that changed
            total = _stated_length(url, answer, size, sha256)
            part.begin(Source(url, _validator(answer), total))
        _copy(url, part, answer, total, size, timeout, tell)


def _ask(url: str, source: Source | None, length: int, timeout: float) -> Any:
    """The server's answer: 200, or what it says to a request for the rest of the file."""
    headers = {"User-Agent": "difflm", "Accept-Encoding": "identity"}
    if source:
        headers |= {"Range": f"bytes={length}-", "If-Range": source.validator}
    try:
        answer = build_opener(_Redirects).open(Request(url, headers=headers), timeout=timeout)
    except HTTPError as error:
        if source and error.code == 416:
            return error
        error.close()
        meaning = responses.get(error.code, "unknown")
        raise DifflmError(f"{url} answered {error.code} ({meaning}). {_ADVICE.get(error.code, _LATER)}") from None
    except (OSError, HTTPException) as error:
        raise DifflmError(f"{_trouble(error, url, timeout)}. Run the same command again to try once more.") from None
    if answer.status != 200 and not source:
        answer.close()
        raise DifflmError(f"{url} answered {answer.status}, not with a file. {_LATER}")
    return answer


_LATER = "Try again later."
_ADVICE = {
    401: "It asks for a login: see its home in `difflm data list`.",
    403: "It may ask for a login: see its home in `difflm data list`.",
    404: "The file may have moved: see its home in `difflm data list`.",
    410: "The file is gone: see its home in `difflm data list`.",
}


class _Redirects(HTTPRedirectHandler):
    """Follows to http and https only, and never from https to http, where anybody could change the file."""

    def http_error_302(self, req: Request, fp: Any, code: int, msg: str, headers: Any) -> Any:
        target = urljoin(req.full_url, headers.get("Location") or headers.get("URI") or "")
        if not _is_web(target) or (req.type == "https" and urlsplit(target).scheme != "https"):
            fp.close()
            raise DifflmError(f"{req.full_url} leads on to {target!r}, which is not followed: refused.")
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _is_web(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _check_address(url: str) -> None:
    if not _is_web(url):
        raise UsageError(f"only http and https addresses are fetched, not {url!r}.")


def _validator(answer: Any) -> str:
    """A word by which the server knows this very file again; weak ETags promise less than equal bytes."""
    tag: str = answer.headers.get("ETag", "")
    return tag if tag.startswith('"') else answer.headers.get("Last-Modified", "")


def _range(answer: Any) -> tuple[int, int, int]:
    """First byte, last byte and length of the whole, as the answer states them; −1 where it does not."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", "").strip())
    return (int(found[1]), int(found[2]), int(found[3])) if found else (-1, -1, -1)


def _continues(answer: Any, source: Source, length: int) -> bool:
    """Whether the answer is the rest of the same file, from `length` to its end."""
    if answer.status != 206 or _encoded(answer):
        return False
    first, last, total = _range(answer)
    tag = answer.headers.get("ETag")
    same = source.total in (None, total) and (tag == source.validator or not (tag and source.validator.startswith('"')))
    return same and (first, last) == (length, total - 1) and answer.length in (None, total - length)


def _encoded(answer: Any) -> bool:
    return answer.headers.get("Content-Encoding", "identity").lower() not in ("", "identity")


def _stated_length(url: str, answer: Any, size: int | None, sha256: str | None) -> int | None:
    """The length of the whole file; None where it comes in chunks, whose end is marked."""
    if _encoded(answer) or answer.headers.get_content_type() == "text/html":
        raise DifflmError(f"{url} answered with a web page or a packed stream, not with the file. {_LATER}")
    total: int | None = answer.length
    if size is not None and total not in (None, size):
        raise DifflmError(f"{url} is {total:,} bytes long, not {size:,}: another file is there now. Refused.")
    if total is None and not answer.chunked and size is None and sha256 is None:
        raise DifflmError(f"{url} does not say how long it is, so a part could not be told from the whole. {_LATER}")
    return total


def _copy(url: str, part: Part, answer: Any, total: int | None, size: int | None, timeout: float, tell: Tell) -> None:
    """Append what comes. Without a stated length one byte more than `size` is asked for, to see that there is none."""
    expected = size if total is None else total
    limit = total if total is not None or size is None else size + 1
    trouble = f"the connection to {urlsplit(url).hostname} broke"
    length = part.length
    tell(part.target.name, length, expected)
    try:
        # `read1` gives what is there at once, so that nothing that came is lost when the connection stalls.
        while block := answer.read1(CHUNK if limit is None else min(CHUNK, limit - length)):
            part.write(block)
            length += len(block)
            tell(part.target.name, length, expected)
        if expected is None or length >= expected:
            return
    except (OSError, HTTPException) as error:
        trouble = _trouble(error, url, timeout)
    of = "" if expected is None else f" of {expected:,}"
    hope = "go on from there" if part.source(url) else "start anew (its server cannot go on)"
    raise DifflmError(f"{trouble} after {length:,}{of} bytes.\nRun the same command again to {hope}.")


def _trouble(error: BaseException, url: str, timeout: float) -> str:
    host = urlsplit(url).hostname
    if isinstance(error, URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    if isinstance(error, TimeoutError):
        return f"{host} sent nothing for {timeout:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {host} cannot be verified ({error.verify_message})"
    if isinstance(error, socket.gaierror):
        return f"{host} cannot be found: this machine may be offline"
    if isinstance(error, ConnectionRefusedError):
        return f"{host} refuses the connection"
    return f"the connection to {host} broke"
