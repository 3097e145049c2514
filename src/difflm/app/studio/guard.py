"""What stands before every request: whose page sends it, whether it has the token, and how large it is.

A server on this machine can be reached by every page that its browser opens. Three things keep strangers out: the name
in `Host` (a page whose own name was made to point here says another one), `Origin` (a page of another server), and the
token, where there is one.
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

OPEN = ("/", "/health", "/docs", "/openapi.json")  # without a token: they tell nothing and cost nothing
DRAINED = 8 * 2**20  # bytes of a body that is too large, read so that the client hears why
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

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self.check(scope["path"], Headers(scope=scope))
            body = await self.body(Headers(scope=scope), receive)
        except Refusal as refusal:
            await answer(refusal, dressed)
            return
        if body is not None:
            await self.app(scope, replayed(body, receive), dressed)

    def check(self, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self.known(host):
            raise Refusal(403, "forbidden", "this server does not answer to that host name.")
        origin = headers.get("origin")
        foreign = origin is not None and place_of(origin) != host.lower()
        if foreign or (headers.get("sec-fetch-site") == "cross-site" and path != "/"):
            raise Refusal(403, "forbidden", "pages of other servers may not use this one.")
        if self.token and not (path in OPEN or path.startswith("/assets/")):
            kind, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode(), self.token)
            if kind.lower() != "bearer" or not right:
                raise Refusal(401, "unauthorized", "give the token: Authorization: Bearer …", www_authenticate="Bearer")

    def known(self, host: str) -> bool:
        """Whether a page under this name may be ours. An address cannot be made to point elsewhere, a name can; where
        there is a token, it is what counts."""
        if self.token:
            return True
        name = hostname(host)
        return name in self.hosts or is_address(name)

    async def body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole of it; None where the client left."""
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                return await read_body(receive, self.limits.body_bytes)
        except TimeoutError:
            raise Refusal(408, "timeout", "the body did not arrive in time.", connection="close") from None


async def read_body(receive: Receive, most: int) -> bytes | None:
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= most:
            chunks.append(chunk)
        if size > DRAINED or (size > most and not message.get("more_body")):
            raise Refusal(413, "too_large", f"a body has at most {most:,} bytes on this server.", connection="close")
        if not message.get("more_body"):
            return b"".join(chunks)


def replayed(body: bytes, receive: Receive) -> Receive:
    """The body once, in one piece, then what else the client does."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def answer(refusal: Refusal, send: Send) -> None:
    body = json.dumps(error_object(refusal.message, refusal.kind)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def place_of(origin: str) -> str:
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
