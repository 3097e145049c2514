"""Requests and responses of the server as pydantic models, from which the OpenAPI document is made."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from difflm.app.studio.limits import Limits
from difflm.controls.guidance import STANDARD
from difflm.errors import UsageError, is_unicode
from difflm.generation.requests import Request
from difflm.runtime.files import Json, read_own_table


def shown(example: Json) -> ConfigDict:
    """How a body is read, and one that works with the bundled model."""
    return ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [example]})


class Asked(Request):
    """A request for texts. Its keys are the options of `difflm generate` that say what is written, and how."""

    model_config = shown({"n": 2, "length": 14, "contains": ["cheap"], "steps": 50})

    guidance: float | None = Field(None, ge=0, le=1000, description="How strongly classifiers steer.")

    def job(self) -> dict[str, Any]:
        size = self.guidance
        return {**super().job(), "guidance": None if size is None else replace(STANDARD, size=size)}

    def check(self, limits: Limits) -> None:
        """Refuse what exceeds this server's limits; `TextDiffusion.make_job` refuses what the model cannot do."""
        sizes = {"n": limits.n, "mbr": limits.candidates, "candidates": limits.candidates, "steps": limits.steps}
        sizes |= {"beams": limits.rows, "revisions": limits.candidates}
        for key, most in sizes.items():
            if (value := getattr(self, key)) is not None and value > most:
                raise UsageError(f"{key} must be at most {most} on this server, not {value}.")
        if self.n * self.each > limits.rows:
            raise UsageError(f"{self.n} × {self.each} candidates: this server writes {limits.rows} texts at most.")
        for key in type(self).model_fields:
            if key in self.model_fields_set:
                check_size(key, getattr(self, key), limits)

    def command(self, model: str) -> str:
        """The command that generates the same texts."""
        argv = ["difflm", "generate", model]
        for key, value in self.model_dump(exclude_defaults=True).items():
            argv += option(key, value)
        return shlex.join(argv)


def check_size(key: str, value: object, limits: Limits) -> None:
    if isinstance(value, str):
        if len(value) > limits.characters:
            raise UsageError(f"{key} has {len(value):,} characters; this server takes at most {limits.characters:,}.")
        if not is_unicode(value):
            raise UsageError(f"{key} contains half of a surrogate pair.")
    if isinstance(value, list | dict):
        if len(value) > limits.items:
            raise UsageError(f"{key} has {len(value)} entries; this server takes at most {limits.items}.")
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            check_size(key, part, limits)


def option(key: str, value: Any) -> list[str]:
    """A key of a request as the option of the command."""
    name = "-n" if key == "n" else f"--{key.replace('_', '-')}"
    if key == "json_schema":
        return [name, value if isinstance(value, str) else json.dumps(value)]
    if isinstance(value, bool):
        return [name if value else f"--no-{key}"]
    if isinstance(value, dict):
        return [part for label, wanted in value.items() for part in (name, f"{label}={wanted}")]
    if isinstance(value, list):
        return [part for item in value for part in (name, item)]
    return [name, str(value)]


class InfillAsked(Asked):
    """A text with gaps to fill. The other keys are those of any request, except `infill`."""

    model_config = shown({"template": "The Eagle is a ___ near the riverside.", "seed": 1})

    template: str = Field(description="`___` is a gap of any length, `___:4` one of four words.")

    def asked(self) -> Asked:
        if self.infill is not None:
            raise UsageError("give template or infill, not both.")
        return Asked(**{**self.model_dump(exclude={"template"}, exclude_unset=True), "infill": self.template})


class PlayerAsked(BaseModel):
    """The request whose texts the player shows."""

    model_config = shown({"request": {"n": 2, "length": 14}})

    request: Asked


class PatternAsked(BaseModel):
    """A regular expression to check before anything is written."""

    model_config = shown({"pattern": r"The [A-Z]\w+ is an? .*\."})

    pattern: str = Field(description="The whole text must match it.")


class AlternativesAsked(BaseModel):
    """A text for whose words alternatives are wanted."""

    model_config = shown({"text": "The Eagle is a cheap pub near the riverside."})

    text: str


# -- answers ----------------------------------------------------------------------------------------------------------

ANYTHING = TypeAdapter[Any](Any)
TABLE: Json = read_own_table("answers.yaml", __file__)


KINDS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed", 408: "timeout",
         413: "too_large", 500: "failed"}  # fmt: skip


class Answer(JSONResponse):
    """JSON, in which numbers that it cannot spell are null."""

    def render(self, content: object) -> bytes:
        return ANYTHING.dump_json(content)


def error_object(message: str, kind: str = "failed") -> dict[str, dict[str, str]]:
    return {"error": {"message": message, "type": kind}}


def error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None, kind: str | None = None
) -> JSONResponse:
    encodable = message.encode("utf-8", "replace").decode()  # a key may hold a lone surrogate
    return JSONResponse(error_object(encodable, kind or KINDS.get(status, "invalid_request")), status, headers)


def describe_route(path: str) -> dict[str, Any]:
    """What the document says of the answers of a route, as keywords of its decorator."""
    about = TABLE["routes"][path]
    content = {kind: {"schema": refer(one) if isinstance(one, str) else one} for kind, one in about["content"].items()}
    responses: dict[int | str, Json] = {200: {"content": content}}
    responses[200] |= {"description": about["description"]} if "description" in about else {}
    for status, said in (about.get("errors") or dict.fromkeys(TABLE["errors"])).items():
        error = {"content": {"application/json": {"schema": refer("ErrorAnswer")}}}
        responses[status] = {**TABLE["errors"][status], **error, **({"description": said} if said else {})}
    # StreamingResponse has no type of its own, which the document would give to errors.
    kind = Answer if "application/json" in content else StreamingResponse
    return {"tags": about["tags"], "responses": responses, "response_model": None, "response_class": kind}


def refer(schema: str) -> Json:
    return {"$ref": f"#/components/schemas/{schema}"}
