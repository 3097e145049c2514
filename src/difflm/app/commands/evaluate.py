"""`difflm evaluate`, `difflm compare` and `difflm score`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from difflm.app.commands.options import (
    FILES,
    Data,
    Device,
    Draws,
    Json,
    Run,
    Seed,
    check_file,
    check_names,
    check_reads_sources,
    is_text,
    join_others,
    load_model,
    option,
    peek_config,
    read_stdin,
    report_errors,
    with_options,
)
from difflm.app.console import Bar, complain, note, put_json, to_json
from difflm.errors import UsageError
from difflm.models.sampling import Sampling
from difflm.runtime.files import check_place

if TYPE_CHECKING:
    from difflm.evaluation.reports import Report

SAMPLES = 200  # texts of each method that is trained to be compared
# Panels of the help page: each says which tasks its options are for.
LANGUAGE, CONTROL, INFILL, SEQ2SEQ = (f"--task {name}" for name in ("language", "control", "infill", "seq2seq"))
DECODERS, REFERENCES = f"{CONTROL} or infill", f"{INFILL} or seq2seq"
RIVALS, TRAINING = f"{CONTROL}, infill or seq2seq", "Training what is compared"
SETTINGS = (
    *("steps", "sampler", "temperature", "noise_temperature", "noise_top_p", "clamp"),
    *("projection", "projection_top_p", "start"),
)


@dataclass(frozen=True)
class MeasureOptions:
    """The options that evaluate and compare share."""

    data: Data = None
    split: Annotated[Literal["train", "valid", "test"], option("Which texts to measure on.")] = "valid"
    on: Annotated[
        str | None, option("Texts to measure on. [those that the runs held out]", "NAME or FILE", panel=LANGUAGE)
    ] = None
    samples: Annotated[
        int | None,
        option("Texts to generate [1000]; control: targets [200]; infill: gaps [1000]; seq2seq: sources [all]."),
    ] = None
    score_texts: Annotated[int, option("Held-out texts whose likelihood is measured.", panel=LANGUAGE)] = 500
    seed: Seed = 0
    draws: Draws = 8
    judge: Annotated[str | None, option("An autoregressive model that scores the samples. [judge]", "RUN")] = None
    twin: Annotated[str | None, option("An autoregressive run to compare with.", "RUN", panel=LANGUAGE)] = None
    out: Annotated[Path | None, option("Append the records to this file instead of the runs.", "FILE", panel=FILES)] = (
        None
    )
    device: Device = "auto"
    as_json: Json = False


@dataclass(frozen=True)
class ControlOptions:
    """The options of the control task."""

    controls: Annotated[
        str | None, option("Which controls, such as length,field+pos. [all]", "NAMES", panel=CONTROL)
    ] = None
    targets: Annotated[
        Path | None, option("Read the targets from this file; draw them into it if it is new.", "FILE", panel=CONTROL)
    ] = None
    each: Annotated[int, option("Samples per target.", panel=CONTROL)] = 5
    candidates: Annotated[
        int,
        option(
            "Generate N candidates and keep the best one by the classifiers; of filled gaps, the one that fits best.",
            "N",
            panel=CONTROL,
        ),
    ] = 1
    guidance: Annotated[
        str | None, option("How strongly classifiers steer; see `difflm generate`.", "SIZE", panel=CONTROL)
    ] = None
    guide: Annotated[list[Path] | None, option("A classifier of a run; repeatable.", "DIR", panel=CONTROL)] = None
    texts: Annotated[
        Path | None, option("Save the texts here; if the file exists, measure its texts.", "FILE", panel=CONTROL)
    ] = None
    second_parser: Annotated[
        Path | None, option("A parser trained on other trees, for a second opinion.", "DIR", panel=CONTROL)
    ] = None

    def names(self) -> list[str] | None:
        return None if self.controls is None else split_names(self.controls)


@dataclass(frozen=True)
class DecoderOptions:
    """The options of the control and the infilling task that are about left-to-right models."""

    method: Annotated[
        list[str] | None,
        option(
            "A decoder for left-to-right runs, or `all`; each gets a row; repeatable.",
            "NAME[=GUIDANCE]",
            panel=DECODERS,
        ),
    ] = None


@dataclass(frozen=True)
class RivalOptions:
    rival: Annotated[list[str] | None, option("A run to compare with; repeatable.", "RUN", panel=RIVALS)] = None


@dataclass(frozen=True)
class InfillOptions:
    """The options of the infilling task."""

    sets: Annotated[str | None, option("anlg, roc, or both: anlg,roc. [both]", "NAMES", panel=INFILL)] = None

    def names(self) -> list[str]:
        return split_names(self.sets or "anlg,roc")


@dataclass(frozen=True)
class ReferenceOptions:
    """The options that the infilling and seq2seq tasks share: both compare texts with what people wrote."""

    skip: Annotated[
        int,
        option("Skip the first N gaps or sources, which settings were chosen on.", "N", panel=REFERENCES),
    ] = 0
    mbr: Annotated[
        int, option("Generate N candidates and keep the one most like the others.", "N", panel=REFERENCES)
    ] = 10
    beams: Annotated[int, option("Beam size of autoregressive models; 0: no beam search.", panel=REFERENCES)] = 5
    encoder: Annotated[
        str | None, option("Also compute BERTScore with the encoder in this directory.", "DIR", panel=REFERENCES)
    ] = None


@dataclass(frozen=True)
class Seq2SeqOptions:
    """The options of the seq2seq task."""

    pairs: Annotated[
        str | None,
        option("Sources and references. [held-out pairs]", "FILE, NAME or SOURCES,TARGETS…", panel=SEQ2SEQ),
    ] = None
    column: Annotated[str | None, option("The columns of the pairs. [src,trg]", "SOURCE,TARGET", panel=SEQ2SEQ)] = None
    rank: Annotated[
        list[str] | None,
        option(
            "Add the likeliest candidate, by the model's own bound or a run; repeatable.", "bound|RUN", panel=SEQ2SEQ
        ),
    ] = None
    repairs: Annotated[
        int, option("At most how often a left-to-right --rank RUN repairs each candidate first.", "N", panel=SEQ2SEQ)
    ] = 0
    oracle: Annotated[
        bool, option("Add the candidate closest to the references, as an upper limit.", panel=SEQ2SEQ)
    ] = False


def split_names(listed: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in listed.split(",")))


Task = Annotated[
    Literal["language", "control", "infill", "seq2seq"],
    option("What to measure; --help-all lists the options of each task."),
]
GROUPS: dict[str, type] = {
    "control": ControlOptions,
    "decoder": DecoderOptions,
    "infill": InfillOptions,
    "reference": ReferenceOptions,
    "seq2seq": Seq2SeqOptions,
}
# The tasks that each group of options belongs to.
OWNERS = {
    "control": ["control"],
    "decoder": ["control", "infill"],
    "infill": ["infill"],
    "reference": ["infill", "seq2seq"],
    "seq2seq": ["seq2seq"],
    "rivals": ["infill", "seq2seq", "control"],
}


@report_errors
@join_others
@with_options(options=MeasureOptions, settings=SETTINGS, **GROUPS, rivals=RivalOptions)
def evaluate(
    run: Run,
    options: MeasureOptions,
    settings: dict[str, Any],
    rivals: RivalOptions,
    task: Task = "language",
    **groups: Any,
) -> None:
    """Measure a model and compare it with real text; the figures are appended to its metrics.jsonl."""
    measure([run, *(rivals.rival or ())], task, options, settings, {**groups, "rivals": rivals})


def measure(
    runs: list[str], task: str, options: MeasureOptions, settings: dict[str, Any], groups: dict[str, Any]
) -> None:
    """Measure runs by a task, and publish the report."""
    report = make_report(runs, task, options, settings, groups)
    from difflm.app.measuring import publish

    publish(runs, report, options)


def make_report(
    runs: list[str], task: str, options: MeasureOptions, settings: dict[str, Any], groups: dict[str, Any]
) -> "Report":
    """Measure runs by a task; options of other tasks are refused."""
    for name, group in groups.items():
        if task not in OWNERS[name]:
            refuse_given(group, [f.name for f in fields(group)], " or ".join(OWNERS[name]))
    foreign = {"control": ["draws"], "infill": [], "seq2seq": ["draws", "judge"]}
    if task != "language":
        refuse_given(options, ["score_texts", "twin", "on", *foreign[task]], "language")
    if options.out is not None:
        check_place(options.out)
    Sampling().change(settings)
    check_names(options.device, *runs, options.judge, options.twin, guides=groups["control"].guide)
    for run in runs if task == "seq2seq" else ():
        check_reads_sources(run)
    from difflm.app import measuring

    decoder, reference = groups["decoder"], groups["reference"]
    if task == "language":
        return measuring.measure_language(runs, options, settings)
    if task == "control":
        return measuring.measure_control(runs, options, settings, groups["control"], decoder)
    if task == "infill":
        return measuring.measure_infill(runs, options, settings, groups["infill"], reference, decoder)
    return measuring.measure_seq2seq(runs, options, settings, reference, groups["seq2seq"])


def refuse_given(options: Any, names: list[str], task: str) -> None:
    """Refuse options (fields of a dataclass) that belong to another task."""
    for f in fields(options):
        if f.name in names and getattr(options, f.name) not in (f.default, []):
            raise UsageError(f"--{f.name.replace('_', '-')} is for --task {task}: leave it out, or change the task.")


@dataclass(frozen=True)
class TrainOptions:
    """The options of compare for methods that it trains before it compares them."""

    methods: Annotated[
        str | None,
        option("Train these methods on data=FILE, then compare them: difflm,mdlm.", "NAMES", panel=TRAINING),
    ] = None
    minutes: Annotated[float, option("With --methods: training time of each.", panel=TRAINING)] = 5.0
    into: Annotated[
        Path | None, option("With --methods: where to save the runs. [FILE-compare]", "DIR", panel=TRAINING)
    ] = None


@report_errors
@with_options(options=MeasureOptions, settings=SETTINGS, training=TrainOptions, **GROUPS)
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN …", help="Runs trained on the same data; with --methods, key=value."),
    ],
    options: MeasureOptions,
    settings: dict[str, Any],
    training: TrainOptions,
    task: Task = "language",
    **groups: Any,
) -> int:
    """Measure several models on the same data with the same judge, in one table; each run keeps its figures."""
    if training.methods is None:
        refuse_given(training, ["minutes", "into"], "language with --methods")
    else:
        from difflm.app.own_comparison import train_methods

        names = split_names(training.methods)
        trained = train_methods(names, runs, training.minutes, training.into, options.data, options.device)
        if trained is None:
            return 1
        runs = trained
        options = replace(options, samples=SAMPLES if options.samples is None else options.samples)
    measure(runs, task, options, settings, groups)
    return 0


@report_errors
def score(
    run: Run,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|TEXT", help="A text, or a file: .txt (one per line), .csv or .jsonl; or pairs of texts."
        ),
    ],
    column: Annotated[
        str | None, option("The column with the texts, or SOURCE,TARGET for pairs. [text; src,trg]")
    ] = None,
    source: Annotated[str | None, option("The source of all texts, for models trained on pairs.")] = None,
    seed: Seed = 0,
    draws: Draws = 16,
    device: Device = "auto",
    as_json: Json = False,
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
    from difflm.generation.jobs import check_request

    check_request(1, seed)
    from difflm.data.tokenizers import UNK

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
    from difflm.data.references import find_pair_files
    from difflm.data.texts import read_examples, read_texts

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

    def figures(self) -> dict[str, Any]:
        figures = {"nats": round(self.nats, 4), "nats_per_token": round(self.nats / self.tokens, 4), "kind": self.kind}
        return {**figures, "standard_error": round(self.error, 4)} if self.estimated else figures
