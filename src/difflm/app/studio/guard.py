"""Checks before every request: the host name and origin, the token, and the size of the body.

Every page that the browser of this machine opens can reach the server. Three things keep foreign pages out: the name in
`Host` (DNS rebinding sends another one), `Origin` (a page of another server), and the token, where there is one.
"""

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from difflm.app.studio.limits import Limits
from difflm.app.studio.log import Metrics, log_event

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
KINDS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed", 408: "timeout",
         413: "too_large", 500: "failed"}  # fmt: skip
CLOSE = {"connection": "close"}


def error_object(message: str, kind: str = "failed") -> dict[str, dict[str, str]]:
    return {"error": {"message": message, "type": kind}}


def error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None, kind: str | None = None
) -> JSONResponse:
    encodable = message.encode("utf-8", "replace").decode()  # a key may hold a lone surrogate
    return JSONResponse(error_object(encodable, kind or KINDS.get(status, "invalid_request")), status, headers)


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
        added = HEADERS
        if self.allows(asked):
            added = {**HEADERS, **CORS, b"access-control-allow-origin": asked["origin"].encode("latin-1")}

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(one for one in added.items() if one[0] not in own)]
            await send(message)

        try:
            await self.respond(scope, asked, receive, send_with_headers)
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

    def allows(self, headers: Headers) -> bool:
        """Whether the requesting page is allowed by `--cors`."""
        return headers.get("origin", "").lower() in self.cors

    async def respond(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS" and self.allows(headers):  # a CORS preflight request
            await Response(status_code=204)(scope, receive, send)
            return
        try:
            self.check(scope["path"], headers)
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

    def check(self, path: str, headers: Headers) -> None:
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
        if is_foreign and not self.allows(headers):
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
