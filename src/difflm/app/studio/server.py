"""The uvicorn server, and the checks before every request: the host name and origin, the token, and the size of the
body.

It closes stalled connections, limits their number, refuses ambiguous requests, finishes its requests after SIGTERM, and
stops immediately on Ctrl-C. Every page that the browser of this machine opens can reach it. Three things keep foreign
pages out: the name in `Host` (DNS rebinding sends another one), `Origin` (a page of another server), and the token,
where there is one.
"""

import asyncio
import hmac
import ipaddress
import json
import signal
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from difflm.app.studio.app import build_app
from difflm.app.studio.engine import Engine
from difflm.app.studio.limits import Limits
from difflm.app.studio.log import Metrics, log_event, use_json_logs
from difflm.app.studio.schemas import error_object, error_response
from difflm.app.studio.served import Models, Served
from difflm.errors import UsageError
from difflm.machine import is_on

HEADER_SECONDS = 10.0  # for a client to send the headers of a request
CLOSE_SECONDS = 3  # for connections to close when the server stops
MOST_PIECES = 1_000  # of a body: a piece of one byte takes as long to parse as one of thousands
PUBLIC = ("/", "/health", "/ready", "/docs", "/openapi.json")  # need no token: they reveal nothing and cost nothing
LOGGED = 200  # characters of a path in the log
CLIENT_CLOSED_REQUEST = 499  # the status in the log if the client has left before there was an answer
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
}

CORS = {
    b"access-control-allow-methods": b"GET, POST",
    b"access-control-allow-headers": b"authorization, content-type",
    b"access-control-expose-headers": b"retry-after",
    b"access-control-max-age": b"600",
    b"vary": b"origin",
}
CLOSE = {"connection": "close"}
LOOPBACK, EVERYWHERE = ("localhost", "127.0.0.1", "::1"), ("0.0.0.0", "::")


def refusal(status: str, message: str, kind: str, *headers: str) -> bytes:
    """A whole response, before any part of the application is reached."""
    body = json.dumps(error_object(message, kind))
    about = ["content-type: application/json", f"content-length: {len(body)}", "connection: close"]
    return "\r\n".join([f"HTTP/1.1 {status}", *about, *headers, "", body]).encode()


CROWDED = refusal("503 Service Unavailable", "too many connections. Try again later.", "busy", "retry-after: 1")
NOT_HTTP = f"this is not a valid HTTP request with one length and at most {MOST_PIECES:,} pieces."
INVALID = refusal("400 Bad Request", NOT_HTTP, "invalid_request")


@dataclass
class Guard:
    """ASGI middleware around the whole application. `hosts` and the origins `cors` are in lower case."""

    app: ASGIApp
    limits: Limits
    token: str | None
    hosts: Collection[str]
    log_requests: bool
    cors: Collection[str]
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status, asked = time.monotonic(), CLIENT_CLOSED_REQUEST, Headers(scope=scope)
        allowed = asked.get("origin", "").lower() in self.cors  # the requesting page, by `--cors`
        added = HEADERS
        if allowed:
            added = {**HEADERS, **CORS, b"access-control-allow-origin": asked["origin"].encode("latin-1")}

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(one for one in added.items() if one[0] not in own)]
            await send(message)

        try:
            await self.respond(scope, asked, allowed, receive, send_with_headers)
        finally:
            seconds = time.monotonic() - begun
            route = scope["route"].path if "route" in scope else "other"  # not the path, which clients choose
            self.metrics.count("requests_total", path=route, status=str(status))
            if scope["method"] == "POST":
                self.metrics.count_seconds(seconds)
            if self.log_requests:
                client, path = (scope["client"] or [""])[0], scope["path"][:LOGGED]
                about = {"method": scope["method"], "path": path, "client": client}
                log_event("request", **about, status=status, seconds=round(seconds, 4))

    async def respond(self, scope: Scope, headers: Headers, allowed: bool, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS" and allowed:  # a CORS preflight request
            await Response(status_code=204)(scope, receive, send)
            return
        try:
            self.check(scope["path"], headers, allowed)
            async with asyncio.timeout(self.limits.body_seconds):
                body = await read_body(Request(scope, receive), self.limits.body_bytes)
        except ClientDisconnect:
            return
        except TimeoutError:
            await error_response(408, "the body did not arrive in time.", CLOSE)(scope, receive, send)
        except HTTPException as error:
            refused = error_response(error.status_code, error.detail, {**CLOSE, **(error.headers or {})})
            await refused(scope, receive, send)
        else:
            await self.run_app(scope, body, receive, send)

    async def run_app(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Give the request to the application, whose work is cancelled when the client disconnects."""
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        task = asyncio.ensure_future(self.app(scope, replay, send))
        left = asyncio.ensure_future(receive())  # after the body, only a disconnection is received
        try:
            await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            left.cancel()
            task.cancel()

    def check(self, path: str, headers: Headers, allowed: bool) -> None:
        host = headers.get("host", "")
        # A name can be made to point here (DNS rebinding), an address cannot; where there is a token, it decides.
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
            is_known = bool(self.token) or name in self.hosts or ipaddress.ip_address(name) is not None
        except ValueError:
            is_known = bool(self.token)
        if not is_known:
            raise HTTPException(403, "this server does not accept that host name.")
        origin = headers.get("origin")
        is_foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
        is_foreign = is_foreign or (headers.get("sec-fetch-site") == "cross-site" and path != "/")
        if is_foreign and not allowed:
            raise HTTPException(403, "pages from other origins may not use this server.")
        if self.token and not (path in PUBLIC or path.startswith("/assets/")):
            kind, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode(), self.token.encode())
            if kind.lower() != "bearer" or not right:
                bearer = {"www-authenticate": "Bearer"}
                raise HTTPException(401, "give the token: Authorization: Bearer …", bearer)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body; of one that is too large, nothing more is read."""
    body = bytearray()
    if int(request.headers.get("content-length", 0)) <= max_bytes:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                break
        else:
            return bytes(body)
    raise HTTPException(413, f"this server takes bodies of at most {max_bytes:,} bytes.")


# -- connections ------------------------------------------------------------------------------------------------------


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
