"""Uvicorn around the application: connections that stall are let go, Ctrl-C ends at once."""

import asyncio
import socket
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from difflm.app.studio.app import build_app
from difflm.app.studio.engine import Engine
from difflm.app.studio.limits import Limits
from difflm.app.studio.served import Served
from difflm.errors import UsageError

HEADER_SECONDS = 10.0  # to say what is asked
LOOPBACK, EVERYWHERE = ("localhost", "127.0.0.1", "::1"), ("0.0.0.0", "::")


def patient(limits: Limits) -> type[H11Protocol]:
    """Connections that wait for a slow client, but not for ever."""

    class Patient(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.stalled: asyncio.TimerHandle | None = None
            self.silent: asyncio.TimerHandle | None = self.loop.call_later(HEADER_SECONDS, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self.resumed()
            self.asked()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self.asked()
            elif self.silent is None:  # the beginning of another request
                self.silent = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self.stalled = self.loop.call_later(limits.stall_seconds, self.transport.abort)  # if it cannot end

        def asked(self) -> None:
            if self.silent:
                self.silent.cancel()
            self.silent = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self.stalled = self.loop.call_later(limits.stall_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            self.resumed()
            super().resume_writing()

        def resumed(self) -> None:
            if self.stalled:
                self.stalled.cancel()
            self.stalled = None

    return Patient


class Server(uvicorn.Server):
    """Tells those who wait that it ends before it waits for them to go."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        with suppress(RuntimeError):
            asyncio.get_running_loop().call_soon_threadsafe(self.engine.stop)


def listen(host: str, port: int) -> socket.socket:
    """A socket of our own, so that a port in use is told in a line, and port 0 is any free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port} ({error.strerror}). Choose another --port.") from None
    return listening


def names(host: str) -> tuple[str, ...]:
    """Host names that lead to this server; addresses always do."""
    own = () if host in LOOPBACK else (socket.gethostname(), f"{socket.gethostname()}.local")
    return ("localhost", host, *own)


def make_server(served: Served, limits: Limits, token: str | None, host: str = "127.0.0.1") -> Server:
    engine = Engine(served.lm, limits)
    config = uvicorn.Config(
        build_app(served, engine, token, names(host)),
        http=patient(limits),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
    )
    return Server(config, engine)


def serve(served: Served, host: str, port: int, token: str | None, ready: Callable[[str], None], browse: bool) -> None:
    """Until Ctrl-C."""
    listening = listen(host, port)
    shown = "localhost" if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listening.getsockname()[1]}"
    server = make_server(served, Limits(), token, host)
    ready(url)
    if browse:  # the socket listens already: a page that comes early waits
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    with suppress(KeyboardInterrupt):
        server.run([listening])
