"""Evaluation of runs: load them, measure them, and publish a report: print it, keep its figures. Imports torch."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from difflm.app.commands.evaluate import (
    ControlOptions,
    DecoderOptions,
    InfillOptions,
    MeasureOptions,
    ReferenceOptions,
    Seq2SeqOptions,
)
from difflm.app.commands.options import load_model as load_whole
from difflm.app.commands.options import load_rank, parse_guidance, parse_methods, peek_config
from difflm.app.console import Bar, note, put_json, put_table
from difflm.controls.guidance import GuidanceSettings
from difflm.controls.learned import checking_tagger
from difflm.data.corpora import NAMES, corpus, corpus_path, resolve_data
from difflm.data.known_corpora import E2EPair, anlg_path, e2e_path, read_e2e
from difflm.data.references import read_pair_set
from difflm.data.stories import read_anlg, story_gaps, whole
from difflm.errors import UsageError, suggest
from difflm.evaluation.bert_score import BertScore
from difflm.evaluation.control import Protocol, System, evaluate_control
from difflm.evaluation.corpora import corpus_for, named_corpus, pairs_for
from difflm.evaluation.infill import Asked, Lengths, Set, evaluate_infill
from difflm.evaluation.language import check_numbers, evaluate_language
from difflm.evaluation.reports import Report
from difflm.evaluation.seq2seq import Ways, evaluate_seq2seq
from difflm.evaluation.targets import (
    CONTROLS,
    check_known,
    choose,
    draw_targets,
    fit_for,
    keep_fitting,
    read_targets,
    write_targets,
)
from difflm.generation.jobs import check_device
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.rivals import DECODERS
from difflm.models.open_models import find_open_model
from difflm.runtime.distributed import current
from difflm.runtime.files import append_line, write_atomic
from difflm.training.model_card import write_card
from difflm.training.run import bundled_runs, find_run, read_config

load_model = partial(load_whole, divided=True)  # several processes generate the texts that are measured

GAPS = ("anlg", "roc")  # gap sets of the infilling task
SAMPLES, TARGETS = 1000, 200  # texts of the language task or gaps, targets a control


def measure_language(runs: list[str], options: MeasureOptions, settings: dict[str, Any]) -> Report:
    """Measure all runs on their common corpus."""
    samples = SAMPLES if options.samples is None else options.samples
    check_numbers(samples, options.seed, options.draws, options.score_texts)  # before anything is loaded
    named = None if options.on is None else named_corpus(options.on, options.data, options.split)
    if named is None:
        for data in (peek_config(run).get("recipe", {}).get("data") for run in runs):
            if data in NAMES:
                corpus_path(data, options.data, options.split)  # rejects a missing one before anything is loaded
    models = dict(zip(run_names(runs), (load_model(run, options.device) for run in runs), strict=True))
    judge = load_judge(options.judge, models.values(), options.device)
    twin = load_model(options.twin, options.device) if options.twin else None
    if named is not None:
        corpus = named
    else:
        ours = {name: lm for name, lm in models.items() if lm.config["recipe"]}
        if not ours:
            raise UsageError("what somebody else's model was trained on is not known: give --on NAME or FILE.")
        check_same_data(ours, options.data)
        others = {"the judge": judge, "the twin": twin}
        check_seeds({**ours, **{name: lm for name, lm in others.items() if lm is not None}}, options.data)
        corpus = corpus_for(next(iter(ours.values())), options.data, options.split)
    with Bar("measuring") as bar:
        report = evaluate_language(
            models, corpus, judge, samples, options.seed, options.draws, twin, settings, bar.update, options.score_texts
        )
    return report


def measure_control(
    runs: list[str],
    options: MeasureOptions,
    settings: dict[str, Any],
    control: ControlOptions,
    decoder: DecoderOptions,
) -> Report:
    """Measure runs on targets that are drawn from E2E or read from a file."""
    names, count = control.names(), TARGETS if options.samples is None else options.samples
    guidance, methods = parse_guidance(control.guidance), parse_methods(decoder.method)
    protocol = Protocol(control.each, options.seed, control.candidates, guidance, settings)
    protocol.check()
    check_known(names or ())
    refuse_open(runs, "its controls have no classifiers")
    if count < 1:
        raise UsageError(f"--samples, here targets per control, must be at least 1, not {count}.")
    path = control.targets
    given = choose(read_targets(path), names, count, path) if path and path.exists() else None
    pairs = load_e2e(options, required=given is None)
    models = dict(zip(run_names(runs), (load_model(run, options.device) for run in runs), strict=True))
    for folder in control.guide or ():
        guide_models(list(models.values()), folder)
    check_decoded(models, methods)
    systems = find_systems(models, protocol, methods)
    tagger, lm, notes = checking_tagger(), systems[0].lm, list[str]()
    if given is not None:
        targets = given
        for one in models.values():
            targets, changed = fit_for(targets, one, tagger)
            notes += changed
        about = {"corpus": Path(str(path)).name, "split": "targets of a file"}
    else:
        fitting = pairs
        for one in models.values():
            fitting = keep_fitting(fitting, one)
        targets = draw_targets(names or CONTROLS, fitting or pairs, lm, tagger, count, options.seed)
        about = {"corpus": "e2e", "split": options.split}
        if path and current().first:
            write_targets(path, targets)
            note(f"{path}: {len(targets):,} targets. Give this file again to use the same targets.")
    judge, first = load_judge(options.judge, models.values(), options.device), systems[0]
    keep = control.texts, control.second_parser, systems[1:]
    with Bar("measuring") as bar:
        report = evaluate_control(
            lm, first.name, targets, judge, first.protocol, pairs, about, notes, bar.update, *keep
        )
    return report


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


def check_decoded(models: dict[str, TextDiffusion], methods: Iterable[str]) -> None:
    """Refuse a decoder that decodes none of the models."""
    for method in methods:
        if not any(isinstance(lm.model, DECODERS[method].decodes) for lm in models.values()):
            kinds = ", ".join(dict.fromkeys(lm.config["method"] for lm in models.values()))
            raise UsageError(f"{method} decodes {DECODERS[method].family}; there are none among these runs ({kinds}).")


def find_systems(
    models: dict[str, TextDiffusion], protocol: Protocol, methods: dict[str, GuidanceSettings | None]
) -> list[System]:
    """Return the rows of a control: each run by itself, unless it needs a decoder, and with each that decodes it."""
    found = []
    for name, lm in models.items():
        decoders = [method for method in methods if isinstance(lm.model, DECODERS[method].decodes)]
        if lm.model.capabilities.denoises or not decoders:
            found.append(System(name, lm, protocol))
        for method in decoders:
            found.append(System(name, lm, replace(protocol, guidance=methods[method], method=method)))
    return found


def load_e2e(options: MeasureOptions, required: bool) -> list[E2EPair]:
    """Load the pairs of the split; with targets of a file they serve as a comparison only and may be missing."""
    try:
        return list(read_e2e(e2e_path(options.data, options.split)))
    except UsageError:
        if required:
            raise
        return []


def measure_infill(
    runs: list[str],
    options: MeasureOptions,
    settings: dict[str, Any],
    infill: InfillOptions,
    reference: ReferenceOptions,
    decoder: DecoderOptions,
) -> Report:
    """Measure a run and its rivals on the same gaps; also keep some of their texts for people to read."""
    names, count = infill.names(), SAMPLES if options.samples is None else options.samples
    methods = parse_methods(decoder.method)
    how = Asked(options.seed, reference.mbr, reference.beams, options.draws, settings, methods)
    how.check()
    if count < 2:
        raise UsageError(f"--samples, which are gaps here, must be at least 2, not {count}.")
    if unknown := {*names} - {*GAPS}:
        raise UsageError(f"unknown gaps {min(unknown)!r}. {suggest(min(unknown), GAPS)}Known: {', '.join(GAPS)}.")
    similarity = BertScore(reference.encoder, check_device(options.device)) if reference.encoder else None
    stories = list(whole(corpus("roc", options.data, "train")))
    if reference.skip < 0:
        raise UsageError(f"--skip must be 0 or more gaps, not {reference.skip}.")
    sets = [load_gaps(name, stories, count, options, reference.skip) for name in names]
    models = dict(zip(run_names(runs), (load_model(one, options.device) for one in runs), strict=True))
    check_decoded(models, methods)
    judge = load_model(options.judge, options.device) if options.judge else None
    training = [sentence for story in stories for sentence in story]
    with Bar("measuring") as bar:
        report, middles = evaluate_infill(models, sets, how, training, similarity, bar.update, judge)
    keep_middles(runs[0], middles, options.out)
    return report


def measure_seq2seq(
    runs: list[str],
    options: MeasureOptions,
    settings: dict[str, Any],
    reference: ReferenceOptions,
    seq2seq: Seq2SeqOptions,
) -> Report:
    """Measure a run and its rivals on the same sources: those of a file, or those that the run's training held out."""
    ways = Ways(options.seed, reference.mbr, reference.beams, seq2seq.oracle, settings, seq2seq.repairs)
    ways.check()
    ranks = list(dict.fromkeys(seq2seq.rank or ()))
    if ranks and reference.mbr < 2 and not seq2seq.repairs:
        raise UsageError("--rank chooses among candidates: give --mbr 2 or more.")
    if len({*ranks} - {"bound"}) > 1:
        raise UsageError("--rank takes one run at most; `bound` may be given as well.")
    if seq2seq.repairs and not {*ranks} - {"bound"}:
        raise UsageError("--repairs needs a left-to-right run that ranks the candidates: give --rank RUN.")
    if seq2seq.pairs is None and seq2seq.column is not None:
        raise UsageError("--column names the columns of --pairs FILE.")
    if options.samples is not None and options.samples < 1:
        raise UsageError(f"--samples, which are sources here, must be at least 1, not {options.samples}.")
    if reference.skip < 0:
        raise UsageError(f"--skip must be 0 or more sources, not {reference.skip}.")
    refuse_open(runs, "it learned no pairs")
    similarity = BertScore(reference.encoder, check_device(options.device)) if reference.encoder else None
    given = read_pair_set(seq2seq.pairs, seq2seq.column, options.data, options.split) if seq2seq.pairs else None
    models = dict(zip(run_names(runs), (load_model(one, options.device) for one in runs), strict=True))
    for lm in models.values():
        lm.source_room()
    ways = replace(ways, ranks=[load_rank(one, options.device) for one in ranks])
    if given is None:
        check_same_data(models, options.data)
        given = pairs_for(next(iter(models.values())), options.data, options.split)
    pairs = given.sample(options.samples, reference.skip, options.seed)
    with Bar("measuring") as bar:
        report = evaluate_seq2seq(models, pairs, ways, similarity, bar.update)
    return report


def load_gaps(name: str, stories: Sequence[Sequence[str]], count: int, options: MeasureOptions, skip: int = 0) -> Set:
    """Load `count` gaps after the first `skip` in the seed's order, of aNLG's dev set or of the split's stories.

    The order depends on neither number, so that settings can be chosen on other gaps than the reported ones."""
    ends_only = name == "anlg"
    if ends_only:
        found = read_anlg(anlg_path(options.data))
    else:
        found = list(story_gaps(corpus("roc", options.data, options.split), options.seed))
    chosen = random.Random(options.seed).sample(found, len(found))[skip : skip + count]
    if len(chosen) < 2:
        raise UsageError(f"{name} has {len(found):,} gaps: --skip {skip} leaves {len(chosen)}; at least 2 are needed.")
    return Set(name, chosen, Lengths.of(stories, ends_only), "dev" if ends_only else options.split)


def keep_middles(run: str, middles: dict[str, str], out: Path | None) -> None:
    """Write some gaps and their middles next to the figures."""
    nowhere = out is None and (run in bundled_runs() or find_open_model(run) is not None)
    if nowhere or not current().first:
        return
    folder = out.parent if out else find_run(run)
    for name, text in middles.items():
        path = folder / f"{out.stem if out else 'infill'}-{name}.txt"
        write_atomic(path, text)
        note(f"{path}: gaps and what was written into them.")


def source_of(lm: TextDiffusion, root: Path | None) -> tuple[str, ...]:
    """Return the corpus or file, and the column, that a model was trained on."""
    recipe = lm.config["recipe"]
    more = (recipe["column"], recipe.get("chunk"), recipe.get("split"))
    return (resolve_data(recipe["data"], root), *(str(one) for one in more if one))


def check_same_data(models: dict[str, TextDiffusion], root: Path | None) -> None:
    """Refuse runs that were trained on different data, or on different texts of one file."""
    sources = {name: source_of(lm, root) for name, lm in models.items()}
    if len(set(sources.values())) > 1:
        texts = ", ".join(f"{name}: {' '.join(source)}" for name, source in sources.items())
        raise UsageError(f"these runs were trained on different data ({texts}). Compare runs trained on the same data.")
    check_seeds(models, root)


def check_seeds(models: dict[str, TextDiffusion], root: Path | None) -> None:
    """Refuse runs with different seeds on a file: the seed decides which texts are held out."""
    first = next(iter(models.values()))
    if first.config["recipe"]["data"] in NAMES:
        return
    source, seed = source_of(first, root), first.config["recipe"]["seed"]
    for name, lm in models.items():
        other = lm.config["recipe"]["seed"]
        if source_of(lm, root) == source and other != seed:
            seeds = f"{next(iter(models))}: seed {seed}, {name}: seed {other}"
            raise UsageError(f"these runs held out different texts ({seeds}). Compare runs with the same seed.")


def run_names(runs: list[str]) -> list[str]:
    """Name each run by its last folder, or by its whole path if two names would be equal."""
    if doubled := [run for run in runs if runs.count(run) > 1]:
        raise UsageError(f"{doubled[0]} is named twice.")
    for run in runs:
        if find_open_model(run) is None:
            read_config(find_run(run))  # rejects what is not a run
    short = [Path(run).resolve().name if Path(run).is_dir() else run for run in runs]
    return [name if short.count(name) == 1 else run for name, run in zip(short, runs, strict=True)]


def refuse_open(runs: list[str], why: str) -> None:
    """Refuse models of other people by a task that asks for what they do not have."""
    for run in runs:
        if find_open_model(run) is not None:
            raise UsageError(f"{run} is somebody else's model: {why}. The tasks language and infill measure it.")


def load_judge(name: str | None, models: Iterable[TextDiffusion], device: str) -> TextDiffusion | None:
    """Load the requested judge, or the bundled one if it shares a tokenizer with one of the models."""
    if name is not None:
        return load_model(name, device)
    tokenizer = read_config(find_run("judge"))["tokenizer"]
    if any(lm.tokenizer.fingerprint() == tokenizer for lm in models):
        return load_model("judge", device)
    note("The bundled judge has a different vocabulary, so its figures are left out. Give a judge with --judge RUN.")
    return None


def publish(runs: list[str], report: Report, options: MeasureOptions) -> None:
    """Print the report and keep its figures.

    All figures go to `--out`. Without it each run's metrics.jsonl and card get its own figures and those of rows that
    belong to no run, such as real text and the twin; a bundled model is not changed."""
    if not current().first:  # of several processes
        return
    if options.as_json:
        for row_object in report.objects():
            put_json(row_object)
    else:
        for table in report.tables():
            put_table(table)
    names = run_names(runs)
    rows = list(dict.fromkeys(row.name for row in report.rows))
    if options.out:
        append_records(options.out, report, rows)
        return
    for run, name in zip(runs, names, strict=True):
        if run in bundled_runs() or find_open_model(run) is not None:
            whose = "bundled" if run in bundled_runs() else "somebody else's"
            note(f"{run} is {whose}: nothing was appended to it. Save the figures with --out FILE.")
            continue
        folder = find_run(run)
        append_records(folder / "metrics.jsonl", report, [row for row in rows if row not in {*names} - {name}])
        write_card(folder)


def append_records(path: Path, report: Report, rows: list[str]) -> None:
    for row in rows:
        for record in report.records(row):
            append_line(path, json.dumps(record, ensure_ascii=False))
