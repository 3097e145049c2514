"""The uvicorn server. It closes stalled connections, limits their number, refuses ambiguous requests, finishes its
requests after SIGTERM, and stops immediately on Ctrl-C."""

import asyncio
import json
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from difflm.app.studio.app import build_app
from difflm.app.studio.engine import Engine
from difflm.app.studio.guard import Guard, error_object
from difflm.app.studio.limits import Limits
from difflm.app.studio.log import log_event, use_json_logs
from difflm.app.studio.served import Models, Served
from difflm.errors import UsageError
from difflm.machine import is_on

HEADER_SECONDS = 10.0  # for a client to send the headers of a request
CLOSE_SECONDS = 3  # for connections to close when the server stops
MOST_PIECES = 1_000  # of a body: a piece of one byte takes as long to parse as one of thousands
LOOPBACK, EVERYWHERE = ("localhost", "127.0.0.1", "::1"), ("0.0.0.0", "::")


def refusal(status: str, message: str, kind: str, *headers: str) -> bytes:
    """A whole response, before any part of the application is reached."""
    body = json.dumps(error_object(message, kind))
    about = ["content-type: application/json", f"content-length: {len(body)}", "connection: close"]
    return "\r\n".join([f"HTTP/1.1 {status}", *about, *headers, "", body]).encode()


CROWDED = refusal("503 Service Unavailable", "too many connections. Try again later.", "busy", "retry-after: 1")
NOT_HTTP = f"this is not a valid HTTP request with one length and at most {MOST_PIECES:,} pieces."
INVALID = refusal("400 Bad Request", NOT_HTTP, "invalid_request")


class StrictConnection(h11.Connection):
    """Parses requests, and refuses two kinds that h11 accepts: a length told in two ways, of which a proxy might
    believe the other one, and a body in very many pieces."""

    pieces = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.pieces = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        self.pieces += isinstance(event, h11.Data)
        if self.pieces > MOST_PIECES:
            raise h11.RemoteProtocolError("too many pieces")
        return event


def stall_limited_protocol(limits: Limits) -> type[H11Protocol]:
    """Make a protocol that waits for a slow client, but only for a limited time."""

    class StallLimitedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.conn = StrictConnection(h11.SERVER)
            self.since = self.loop.time()  # when the client could begin to send its request
            self.header = self.stall = self.abort_after(HEADER_SECONDS)
            if not self.make_room():
                log_event("refused", connections=len(self.connections))
                transport.write(CROWDED)
                transport.close()

        def abort_after(self, seconds: float) -> asyncio.TimerHandle:
            return self.loop.call_later(seconds, self.transport.abort)

        def make_room(self) -> bool:
            """Whether there is room for one more connection, if need be by closing the one whose request has been
            awaited for the longest time."""
            every: Iterable[Any] = self.connections  # all of this class
            there = [one for one in every if not one.transport.is_closing()]
            awaited = [one for one in there if one.conn.their_state in (h11.IDLE, h11.SEND_BODY)]
            slowest = min(awaited, key=lambda one: one.since)
            if len(there) > limits.connections and slowest is not self:
                slowest.transport.abort()
            return len(there) <= limits.connections or slowest is not self

        def send_400_response(self, msg: str) -> None:
            """Answer bytes that are not a request, unless an answer is already under way."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.write(INVALID)
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self.header.cancel()
            self.stall.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self.header.cancel()
            elif self.header.cancelled():  # the beginning of the next request
                self.header = self.abort_after(HEADER_SECONDS)

        def on_response_complete(self) -> None:
            if self.conn.their_state is h11.SEND_BODY:  # nobody wants the rest of the body
                self.transport.close()
            self.since = self.loop.time()
            super().on_response_complete()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self.stall = self.abort_after(limits.stall_seconds)  # in case the connection does not close

        def pause_writing(self) -> None:
            super().pause_writing()
            self.stall = self.abort_after(limits.stall_seconds)

        def resume_writing(self) -> None:
            self.stall.cancel()
            super().resume_writing()

    return StallLimitedProtocol


class Server(uvicorn.Server):
    """A server that ends open streams before it waits for its clients to disconnect: immediately on Ctrl-C; after
    SIGTERM, when all requests are finished or their time is up."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        draining = sig == signal.SIGTERM and not self.should_exit
        seconds = self.engine.limits.drain_seconds if draining else 0
        self.config.timeout_graceful_shutdown = int(seconds) + CLOSE_SECONDS
        super().handle_exit(sig, frame)
        with suppress(RuntimeError):
            loop = asyncio.get_running_loop()
            loop.call_soon_threadsafe(self.engine.drain)
            loop.call_soon_threadsafe(loop.call_later, seconds, self.engine.stop)


def listen(host: str, port: int) -> socket.socket:
    """Open the socket here, so that a port in use gives a one-line error, and port 0 means any free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio turns off Nagle's algorithm if the protocol is named, which not every system does. With it, an answer
        # over a kept connection takes 40 ms longer: its body waits until the client has acknowledged its head.
        listening = socket.socket(family, kind, socket.IPPROTO_TCP)
        # On Windows, the usual option would let two servers share a port.
        option = "SO_EXCLUSIVEADDRUSE" if is_on("exclusive_ports") else "SO_REUSEADDR"
        listening.setsockopt(socket.SOL_SOCKET, getattr(socket, option, socket.SO_REUSEADDR), 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port} ({error.strerror}). Choose another --port.") from None
    return listening


def make_server(
    served: Sequence[Served],
    limits: Limits,
    token: str | None,
    host: str = "127.0.0.1",
    log_requests: bool = False,
    cors: Collection[str] = (),
) -> Server:
    serving = Models(served)
    engine = Engine(serving.first.lm, limits)
    own = [] if host in LOOPBACK else [socket.gethostname(), f"{socket.gethostname()}.local"]
    hosts = {name.lower() for name in ("localhost", host, *own)}
    app = build_app(serving, engine, token)
    config = uvicorn.Config(
        Guard(app, limits, token, hosts, log_requests, {origin.lower() for origin in cors}, engine.metrics),
        http=stall_limited_protocol(limits),
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    use_json_logs()
    return Server(config, engine)


def serve(server: Server, listening: socket.socket, host: str, ready: Callable[[str], None], browse: bool) -> None:
    """Serve until Ctrl-C."""
    shown = "localhost" if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listening.getsockname()[1]}"
    ready(url)
    if browse:  # the socket is already open: an early request waits
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    with suppress(KeyboardInterrupt):
        server.run([listening])
