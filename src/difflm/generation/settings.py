"""The arguments of the generating methods, defined once: editors complete them, and `help` lists them."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, TypeVar, get_args

from difflm.controls import CONTROLS, Control, Infill
from difflm.controls.gaps import Edit
from difflm.controls.guidance import GuidanceSettings
from difflm.data.chat import Message
from difflm.errors import UsageError, suggest
from difflm.generation.jobs import Ids, Watch
from difflm.generation.ranking import Rank
from difflm.generation.rewriting import Rewriting
from difflm.models.sampling import SETTINGS, Projection, Start

F = TypeVar("F", bound=Callable[..., Any])


class Settings(TypedDict, total=False):
    """The settings of `Sampling`; None keeps the model's value."""

    sampler: str | None
    steps: int | None
    temperature: float | None
    noise_temperature: float | None
    noise_top_p: float | None
    clamp: bool | None
    clamp_below: float | None
    stop_at: float | None
    told_time: float | None
    length_beam: int | None
    draw: bool | None
    projection: Projection | None
    projection_top_p: float | None
    contrast: float | None
    block: int | None
    sure: float | None
    top_k: int | None
    top_p: float | None
    beams: int | None
    length_penalty: float | None
    start: Start | None
    revisions: int | None


class Asked(Settings, total=False):
    """Arguments of a request other than its controls; `TextDiffusion.make_job` describes them."""

    mbr: int
    candidates: int
    rank: "Rank | None"  # by name, as the reference shows it
    repairs: int
    guidance: GuidanceSettings | float | None
    method: str | None
    messages: Sequence[Message] | None
    watch: Watch | None


class Written(Asked, total=False):
    """Also the arguments of methods that return whole lists of texts; `TextDiffusion.generate` describes them."""

    controls: Control | Sequence[Control]
    progress: bool | Callable[[int, int], None]
    frames: bool


class WrittenFrom(Written, total=False):
    """Also the source, for methods that may be given one."""

    source: str | Sequence[str] | None


@dataclass
class Task:
    """What one request asks for, with the defaults; `TextDiffusion.generate` describes it."""

    n: int
    seed: int = 0
    mbr: int = 1
    candidates: int = 1
    usual: bool = False  # whether gaps have as many candidates as the model says
    controls: Sequence[Control] = ()
    edit: Edit | None = None
    rewriting: Rewriting | None = None  # the same for a model that says texts in other words; then `edit` is None
    edited: str = ""  # the text of either
    guidance: GuidanceSettings | None = None
    watch: Watch | None = None
    source: str | Sequence[str] | None = None
    rank: Rank | None = None
    repairs: int = 0
    method: str | None = None
    messages: Sequence[Message] | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # those of `Sampling`
    told: list[Ids] = field(default_factory=list)  # the sources
    sources: list[Ids] = field(default_factory=list)  # one for each text: its source, or the messages
    template: Infill | None = None  # the text whose gaps are filled by denoising
    judged: bool = False  # whether the model reads whole texts in order, and so can tell the best

    @property
    def chooses_by_fit(self) -> bool:
        """Whether the model itself chooses among candidates: by how well they read, fill gaps, or answer messages."""
        steered = any(control.head for control in self.controls if isinstance(control, Control))
        return not steered and (self.judged or self.template is not None or self.messages is not None)


DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(Task)} | {"progress": False, "frames": False}


def list_arguments(method: F) -> F:
    """Show the arguments that `**asked` stands for in a method's signature. The method itself is not wrapped."""
    signature = inspect.signature(method)
    *own, rest = signature.parameters.values()
    (kind,) = get_args(rest.annotation)
    hints = {name: hint for name, hint in kind.__annotations__.items() if name not in signature.parameters}
    more = [  # first those that methods add, last the settings
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=hints[name])
        for name in sorted(hints, key=lambda name: (name in SETTINGS, name in Asked.__annotations__))
    ]
    method.__signature__ = signature.replace(parameters=own + more)  # type: ignore[attr-defined]
    return method


def explain_setting(name: str) -> UsageError:
    """The error for an unknown argument, with a similar name or what to give instead."""
    if name in CONTROLS:
        return UsageError(f"{name} is a control: give controls=[{CONTROLS[name].__name__}(…)].")
    known = [*SETTINGS, *WrittenFrom.__annotations__, "n", "seed", "edit"]
    hint = suggest(name, known) or f"Known: {', '.join(SETTINGS)}."
    return UsageError(f"unknown setting {name!r}. {hint}".strip())
