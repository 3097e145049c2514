"""The uvicorn server: it closes connections that stall, and Ctrl-C ends it at once."""

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

HEADER_SECONDS = 10.0  # to send the headers of a request
LOOPBACK, EVERYWHERE = ("localhost", "127.0.0.1", "::1"), ("0.0.0.0", "::")


def stall_limited_protocol(limits: Limits) -> type[H11Protocol]:
    """Make a protocol that waits for a slow client, but not for ever."""

    class StallLimitedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.timers: dict[str, asyncio.TimerHandle] = {}
            self.start_timer("header", HEADER_SECONDS)

        def start_timer(self, name: str, seconds: float) -> None:
            self.timers[name] = self.loop.call_later(seconds, self.transport.abort)

        def cancel_timer(self, name: str) -> None:
            if timer := self.timers.pop(name, None):
                timer.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            for name in list(self.timers):
                self.cancel_timer(name)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self.cancel_timer("header")
            elif "header" not in self.timers:  # the beginning of another request
                self.start_timer("header", HEADER_SECONDS)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self.start_timer("stall", limits.stall_seconds)  # if it cannot end

        def pause_writing(self) -> None:
            super().pause_writing()
            self.start_timer("stall", limits.stall_seconds)

        def resume_writing(self) -> None:
            self.cancel_timer("stall")
            super().resume_writing()

    return StallLimitedProtocol


class Server(uvicorn.Server):
    """A server that ends open streams before it waits for its clients to disconnect."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        with suppress(RuntimeError):
            asyncio.get_running_loop().call_soon_threadsafe(self.engine.stop)


def listen(host: str, port: int) -> socket.socket:
    """Open our own socket, so that a port in use is one line of error, and port 0 is any free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port} ({error.strerror}). Choose another --port.") from None
    return listening


def make_server(served: Served, limits: Limits, token: str | None, host: str = "127.0.0.1") -> Server:
    engine = Engine(served.lm, limits)
    own = () if host in LOOPBACK else (socket.gethostname(), f"{socket.gethostname()}.local")
    config = uvicorn.Config(
        build_app(served, engine, token, ("localhost", host, *own)),
        http=stall_limited_protocol(limits),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
    )
    return Server(config, engine)


def serve(served: Served, host: str, port: int, token: str | None, ready: Callable[[str], None], browse: bool) -> None:
    """Serve until Ctrl-C."""
    listening = listen(host, port)
    shown = "localhost" if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listening.getsockname()[1]}"
    server = make_server(served, Limits(), token, host)
    ready(url)
    if browse:  # the socket is open already: an early request waits
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    with suppress(KeyboardInterrupt):
        server.run([listening])
