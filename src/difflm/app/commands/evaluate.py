"""`difflm evaluate`, `difflm compare` and `difflm score`."""

import functools
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

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
    Run,
    Sampler,
    ScoreTexts,
    Seed,
    Split,
    Steps,
    Temperature,
    Twin,
    load_model,
    report_errors,
)
from difflm.app.console import Bar, note, put_json
from difflm.errors import UsageError


@dataclass(frozen=True)
class Measuring:
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
        """How the models are asked to write, where it is not as they would."""
        names = ("steps", "sampler", "temperature", "noise_temperature", "noise_top_p", "clamp")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class Controlling:
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
class Infilling:
    """The options of the infilling task."""

    sets: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Infilling task: anlg, roc, or both with a comma. [both]")
    ] = None
    skip: Annotated[
        int,
        typer.Option(help="Infilling task: gaps of the seed's order to leave out, so as to choose settings on others."),
    ] = 0
    rival: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Infilling task: a run to stand beside; repeatable.")
    ] = None
    mbr: Annotated[int, typer.Option(help="Infilling task: of so many candidates, the one most like the others.")] = 10
    beams: Annotated[int, typer.Option(help="Infilling task: beams of a left-to-right model; 0: no search.")] = 5
    encoder: Annotated[
        str | None, typer.Option(metavar="DIR", help="Infilling task: BERTScore by the encoder of this directory.")
    ] = None

    def names(self) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in (self.sets or "anlg,roc").split(",")))


def with_options(**groups: type) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Give a verb the options that dataclasses name; it gets each group as one argument."""

    def decorate(verb: Callable[..., int | None]) -> Callable[..., int | None]:
        shared = {name: inspect.signature(group).parameters for name, group in groups.items()}
        own = [p for p in inspect.signature(verb).parameters.values() if p.name not in groups]

        @functools.wraps(verb)
        def joined(**given: Any) -> int | None:
            asked = {name: groups[name](**{key: given.pop(key) for key in keys}) for name, keys in shared.items()}
            return verb(**given, **asked)

        signature = inspect.Signature([*own, *(p for keys in shared.values() for p in keys.values())])
        joined.__signature__ = signature  # type: ignore[attr-defined]
        joined.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return joined

    return decorate


@report_errors
@with_options(asked=Measuring, control=Controlling, infill=Infilling)
def evaluate(
    run: Run,
    asked: Measuring,
    control: Controlling,
    infill: Infilling,
    task: Annotated[Literal["language", "control", "infill"], typer.Option(help="What to measure.")] = "language",
) -> None:
    """Measure a model beside real text; append the figures to its metrics.jsonl."""
    if task != "control":
        refuse_given(control, [f.name for f in fields(control)], "control")
    if task != "infill":
        refuse_given(infill, [f.name for f in fields(infill)], "infill")
    if task == "language":
        measure_and_keep([run], asked)
        return
    if task == "infill":
        measure_gaps(run, asked, infill)
        return
    refuse_given(asked, ["draws", "score_texts", "twin"], "language")
    from difflm.app.measuring import keep_records, measure_control, show_report

    report = measure_control(run, asked, control)
    show_report(report, asked.as_json)
    keep_records([run], report, asked.out)


def measure_gaps(run: str, asked: Measuring, infill: Infilling) -> None:
    refuse_given(asked, ["score_texts", "twin", "judge"], "language")
    from difflm.app.measuring import keep_middles, keep_records, measure_infill, show_report

    report, middles = measure_infill(run, asked, infill)
    show_report(report, asked.as_json)
    keep_records([run, *(infill.rival or ())], report, asked.out)
    keep_middles(run, middles, asked.out)


def refuse_given(options: Measuring | Controlling | Infilling, names: list[str], task: str) -> None:
    """An option without effect would be taken for one that has some."""
    for f in fields(options):
        if f.name in names and getattr(options, f.name) not in (f.default, []):
            raise UsageError(f"--{f.name.replace('_', '-')} belongs to --task {task}.")


@report_errors
@with_options(asked=Measuring)
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN …", help="Runs that were trained on the same data.")],
    asked: Measuring,
) -> None:
    """Measure several models on the same data with the same judge: one table; each keeps its figures."""
    measure_and_keep(runs, asked)


def measure_and_keep(runs: list[str], asked: Measuring) -> None:
    from difflm.app.measuring import keep_records, measure, show_report

    report = measure(runs, asked)
    show_report(report, asked.as_json)
    keep_records(runs, report, asked.out)


@report_errors
def score(
    run: Run,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Texts: .txt (a text a line), .csv or .jsonl, each also .gz.")
    ],
    column: Annotated[str | None, typer.Option(help="Column of a .csv or .jsonl file. [text]")] = None,
    seed: Seed = 0,
    draws: Draws = 16,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """How likely a model finds given texts: nats of each, exact or the estimate of a bound with its ±; the mean."""
    if not 1 <= draws <= 1_000_000:
        raise UsageError(f"--draws must lie between 1 and 1,000,000, not {draws}.")
    from difflm.data.texts import read_texts
    from difflm.data.tokenizers import UNK

    texts = list(read_texts(file, column))
    lm = load_model(run, device)
    kind = lm.model.likelihood
    if kind is None:
        raise UsageError(f"{run} ({lm.config['method']}) has no likelihood and no bound: it cannot score.")
    rows = lm.encode(texts)
    nats: list[float] = []
    errors: list[float] = []
    with Bar("scoring", len(rows)) as bar:
        for start in range(0, len(rows), 256):
            piece = lm.score_ids_with_errors(rows[start : start + 256], seed, draws, first=start)
            told_of = zip(texts[start:], rows[start:], piece[0].tolist(), piece[1].tolist(), strict=False)
            for text, row, value, error in told_of:
                report_errors = Scored(value, error, len(row) + 1, kind)
                bar.put(
                    json.dumps({"text": text, **report_errors.figures()}, ensure_ascii=False)
                    if as_json
                    else f"{report_errors}  {text}"
                )
                nats.append(value)
                errors.append(error)
            bar.update("scoring", len(nats), len(rows))
    # Words and END, as everywhere: a bound in nats/token is total nats over total tokens. The ± is that of the draws.
    error = math.sqrt(sum(e * e for e in errors)) / len(errors)
    mean = Scored(sum(nats) / len(nats), error, sum(len(row) + 1 for row in rows) / len(rows), kind)
    if as_json:
        put_json({"mean": mean.figures(), "texts": len(nats)})
    else:
        print(f"{mean}  mean of {len(nats):,} texts")
    unknown = sum(row.count(UNK) for row in rows)
    if unknown:
        note(
            f"{unknown:,} of {sum(map(len, rows)):,} tokens are words this model does not know: they count as one word."
        )


@dataclass(frozen=True)
class Scored:
    """Nats of a text, or of several on average, and the standard error that a bound's draws leave."""

    nats: float
    error: float  # 0 where nats are exact, NaN of a single estimate
    tokens: float
    kind: str

    @property
    def estimated(self) -> bool:
        return self.kind == "bound" and math.isfinite(self.error)

    def __str__(self) -> str:
        error = f" ±{self.error:6.3f}" if self.estimated else ""
        per_token = f" ±{self.error / self.tokens:6.3f}" if self.estimated else ""
        return f"{self.nats:9.3f}{error} nats {self.nats / self.tokens:7.3f}{per_token} nats/token {self.kind}"

    def figures(self) -> dict[str, Any]:
        figures = {"nats": round(self.nats, 4), "nats_per_token": round(self.nats / self.tokens, 4), "kind": self.kind}
        return {**figures, "standard_error": round(self.error, 4)} if self.estimated else figures
