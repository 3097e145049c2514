"""Checks before every request: the host name and origin, the token, and the size of the body.

Every page that the browser of this machine opens can reach the server. Three things keep foreign pages out: the name in
`Host` (DNS rebinding sends another one), `Origin` (a page of another server), and the token, where there is one.
"""

import asyncio
import hmac
import ipaddress
import json
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from difflm.app.studio.limits import Limits

PUBLIC = ("/", "/health", "/docs", "/openapi.json")  # without a token: they reveal nothing and cost nothing
MAX_DRAINED = 8 * 2**20  # bytes of a body that is too large, read so that the client gets the answer
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


class Refusal(Exception):
    def __init__(self, status: int, kind: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def error_object(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind}}


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, limits: Limits, token: str | None, hosts: Collection[str]) -> None:
        self.app, self.limits, self.hosts = app, limits, {host.lower() for host in hosts}
        self.token = token.encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self.check(scope["path"], Headers(scope=scope))
            body = await self.read_body(receive)
        except Refusal as refusal:
            await send_refusal(refusal, send_with_headers)
            return
        if body is not None:
            await self.app(scope, replay_body(body, receive), send_with_headers)

    def check(self, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self.is_known_host(host):
            raise Refusal(403, "forbidden", "this server does not answer to that host name.")
        origin = headers.get("origin")
        is_foreign = origin is not None and host_of(origin) != host.lower()
        if is_foreign or (headers.get("sec-fetch-site") == "cross-site" and path != "/"):
            raise Refusal(403, "forbidden", "pages of other servers may not use this one.")
        if self.token and not (path in PUBLIC or path.startswith("/assets/")):
            kind, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode(), self.token)
            if kind.lower() != "bearer" or not right:
                raise Refusal(401, "unauthorized", "give the token: Authorization: Bearer …", www_authenticate="Bearer")

    def is_known_host(self, host: str) -> bool:
        """Whether a page under this host may be ours. A name can be made to point here (DNS rebinding), an address
        cannot; where there is a token, the token decides."""
        if self.token:
            return True
        name = hostname(host)
        return name in self.hosts or is_address(name)

    async def read_body(self, receive: Receive) -> bytes | None:
        """Read the whole body; None where the client disconnected."""
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                return await read_body(receive, self.limits.body_bytes)
        except TimeoutError:
            raise Refusal(408, "timeout", "the body did not arrive in time.", connection="close") from None


async def read_body(receive: Receive, max_bytes: int) -> bytes | None:
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        if size > MAX_DRAINED or (size > max_bytes and not message.get("more_body")):
            raise Refusal(
                413, "too_large", f"a body has at most {max_bytes:,} bytes on this server.", connection="close"
            )
        if not message.get("more_body"):
            return b"".join(chunks)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole body once, then the client's further messages."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def send_refusal(refusal: Refusal, send: Send) -> None:
    body = json.dumps(error_object(refusal.message, refusal.kind)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def host_of(origin: str) -> str:
    """The host and port that a page came from."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def hostname(host: str) -> str:
    """Without the port and the brackets of an address."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
