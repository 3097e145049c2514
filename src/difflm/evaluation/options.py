"""What can be asked of an evaluation: every option once, for the command and for Python, with the tasks it is for."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from difflm.errors import UsageError
from difflm.generation.requests import read_guidance
from difflm.runtime.files import Json, read_own_table

if TYPE_CHECKING:
    from difflm.controls.guidance import GuidanceSettings

TASKS = LANGUAGE, CONTROL, INFILL, SEQ2SEQ = ("language", "control", "infill", "seq2seq")
SAMPLES = 1000  # texts of the language task, or gaps
# The sampling settings that an evaluation may change.
SETTINGS = (
    *("steps", "sampler", "temperature", "noise_temperature", "noise_top_p", "clamp"),
    *("projection", "projection_top_p", "start"),
)


@dataclass(frozen=True)
class About:
    """What a help page says of an option, how it names its value, the tasks that it is for, and least and most."""

    help: str
    metavar: str | None = None
    tasks: Sequence[str] = TASKS
    range: Sequence[int] = (0, 0)  # any
    infill: Sequence[int] = ()  # the range for infilling, if it is another


@dataclass(frozen=True)
class Options:
    """The fields; `options.yaml` says what each is."""

    data: Path | None = None
    split: Literal["train", "valid", "test"] = "valid"
    on: str | None = None
    samples: int | None = None
    score_texts: int = 500
    seed: int = 0
    draws: int = 8
    judge: str | None = None
    twin: str | None = None
    out: Path | None = None  # append the records to this file instead of the runs
    device: str = "auto"
    controls: str | None = None
    targets: Path | None = None
    each: int = 5
    candidates: int = 1
    guidance: str | None = None
    guide: list[Path] | None = None
    texts: Path | None = None
    second_parser: Path | None = None
    method: list[str] | None = None
    sets: str | None = None
    skip: int = 0
    mbr: int = 10
    beams: int = 5
    encoder: str | None = None
    pairs: str | None = None
    column: str | None = None
    rank: list[str] | None = None
    repairs: int = 0
    oracle: bool = False
    settings: Json = field(default_factory=dict)  # changes to the models' sampling, by SETTINGS

    def check_task(self, task: str) -> None:
        """Refuse options of other tasks."""
        for name, about in describe_options().items():
            if task not in about.tasks and getattr(self, name) not in (getattr(Options, name), []):
                raise wrong_task(name, about.tasks)

    def check(self, task: str) -> None:
        """Refuse what cannot be measured, before anything is loaded."""
        from difflm.generation.checks import check_request

        self.check_task(task)
        for name, about in describe_options().items():
            value, (least, most) = getattr(self, name), about.infill if task == INFILL and about.infill else about.range
            if value is not None and most and not least <= value <= most:
                raise UsageError(f"--{name.replace('_', '-')} must be between {least} and {most:,}, not {value}.")
        check_request(1, self.seed, 1, self.candidates)
        check_request(1, self.seed, self.mbr)

    @property
    def methods(self) -> "dict[str, GuidanceSettings | None]":
        """Decoders by name, each with its guidance; `all` are those of the registry. None: its usual guidance."""
        from difflm.methods.rivals import DECODERS, find_decoder

        found: dict[str, GuidanceSettings | None] = {}
        for given in self.method or ():
            name, equals, guidance = given.partition("=")
            if (equals and name == "all") or guidance == "original":
                raise UsageError(f"--method {given}: give the guidance of one decoder as a number, such as fudge=2.")
            names = [*DECODERS] if name == "all" else [find_decoder(name).name]
            found |= dict.fromkeys(names, read_guidance(guidance, f"--method {name}") if equals else None)
        return found


class Watcher(Protocol):
    """Is told of progress, and of what a user should know at once."""

    def update(self, what: str, done: int, total: int | None) -> None: ...
    def note(self, message: str) -> None: ...


DEFAULTS = Options()
OnProgress = Callable[[str, int, int], None]  # what is being done, how much of it is done, and of how much
TELL: ContextVar[OnProgress] = ContextVar("TELL", default=lambda what, done, total: None)


def say(what: str, done: int = 0, total: int = 1) -> None:
    """Tell whoever watches this evaluation what is being done; nothing, if that has no name."""
    if what:
        TELL.get()(what, done, total)


@cache
def describe_options() -> dict[str, About]:
    """The options that only some tasks have, or that no other command has."""
    return {name: About(**about) for name, about in read_own_table("options.yaml", __file__).items()}


def wrong_task(option: str, tasks: Sequence[str]) -> UsageError:
    name = option.replace("_", "-")
    return UsageError(f"--{name} is for --task {' or '.join(tasks)}: leave it out, or change the task.")


def split_names(listed: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in listed.split(",")))
