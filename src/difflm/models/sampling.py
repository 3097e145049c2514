"""`Sampling`: how text is made. `families.yaml` states the range of every setting, its help text and the models that
understand it once; the command's options, the HTTP API's schema, the checks and their messages derive from it. Nothing
here imports torch, so that the command's help need not."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from difflm.errors import UsageError, suggest
from difflm.runtime.files import read_own_table

Family = Literal["any", "diffusion", "vectors", "simplex", "masks", "masked", "tokens", "left-to-right", "edits"]
Projection = Literal["mean", "greedy", "sample", "multi-hot"]
Start = Literal["noise", "nothing", "source"]


_TABLE = read_own_table("families.yaml", __file__)


def setting(name: str) -> Any:
    """The range, the help text and the family of a setting, as `families.yaml` has them."""
    about = {"low": None, "high": None, "above": False, "zero": "", **_TABLE["sampling"][name]}
    ends = {"gt" if about["above"] and not about["zero"] else "ge": about["low"], "le": about["high"]}
    return Field(description=about.pop("help"), json_schema_extra=about, **ends)


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Sampling:
    """How text is made. A method holds its own defaults; a request changes some of them."""

    sampler: Annotated[str, setting("sampler")] = "ancestral"
    steps: Annotated[int, setting("steps")] = 50
    temperature: Annotated[float, setting("temperature")] = 1.0
    noise_temperature: Annotated[float, setting("noise_temperature")] = 1.0
    noise_top_p: Annotated[float, setting("noise_top_p")] = 1.0
    clamp: Annotated[bool, setting("clamp")] = False
    clamp_below: Annotated[float, setting("clamp_below")] = 1.0
    stop_at: Annotated[float, setting("stop_at")] = 0.0
    told_time: Annotated[float, setting("told_time")] = 0.0
    length_beam: Annotated[int, setting("length_beam")] = 0
    draw: Annotated[bool, setting("draw")] = False
    projection: Annotated[Projection, setting("projection")] = "mean"
    projection_top_p: Annotated[float, setting("projection_top_p")] = 1.0
    contrast: Annotated[float, setting("contrast")] = 0.0
    block: Annotated[int, setting("block")] = 0
    sure: Annotated[float, setting("sure")] = 0.9
    top_k: Annotated[int, setting("top_k")] = 0
    top_p: Annotated[float, setting("top_p")] = 1.0
    beams: Annotated[int, setting("beams")] = 0
    length_penalty: Annotated[float, setting("length_penalty")] = 0.0
    start: Annotated[Start, setting("start")] = "noise"
    revisions: Annotated[int, setting("revisions")] = 1

    def change(self, changes: Mapping[str, Any]) -> "Sampling":
        """The same with other values; `None` leaves one as it is. Unknown names and values out of range are refused."""
        if unknown := [name for name in changes if name not in SETTINGS]:
            raise explain_setting(unknown[0])
        given = {name: value for name, value in changes.items() if value is not None}
        try:
            return replace(self, **given)
        except ValidationError as error:
            wrong = str(error.errors()[0]["loc"][0])
            raise UsageError(f"--{option_name(wrong)} {describe_range(wrong)}, not {given[wrong]}.") from None


STEP_RULES = {family: about["rules"] for family, about in _TABLE["processes"].items()}
KNOWN = {family: about["settings"] for family, about in _TABLE["processes"].items()}
SETTINGS = Sampling.__pydantic_fields__  # type: ignore[attr-defined]
FAMILIES: dict[str, Family] = {name: one.json_schema_extra["family"] for name, one in SETTINGS.items()}


def explain_setting(name: str, others: Iterable[str] = ()) -> UsageError:
    """The error for an unknown setting, or argument if there are `others`."""
    hint = suggest(name, [*SETTINGS, *others]) or f"Known: {', '.join(SETTINGS)}."
    return UsageError(f"unknown setting {name!r}. {hint}".strip())


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
        kind = SETTINGS[name].annotation
        choices = ", ".join(get_args(kind))
        return f"must be one of {choices}" if choices else f"must be of type {kind.__name__}"
    if high is None:
        return f"must be at least 1 (0: {zero})"
    if about["above"]:
        return f"must be greater than 0 and at most {high}"
    return f"must be between {1 if zero else low} and {high:,}" + (f" (0: {zero})" if zero else "")
