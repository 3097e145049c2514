"""Requests and responses of the server as pydantic models, from which the OpenAPI document is made."""

import json
import shlex
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from difflm.app.studio.limits import Limits
from difflm.controls.guidance import STANDARD
from difflm.errors import UsageError, is_unicode
from difflm.generation.requests import Request
from difflm.runtime.files import Json


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
        return Asked(**{**self.model_dump(exclude={"template"}), "infill": self.template})


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


class ControlAnswer(BaseModel):
    """Whether a text meets one control, according to a checker that had no part in writing it."""

    name: str
    target: Any
    satisfied: bool | None = Field(description="null: no checker is available, or the model does not know all words.")
    score: float | None
    checker: str
    guarantee: str = Field("none", description="exact in every text, steered towards, or none but the check.")


class TextAnswer(BaseModel):
    """One text, as a line of `difflm generate --json`."""

    text: str
    tokens: list[str]
    controls: list[ControlAnswer]
    steps: int
    denoiser_calls: int
    seconds: float = Field(description="Wall-clock time of the batch that the text was part of.")
    seed: int
    classifier_calls: int = Field(0, description="In addition to those of the model; left out if there are none.")
    warnings: list[str] = Field(
        default_factory=list,
        description="Why the text may not be what was requested; left out if there are none.",
    )


class TextsAnswer(BaseModel):
    texts: list[TextAnswer]


class Fault(BaseModel):
    message: str
    type: str


class ErrorAnswer(BaseModel):
    """Every error has this form."""

    error: Fault


class HealthAnswer(BaseModel):
    status: str
    model: str
    queue: int = Field(description="Requests that are waiting.")


class ExampleRequest(BaseModel):
    name: str
    request: Json


class ModelFacts(BaseModel):
    name: str
    method: str
    parameters: int
    longest: int = Field(description="The largest number of words in a text.")
    steps: int = Field(description="Default number of denoising steps.")
    temperature: float = Field(description="Default temperature.")
    whole_words: bool = Field(description="Whether each token is a whole word.")
    device: str
    learned: str | None = Field(description="What it was trained on; null if its files do not say.")
    vocabulary: int = Field(description="How many words, subwords or characters it knows.")
    left_to_right: bool = Field(description="Whether it writes word by word rather than all words at once.")
    preview: str | None = Field(description="A faster model that it taught: the page shows its text first.")
    examples: list[ExampleRequest] = Field(description="Requests that suit it; empty for a model of your own.")


class ModelsAnswer(BaseModel):
    models: list[ModelFacts]


class PatternAnswer(BaseModel):
    message: str | None = Field(description="What is wrong with it; null if texts of this model can match.")
    lengths: list[int] = Field(description="Possible lengths of matching texts, in tokens.")
    unit: str = Field(description="What a token is: words, characters or tokens.")


class LikelyWord(BaseModel):
    word: str
    p: float


class WeighedWord(BaseModel):
    word: str | None = Field(description="null: the model does not know it.")
    p: float | None = Field(description="Its probability, given all other words of the text.")
    likely: list[LikelyWord] = Field(description="The likeliest words in its place.")


class AlternativesAnswer(BaseModel):
    words: list[WeighedWord]


class LimitsAnswer(BaseModel):
    n: int
    steps: int
    candidates: int
    rows: int = Field(description="n times candidates.")


class LengthAnswer(BaseModel):
    most: int
    unit: str = Field(description="What a length counts: words, characters or tokens.")


class ControlsAnswer(BaseModel):
    """What each control accepts; null if this model does not support it."""

    source: dict[Literal["most"], int] | None = Field(description="Most tokens of a source, which is then required.")
    length: LengthAnswer | None
    field: dict[str, list[str]] | None
    label: dict[str, list[str]] | None
    pos: dict[Literal["tags"], list[str]] | None
    tree: dict[Literal["labels"], list[str]] | None
    span: dict[Literal["labels"], list[str]] | None
    contains: dict[Literal["most"], int] | None = Field(description="The most words or phrases in one request.")
    avoid: dict[str, str] | None
    pattern: dict[Literal["unit"], str] | None = Field(description="What its tokens are: words, characters or tokens.")
    infill: dict[Literal["sizes"], bool] | None = Field(description="Whether the number of words in a gap can be set.")
    json_schema: Json | None = Field(description="Whether it can write JSON: its signs are known.")
    alternatives: dict[Literal["most"], int] | None = Field(description="How many likely words each position gets.")
    edit: dict[str, str] | None
    samplers: list[str]
    limits: LimitsAnswer
