"""The API's own page: the OpenAPI document as plain HTML, without a script."""

import html
import json
import re
import shlex
from string import Template
from typing import Any

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title: the API</title>
<link rel="stylesheet" href="/assets/reference.css">
</head>
<body>
<main>
<h1>$title <small>$version</small></h1>
<p>$description <a href="/">The page</a> · <a href="/openapi.json">the OpenAPI document</a></p>
$parts
</main>
</body>
</html>
""")


def reference(document: dict[str, Any], address: str) -> str:
    """Every operation with its body and answer, what each error means, and every schema that these name. `address` is
    that of the server, such as http://127.0.0.1:8000."""
    operations = [
        operation(method, path, found, document, address)
        for path, item in document["paths"].items()
        for method, found in item.items()
    ]
    schemas = [schema(name, found) for name, found in sorted(document["components"]["schemas"].items())]
    info = document["info"]
    return PAGE.substitute(
        title=html.escape(info["title"]),
        version=html.escape(info["version"]),
        description=html.escape(info["description"]),
        parts="\n".join([*operations, errors(document), "<h2>What stands in them</h2>", *schemas]),
    )


def operation(method: str, path: str, found: dict[str, Any], document: dict[str, Any], address: str) -> str:
    body = found.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    right = [answer for status, answer in found["responses"].items() if status < "400"]
    wrong = [f'<a href="#errors">{status}</a>' for status in sorted(found["responses"]) if status >= "400"]
    rows = [("body", kind(body))] if body else []
    rows += [("answer", content(answer)) for answer in right] + [("errors", " ".join(wrong))]
    told = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in rows)
    return (
        f"<section><h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{marked(found['description'])}</p>"
        f"<table>{told}</table>{example(f'{address}{path}', body, document) if body else ''}</section>"
    )


def content(answer: dict[str, Any]) -> str:
    named = (f"{kind(found['schema'])} <small>{html.escape(name)}</small>" for name, found in answer["content"].items())
    return " or ".join(named)


def example(url: str, body: dict[str, Any], document: dict[str, Any]) -> str:
    found = document["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]
    value = json.dumps(found["examples"][0], ensure_ascii=False)
    command = f"curl {shlex.quote(url)} -H content-type:application/json \\\n  -d {shlex.quote(value)}"
    return f"<pre>{html.escape(command)}</pre>"


def errors(document: dict[str, Any]) -> str:
    meaning = {
        status: answer["description"]
        for item in document["paths"].values()
        for found in item.values()
        for status, answer in found["responses"].items()
        if status >= "400"
    }
    rows = "".join(
        f"<tr><th>{status}</th><td>{html.escape(text)}</td></tr>" for status, text in sorted(meaning.items())
    )
    return (
        f'<section><h2 id="errors">Errors</h2><p>All have the form of {kind(ERROR)}.</p><table>{rows}</table></section>'
    )


ERROR = {"$ref": "#/components/schemas/ErrorAnswer"}


def marked(text: str) -> str:
    """Prose with `names` in it."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def schema(name: str, found: dict[str, Any]) -> str:
    required = found.get("required", [])
    rows = "".join(
        f"<tr><td><code>{html.escape(key)}</code>{' *' if key in required else ''}</td><td>{kind(value)}</td>"
        f"<td>{marked(told(value))}</td></tr>"
        for key, value in found.get("properties", {}).items()
    )
    about = f"<p>{marked(found['description'])}</p>" if "description" in found else ""
    table = f"<table><tr><th>key</th><th>kind</th><th></th></tr>{rows}</table>" if rows else ""
    return f'<section><h3 id="{html.escape(name)}"><code>{html.escape(name)}</code></h3>{about}{table}</section>'


def kind(found: dict[str, Any]) -> str:
    """What a value is, in a few words."""
    if "$ref" in found:
        name = html.escape(found["$ref"].rsplit("/", 1)[1])
        return f'<a href="#{name}"><code>{name}</code></a>'
    if "anyOf" in found:
        return " or ".join(kind(one) for one in found["anyOf"])
    if "const" in found:
        return f"<code>{html.escape(json.dumps(found['const']))}</code>"
    if "enum" in found:
        return " or ".join(f"<code>{html.escape(json.dumps(one))}</code>" for one in found["enum"])
    if found.get("type") == "array":
        return f"list of {kind(found['items'])}"
    if isinstance(found.get("additionalProperties"), dict):
        return f"names with {kind(found['additionalProperties'])}"
    return html.escape(found.get("type", "anything"))


def told(value: dict[str, Any]) -> str:
    """Its description, its bounds and what it is when left out."""
    parts = [value.get("description", "")]
    bounds = [one for one in (value, *value.get("anyOf", ())) if "minimum" in one or "maximum" in one]
    if bounds:
        low, high = bounds[0].get("minimum"), bounds[0].get("maximum")
        parts.append(f"At least {low:g}." if high is None else f"From {low or 0:g} to {high:,}.")
    if value.get("default") is not None:
        parts.append(f"[{json.dumps(value['default'])}]")
    return " ".join(part for part in parts if part)
