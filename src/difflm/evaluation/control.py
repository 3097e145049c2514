"""`evaluate --task control` measures whether texts satisfy a request and still read like real text.

Targets come from real sentences (`difflm.evaluation.targets`). The model generates a few texts for each; checkers that
took no part in generation read the printed words. `figures.yaml` defines the figures.
"""

import hashlib
import json
import math
import random
import time
import zlib
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from difflm.annotators.e2e_fields import verbatim
from difflm.controls.guidance import ORIGINAL, GuidanceSettings
from difflm.controls.learned import POS, checking_tagger, parse_ahead
from difflm.controls.plan import check_text
from difflm.data.corpora import E2EPair, e2e_path, read_e2e
from difflm.data.text_metrics import distinct_n, self_bleu
from difflm.data.texts import read_lines
from difflm.data.words import has_phrase, join_words, split_words
from difflm.errors import UsageError
from difflm.evaluation import shared
from difflm.evaluation import targets as asking
from difflm.evaluation.checkers import Checkers
from difflm.evaluation.options import DEFAULTS, Options, Watcher, say, split_names
from difflm.evaluation.reports import CONTROL, SENTENCES, Report, Row
from difflm.evaluation.targets import Target, write_lines
from difflm.generation.jobs import Generation, GenerationJob
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request, read_guidance
from difflm.methods.rivals import DECODERS
from difflm.runtime.distributed import current
from difflm.runtime.files import Json

TARGETS = 200  # of a control
COMPARED = 5  # samples of a target for self-BLEU: people wrote about eight sentences per meaning
Z95 = 1.959964
VALIDATION = {"corpus": "e2e", "split": "valid"}
Words = list[str]


@dataclass(frozen=True)
class Made:
    """A target and the texts that were generated for it."""

    target: Target
    texts: list[Generation]

    @property
    def words(self) -> list[Words]:
        return [split_words(text.text) for text in self.texts]


@dataclass(frozen=True)
class System:
    """A run, how texts are requested of it, and its decoder: a row for every control."""

    lm: TextDiffusion
    each: int = 5  # samples per target
    seed: int = 0
    candidates: int = 1
    guidance: GuidanceSettings | None = None  # None: the model's own, or the decoder's
    settings: Json = field(default_factory=dict)  # of `Sampling`
    method: str | None = None  # the decoder of a left-to-right model
    name: str = ""

    @property
    def how(self) -> str:
        """The decoder, or the method of a run that needs none."""
        return self.method or str(self.lm.config["method"])

    def make_job(self, target: Target, number: int) -> GenerationJob:
        """Return the job that samples one target, with its own noise."""
        controls = target.asked.controls()
        fills = target.asked.infill is not None and self.method is None and self.lm.reads_tokens
        chooses = fills or any(control.head for control in controls)  # the model, or a classifier
        return self.lm.make_job(
            self.each,
            zlib.crc32(f"{self.seed} {target.control} {number}".encode()) >> 1,
            candidates=self.candidates if chooses else 1,
            controls=controls,
            guidance=self.guidance,
            method=self.method,
            **shared.settings_for(self.lm, self.settings),
        )

    def write(self, targets: Sequence[Target], doing: str = "") -> list[Made]:
        """Generate the texts of all targets together."""
        jobs = [self.make_job(target, number) for number, target in enumerate(targets)]
        return [Made(*pair) for pair in zip(targets, shared.run_all(self.lm, jobs, doing), strict=True)]

    def warm_up(self, target: Target) -> None:
        """Run a short job: the first call is slower than the next ones."""
        quick = replace(self, each=1, candidates=1, settings={**self.settings, "steps": 2})
        list(self.lm.run_jobs([quick.make_job(target, 0)]))

    def describe(self) -> str:
        sampling = shared.describe_sampling(self.lm.sampling(**shared.settings_for(self.lm, self.settings)))
        if self.method is not None:
            strength = self.guidance.size if self.guidance else DECODERS[self.method].usual_strength
            return f"{sampling} {self.method}={strength:g} candidates={self.candidates}"
        settings = self.lm.guidance_settings(self.guidance)
        rule = "original" if settings == ORIGINAL else f"{'original, ' * (settings.climb == 'sign')}{settings.size:g}"
        return f"{sampling} guidance={rule} candidates={self.candidates}"

    def refusal(self, targets: Sequence[Target]) -> str:
        """Return why it does not support a target; empty if it supports all."""
        try:
            for target in targets:
                self.lm.plan_controls(target.asked.controls(), None, self.guidance, self.method)
        except UsageError as error:
            return str(error)
        return ""


# -- the whole --------------------------------------------------------------------------------------------------------


def measure_control(runs: Sequence[str], options: Options, watch: Watcher) -> Report:
    """Measure runs on targets that are drawn from E2E or read from a file."""
    names = None if options.controls is None else split_names(options.controls)
    count, path, guidance = options.samples or TARGETS, options.targets, read_guidance(options.guidance)
    asking.check_known(names or ())
    given = asking.choose(asking.read_targets(path), names, count, path) if path and path.exists() else None
    pairs: list[E2EPair] = []
    with nullcontext() if given is None else suppress(UsageError):  # to compare with alone, so they may be missing
        pairs = list(read_e2e(e2e_path(options.data, options.split)))
    models = shared.load_runs(runs, options.device)
    for folder in options.guide or ():
        guide_models(list(models.values()), folder)
    decoders, systems = shared.find_decoders(models, options), list[System]()
    for name, lm in models.items():
        own = System(lm, options.each, options.seed, options.candidates, guidance, options.settings, name=name)
        systems += [own] if lm.model.capabilities.denoises or not decoders[name] else []
        systems += [replace(own, method=method, guidance=options.methods[method]) for method in decoders[name]]
    tagger, writers = checking_tagger(), list(models.values())
    if given is not None:
        targets, notes = asking.fit_for(given, writers, tagger)
        about = {"corpus": str(path and path.name), "split": "targets of a file"}
    else:
        about, notes = {"corpus": "e2e", "split": options.split}, []
        targets = asking.draw_targets(names or asking.CONTROLS, pairs, writers, tagger, count, options.seed)
        if path and current().first:
            write_lines(path, (target.to_json() for target in targets))
            watch.note(f"{path}: {len(targets):,} targets. Give this file again to use the same targets.")
    judge = shared.load_judge(options.judge, models.values(), options.device, watch.note)
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


def evaluate_control(
    systems: Sequence[System],
    targets: Sequence[Target],
    judge: TextDiffusion | None,
    pairs: Sequence[E2EPair] = (),
    options: Options = DEFAULTS,
    about: Json = VALIDATION,
) -> Report:
    """Generate texts for every target and measure them. Sentences of one meaning among `pairs` are compared with the
    samples of one target; `about` says where the targets come from. The texts are kept in the file `texts`; if it
    exists, its texts are measured instead. A control that one of several systems does not support is a row without
    figures, with the reason."""
    texts, first = options.texts, systems[0]
    sampling = [system.describe() for system in systems]
    if texts and len(systems) > 1:
        raise UsageError("--texts keeps the texts of one run: leave the others out.")
    counted = any(target.asked.length is not None for target in targets)
    if counted and any(system.lm.tokenizer.kind != "words" for system in systems):
        raise UsageError("lengths of targets are counted in words: measure them with a model of whole words.")
    checkers = Checkers.load(options.second_parser)
    kept = read_texts(texts, targets, first.each) if texts and texts.exists() else None
    refused = find_refusals(systems, targets) if kept is None else {}
    measure = Measure(judge, checkers, human_self_bleu(pairs, min(first.each, COMPARED), first.seed))
    rows, every = list[Row](), list[Made]()
    for control, asked in by_control(targets).items():
        for number, system in enumerate(systems):
            if reason := refused.get((number, control)):
                row = Row(system.name, {}, {"checkers": [], "refused": reason}, control, len(asked))
            else:
                made, seconds = [one for one in kept or () if one.target.control == control], None
                if kept is None:
                    system.warm_up(asked[0])
                    start = time.perf_counter()
                    made = system.write(asked, f"{control}, {system.name}, {system.how}: writing")
                    seconds = time.perf_counter() - start
                say(f"{control}: measuring")
                row = measure.model_row(system.name, control, made, seconds)
                every += made
            row.about["method"] = system.lm.config["method"]
            row.about.update(how=system.how, each=system.each, sampling=sampling[number])
            rows.append(row)
        rows.append(measure.sentence_row(control, asked))
    if texts and kept is None:
        write_texts(texts, every)
    notes = [f"the texts are those of {texts.name}, made before"] if texts and kept is not None else []
    return make_report(systems, targets, measure, rows, about, notes)


def make_report(
    systems: Sequence[System],
    targets: Sequence[Target],
    measure: "Measure",
    rows: list[Row],
    about: Json,
    notes: list[str],
) -> Report:
    """The report of these rows: what they share, and how the table is read."""
    first, judge = systems[0], measure.judge
    lines = "\n".join(json.dumps(target.to_json(), ensure_ascii=False) for target in targets)
    about = {"tokenizer": shared.describe_tokenizer(first.lm.tokenizer), **about}
    about |= {"target_set": hashlib.sha256(lines.encode()).hexdigest()[:16], "seed": first.seed}
    about["judge"] = shared.model_name(judge) if judge else None
    used = dict.fromkeys(checker for row in rows for checker in row.about["checkers"])
    sampling = dict.fromkeys(row.about["sampling"] for row in rows if row.name != SENTENCES)
    legend = ["in brackets: 95 %, over targets", f"checked by: {', '.join(used)}", *sampling]
    legend += [f"judge: {about['judge']}"] if judge else []
    notes = [*notes, f"seconds: on {shared.device_name(first.lm.device)}", *measure.make_notes(rows)]
    names = ", ".join(dict.fromkeys(system.name for system in systems))
    counts = " to ".join(dict.fromkeys(f"{select(row.count for row in rows):,}" for select in (min, max)))
    amount = f"{counts} targets per control, {first.each} samples each, seed {first.seed}"
    title = f"{names} on {about['corpus']} ({about['split']}): {amount}"
    return Report("control", title, rows, about, legend, notes)


def find_refusals(systems: Sequence[System], targets: Sequence[Target]) -> dict[tuple[int, str], str]:
    """Find the controls that systems, by number, do not support, before the first text is generated. It is an error if
    the only system is a run without a decoder, or if nothing is left."""
    groups = by_control(targets)
    found = {
        (number, control): reason
        for number, system in enumerate(systems)
        for control, asked in groups.items()
        if (reason := system.refusal(asked))
    }
    alone = len(systems) == 1 and systems[0].method is None
    if found and (alone or len(found) == len(systems) * len(groups)):
        raise UsageError(next(iter(found.values())))
    return found


def by_control(targets: Sequence[Target]) -> dict[str, list[Target]]:
    names = dict.fromkeys(target.control for target in targets)
    return {name: [target for target in targets if target.control == name] for name in names}


def write_texts(path: Path, made: Sequence[Made]) -> None:
    keys = ("text", "steps", "denoiser_calls", "classifier_calls")
    lines = []
    for one in made:
        about = {"control": one.target.control, "asked": one.target.to_json()["asked"]}
        lines += [{**about, **{key: getattr(text, key) for key in keys}} for text in one.texts]
    write_lines(path, lines)


def read_texts(path: Path, targets: Sequence[Target], each: int) -> list[Made]:
    """Read texts, of this or any other system, and check them again. Each line names what it was generated for;
    targets with the same request take texts in the order of the file."""
    texts: dict[tuple[str, str], list[Generation]] = {}
    for number, line in read_lines(path):
        try:
            one = json.loads(line)
            target = Target(one["control"], Request.model_validate(one["asked"]))
            calls = (int(one.get("steps", 0)), int(one.get("denoiser_calls", 0)))
            asked = int(one.get("classifier_calls", 0))
            text = Generation(str(one["text"]), split_words(str(one["text"])), *calls, 0.0, 0, classifier_calls=asked)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):  # pydantic's error is a ValueError
            raise UsageError(f'{path}, line {number} is not a text such as {{"control", "asked", "text"}}.') from None
        texts.setdefault((target.control, target.key), []).append(text)
    syntactic = {(one.control, one.key) for one in targets if one.asked.tree or one.asked.span}
    parse_ahead(text.tokens for key in syntactic & texts.keys() for text in texts[key])
    found = []
    for target in targets:
        own = texts.get((target.control, target.key), [])
        if len(own) < each:
            raise UsageError(f"{path} has too few texts for {target.key}: {each} for each target. Lower --each.")
        controls, some = target.asked.controls(), [own.pop(0) for _ in range(each)]
        found.append(Made(target, [replace(text, controls=check_text(controls, text.text)) for text in some]))
    return found


def outcomes(target: Target, text: Generation) -> dict[str, float]:
    """Return how well one printed text satisfies its target, from 0 to 1."""
    words, asked = split_words(text.text), target.asked
    found: dict[str, float] = {}
    for control, check in zip(asked.controls(), text.controls, strict=True):
        satisfied = check["satisfied"]
        if control.keeps_text:  # judged even if the model does not know its words, and however it is spaced
            satisfied = any(control.check(spaced).satisfied for spaced in (text.text, join_words(words)))
        for name, figure in CONTROL.items():
            if figure.control == control.name:
                found[name] = check["score"] if figure.graded else float(bool(satisfied))
    if asked.length is not None:
        found["length_within_2"] = float(abs(len(words) - asked.length) <= 2)
    for field_, value in asked.field.items():
        found["field_verbatim"] = float(verbatim(words, field_, value))
    if asked.contains:
        there = [has_phrase(text.text, phrase) for phrase in asked.contains]
        found["contains_found"] = sum(there) / len(there)
    if len(text.controls) > 1:
        found["all_at_once"] = float(all(check["satisfied"] for check in text.controls))
    return found


def target_means(made: Made) -> dict[str, float]:
    """Average every outcome over the samples of a target."""
    each = [outcomes(made.target, text) for text in made.texts]
    return {figure: float(np.mean([found[figure] for found in each])) for figure in each[0]}


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson, 1927)."""
    z2 = Z95**2 / trials
    centre, half = share + z2 / 2, Z95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials))
    return max(0.0, (centre - half) / (1 + z2)), min(1.0, (centre + half) / (1 + z2))


def interval(figure: str, values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean over targets."""
    mean = float(np.mean(values))
    if not CONTROL[figure].graded or len(set(values)) == 1:
        return wilson(mean, len(values))
    half = Z95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return max(0.0, mean - half), min(1.0, mean + half)


@dataclass(frozen=True)
class Measure:
    """The checkers and comparisons for the texts of a row."""

    judge: TextDiffusion | None
    checkers: Checkers
    people: tuple[float, int] | None = None  # of `human_self_bleu`

    def model_row(self, name: str, control: str, made: Sequence[Made], seconds: float | None) -> Row:
        row = self.compare(name, control, len(made), [[text.text for text in one.texts] for one in made])
        means = [target_means(one) for one in made]
        values = {figure: [found[figure] for found in means] for figure in means[0]}
        values |= self.checkers.second_opinions(control, [(one.target, one.words) for one in made])
        for figure, found in values.items():
            row.figures[figure], row.intervals[figure] = float(np.mean(found)), interval(figure, found)
            row.texts[figure] = len(found) * len(made[0].texts)  # a second checker may cover fewer targets
        some = [one.words[:COMPARED] for one in made]
        row.figures["self_bleu"] = float(np.mean([self_bleu(words) for words in some])) if len(some[0]) > 1 else None
        row.texts["self_bleu"] = sum(map(len, some))
        texts = [text for one in made for text in one.texts]
        row.figures["denoiser_calls"] = float(np.mean([text.denoiser_calls for text in texts]))
        if any(text.classifier_calls for text in texts):
            row.figures["classifier_calls"] = float(np.mean([text.classifier_calls for text in texts]))
        row.figures["seconds_50"] = None if seconds is None else 50 * seconds / len(texts)
        row.figures["seconds"] = seconds
        return row

    def sentence_row(self, control: str, targets: Sequence[Target]) -> Row:
        """Measure the sentences that the targets were drawn from."""
        sentences = [[target.sentence] for target in targets if target.sentence]
        row = self.compare(SENTENCES, control, len(targets), sentences)
        row.about["method"] = "people"
        if self.people:
            row.figures["self_bleu"], row.texts["self_bleu"] = self.people
        return row

    def compare(self, name: str, control: str, targets: int, groups: Sequence[Sequence[str]]) -> Row:
        """Measure the figures that texts and real sentences share; a group has the texts of one target."""
        words = [[split_words(text) for text in group] for group in groups]
        about = {"checkers": self.checkers.names(control)}
        row = Row(name, {}, about, control, targets, dict.fromkeys(CONTROL, sum(map(len, groups))))
        if groups:
            row.figures.update(self.checkers.agreements(control, [one for many in words for one in many if one]))
            row.figures["distinct_4"] = distinct_n([many[0] for many in words], 4)
            row.texts["distinct_4"] = len(groups)
        if self.judge:
            shared.judge_texts(self.judge, row, groups)
        return row

    def make_notes(self, rows: Sequence[Row]) -> list[str]:
        """Return what a reader of the table must know."""
        named = [(f"{row.group}, {row.name}, {row.about['how']}", row) for row in rows if row.name != SENTENCES]
        notes = [f"{name}: {row.about['refused']}" for name, row in named if "refused" in row.about]
        notes += [] if self.judge else ["no judge: no judge figures"]
        for name, row in named if self.judge else ():
            if short := row.texts.get("denoiser_calls", 0) - row.texts.get(shared.JUDGED, 0):
                notes.append(f"{name}: {short} texts are empty or too long for the judge, and not judged")
        if self.people is None:
            notes.append("no sentences of one meaning to compare self-BLEU with")
        if self.checkers.second_tagger is None and any(POS in row.group.split("+") for row in rows):
            notes.append("spaCy is not installed: tags are checked by the bundled tagger alone")
        if not all(row.texts[shared.JUDGED] for row in rows if row.name == SENTENCES):
            notes.append("some targets come without a sentence")
        return notes


def human_self_bleu(pairs: Sequence[E2EPair], count: int, seed: int) -> tuple[float, int] | None:
    """Return the self-BLEU of `count` sentences of one meaning, averaged over meanings, and the number of sentences."""
    meanings: dict[str, list[str]] = {}
    for pair in pairs:
        meanings.setdefault(json.dumps(pair.fields, sort_keys=True), []).append(pair.text)
    draw = random.Random(seed)
    groups = [draw.sample(texts, count) for texts in meanings.values() if len(texts) >= count > 1]
    if not groups:
        return None
    return float(np.mean([self_bleu([split_words(text) for text in texts]) for texts in groups])), count * len(groups)
