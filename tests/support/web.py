"""A web server of a test's own, which breaks, stalls and lies where it is told to."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from difflm.data.catalogue import Corpus


@dataclass
class Page:
    """A file as a server gives it away, with the server's faults."""

    data: bytes
    cut: int | None = None  # bytes of the body after which the connection breaks
    stall: bool = False  # … or stalls
    length: bool = True
    claimed: int | None = None  # Content-Length that is not true
    chunked: bool = False
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Web"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.close_connection = True
        self.server.asked.append((self.path, self.headers))
        page = self.server.pages.get(self.path, Page(b"", status=404))
        self.send_response(page.status)
        for name, value in self.facts(page).items():
            self.send_header(name, value)
        self.end_headers()
        self.send(page, page.data)

    def facts(self, page: Page) -> dict[str, str]:
        found = {"Connection": "close"}
        if page.chunked:
            found["Transfer-Encoding"] = "chunked"
        elif page.length:
            found["Content-Length"] = str(len(page.data) if page.claimed is None else page.claimed)
        return found | page.headers

    def send(self, page: Page, body: bytes) -> None:
        whole = page.cut is None or page.cut >= len(body)
        body = body[: page.cut]
        if page.chunked:
            body = (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if whole else b"")
        self.wfile.write(body)
        self.wfile.flush()
        if page.stall:
            self.server.over.wait(10)


class Web(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages: dict[str, Page] = {}
        self.asked: list[tuple[str, Message]] = []
        self.over = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves early is no news."""

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"{self.base}/file"

    def give(self, page: Page, path: str = "/file") -> str:
        self.pages[path] = page
        return self.base + path


@pytest.fixture
def web(serving: Web) -> Web:
    serving.pages, serving.asked = {}, []
    return serving


@pytest.fixture(scope="module")
def serving() -> Iterator[Web]:
    with pytest.MonkeyPatch.context() as patch, Web() as server:
        patch.setenv("no_proxy", "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def served(corpus: Corpus, base: str) -> Corpus:
    """The corpus on another server, at the same paths."""
    moved = [one.model_copy(update={"url": base + urlsplit(one.url).path}) for one in corpus.downloads]
    return corpus.model_copy(update={"downloads": tuple(moved)})
