"""The options of `difflm evaluate` and `difflm compare`, in groups."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from difflm.app.commands.options import Data, Device, Draws, Guidance, Json, Seed

SETTINGS = ("steps", "sampler", "temperature", "noise_temperature", "noise_top_p", "clamp")


@dataclass(frozen=True)
class MeasureOptions:
    """The options that evaluate and compare share."""

    data: Data = None
    split: Annotated[Literal["train", "valid"], typer.Option(help="Which texts to measure on.")] = "valid"
    samples: Annotated[
        int | None,
        typer.Option(help="Texts to generate [1000]; control task: targets a control [200]; infilling: gaps [1000]."),
    ] = None
    score_texts: Annotated[int, typer.Option(help="Held-out texts whose likelihood is measured.")] = 500
    seed: Seed = 0
    draws: Draws = 8
    judge: Annotated[
        str | None, typer.Option(metavar="RUN", help="Left-to-right model that reads the samples. [judge]")
    ] = None
    twin: Annotated[str | None, typer.Option(metavar="RUN", help="Autoregressive run whose samples stand beside.")] = (
        None
    )
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Append the records here, not to the runs.")] = None
    device: Device = "auto"
    as_json: Json = False


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
        return None if self.controls is None else split_names(self.controls)


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
        return split_names(self.sets or "anlg,roc")


def split_names(listed: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in listed.split(",")))
