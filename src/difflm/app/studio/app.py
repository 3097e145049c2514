"""The whole application: page, assets, API, and error responses."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from difflm import __version__
from difflm.app.studio import api, completions
from difflm.app.studio.engine import Busy, Engine, Stopping, Stuck, TimedOut
from difflm.app.studio.guard import Guard, error_object
from difflm.app.studio.limits import Limits
from difflm.app.studio.player import HERE
from difflm.app.studio.reference import render_reference
from difflm.app.studio.served import Served
from difflm.app.studio.streams import ClientDisconnect
from difflm.errors import DifflmError, UsageError

KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
ASSETS = {path.name: path for path in sorted(HERE.iterdir()) if path.suffix in KINDS}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CLIENT_CLOSED_REQUEST = 499  # nobody reads it
STATUS: dict[type[DifflmError], tuple[int, str]] = {
    Busy: (429, "busy"),
    TimedOut: (503, "timeout"),
    Stopping: (503, "stopping"),
    Stuck: (503, "stuck"),
    UsageError: (422, "invalid_request"),
}


def build_app(served: Served, engine: Engine, token: str | None = None, hosts: Collection[str] = ("localhost",)) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(
        title="difflm studio",
        version=__version__,
        description="Text that forms all at once, and that can be steered while it does.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers=HANDLERS,
    )
    app.include_router(api.routes(served, engine))
    app.include_router(completions.routes(served, engine))
    add_pages(app)
    add_server_facts(app.openapi(), served, engine.limits, token)
    app.add_middleware(Guard, limits=engine.limits, token=token, hosts=hosts)
    return app


def add_server_facts(document: dict[str, Any], served: Served, limits: Limits, token: str | None) -> None:
    """Add to the application's OpenAPI document what only this server knows: its limits and its token."""
    most = {"n": limits.n, "mbr": limits.candidates, "candidates": limits.candidates, "steps": limits.steps}
    for name in ("Asked", "InfillAsked", "CompletionAsked"):
        properties = document["components"]["schemas"][name]["properties"]
        for key, value in {**most, "length": served.lm.model.max_words}.items():
            if key in properties:
                number = next(iter(properties[key].get("anyOf", ())), properties[key])
                number.update({"minimum": 1, "maximum": value})
    if token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]


def add_pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        path = HERE / "page.html"
        text = path.read_text(encoding="utf-8") if path.exists() else "<!doctype html><title>difflm studio</title>"
        return HTMLResponse(text, headers={"content-security-policy": POLICY, "cache-control": "no-cache"})

    @app.get("/docs", include_in_schema=False)
    async def reference(request: Request) -> Response:
        address = str(request.base_url).rstrip("/")
        return HTMLResponse(render_reference(app.openapi(), address), headers={"content-security-policy": POLICY})

    @app.get("/assets/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        path = ASSETS.get(name)  # a name of the table, never a path
        if path is None:
            raise HTTPException(404, "there is no such asset.")
        headers = {"cache-control": "no-cache"}
        return Response(path.read_bytes(), media_type=KINDS[path.suffix], headers=headers)


# -- errors -----------------------------------------------------------------------------------------------------------


def error_response(status: int, kind: str, message: str, headers: Any = None) -> JSONResponse:
    encodable = message.encode("utf-8", "replace").decode()  # a key may hold a lone surrogate
    return JSONResponse(error_object(encodable, kind), status, headers)


async def known_error(request: Request, error: Exception) -> Response:
    status, kind = next((found for known, found in STATUS.items() if isinstance(error, known)), (500, "failed"))
    headers = {"retry-after": str(error.retry_after)} if isinstance(error, Busy) else None
    return error_response(status, kind, str(error), headers)


async def invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        return error_response(415, "invalid_request", "send JSON, and say so: Content-Type: application/json.")
    faults = error.errors()
    if any(fault["type"] == "json_invalid" for fault in faults):
        return error_response(400, "invalid_request", "the body is not JSON.")
    return error_response(422, "invalid_request", " ".join(explain_fault(fault) for fault in faults[:4]))


def explain_fault(fault: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in fault["loc"][1:])
    if fault["type"] == "extra_forbidden":
        return f"unknown key {key[:100]!r}."
    message = fault["msg"][:1].lower() + fault["msg"][1:]
    return f"{key[:100]}: {message}." if key else f"{message}."


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return error_response(error.status_code, kind, str(error.detail).rstrip(".") + ".", error.headers)


async def client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def unexpected(request: Request, error: Exception) -> Response:
    return error_response(500, "failed", "the server failed; its log says why.")


HANDLERS: dict[Any, Any] = {
    DifflmError: known_error,
    RequestValidationError: invalid,
    HTTPException: http_error,
    ClientDisconnect: client_left,
    Exception: unexpected,
}
