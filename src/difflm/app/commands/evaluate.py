"""`difflm evaluate`, `difflm compare` and `difflm score`."""

import math
from dataclasses import replace
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
        from difflm.app.commands.train import train_methods

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
    found: list[tuple[float, float, int]] = []  # nats, the error of a bound's draws, and tokens, END included
    with Bar("scoring", len(rows)) as bar:
        for start in range(0, len(rows), 256):
            here = slice(start, start + 256)
            numbers = range(len(rows))[here]
            nats, errors = lm.score_ids_with_errors(rows[here], seed, draws, numbers=numbers, sources=told[here])
            for k, value, error in zip(numbers, nats.tolist(), errors.tolist(), strict=True):
                found.append((value, error, len(rows[k]) + 1))
                said, figures = describe_nats(*found[-1], kind)
                about = {"source": sources[k], "text": texts[k]} if sources else {"text": texts[k]}
                bar.put(to_json({**about, **figures}) if as_json else f"{said}  {texts[k]}")
            bar.update("scoring", len(found), len(rows))
    count, (values, spreads, tokens) = len(found), zip(*found, strict=True)
    said, figures = describe_nats(sum(values) / count, math.hypot(*spreads) / count, sum(tokens) / count, kind)
    if as_json:
        put_json({"mean": figures, "texts": count})
    else:
        print(f"{said}  mean of {count:,} text{'s'[: count != 1]}")
    if unknown := sum(row.count(UNK) for row in rows):
        note(f"{unknown:,} of {sum(map(len, rows)):,} tokens are unknown words for this model; all count as one.")


def read_given(run: str, given: str, column: str | None, source: str | None) -> tuple[list[str], list[str]]:
    """The texts to score: one that is given, those of a file, or of standard input; and their sources, if they have
    any."""
    from difflm.data.corpora import find_pair_files
    from difflm.data.texts import read_examples, read_texts
    from difflm.training.run import peek_config

    is_file = given != "-" and not is_text(given)
    if column is not None and not is_file:
        raise UsageError("--column is for a .csv or .jsonl file: leave it out, or name one.")
    if source is not None:
        check_reads_sources(run)
    elif peek_config(run).get("recipe", {}).get("source_longest"):
        if not is_file:
            raise UsageError(f"{run} scores texts that have sources: give --source TEXT, or a file of pairs.")
        pairs = list(read_examples(find_pair_files(given, None), column))
        return [pair.target for pair in pairs], [str(pair.source) for pair in pairs]
    if is_file:
        check_file(given)
        texts = list(read_texts(Path(given), column))
    else:
        texts = [line.strip() for _, line in read_stdin("text") if line.strip()] if given == "-" else [given.strip()]
    if not all(texts) or not texts:
        raise UsageError("there is no text to score.")
    return texts, [source] * len(texts) if source is not None else []


def describe_nats(nats: float, error: float, tokens: float, kind: str) -> tuple[str, dict[str, object]]:
    """A line, and the figures, of the nats of a text or of their mean. `error` is the standard error of a bound's
    draws, NaN for a single one."""
    figures: dict[str, object] = {"nats": round(nats, 4), "nats_per_token": round(nats / tokens, 4), "kind": kind}
    if kind != "bound" or not math.isfinite(error):
        return f"{nats:9.3f} nats {nats / tokens:7.3f} nats/token {kind}", figures
    line = f"{nats:9.3f} ±{error:6.3f} nats {nats / tokens:7.3f} ±{error / tokens:6.3f} nats/token {kind}"
    return line, {**figures, "standard_error": round(error, 4)}
