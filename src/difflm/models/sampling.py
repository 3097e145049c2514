"""`Sampling`: how text is made. Every setting states its range, its help text and the models that understand it once;
the command's options, the HTTP API's schema, the checks and their messages derive from it. Nothing here imports torch,
so that the command's help need not."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from difflm.errors import UsageError
from difflm.runtime.files import read_own_table

Family = Literal["any", "diffusion", "vectors", "simplex", "masks", "masked", "tokens", "left-to-right", "edits"]
Projection = Literal["mean", "greedy", "sample", "multi-hot"]
Start = Literal["noise", "nothing", "source"]


def setting(
    family: Family, help: str, low: float | None = None, high: float | None = None, above: bool = False, zero: str = ""
) -> Any:
    """`above`: the range excludes `low`. `zero`: the meaning of 0, if it is outside of the range."""
    ends: dict[str, Any] = {"gt" if above and not zero else "ge": low, "le": high}
    about: dict[str, Any] = {"family": family, "low": low, "high": high, "above": above, "zero": zero}
    return Field(description=help, json_schema_extra=about, **ends)


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Sampling:
    """How text is made. A method holds its own defaults; a request changes some of them."""

    sampler: Annotated[
        str, setting("diffusion", "Step rule: ancestral, ddim, dpm-solver …; masked models: confidence, remask …")
    ] = "ancestral"
    steps: Annotated[int, setting("diffusion", "Denoising steps; fewer are faster and rougher.", 1, 10_000)] = 50
    # 0, the likeliest word, is for models that say so (`greedy`).
    temperature: Annotated[
        float,
        setting("any", "Below 1: plainer and safer words; above 1: more variety.", 0, 10, above=True, zero="greedy"),
    ] = 1.0
    noise_temperature: Annotated[float, setting("vectors", "Scale of the sampled noise.", 0, 10)] = 1.0
    noise_top_p: Annotated[
        float, setting("vectors", "Truncate the noise to this share of its probability.", 0, 1, above=True)
    ] = 1.0
    clamp: Annotated[bool, setting("vectors", "Snap each prediction to the nearest word.")] = False
    clamp_below: Annotated[float, setting("vectors", "Clamp only at times up to this one, from 0 to 1.", 0, 1)] = 1.0
    stop_at: Annotated[
        float, setting("vectors", "Stop at this time, from 0 to 1, and print the last prediction. [0]", 0, 1)
    ] = 0.0
    told_time: Annotated[
        float, setting("vectors", "Give the network times from 1 down to this one, as CeDi does. [0]", 0, 1)
    ] = 0.0
    length_beam: Annotated[
        int, setting("diffusion", "Spread candidates over the K likeliest lengths.", 0, 1000, zero="sample one")
    ] = 0
    draw: Annotated[bool, setting("vectors", "Sample a word from each prediction instead of its mean.")] = False
    projection: Annotated[
        Projection, setting("simplex", "SSD-LM, what each step projects to: mean, greedy, sample or multi-hot.")
    ] = "mean"
    projection_top_p: Annotated[
        float,
        setting("simplex", "SSD-LM: project to the likeliest words of this share of probability.", 0, 1, above=True),
    ] = 1.0
    contrast: Annotated[
        float, setting("masks", "Classifier-free guidance weight on the known words or the source. [0]", 0, 100)
    ] = 0.0
    block: Annotated[
        int,
        setting("masked", "Write N positions at a time, from left to right. [0: anywhere]", 0, 10_000, zero="anywhere"),
    ] = 0
    sure: Annotated[
        float,
        setting(
            "masked",
            "Samplers threshold and entropy-bound: how certain tokens must be to be written together.",
            0,
            1,
            above=True,
        ),
    ] = 0.9
    top_k: Annotated[int, setting("left-to-right", "Sample from the K likeliest words.", 0, zero="all words")] = 0
    top_p: Annotated[
        float, setting("tokens", "Sample from the likeliest tokens of this share of probability.", 0, 1, above=True)
    ] = 1.0
    beams: Annotated[int, setting("left-to-right", "Beam size of a beam search.", 0, 1000, zero="sample instead")] = 0
    length_penalty: Annotated[
        float, setting("left-to-right", "Beam search: values above 0 prefer longer texts. [0]", 0, 10)
    ] = 0.0
    start: Annotated[Start, setting("edits", "What editing starts from: noise, nothing or the source.")] = "noise"
    revisions: Annotated[
        int, setting("edits", "With beams: keep R revisions of a text from round to round.", 1, 1000)
    ] = 1

    def change(self, changes: Mapping[str, Any]) -> "Sampling":
        """The same with other values; `None` leaves one as it is. Unknown names and values out of range are refused."""
        for name in changes:
            if name not in SETTINGS:
                near = difflib.get_close_matches(name, SETTINGS, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(SETTINGS)}."
                raise UsageError(f"unknown setting {name!r}. {hint}")
        given = {name: value for name, value in changes.items() if value is not None}
        try:
            return replace(self, **given)
        except ValidationError as error:
            wrong = str(error.errors()[0]["loc"][0])
            raise UsageError(f"--{option_name(wrong)} {describe_range(wrong)}, not {given[wrong]}.") from None


_TABLE = read_own_table("families.yaml", __file__)
STEP_RULES = {family: about["rules"] for family, about in _TABLE["processes"].items()}
KNOWN = {family: about["settings"] for family, about in _TABLE["processes"].items()}
SETTINGS = Sampling.__pydantic_fields__  # type: ignore[attr-defined]
FAMILIES: dict[str, Family] = {name: one.json_schema_extra["family"] for name, one in SETTINGS.items()}


def understood_by(families: Collection[Family]) -> list[str]:
    """Settings that a model of these families understands."""
    return [name for name, family in FAMILIES.items() if family in families]


def refuse_foreign(names: Iterable[str], families: Collection[str], who: str) -> None:
    """Refuse settings that mean nothing to a model which knows these families of them."""
    for name in names:
        if (family := FAMILIES[name]) not in families:
            raise UsageError(f"--{option_name(name)} is for {_TABLE['settings'][family]}, but {who}: leave it out.")


def option_name(name: str) -> str:
    return name.replace("_", "-")


def describe_range(name: str) -> str:
    about = SETTINGS[name].json_schema_extra
    low, high, zero = about["low"], about["high"], about["zero"]
    if low is None:
        choices = get_args(SETTINGS[name].annotation)
        return (
            f"must be one of {', '.join(choices)}"
            if choices
            else f"must be of type {SETTINGS[name].annotation.__name__}"
        )
    if high is None:
        return f"must be at least 1 (0: {zero})"
    if about["above"]:
        return f"must be greater than 0 and at most {high}"
    return f"must be between {1 if zero else low} and {high:,}" + (f" (0: {zero})" if zero else "")
