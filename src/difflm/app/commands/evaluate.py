"""`difflm evaluate`, `difflm compare` and `difflm score`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from difflm.app.commands.options import (
    check_file,
    check_names,
    check_reads_sources,
    command,
    is_text,
    load_model,
    read_stdin,
)
from difflm.app.console import Bar, complain, note, put_json, put_table, to_json
from difflm.errors import UsageError
from difflm.evaluation.options import SETTINGS, Options, split_names, wrong_task

Task = Literal["language", "control", "infill", "seq2seq"]
RIVALS = ("infill", "seq2seq", "control")  # tasks that compare runs which were trained on different data
SAMPLES = 200  # texts of each method that is trained to be compared


@command("evaluate", options=Options, settings=SETTINGS)
def evaluate(
    run: str,
    options: Options,
    settings: dict[str, object],
    task: Task = "language",
    rival: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Measure a model and compare it with real text; the figures are appended to its metrics.jsonl."""
    if rival and task not in RIVALS:
        raise wrong_task("rival", RIVALS)
    measure([run, *(rival or ())], task, replace(options, settings=settings), as_json)


def measure(runs: list[str], task: str, options: Options, as_json: bool) -> None:
    """Measure runs by a task, print the report and keep its figures."""
    options.check_task(task)
    check_names(options.device, *runs, options.judge, options.twin, guides=options.guide)
    for run in runs if task == "seq2seq" else ():
        check_reads_sources(run)
    from difflm.evaluation.tasks import evaluate as evaluate_runs
    from difflm.evaluation.tasks import keep_report
    from difflm.runtime.distributed import current

    with Bar("measuring") as bar:
        report = evaluate_runs(runs, task, options, bar)
    if not current().first:  # of several processes
        return
    if as_json:
        for row_object in report.objects():
            put_json(row_object)
    else:
        for table in report.tables():
            put_table(table)
    keep_report(report, runs, options.out, bar)


@command("compare", options=Options, settings=SETTINGS)
def compare(
    runs: list[str],
    options: Options,
    settings: dict[str, object],
    task: Task = "language",
    methods: str | None = None,
    minutes: float = 5.0,
    into: Path | None = None,
    as_json: bool = False,
) -> int:
    """Measure several models on the same data with the same judge, in one table; each run keeps its figures."""
    options = replace(options, settings=settings)
    if methods is None:
        for name, given in (("minutes", minutes != 5.0), ("into", into is not None)):
            if given:
                raise wrong_task(name, ["language with --methods"])
    else:
        from difflm.app.own_comparison import train_methods

        trained = train_methods(split_names(methods), runs, minutes, into, options.data, options.device)
        if trained is None:
            return 1
        runs = trained
        options = replace(options, samples=SAMPLES if options.samples is None else options.samples)
    measure(runs, task, options, as_json)
    return 0


@command("score")
def score(
    run: str,
    file: str,
    column: str | None = None,
    source: str | None = None,
    seed: int = 0,
    draws: int = 16,
    device: str = "auto",
    as_json: bool = False,
) -> None:
    """Score texts: the nats of each, exact or a bound with its standard error, and their mean."""
    if not 1 <= draws <= 1_000_000:
        raise UsageError(f"--draws must be between 1 and 1,000,000, not {draws}.")
    check_names(device, run)
    if column is not None and (file == "-" or is_text(file)):
        raise UsageError("--column is for a .csv or .jsonl file: leave it out, or name one.")
    if source is not None:
        check_reads_sources(run)
    texts, sources = read_given(run, file, column, source)
    from difflm.data.tokenizers import UNK
    from difflm.generation.checks import check_request

    check_request(1, seed)
    lm = load_model(run, device)
    kind = lm.model.capabilities.likelihood
    if kind is None:
        raise UsageError(f"{run} ({lm.config['method']}) has no likelihood and no bound: it cannot score.")
    for warning in lm.warn_of_language(" ".join(texts)):
        complain(f"warning: {warning}")
    rows, told = lm.encode(texts), lm.encode_sources(sources) if sources else []
    scores: list[Scored] = []
    with Bar("scoring", len(rows)) as bar:
        for start in range(0, len(rows), 256):
            here = slice(start, start + 256)
            numbers = range(len(rows))[here]
            nats, errors = lm.score_ids_with_errors(rows[here], seed, draws, numbers=numbers, sources=told[here])
            for k, value, error in zip(numbers, nats.tolist(), errors.tolist(), strict=True):
                scored = Scored(value, error, len(rows[k]) + 1, kind)
                about = {"source": sources[k], "text": texts[k]} if sources else {"text": texts[k]}
                line = to_json({**about, **scored.figures()})
                bar.put(line if as_json else f"{scored}  {texts[k]}")
                scores.append(scored)
            bar.update("scoring", len(scores), len(rows))
    mean = Scored.mean(scores)
    if as_json:
        put_json({"mean": mean.figures(), "texts": len(scores)})
    else:
        print(f"{mean}  mean of {len(scores):,} text{'s'[: len(scores) != 1]}")
    unknown = sum(row.count(UNK) for row in rows)
    if unknown:
        note(f"{unknown:,} of {sum(map(len, rows)):,} tokens are unknown words for this model; all count as one.")


def read_given(run: str, given: str, column: str | None, source: str | None) -> tuple[list[str], list[str]]:
    """The texts to score: one that is given, those of a file, or of standard input; and their sources, if they have
    any."""
    from difflm.data.corpora import find_pair_files
    from difflm.data.texts import read_examples, read_texts
    from difflm.training.run import peek_config

    reads_sources = bool(peek_config(run).get("recipe", {}).get("source_longest"))
    if source is None and reads_sources:
        if given == "-" or is_text(given):
            raise UsageError(f"{run} scores texts that have sources: give --source TEXT, or a file of pairs.")
        pairs = list(read_examples(find_pair_files(given, None), column))
        return [pair.target for pair in pairs], [str(pair.source) for pair in pairs]
    if given == "-":
        texts = [line.strip() for _, line in read_stdin("text") if line.strip()]
    elif is_text(given):
        texts = [given.strip()]
    else:
        check_file(given)
        texts = list(read_texts(Path(given), column))
    if not all(texts) or not texts:
        raise UsageError("there is no text to score.")
    return texts, [source] * len(texts) if source is not None else []


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

    def figures(self) -> dict[str, object]:
        figures = {"nats": round(self.nats, 4), "nats_per_token": round(self.nats / self.tokens, 4), "kind": self.kind}
        return {**figures, "standard_error": round(self.error, 4)} if self.estimated else figures
