"""What the verbs that need a model share: loading runs, measuring them, keeping the figures. Imports torch."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflm.app.commands.options import load_model, parse_guidance
from difflm.app.console import Bar, note, put_json, put_table
from difflm.controls.learned import checking_tagger
from difflm.data.corpora import NAMES, corpus, located
from difflm.data.e2e import E2EPair, e2e_path, read_e2e
from difflm.data.stories import anlg_path, read_anlg, story_gaps, whole
from difflm.errors import UsageError
from difflm.evaluation.bert_score import BertScore
from difflm.evaluation.control import Protocol, evaluate_control
from difflm.evaluation.control_records import ControlReport
from difflm.evaluation.infill import Asked, Lengths, Set, evaluate_infill
from difflm.evaluation.infill_records import InfillReport
from difflm.evaluation.language import Report, check_numbers, corpus_for, evaluate_language
from difflm.evaluation.targets import (
    CONTROLS,
    Target,
    check_known,
    choose,
    draw_targets,
    fit_for,
    read_targets,
    write_targets,
)
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.validation import check_device
from difflm.runtime.files import append_line, write_atomic
from difflm.training.model_card import write_card
from difflm.training.run import bundled_runs, find_run, read_config

if TYPE_CHECKING:
    from difflm.app.commands.evaluate import Controlling, Infilling, Measuring

SAMPLES, TARGETS = 1000, 200  # texts of the language task or gaps, targets a control
AnyReport = Report | ControlReport | InfillReport


def measure(runs: list[str], asked: "Measuring") -> Report:
    """All runs on the corpus of the first, which must be that of every other."""
    samples = SAMPLES if asked.samples is None else asked.samples
    check_numbers(samples, asked.seed, asked.draws, asked.score_texts)  # before anything is loaded
    models = dict(zip(run_names(runs), (load_model(run, asked.device) for run in runs), strict=True))
    sources = {name: source_of(lm, asked.data) for name, lm in models.items()}
    if len(set(sources.values())) > 1:
        texts = ", ".join(f"{name}: {' '.join(source)}" for name, source in sources.items())
        raise UsageError(f"these runs were trained on different data ({texts}). Compare runs of the same.")
    judge = load_judge(asked.judge, models.values(), asked.device)
    twin = load_model(asked.twin, asked.device) if asked.twin else None
    others = {"the judge": judge, "the twin": twin}
    check_seeds({**models, **{name: lm for name, lm in others.items() if lm is not None}}, asked.data)
    corpus = corpus_for(next(iter(models.values())), asked.data, asked.split)
    with Bar("measuring") as bar:
        return evaluate_language(
            models,
            corpus,
            judge,
            samples=samples,
            seed=asked.seed,
            draws=asked.draws,
            twin=twin,
            settings=asked.settings(),
            on_progress=bar.update,
            score_texts=asked.score_texts,
        )


def measure_control(run: str, asked: "Measuring", control: "Controlling") -> ControlReport:
    """One run, asked for what the targets ask; they are drawn from E2E, or stand in a file."""
    names, count = control.names(), TARGETS if asked.samples is None else asked.samples
    guidance = parse_guidance(control.guidance)
    protocol = Protocol(control.each, asked.seed, control.candidates, guidance, asked.settings())
    protocol.check()
    check_known(names or ())
    if count < 1:
        raise UsageError(f"the number of samples, which are targets a control here, must be at least 1, not {count}.")
    path = control.targets
    given = choose(read_targets(path), names, count, path) if path and path.exists() else None
    pairs = e2e_pairs(asked, needed=given is None)
    lm = load_model(run, asked.device)
    for folder in control.guide or ():
        lm.guided_by(folder)
    targets, about, notes = settle_targets(lm, given, pairs, asked, path, names or CONTROLS, count)
    judge = load_judge(asked.judge, [lm], asked.device)
    with Bar("measuring") as bar:
        report = evaluate_control(
            lm,
            run_names([run])[0],
            targets,
            judge,
            protocol,
            pairs,
            about,
            notes,
            bar.update,
            control.texts,
            control.second_parser,
        )
    if path and given is None:
        note(f"{path}: {len(targets):,} targets. Give the same file again to ask for the same.")
    return report


def e2e_pairs(asked: "Measuring", needed: bool) -> list[E2EPair]:
    """The pairs of the split; with targets of a file they are only stood beside, and may be missing."""
    try:
        return list(read_e2e(e2e_path(asked.data, asked.split)))
    except UsageError:
        if needed:
            raise
        return []


def settle_targets(
    lm: TextDiffusion,
    given: list[Target] | None,
    pairs: list[E2EPair],
    asked: "Measuring",
    path: Path | None,
    names: Sequence[str],
    count: int,
) -> tuple[list[Target], dict[str, Any], list[str]]:
    """The targets, where they come from, and what a reader must know of them."""
    tagger = checking_tagger()
    if given is not None:
        targets, notes = fit_for(given, lm, tagger)
        return targets, {"corpus": Path(str(path)).name, "split": "targets of a file"}, notes
    targets = draw_targets(names, pairs, lm, tagger, count, asked.seed)
    if path:
        write_targets(path, targets)
    return targets, {"corpus": "e2e", "split": asked.split}, []


def measure_infill(run: str, asked: "Measuring", infill: "Infilling") -> tuple[InfillReport, dict[str, str]]:
    """A run and its rivals on the same gaps; also some of what they wrote, for people."""
    names, count = infill.names(), SAMPLES if asked.samples is None else asked.samples
    how = Asked(asked.seed, infill.mbr, infill.beams, asked.draws, asked.settings())
    how.check()
    if count < 2:
        raise UsageError(f"the number of samples, which are gaps here, must be at least 2, not {count}.")
    if unknown := set(names) - {"anlg", "roc"}:
        raise UsageError(f"no gaps {min(unknown)!r}. Known: anlg, roc.")
    similarity = BertScore(infill.encoder, check_device(asked.device)) if infill.encoder else None
    stories = list(whole(corpus("roc", asked.data, "train")))
    if infill.skip < 0:
        raise UsageError(f"--skip must be 0 or more gaps, not {infill.skip}.")
    sets = [gaps_of(name, stories, count, asked, infill.skip) for name in names]
    runs = [run, *(infill.rival or ())]
    models = dict(zip(run_names(runs), (load_model(one, asked.device) for one in runs), strict=True))
    training = [sentence for story in stories for sentence in story]
    with Bar("measuring") as bar:
        return evaluate_infill(models, sets, how, training, similarity, on_progress=bar.update)


def gaps_of(name: str, stories: Sequence[Sequence[str]], count: int, asked: "Measuring", skip: int = 0) -> Set:
    """`count` gaps in the seed's order behind the first `skip`: of aNLG's development set, or of the split's stories.

    The order does not depend on either number, so that settings chosen behind the gaps that are reported are chosen on
    others."""
    ends_only = name == "anlg"
    if ends_only:
        found = read_anlg(anlg_path(asked.data))
    else:
        found = list(story_gaps(corpus("roc", asked.data, asked.split), asked.seed))
    chosen = random.Random(asked.seed).sample(found, len(found))[skip : skip + count]
    if len(chosen) < 2:
        raise UsageError(f"{name} has {len(found):,} gaps: --skip {skip} leaves {len(chosen)}, and 2 are the fewest.")
    return Set(name, chosen, Lengths.of(stories, ends_only), "dev" if ends_only else asked.split)


def keep_middles(run: str, middles: dict[str, str], out: Path | None) -> None:
    """What was written goes beside the figures."""
    if out is None and run in bundled_runs():
        return
    folder = out.parent if out else find_run(run)
    for name, text in middles.items():
        path = folder / f"{out.stem if out else 'infill'}-{name}.txt"
        write_atomic(path, text)
        note(f"{path}: gaps and what was written into them.")


def source_of(lm: TextDiffusion, root: Path | None) -> tuple[str, ...]:
    """The corpus or the file, and the column, that a model was trained on."""
    recipe = lm.config["recipe"]
    more = (recipe["column"], recipe.get("chunk"))
    return (located(recipe["data"], root), *(str(one) for one in more if one))


def check_seeds(models: dict[str, TextDiffusion], root: Path | None) -> None:
    """The seed says which texts of a file are held out: with another one, a model may have learned them."""
    first = next(iter(models.values()))
    if first.config["recipe"]["data"] in NAMES:
        return
    source, seed = source_of(first, root), first.config["recipe"]["seed"]
    for name, lm in models.items():
        other = lm.config["recipe"]["seed"]
        if source_of(lm, root) == source and other != seed:
            told = f"{next(iter(models))}: seed {seed}, {name}: seed {other}"
            raise UsageError(f"these runs held out different texts of their file ({told}). Compare runs of one seed.")


def run_names(runs: list[str]) -> list[str]:
    """A short name for each run: its last folder, the whole path where two would be called the same."""
    if doubled := [run for run in runs if runs.count(run) > 1]:
        raise UsageError(f"{doubled[0]} is named twice.")
    short = [Path(run).resolve().name if Path(run).is_dir() else run for run in runs]
    return [name if short.count(name) == 1 else run for name, run in zip(short, runs, strict=True)]


def load_judge(name: str | None, models: Iterable[TextDiffusion], device: str) -> TextDiffusion | None:
    """The judge that was asked for, or the bundled one where it reads the same words as one of the models."""
    if name is not None:
        return load_model(name, device)
    tokenizer = read_config(find_run("judge"))["tokenizer"]
    if any(lm.tokenizer.fingerprint() == tokenizer for lm in models):
        return load_model("judge", device)
    note("The bundled judge reads other words: its figures are left out. Give a judge with --judge RUN.")
    return None


def show_report(report: AnyReport, as_json: bool) -> None:
    if not as_json:
        put_table(report.table())
        return
    if not isinstance(report, Report):
        for row_object in report.objects():
            put_json(row_object)
        return
    shared = {
        key: getattr(report, key) for key in ("corpus", "split", "samples", "seed", "draws", "judge", "judge_p99")
    }
    for row in report.rows:
        about = {"texts": row.texts, "errors": row.errors, "notes": row.notes}
        put_json({"name": row.name, "method": row.method, **row.figures, **about, **shared})


def keep_records(runs: list[str], report: AnyReport, out: Path | None) -> None:
    """All figures go to `out`. Without it each run's metrics.jsonl and card get its own and those of the rows that are
    no run's, real text and the twin; a bundled model is left as it was shipped."""
    names = run_names(runs)
    rows = list(dict.fromkeys(row.name for row in report.rows))
    if out:
        append_records(out, report, rows)
        return
    for run, name in zip(runs, names, strict=True):
        if run in bundled_runs():
            note(f"{run} is bundled: nothing was appended to it. Keep the figures with --out FILE.")
            continue
        folder = find_run(run)
        append_records(folder / "metrics.jsonl", report, [row for row in rows if row not in {*names} - {name}])
        write_card(folder)


def append_records(path: Path, report: AnyReport, rows: list[str]) -> None:
    for row in rows:
        for record in report.records(row):
            append_line(path, json.dumps(record, ensure_ascii=False))
