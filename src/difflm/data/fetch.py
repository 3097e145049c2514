"""Download the public corpora: a file is complete and checked, or it does not exist."""

import ipaddress
import shutil
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from http.client import responses
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import requests

from difflm.data.catalogue import CONVERSIONS, Corpus, CorpusFile, Download
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import replace_atomically, sha256_of

CHUNK = 1 << 16
TIMEOUT = 30.0  # seconds without a byte
MOST_BYTES = 2 << 30  # of a file or an archive of unknown size, and of what an archive holds
HEADERS = {"User-Agent": "difflm", "Accept-Encoding": "identity"}
ADVICE = {
    401: "It asks for a login: see its home in `difflm data list`.",
    403: "It may ask for a login: see its home in `difflm data list`.",
    404: "The file may have moved: see its home in `difflm data list`.",
    410: "The file is gone: see its home in `difflm data list`.",
}
LATER = "Try again later."
NETWORK_ERRORS = {  # by the class of urllib3's error
    "ReadTimeoutError": "{host} sent nothing for {timeout:g} s",
    "ConnectTimeoutError": "{host} did not answer within {timeout:g} s",
    "NameResolutionError": "{host} cannot be found: this machine may be offline",
    "NewConnectionError": "{host} refuses the connection",
    "SSLError": "the certificate of {host} cannot be verified",
}

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all


def fetch_corpus(corpus: Corpus, out: Path, progress: Progress = lambda *_: None) -> list[Path]:
    """Fetch a corpus into `out`/name and convert it to what difflm reads."""
    if not corpus.downloads:
        raise UsageError(f"{corpus.name} cannot be fetched: {corpus.obtain}")
    folder = out / corpus.name
    for download in corpus.downloads:
        if not all(is_complete(folder / one.file, one) for one in download.files):
            fetch_download(download, folder, progress)
    made = CONVERSIONS[corpus.convert](folder) if corpus.convert else []
    return [*(folder / one.file for one in corpus.files), *made]


def fetch_download(download: Download, folder: Path, progress: Progress) -> None:
    if not any(one.inside for one in download.files):
        [one] = download.files
        fetch_file(download.url, folder / one.file, one.size, one.sha256, progress=progress, most=MOST_BYTES)
        return
    archive = folder / urlsplit(download.url).path.rpartition("/")[2]
    try:
        fetch_file(download.url, archive, progress=progress, most=MOST_BYTES)
        for one in download.files:
            unpack_file(archive, one, folder / one.file)
    finally:
        archive.unlink(missing_ok=True)


def unpack_file(archive: Path, one: CorpusFile, target: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as packed:
            found = next((name for name in packed.namelist() if name.rpartition("/")[2] == one.inside), None)
            if found is None:
                listed = ", ".join(packed.namelist()[:8])
                raise DifflmError(f"{archive.name} holds no {one.inside}. It holds: {listed}.")
            size = packed.getinfo(found).file_size  # reading ends there, whatever is packed
            if one.size not in (None, size):
                raise DifflmError(f"{found} in {archive.name} is not {one.size:,} bytes long: refused.")
            if size > MOST_BYTES:
                raise DifflmError(f"{found} in {archive.name} has {size:,} bytes, more than {MOST_BYTES:,}: refused.")
            with replace_atomically(target) as temporary:
                with packed.open(found) as source, temporary.open("wb") as file:
                    shutil.copyfileobj(source, file)
                check_file(temporary, target.name, one.size, one.sha256)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: encrypted
        raise DifflmError(f"{archive.name} is not a complete zip archive ({error}). Fetch it again.") from None


def is_complete(path: Path, one: CorpusFile) -> bool:
    """Whether the file exists and matches what is known about it."""
    same_size = path.is_file() and one.size in (None, path.stat().st_size)
    return same_size and one.sha256 in (None, sha256_of(path))


def check_file(path: Path, name: str, size: int | None, sha256: str | None) -> None:
    if size not in (None, path.stat().st_size):
        raise DifflmError(f"{name} has {path.stat().st_size:,} bytes, not {size:,}: refused.")
    if sha256 is not None and (found := sha256_of(path)) != sha256:
        raise DifflmError(f"{name} has the wrong checksum: refused.\nsha256 {found}, expected {sha256}.")


def fetch_file(
    url: str,
    target: Path,
    size: int | None = None,
    sha256: str | None = None,
    timeout: float = TIMEOUT,
    progress: Progress = lambda *_: None,
    most: int | None = None,
) -> None:
    """Download `url` to a temporary file, check it, and rename it to `target`. It has at most `most` bytes."""
    if not is_safe_address(url):
        raise UsageError(f"only https addresses are fetched, not {url!r}: others could change a file on its way.")
    if target.is_dir():
        raise DifflmError(f"{target} is a directory. Choose another place with --out.")
    done, total = 0, None
    with replace_atomically(target) as temporary:
        try:
            hooks = {"response": check_redirect}
            answer = requests.get(url, headers=HEADERS, timeout=timeout, stream=True, hooks=hooks)
            with answer, temporary.open("wb") as file:
                total = check_answer(url, answer, size, sha256)
                progress(target.name, 0, total)
                for block in answer.iter_content(CHUNK):
                    done += len(block)
                    if most is not None and max(done, total or 0) > most:
                        raise DifflmError(f"{url} is longer than {most:,} bytes: refused.")
                    if total is not None and done > total:  # a body without a length might never end
                        raise DifflmError(f"{url} is longer than {total:,} bytes: the file there has changed. Refused.")
                    file.write(block)
                    progress(target.name, done, total)
        except requests.TooManyRedirects:
            raise DifflmError(f"{url} redirects in a circle. {LATER}") from None
        except requests.RequestException as error:
            of = "" if total is None else f" of {total:,}"
            cause = error.args[0] if error.args else error
            kind = type(vars(cause).get("reason", cause)).__name__
            explain = NETWORK_ERRORS.get(kind, "the connection to {host} broke")
            trouble = f"{explain.format(host=urlsplit(url).hostname, timeout=timeout)} after {done:,}{of} bytes"
            raise DifflmError(f"{trouble}. Run the same command again to start over.") from None
        check_file(temporary, target.name, size, sha256)


def is_safe_address(url: str) -> bool:
    """Whether downloads from there cannot be tampered with: https, or a server on this machine."""
    parts = urlsplit(url)
    if parts.scheme == "http":
        with suppress(ValueError):  # a name, which may point anywhere
            return ipaddress.ip_address(parts.hostname or "").is_loopback
    return parts.scheme == "https" and bool(parts.hostname)


def check_redirect(answer: requests.Response, *args: object, **kwargs: object) -> None:
    """Follow redirects to safe addresses only, and from https to https only."""
    if answer.is_redirect:
        target = urljoin(answer.url, answer.headers["Location"])
        if not is_safe_address(target) or (answer.url.startswith("https:") and not target.startswith("https:")):
            raise DifflmError(f"{answer.url} redirects to {target!r}, which is not followed: refused.")


def check_answer(url: str, answer: requests.Response, size: int | None, sha256: str | None) -> int | None:
    """Reject responses that cannot be the file; return its length, or None if the body is chunked."""
    code, headers = answer.status_code, answer.headers
    if code != 200:
        meaning = responses.get(code, "unknown")
        raise DifflmError(f"{url} answered {code} ({meaning}). {ADVICE.get(code, LATER)}")
    encoded = headers.get("Content-Encoding", "identity").lower() not in ("", "identity")
    if encoded or headers.get("Content-Type", "").lower().startswith("text/html"):
        raise DifflmError(f"{url} answered with a web page or a packed stream, not with the file. {LATER}")
    stated = headers.get("Content-Length", "")
    total = int(stated) if stated.isdigit() else size
    if size not in (None, total):
        raise DifflmError(f"{url} is {total:,} bytes long, not {size:,}: the file there has changed. Refused.")
    if total is None and sha256 is None and headers.get("Transfer-Encoding", "").lower() != "chunked":
        raise DifflmError(f"{url} does not state its length, so an incomplete download could not be detected. {LATER}")
    return total
