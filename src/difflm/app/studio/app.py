"""The whole application: page, assets, API and the page about it, and error responses."""

import json
import re
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import yaml
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment
from starlette.exceptions import HTTPException

from difflm.app.studio import api, completions
from difflm.app.studio.engine import Engine
from difflm.app.studio.job import Unavailable
from difflm.app.studio.limits import Limits
from difflm.app.studio.schemas import TABLE, error_response
from difflm.app.studio.served import Models
from difflm.errors import DifflmError, UsageError, explain_faults, say_in_request
from difflm.player.page import HERE as PLAYER
from difflm.player.page import read_page
from difflm.runtime.files import Json
from difflm.version import __version__

KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HERE = Path(__file__).parent
SCHEMA = re.compile(r"(?:&#x27;)?#/components/schemas/(\w+)(?:&#x27;)?")
REFERENCE = (HERE / "reference.html.jinja").read_text(encoding="utf-8")
ASSETS = {path.name: path for path in sorted([*HERE.iterdir(), *PLAYER.iterdir()]) if path.suffix in KINDS}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def build_app(serving: Models, engine: Engine, token: str | None) -> FastAPI:
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
        exception_handlers=dict.fromkeys(ERRORS, answer_error),
    )
    # Not `include_router`, which compares every request with all routes twice.
    app.router.routes += [*api.routes(serving, engine).routes, *completions.routes(serving, engine).routes]
    add_pages(app)
    add_server_facts(app.openapi(), serving, engine.limits, token)
    return app


def add_server_facts(document: Json, serving: Models, limits: Limits, token: str | None) -> None:
    """Add to the application's OpenAPI document its answers, and this server's limits, models and token."""
    document["components"]["schemas"] |= TABLE["schemas"]
    longest = max(served.lm.model.max_words for served in serving.all.values())
    most = {"n": limits.n, "mbr": limits.candidates, "candidates": limits.candidates, "steps": limits.steps}
    for name in ("Asked", "InfillAsked", "CompletionAsked"):
        properties = document["components"]["schemas"][name]["properties"]
        for key, value in {**most, "length": longest}.items():
            if key in properties:
                number = next(iter(properties[key].get("anyOf", ())), properties[key])
                number.update({"minimum": 1, "maximum": value})
    for operation in (one for path in document["paths"].values() for one in path.values()):
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "query":  # the model
                parameter["schema"] = {"type": "string", "enum": [*serving.all]}
    if token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]


def add_pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}
        return HTMLResponse(read_page(HERE / "page.html"), headers=headers)

    @app.get("/docs", include_in_schema=False)
    async def reference(request: Request) -> Response:
        address = str(request.base_url).rstrip("/")
        return HTMLResponse(render_reference(app.openapi(), address), headers={"content-security-policy": POLICY})

    @app.get("/assets/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        path = ASSETS.get(name)  # a key of the table, never a path
        if path is None:
            raise HTTPException(404, "there is no such asset.")
        headers = {"cache-control": "no-cache"}
        return Response(path.read_bytes(), media_type=KINDS[path.suffix], headers=headers)


def render_reference(document: Json, address: str) -> str:
    """FastAPI's OpenAPI document as plain HTML, without a script: every operation with an example for the server at
    `address`, and every schema as YAML."""

    def list_contents(operation: Json) -> list[tuple[str, Json]]:
        """The body of an operation, and each response by its status."""
        body = {"body": operation["requestBody"]} if "requestBody" in operation else {}
        return [*body.items(), *sorted(operation["responses"].items())]

    tools = {
        "contents": list_contents,
        "link": lambda text: re.sub(SCHEMA, r'<a href="#\1">\1</a>', escape(text)),
        "quote": shlex.quote,
        "spell": partial(json.dumps, ensure_ascii=False),
        "dump": partial(yaml.safe_dump, sort_keys=False),
    }
    return (
        Environment(autoescape=True, trim_blocks=True).from_string(REFERENCE).render(document, address=address, **tools)
    )


# -- errors -----------------------------------------------------------------------------------------------------------


async def answer_error(request: Request, error: Exception) -> Response:
    match error:
        case Unavailable():
            headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
            return error_response(error.status, say_in_request(error), headers, error.kind)
        case DifflmError():
            return error_response(422 if isinstance(error, UsageError) else 500, say_in_request(error))
        case RequestValidationError():
            faults: Sequence[Any] = error.errors()
            if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
                return error_response(415, "send JSON, and say so: Content-Type: application/json.")
            if any(fault["type"] == "json_invalid" for fault in faults):
                return error_response(400, "the body is not JSON.")
            inside = ({**fault, "loc": [str(part)[:100] for part in fault["loc"][1:]]} for fault in faults[:4])
            return error_response(422, explain_faults(inside, ()))
        case HTTPException():
            return error_response(error.status_code, str(error.detail).rstrip(".") + ".", error.headers)
    return error_response(500, "the server failed; its log says why.")


ERRORS = (DifflmError, RequestValidationError, HTTPException, Exception)
