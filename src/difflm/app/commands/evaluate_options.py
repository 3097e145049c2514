"""The options of `difflm evaluate` and `difflm compare`, in groups."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from difflm.app.commands.options import (
    Clamp,
    Data,
    Device,
    Draws,
    Guidance,
    Json,
    Judge,
    NoiseTemperature,
    NoiseTopP,
    Sampler,
    ScoreTexts,
    Seed,
    Split,
    Steps,
    Temperature,
    Twin,
)


@dataclass(frozen=True)
class MeasureOptions:
    """The options that evaluate and compare share."""

    data: Data = None
    split: Split = "valid"
    samples: Annotated[
        int | None,
        typer.Option(help="Texts to generate [1000]; control task: targets a control [200]; infilling: gaps [1000]."),
    ] = None
    score_texts: ScoreTexts = 500
    seed: Seed = 0
    draws: Draws = 8
    judge: Judge = None
    twin: Twin = None
    steps: Steps = None
    sampler: Sampler = None
    temperature: Temperature = None
    noise_temperature: NoiseTemperature = None
    noise_top_p: NoiseTopP = None
    clamp: Clamp = None
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Append the records here, not to the runs.")] = None
    device: Device = "auto"
    as_json: Json = False

    def settings(self) -> dict[str, Any]:
        """Return the sampling settings that differ from the models' own."""
        names = ("steps", "sampler", "temperature", "noise_temperature", "noise_top_p", "clamp")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class ControlOptions:
    """The options of the control task."""

    controls: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Control task: which ones, such as length,field+pos. [all]")
    ] = None
    targets: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Control task: targets, drawn into it where it is not there.")
    ] = None
    each: Annotated[int, typer.Option(help="Control task: samples a target.")] = 5
    candidates: Annotated[int, typer.Option(help="Control task: of so many, the one the classifiers find best.")] = 1
    guidance: Guidance = None
    guide: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Control task: a classifier of this model; repeatable.")
    ] = None
    texts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Control task: keep the texts; if it is there, measure those.")
    ] = None
    second_parser: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Control task: a parser trained on other trees.")
    ] = None

    def names(self) -> list[str] | None:
        if self.controls is None:
            return None
        return list(dict.fromkeys(name.strip() for name in self.controls.split(",")))


@dataclass(frozen=True)
class InfillOptions:
    """The options of the infilling task."""

    sets: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Infilling task: anlg, roc, or both with a comma. [both]")
    ] = None
    skip: Annotated[
        int,
        typer.Option(help="Infilling task: gaps of the seed's order to leave out, so as to choose settings on others."),
    ] = 0
    rival: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Infilling task: a run to compare with; repeatable.")
    ] = None
    mbr: Annotated[int, typer.Option(help="Infilling task: of so many candidates, the one most like the others.")] = 10
    beams: Annotated[int, typer.Option(help="Infilling task: beams of a left-to-right model; 0: no search.")] = 5
    encoder: Annotated[
        str | None, typer.Option(metavar="DIR", help="Infilling task: BERTScore by the encoder of this directory.")
    ] = None

    def names(self) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in (self.sets or "anlg,roc").split(",")))


def with_options(**groups: type) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Give a command the options of dataclasses; it receives each group as one argument."""

    def decorate(command: Callable[..., int | None]) -> Callable[..., int | None]:
        shared = {name: inspect.signature(group).parameters for name, group in groups.items()}
        own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]

        @functools.wraps(command)
        def with_groups(**given: Any) -> int | None:
            asked = {name: groups[name](**{key: given.pop(key) for key in keys}) for name, keys in shared.items()}
            return command(**given, **asked)

        signature = inspect.Signature([*own, *(p for keys in shared.values() for p in keys.values())])
        with_groups.__signature__ = signature  # type: ignore[attr-defined]
        with_groups.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return with_groups

    return decorate
