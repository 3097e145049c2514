"""What can be asked of an evaluation: every option once, for the command and for Python, with the tasks it is for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_origin, get_type_hints

from difflm.errors import UsageError
from difflm.generation.requests import read_guidance
from difflm.runtime.files import Json

if TYPE_CHECKING:
    from difflm.controls.guidance import GuidanceSettings

TASKS = LANGUAGE, CONTROL, INFILL, SEQ2SEQ = ("language", "control", "infill", "seq2seq")
SAMPLES = 1000  # texts of the language task, or gaps
# The sampling settings that an evaluation may change.
SETTINGS = (
    *("steps", "sampler", "temperature", "noise_temperature", "noise_top_p", "clamp"),
    *("projection", "projection_top_p", "start"),
)


class About:
    """What a help page says of an option, and the tasks that the option is for."""

    def __init__(self, help: str, metavar: str | None = None, *tasks: str) -> None:
        self.help, self.metavar, self.tasks = help, metavar, tasks or TASKS


@dataclass(frozen=True)
class Options:
    data: Path | None = None  # the directory of the corpora
    split: Annotated[Literal["train", "valid", "test"], About("Which texts to measure on.")] = "valid"
    on: Annotated[
        str | None, About("Texts to measure on. [those that the runs held out]", "NAME or FILE", LANGUAGE)
    ] = None
    samples: Annotated[
        int | None,
        About("Texts to generate [1000]; control: targets [200]; infill: gaps [1000]; seq2seq: sources [all]."),
    ] = None
    score_texts: Annotated[int, About("Held-out texts whose likelihood is measured.", None, LANGUAGE)] = 500
    seed: int = 0
    draws: Annotated[int, About("Noise levels per text when estimating the bound.", None, LANGUAGE, INFILL)] = 8
    judge: Annotated[
        str | None,
        About("An autoregressive model that scores the samples. [judge]", "RUN", LANGUAGE, CONTROL, INFILL),
    ] = None
    twin: Annotated[str | None, About("An autoregressive run to compare with.", "RUN", LANGUAGE)] = None
    out: Path | None = None  # append the records to this file instead of the runs
    device: str = "auto"
    controls: Annotated[str | None, About("Which controls, such as length,field+pos. [all]", "NAMES", CONTROL)] = None
    targets: Annotated[
        Path | None, About("Read the targets from this file; draw them into it if it is new.", "FILE", CONTROL)
    ] = None
    each: Annotated[int, About("Samples per target.", None, CONTROL)] = 5
    candidates: Annotated[
        int,
        About(
            "Generate N candidates and keep the best one by the classifiers; of filled gaps, the one that fits best.",
            "N",
            CONTROL,
        ),
    ] = 1
    guidance: Annotated[
        str | None, About("How strongly classifiers steer; see `difflm generate`.", "SIZE", CONTROL)
    ] = None
    guide: Annotated[list[Path] | None, About("A classifier of a run; repeatable.", "DIR", CONTROL)] = None
    texts: Annotated[
        Path | None, About("Save the texts here; if the file exists, measure its texts.", "FILE", CONTROL)
    ] = None
    second_parser: Annotated[
        Path | None, About("A parser trained on other trees, for a second opinion.", "DIR", CONTROL)
    ] = None
    method: Annotated[
        list[str] | None,
        About(
            "A decoder for left-to-right runs, or `all`; each gets a row; repeatable.",
            "NAME[=GUIDANCE]",
            CONTROL,
            INFILL,
        ),
    ] = None
    sets: Annotated[str | None, About("anlg, roc, or both: anlg,roc. [both]", "NAMES", INFILL)] = None
    skip: Annotated[
        int, About("Skip the first N gaps or sources, which settings were chosen on.", "N", INFILL, SEQ2SEQ)
    ] = 0
    mbr: Annotated[int, About("Generate N candidates and keep the one most like the others.", "N", INFILL, SEQ2SEQ)] = (
        10
    )
    beams: Annotated[int, About("Beam size of autoregressive models; 0: no beam search.", None, INFILL, SEQ2SEQ)] = 5
    encoder: Annotated[
        str | None, About("Also compute BERTScore with the encoder in this directory.", "DIR", INFILL, SEQ2SEQ)
    ] = None
    pairs: Annotated[
        str | None, About("Sources and references. [held-out pairs]", "FILE, NAME or SOURCES,TARGETS…", SEQ2SEQ)
    ] = None
    column: Annotated[str | None, About("The columns of the pairs. [src,trg]", "SOURCE,TARGET", SEQ2SEQ)] = None
    rank: Annotated[
        list[str] | None,
        About("Add the likeliest candidate, by the model's own bound or a run; repeatable.", "bound|RUN", SEQ2SEQ),
    ] = None
    repairs: Annotated[
        int, About("At most how often a left-to-right --rank RUN repairs each candidate first.", "N", SEQ2SEQ)
    ] = 0
    oracle: Annotated[bool, About("Add the candidate closest to the references, as an upper limit.", None, SEQ2SEQ)] = (
        False
    )
    settings: Json = field(default_factory=dict)  # changes to the models' sampling, by SETTINGS

    def check_task(self, task: str) -> None:
        """Refuse options of other tasks."""
        for name, about in describe_options().items():
            if task not in about.tasks and getattr(self, name) not in (getattr(Options, name), []):
                raise wrong_task(name, about.tasks)

    def check(self, task: str) -> None:
        """Refuse what cannot be measured, before anything is loaded."""
        from difflm.generation.jobs import MOST_TEXTS, check_request

        self.check_task(task)
        ranges = {
            "samples": (2 if task == INFILL else 1, 1_000_000),
            "score_texts": (1, 1_000_000),
            "draws": (0 if task == INFILL else 1, 1000),
            "each": (1, MOST_TEXTS),
            "beams": (0, 1000),
            "skip": (0, 1_000_000_000),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
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


DEFAULTS = Options()


def describe_options() -> dict[str, About]:
    """The options that only some tasks have, or that no other command has."""
    hints = get_type_hints(Options, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


def wrong_task(option: str, tasks: Sequence[str]) -> UsageError:
    name = option.replace("_", "-")
    return UsageError(f"--{name} is for --task {' or '.join(tasks)}: leave it out, or change the task.")


def split_names(listed: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in listed.split(",")))
