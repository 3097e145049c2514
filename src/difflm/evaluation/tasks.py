"""The tasks of an evaluation: each loads runs and what they are compared with, measures them, and returns a report."""

import json
import random
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from difflm.controls.learned import checking_tagger
from difflm.data.corpora import NAMES, corpus, corpus_path, resolve_data
from difflm.data.known_corpora import E2EPair, anlg_path, e2e_path, read_e2e
from difflm.data.stories import read_anlg, story_gaps, whole
from difflm.errors import UsageError, suggest
from difflm.evaluation.bert_score import BertScore
from difflm.evaluation.control import System, evaluate_control
from difflm.evaluation.corpora import corpus_for, named_corpus, pairs_for, read_pair_set
from difflm.evaluation.infill import Lengths, Set, evaluate_infill
from difflm.evaluation.language import evaluate_language
from difflm.evaluation.options import SAMPLES, TELL, Options, split_names
from difflm.evaluation.reports import Report
from difflm.evaluation.seq2seq import evaluate_seq2seq
from difflm.evaluation.targets import (
    CONTROLS,
    check_known,
    choose,
    draw_targets,
    fit_for,
    keep_fitting,
    read_targets,
    write_lines,
)
from difflm.generation.checks import check_device
from difflm.generation.divided import DividedTextDiffusion
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.ranking import Rank
from difflm.generation.requests import read_guidance
from difflm.methods.rivals import DECODERS
from difflm.models.open_models import find_open_model
from difflm.models.sampling import Sampling
from difflm.runtime.distributed import current
from difflm.runtime.files import append_line, check_place, write_atomic
from difflm.training.model_card import write_card
from difflm.training.run import bundled_runs, find_run, peek_config, read_config

GAPS = ("anlg", "roc")  # gap sets of the infilling task
TARGETS = 200  # of a control
Note = Callable[[str], None]


class Watcher(typing.Protocol):
    """Is told of progress, and of what a user should know at once."""

    def update(self, what: str, done: int, total: int | None) -> None: ...
    def note(self, message: str) -> None: ...


def evaluate(runs: Sequence[str], task: str, options: Options, watch: Watcher) -> Report:
    """Measure runs by a task."""
    options.check(task)
    if options.out is not None:
        check_place(options.out)
    Sampling().change(options.settings)
    before = TELL.set(watch.update)
    try:
        return MEASURES[task](runs, options, watch)
    finally:
        TELL.reset(before)


def measure_language(runs: Sequence[str], options: Options, watch: Watcher) -> Report:
    """Measure all runs on their common corpus."""
    named = None if options.on is None else named_corpus(options.on, options.data, options.split)
    if named is None:
        for data in (peek_config(run).get("recipe", {}).get("data") for run in runs):
            if data in NAMES:
                corpus_path(data, options.data, options.split)  # rejects a missing one before anything is loaded
    models = load_runs(runs, options.device)
    judge = load_judge(options.judge, models.values(), options.device, watch.note)
    twin = load_model(options.twin, options.device) if options.twin else None
    if named is not None:
        corpus = named
    else:
        ours = {name: lm for name, lm in models.items() if lm.config["recipe"]}
        if not ours:
            raise UsageError("what somebody else's model was trained on is not known: give --on NAME or FILE.")
        check_same_data(ours, options.data, {"the judge": judge, "the twin": twin})
        corpus = corpus_for(next(iter(ours.values())), options.data, options.split)
    return evaluate_language(models, corpus, judge, options, twin)


def measure_control(runs: Sequence[str], options: Options, watch: Watcher) -> Report:
    """Measure runs on targets that are drawn from E2E or read from a file."""
    names = None if options.controls is None else split_names(options.controls)
    count, path = options.samples or TARGETS, options.targets
    asked = options.each, options.seed, options.candidates, read_guidance(options.guidance), options.settings
    check_known(names or ())
    refuse_open(runs, "its controls have no classifiers")
    given = choose(read_targets(path), names, count, path) if path and path.exists() else None
    pairs: list[E2EPair] = []
    with nullcontext() if given is None else suppress(UsageError):  # to compare with alone, so they may be missing
        pairs = list(read_e2e(e2e_path(options.data, options.split)))
    models = load_runs(runs, options.device)
    for folder in options.guide or ():
        guide_models(list(models.values()), folder)
    decoders = find_decoders(models, options)
    systems = list[System]()
    for name, lm in models.items():
        if lm.model.capabilities.denoises or not decoders[name]:
            systems.append(System(lm, *asked, name=name))
        for method in decoders[name]:
            systems.append(replace(System(lm, *asked, method, name), guidance=options.methods[method]))
    tagger, lm, notes = checking_tagger(), systems[0].lm, list[str]()
    if given is not None:
        targets = given
        for one in models.values():
            targets, changed = fit_for(targets, one, tagger)
            notes += changed
        about = {"corpus": str(path and path.name), "split": "targets of a file"}
    else:
        fitting = pairs
        for one in models.values():
            fitting = keep_fitting(fitting, one)
        targets = draw_targets(names or CONTROLS, fitting or pairs, lm, tagger, count, options.seed)
        about = {"corpus": "e2e", "split": options.split}
        if path and current().first:
            write_lines(path, (target.to_json() for target in targets))
            watch.note(f"{path}: {len(targets):,} targets. Give this file again to use the same targets.")
    judge = load_judge(options.judge, models.values(), options.device, watch.note)
    report = evaluate_control(systems, targets, judge, pairs, options, about)
    return replace(report, notes=[*notes, *report.notes])


def guide_models(models: Sequence[TextDiffusion], folder: Path) -> None:
    """Give a classifier to the models that it was trained for."""
    refused = []
    for lm in models:
        try:
            lm.guided_by(folder)
        except UsageError as error:
            refused.append(error)
    if len(refused) == len(models):
        raise refused[0]


def find_decoders(models: dict[str, TextDiffusion], options: Options) -> dict[str, list[str]]:
    """Return the decoders that decode each model; one that decodes none of them is refused."""
    kinds = {method: DECODERS[method].decodes for method in options.methods}
    found = {name: [m for m, kind in kinds.items() if isinstance(lm.model, kind)] for name, lm in models.items()}
    for method in kinds:
        if not any(method in some for some in found.values()):
            there = ", ".join(dict.fromkeys(lm.config["method"] for lm in models.values()))
            raise UsageError(f"{method} decodes {DECODERS[method].family}; there are none among these runs ({there}).")
    return found


def measure_infill(runs: Sequence[str], options: Options, watch: Watcher) -> Report:
    """Measure a run and its rivals on the same gaps."""
    names = split_names(options.sets or "anlg,roc")
    if unknown := {*names} - {*GAPS}:
        raise UsageError(f"unknown gaps {min(unknown)!r}. {suggest(min(unknown), GAPS)}Known: {', '.join(GAPS)}.")
    similarity = BertScore(options.encoder, check_device(options.device)) if options.encoder else None
    stories = list(whole(corpus("roc", options.data, "train")))
    sets = [load_gaps(name, stories, options) for name in names]
    models = load_runs(runs, options.device)
    find_decoders(models, options)
    judge = load_judge(options.judge, (), options.device, watch.note) if options.judge else None
    training = [sentence for story in stories for sentence in story]
    return evaluate_infill(models, sets, options, training, similarity, judge)


def measure_seq2seq(runs: Sequence[str], options: Options, watch: Watcher) -> Report:
    """Measure a run and its rivals on the same sources: those of a file, or those that the run's training held out."""
    ranks = list(dict.fromkeys(options.rank or ()))
    if (ranks or options.oracle) and options.mbr < 2 and not options.repairs:
        raise UsageError(f"--{'rank' if ranks else 'oracle'} chooses among candidates: give --mbr 2 or more.")
    if len({*ranks} - {"bound"}) > 1:
        raise UsageError("--rank takes one run at most; `bound` may be given as well.")
    if options.repairs and not {*ranks} - {"bound"}:
        raise UsageError("--repairs needs a left-to-right run that ranks the candidates: give --rank RUN.")
    if options.pairs is None and options.column is not None:
        raise UsageError("--column names the columns of --pairs FILE.")
    refuse_open(runs, "it learned no pairs")
    similarity = BertScore(options.encoder, check_device(options.device)) if options.encoder else None
    given = read_pair_set(options.pairs, options.column, options.data, options.split) if options.pairs else None
    models = load_runs(runs, options.device)
    for lm in models.values():
        lm.source_room()
    rankers: list[Rank] = ["bound" if r == "bound" else TextDiffusion.from_pretrained(r, options.device) for r in ranks]
    if given is None:
        check_same_data(models, options.data)
        given = pairs_for(next(iter(models.values())), options.data, options.split)
    pairs = given.sample(options.samples, options.skip, options.seed)
    return evaluate_seq2seq(models, pairs, options, rankers, similarity)


def load_gaps(name: str, stories: Sequence[Sequence[str]], options: Options) -> Set:
    """Load gaps after the first `skip` in the seed's order, of aNLG's dev set or of the split's stories.

    The order depends on neither number, so that settings can be chosen on other gaps than the reported ones."""
    ends_only = name == "anlg"
    if ends_only:
        found = read_anlg(anlg_path(options.data))
    else:
        found = list(story_gaps(corpus("roc", options.data, options.split), options.seed))
    skip, count = options.skip, SAMPLES if options.samples is None else options.samples
    chosen = random.Random(options.seed).sample(found, len(found))[skip : skip + count]
    if len(chosen) < 2:
        raise UsageError(f"{name} has {len(found):,} gaps: --skip {skip} leaves {len(chosen)}; at least 2 are needed.")
    return Set(name, chosen, Lengths.of(stories, ends_only), "dev" if ends_only else options.split)


Measure = Callable[[Sequence[str], Options, Watcher], Report]
MEASURES: dict[str, Measure] = dict(
    language=measure_language, control=measure_control, infill=measure_infill, seq2seq=measure_seq2seq
)


# -- runs: loading them, refusing those that cannot be compared, and keeping their figures ---------------------------


def load_model(name: str, device: str) -> TextDiffusion:
    """Load a model; several processes share the generation of its texts."""
    kind = DividedTextDiffusion if current().count > 1 else TextDiffusion
    return kind.from_pretrained(name, device)


def load_runs(runs: Sequence[str], device: str) -> dict[str, TextDiffusion]:
    return {name: load_model(run, device) for name, run in name_runs(runs).items()}


def name_runs(runs: Sequence[str]) -> dict[str, str]:
    """The runs by their names in a report: the last folder, or the whole path if two names would be equal."""
    if doubled := [run for run in runs if runs.count(run) > 1]:
        raise UsageError(f"{doubled[0]} is named twice.")
    for run in runs:
        if find_open_model(run) is None:
            read_config(find_run(run))  # rejects what is not a run
    short = [Path(run).resolve().name if Path(run).is_dir() else run for run in runs]
    return {name if short.count(name) == 1 else run: run for name, run in zip(short, runs, strict=True)}


def load_judge(name: str | None, models: Iterable[TextDiffusion], device: str, note: Note) -> TextDiffusion | None:
    """Load the requested judge, or the bundled one if it shares a tokenizer with one of the models."""
    if name is not None:
        lm = load_model(name, device)
        if lm.model.capabilities.likelihood != "exact":
            lacks = f"a judge needs an exact likelihood, which {lm.config['method']} does not have"
            raise UsageError(f"{lacks}. Use an autoregressive run.")
        return lm
    tokenizer = read_config(find_run("judge"))["tokenizer"]
    if any(lm.tokenizer.fingerprint() == tokenizer for lm in models):
        return load_model("judge", device)
    note("The bundled judge has a different vocabulary, so its figures are left out. Give one with --judge RUN.")
    return None


def refuse_open(runs: Sequence[str], why: str) -> None:
    """Refuse models of other people by a task that asks for what they do not have."""
    for run in runs:
        if find_open_model(run) is not None:
            raise UsageError(f"{run} is somebody else's model: {why}. The tasks language and infill measure it.")


def source_of(lm: TextDiffusion, root: Path | None) -> tuple[str, ...]:
    """Return the corpus or file, and the column, that a model was trained on."""
    recipe = lm.config["recipe"]
    more = (recipe["column"], recipe.get("chunk"), recipe.get("split"))
    return (resolve_data(recipe["data"], root), *(str(part) for part in more if part))


def check_same_data(
    models: Mapping[str, TextDiffusion], root: Path | None, others: Mapping[str, TextDiffusion | None] | None = None
) -> None:
    """Refuse runs that were trained on different data, and those, `others` among them, that held out different texts of
    one file: the seed decides which."""
    sources = {name: source_of(lm, root) for name, lm in models.items()}
    if len(set(sources.values())) > 1:
        texts = ", ".join(f"{name}: {' '.join(source)}" for name, source in sources.items())
        raise UsageError(f"these runs were trained on different data ({texts}). Compare runs trained on the same data.")
    first, *_ = models
    source, recipe = sources[first], models[first].config["recipe"]
    for name, lm in {**models, **(others or {})}.items() if recipe["data"] not in NAMES else ():
        if lm and source_of(lm, root) == source and lm.config["recipe"]["seed"] != recipe["seed"]:
            seeds = f"{first}: seed {recipe['seed']}, {name}: seed {lm.config['recipe']['seed']}"
            raise UsageError(f"these runs held out different texts ({seeds}). Compare runs with the same seed.")


def keep_report(report: Report, runs: Sequence[str], out: Path | None, watch: Watcher) -> None:
    """Append the figures, and write the texts that people should read.

    All go to `out`. Without it each run's metrics.jsonl and card get its own figures and those of rows that belong to
    no run, such as real text and the twin; a bundled model is not changed."""
    names = name_runs(runs)
    rows = list(dict.fromkeys(row.name for row in report.rows))
    places = {out: (rows, out.stem)} if out else {}
    for number, (name, run) in enumerate(() if out else names.items()):
        if run in bundled_runs() or find_open_model(run) is not None:
            whose = "bundled" if run in bundled_runs() else "somebody else's"
            watch.note(f"{run} is {whose}: nothing was appended to it. Save the figures with --out FILE.")
        else:
            own = [row for row in rows if row not in {*names} - {name}]
            places[find_run(run) / "metrics.jsonl"] = own, "" if number else report.task
    for path, (own, stem) in places.items():
        for record in (record for row in own for record in report.records(row)):
            append_line(path, json.dumps(record, ensure_ascii=False))
        if not out:
            write_card(path.parent)
        for name, text in report.readings.items() if stem else ():
            reading = path.parent / f"{stem}-{name}.txt"
            write_atomic(reading, text)
            watch.note(f"{reading}: gaps and what was written into them.")
