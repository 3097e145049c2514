"""The page about the API: FastAPI's OpenAPI document as plain HTML, without a script."""

import json
import re
import shlex
from html import escape
from pathlib import Path
from string import Template

import yaml

from difflm.runtime.files import Json

PAGE = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


def render_reference(document: Json, address: str) -> str:
    """Render every operation with an example for the server at `address`, and every schema as YAML."""
    schemas = document["components"]["schemas"]
    operations = [
        f"<section><h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(found['description'])}</p>"
        f"{render_contents(found)}{render_example(address + path, found, schemas)}</section>"
        for path, methods in document["paths"].items()
        for method, found in methods.items()
    ]
    described = [
        f'<h3 id="{name}"><code>{name}</code></h3><pre>{link_schemas(yaml.safe_dump(found, sort_keys=False))}</pre>'
        for name, found in sorted(schemas.items())
    ]
    facts = {name: escape(text) for name, text in document["info"].items()}
    return PAGE.substitute(facts, operations="\n".join(operations), schemas="\n".join(described))


def render_contents(operation: Json) -> str:
    """Render the contents of the body and, by status, those of each response and its meaning."""
    contents = {"body": operation["requestBody"]} if "requestBody" in operation else {}
    contents |= dict(sorted(operation["responses"].items()))
    lines = []
    for name, found in contents.items():
        held = " or ".join(content["schema"].get("$ref", kind) for kind, content in found["content"].items())
        lines.append(f"{name:4} {held}  {found.get('description', '')}")
    return "<pre>" + link_schemas("\n".join(lines)) + "</pre>"


def render_example(url: str, operation: Json, schemas: Json) -> str:
    if "requestBody" not in operation:
        return ""
    body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    value = json.dumps(schemas[body.rsplit("/", 1)[1]]["examples"][0], ensure_ascii=False)
    command = f"curl {shlex.quote(url)} -H content-type:application/json \\\n  -d {shlex.quote(value)}"
    return f"<pre>{escape(command)}</pre>"


def link_schemas(text: str) -> str:
    """Escape for HTML, and link every reference to a schema."""
    return re.sub(r"(?:&#x27;)?#/components/schemas/(\w+)(?:&#x27;)?", r'<a href="#\1">\1</a>', escape(text))
