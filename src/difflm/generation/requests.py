"""Requests from options of the command, lines of a .jsonl file or bodies of the HTTP API; their results as JSON."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
from pydantic import BaseModel, ConfigDict, ValidationError

from difflm import controls
from difflm.controls import Control, Field, Label, Span, Tags, WordCount
from difflm.controls.gaps import Edit
from difflm.data.texts import check_readable, read_lines
from difflm.errors import UsageError, explain_faults
from difflm.models.sampling import SETTINGS

if TYPE_CHECKING:
    from difflm.controls.guidance import GuidanceSettings
    from difflm.generation.texts import Generation


MOST_SEED = 2**31 - 1
MAKERS: dict[str, Callable[[Any], Control]] = {  # of controls, by their keys, in the order of results
    "infill": controls.Infill,
    "length": controls.Length,
    "field": lambda pair: Field(*pair),
    "label": lambda pair: Label(*pair),
    "pos": lambda tags: Tags(tuple(tags.split())),
    "tree": controls.Tree,
    "span": Span.parse,
    "contains": controls.Contains,
    "avoid": controls.Avoid,
    "pattern": controls.Pattern,
    "json_schema": controls.Json,
    "words": WordCount.parse,
    "control": controls.parse_control,
}


def setting(name: str) -> Any:
    """A setting of `Sampling` as a key of a request. The schema states its range; the model checks it."""
    known = SETTINGS[name]
    ends = {"minimum": known.json_schema_extra["low"], "maximum": known.json_schema_extra["high"]}
    extra = {key: end for key, end in ends.items() if end is not None}
    return pydantic.Field(None, description=known.description, json_schema_extra=extra)


def key(help: str, default: Any = None, **extra: Any) -> Any:
    """A key of a request; its option of the command and the HTTP API's schema show `help`."""
    return pydantic.Field(default, description=help, json_schema_extra=extra or None)


class Request(BaseModel):
    """A request for texts. Its keys are the names of the command's options, which derive from them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str | None = key("The source to write from, for models trained on pairs, or the message to a chat model.")
    n: int = key("How many texts to generate.", 1)
    seed: int = key("The same seed gives the same texts.", 0, minimum=0, maximum=MOST_SEED)
    steps: int | None = setting("steps")
    temperature: float | None = setting("temperature")
    sampler: str | None = setting("sampler")
    noise_temperature: float | None = setting("noise_temperature")
    noise_top_p: float | None = setting("noise_top_p")
    clamp: bool | None = setting("clamp")
    clamp_below: float | None = setting("clamp_below")
    stop_at: float | None = setting("stop_at")
    told_time: float | None = setting("told_time")
    length_beam: int | None = setting("length_beam")
    projection: str | None = setting("projection")
    projection_top_p: float | None = setting("projection_top_p")
    contrast: float | None = setting("contrast")
    block: int | None = setting("block")
    sure: float | None = setting("sure")
    top_k: int | None = setting("top_k")
    top_p: float | None = setting("top_p")
    beams: int | None = setting("beams")
    length_penalty: float | None = setting("length_penalty")
    start: str | None = setting("start")
    revisions: int | None = setting("revisions")
    mbr: int = key("Generate N candidates and keep the one most like the others.", 1)
    candidates: int = key(
        "Generate N candidates and keep the one the classifiers score highest; of filled gaps, the one that fits best.",
        1,
    )
    length: int | None = key(
        "Exact length: words and punctuation marks; for subword models words between spaces, for others characters "
        "or tokens."
    )
    contains: list[str] = key("A word or phrase that must appear.", [])
    avoid: list[str] = key("A word that must not appear.", [])
    pattern: list[str] = key("A regular expression that the whole text must match.", [])
    json_schema: dict[str, Any] | str | None = key("A JSON schema that the text must follow, as an object or a text.")
    words: str | None = key("How many words between spaces: 12, or a range such as 8-12.")
    field: dict[str, str] = key("A fact that the text must state, such as food=Japanese.", {})
    label: dict[str, str] = key("A label that your own classifier (guide) knows.", {})
    pos: str | None = key('A part of speech for every word, such as "PROPN AUX ADJ".')
    tree: str | None = key('The syntax tree of the text, such as "(S (NP * *) (VP * (ADJP *)))".')
    span: list[str] = key("A phrase and its position, such as 7,10,VP: words 7 to 10, counted from 0.", [])
    control: list[str] = key("A control from another package.", [])
    infill: str | None = key("A text with gaps to fill: ___ (or [MASK], <mask>) of any length, ___:4 of four words.")
    method: str | None = key(
        "How a left-to-right model is steered: fudge, pplm, delorean, cold, left-only or fine-tuning; for masked "
        "models, masked-lm-gibbs."
    )
    edit: str | None = key("A text to say in other words; all models but english noise it.")
    keep: list[str] = key("With edit: words to keep.", [])
    strength: float | None = key("With edit: noise this much of it, up to 1 (all). [0.5]")

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def refuse_truth_values(cls, value: object, info: pydantic.ValidationInfo) -> object:
        """JSON's true and false are no numbers, although Python counts them as 1 and 0."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation != bool | None:
            raise ValueError("input should not be true or false")
        return value

    @property
    def each(self) -> int:
        """Candidates per text."""
        return max(self.mbr, self.candidates)

    def job(self) -> dict[str, Any]:
        """Arguments of `TextDiffusion.make_job`."""
        own = {key: getattr(self, key) for key in ("n", "seed", "mbr", "candidates", "source", "method")}
        return {**own, "controls": self.controls(), "edit": self.edited(), **self.settings()}

    def controls(self) -> list[Control]:
        asked: list[Control] = []
        for key, make in MAKERS.items():
            value = getattr(self, key)
            values = value if isinstance(value, list) else [] if value is None else [value]
            asked += map(make, value.items() if key in ("field", "label") else values)
        return asked

    def edited(self) -> Edit | None:
        if self.edit is None:
            if self.keep or self.strength is not None:
                raise UsageError("--keep and --strength are for rewriting: give --edit TEXT as well.")
            return None
        return Edit(self.edit, self.strength, tuple(self.keep))

    def settings(self) -> dict[str, Any]:
        """The settings of `Sampling` that are given."""
        given = SETTINGS.keys() & self.model_fields_set
        return {name: value for name in SETTINGS if name in given and (value := getattr(self, name)) is not None}


def read_requests(path: Path) -> list[Request]:
    """Read one JSON object per line; an error names its line, before anything is generated."""
    check_readable(path)
    found = [parse_request(line, f"{path}, line {number}") for number, line in read_lines(path) if line.strip()]
    if not found:
        raise UsageError(f'{path} holds no request. Write one JSON object per line, such as {{"length": 14}}.')
    return found


def parse_request(line: str, where: str) -> Request:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        said = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise UsageError(f"{where} is not JSON: {said}.") from None
    if not isinstance(values, dict):
        raise UsageError(f"{where} is not a JSON object.")
    try:
        return Request.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{where}: {explain_faults(error.errors(), Request.model_fields)}") from None


def generation_to_json(g: "Generation") -> dict[str, object]:
    """One line of `generate --json`."""
    keys = ("text", "tokens", "controls", "steps", "denoiser_calls", "seconds", "seed")
    found = {key: round(g.seconds, 4) if key == "seconds" else getattr(g, key) for key in keys}
    more = {"changed": g.changed, "classifier_calls": g.classifier_calls, "warnings": g.warnings}
    return found | {key: value for key, value in more.items() if value}


def read_guidance(given: str | None, option: str = "--guidance") -> "GuidanceSettings | None":
    """Parse the size of our guidance, or `original`, the settings of Li et al. (2022); None: the model's own."""
    if given is None:
        return None
    try:
        size = 0.0 if given == "original" else float(given)
    except ValueError:
        raise UsageError(f"{option} must be a number or `original`, not {given!r}.") from None
    if not 0 <= size <= 1000:
        raise UsageError(f"{option} must be between 0 and 1,000, not {given}.")
    from difflm.controls.guidance import ORIGINAL, STANDARD

    return ORIGINAL if given == "original" else replace(STANDARD, size=size)
