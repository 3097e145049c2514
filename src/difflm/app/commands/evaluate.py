"""`difflm evaluate`, `difflm compare` and `difflm score`."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from difflm.app.commands.evaluate_options import SETTINGS, ControlOptions, InfillOptions, MeasureOptions
from difflm.app.commands.options import Device, Draws, Json, Run, Seed, load_model, report_errors, with_options
from difflm.app.console import Bar, note, put_json
from difflm.errors import UsageError


@report_errors
@with_options(options=MeasureOptions, settings=SETTINGS, control=ControlOptions, infill=InfillOptions)
def evaluate(
    run: Run,
    options: MeasureOptions,
    settings: dict[str, Any],
    control: ControlOptions,
    infill: InfillOptions,
    task: Annotated[Literal["language", "control", "infill"], typer.Option(help="What to measure.")] = "language",
) -> None:
    """Measure a model beside real text; append the figures to its metrics.jsonl."""
    for group, owner in ((control, "control"), (infill, "infill")):
        if task != owner:
            refuse_given(group, [f.name for f in fields(group)], owner)
    if task != "language":
        refuse_given(options, ["score_texts", "twin", "draws" if task == "control" else "judge"], "language")
    from difflm.app import measuring

    if task == "language":
        measuring.measure_language([run], options, settings)
    elif task == "control":
        measuring.measure_control(run, options, settings, control)
    else:
        measuring.measure_infill(run, options, settings, infill)


def refuse_given(options: MeasureOptions | ControlOptions | InfillOptions, names: list[str], task: str) -> None:
    """Refuse options without effect."""
    for f in fields(options):
        if f.name in names and getattr(options, f.name) not in (f.default, []):
            raise UsageError(f"--{f.name.replace('_', '-')} belongs to --task {task}.")


@report_errors
@with_options(options=MeasureOptions, settings=SETTINGS)
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN …", help="Runs that were trained on the same data.")],
    options: MeasureOptions,
    settings: dict[str, Any],
) -> None:
    """Measure several models on the same data with the same judge: one table; each keeps its figures."""
    from difflm.app.measuring import measure_language

    measure_language(runs, options, settings)


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
    scores: list[Scored] = []
    with Bar("scoring", len(rows)) as bar:
        for start in range(0, len(rows), 256):
            nats, errors = lm.score_ids_with_errors(rows[start : start + 256], seed, draws, first=start)
            chunk = zip(texts[start:], rows[start:], nats.tolist(), errors.tolist(), strict=False)
            for text, row, value, error in chunk:
                scored = Scored(value, error, len(row) + 1, kind)
                line = json.dumps({"text": text, **scored.figures()}, ensure_ascii=False)
                bar.put(line if as_json else f"{scored}  {text}")
                scores.append(scored)
            bar.update("scoring", len(scores), len(rows))
    mean = Scored.mean(scores)
    if as_json:
        put_json({"mean": mean.figures(), "texts": len(scores)})
    else:
        print(f"{mean}  mean of {len(scores):,} texts")
    unknown = sum(row.count(UNK) for row in rows)
    if unknown:
        note(
            f"{unknown:,} of {sum(map(len, rows)):,} tokens are words this model does not know: they count as one word."
        )


@dataclass(frozen=True)
class Scored:
    """Nats of a text, or their mean over several, with the standard error of a bound's draws."""

    nats: float
    error: float  # 0 for exact nats, NaN for a single draw
    tokens: float
    kind: str

    @classmethod
    def mean(cls, scores: "Sequence[Scored]") -> "Scored":
        """Average total nats and total tokens, END included; the errors of the texts' draws are independent."""
        count, error = len(scores), math.sqrt(sum(one.error**2 for one in scores))
        nats, tokens = sum(one.nats for one in scores), sum(one.tokens for one in scores)
        return cls(nats / count, error / count, tokens / count, scores[0].kind)

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
