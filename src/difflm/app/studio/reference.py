"""The page about the API: FastAPI's OpenAPI document as plain HTML, without a script."""

import json
import re
import shlex
from functools import partial
from html import escape
from pathlib import Path

import yaml
from jinja2 import Environment

from difflm.runtime.files import Json

PAGE = Path(__file__).with_suffix(".html.jinja").read_text(encoding="utf-8")


def render_reference(document: Json, address: str) -> str:
    """Render every operation with an example for the server at `address`, and every schema as YAML."""
    tools = {
        "contents": list_contents,
        "link": link_schemas,
        "quote": shlex.quote,
        "spell": partial(json.dumps, ensure_ascii=False),
        "dump": partial(yaml.safe_dump, sort_keys=False),
    }
    return Environment(autoescape=True, trim_blocks=True).from_string(PAGE).render(document, address=address, **tools)


def list_contents(operation: Json) -> list[tuple[str, Json]]:
    """The body of an operation, and each response by its status."""
    body = {"body": operation["requestBody"]} if "requestBody" in operation else {}
    return [*body.items(), *sorted(operation["responses"].items())]


def link_schemas(text: str) -> str:
    """Escape for HTML, and link every reference to a schema."""
    return re.sub(r"(?:&#x27;)?#/components/schemas/(\w+)(?:&#x27;)?", r'<a href="#\1">\1</a>', escape(text))
