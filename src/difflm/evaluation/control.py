"""`evaluate --task control`: does a text obey what was asked of it, and does it still read like one?

Targets come from real sentences (`difflm.evaluation.targets`); of each the model writes a few texts; checkers that had
no part in making them look at the printed words. What each figure means is said in `control_records`.
"""

import hashlib
import json
import math
import random
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from difflm.annotators.e2e_fields import verbatim
from difflm.controls import Control, Field, Infill, Length, Span, Tree
from difflm.controls.guidance import ORIGINAL, GuidanceSettings
from difflm.controls.learned import POS
from difflm.controls.plan import check_text
from difflm.data.e2e import E2EPair
from difflm.data.text_metrics import distinct_n, self_bleu
from difflm.data.texts import read_lines
from difflm.data.words import split_words
from difflm.errors import UsageError
from difflm.evaluation.control_records import FIGURES, SENTENCES, ControlReport, ControlRow
from difflm.evaluation.language import OnProgress, described, device_name, model_name, ratio, score
from difflm.evaluation.opinions import Checkers
from difflm.evaluation.targets import Target
from difflm.generation.jobs import Generation, GenerationJob
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request
from difflm.generation.validation import check_request
from difflm.runtime.files import write_atomic

ALIKE = 5  # samples of a target whose self-BLEU is told: people wrote about eight sentences for a meaning
Z95 = 1.959964
Words = list[str]


@dataclass(frozen=True)
class Protocol:
    """How the texts are asked for."""

    each: int = 5  # samples a target
    seed: int = 0
    candidates: int = 1
    guidance: GuidanceSettings | None = None  # as the model would
    settings: Mapping[str, Any] | None = None  # of `Sampling`

    def check(self) -> None:
        """Refuse nonsense before anything is loaded."""
        check_request(self.each, self.seed, 1)
        if not 1 <= self.candidates <= 1000:
            raise UsageError(f"--candidates must lie between 1 and 1,000, not {self.candidates}.")
        if self.guidance and not 0 <= self.guidance.size <= 1000:
            raise UsageError(f"--guidance must lie between 0 and 1,000, not {self.guidance.size}.")

    def make_job(self, lm: TextDiffusion, target: Target, number: int) -> GenerationJob:
        """The samples of one target, with noise of their own."""
        controls = target.asked.controls()
        return lm.make_job(
            self.each,
            zlib.crc32(f"{self.seed} {target.control} {number}".encode()) >> 1,
            candidates=self.candidates if guided(controls) else 1,  # else there is nothing to choose by
            controls=controls,
            guidance=self.guidance,
            **(self.settings or {}),
        )

    def warm_up(self, lm: TextDiffusion, target: Target) -> None:
        """The first call of anything is no measure of the next ones."""
        quick = replace(self, each=1, candidates=1, settings={**(self.settings or {}), "steps": 2})
        list(lm.run_jobs([quick.make_job(lm, target, 0)]))

    def described(self, lm: TextDiffusion) -> str:
        said = described(lm.sampling(**(self.settings or {})))
        rule = "original" if self.guidance == ORIGINAL else f"{lm.guidance_settings(self.guidance).size:g}"
        return f"{said} guidance={rule} candidates={self.candidates}"


def guided(controls: Sequence[Control]) -> bool:
    return any(control.head for control in controls)


@dataclass(frozen=True)
class Made:
    """A target and the texts that were written for it."""

    target: Target
    texts: list[Generation]

    @property
    def words(self) -> list[Words]:
        return [split_words(text.text) for text in self.texts]


def evaluate_control(
    lm: TextDiffusion,
    name: str,
    targets: Sequence[Target],
    judge: TextDiffusion | None,
    protocol: Protocol,
    pairs: Sequence[E2EPair] = (),
    about: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = lambda what, done, total: None,
    texts: Path | None = None,
    second_parser: Path | None = None,
) -> ControlReport:
    """Ask `lm` for every target and measure what it writes. `pairs` are those whose sentences of one meaning stand
    beside the samples of one target; `about` says where the targets come from. What was written is kept in the file
    `texts`; where that is there already, nothing is written anew and its texts are measured."""
    protocol.check()
    sampling = protocol.described(lm)
    if judge and judge.model.likelihood != "exact":
        raise UsageError(f"a judge needs an exact likelihood, which {judge.config['method']} has not.")
    if lm.tokenizer.kind != "words" and any(target.asked.length is not None for target in targets):
        raise UsageError("lengths of targets are counted in words: measure them with a model of whole words.")
    checkers = Checkers.there(second_parser)
    kept = read_texts(texts, targets, protocol.each) if texts and texts.exists() else None
    for target in targets if kept is None else ():  # all that is wrong, before the first text is made
        lm.plan_controls(target.asked.controls(), guidance=protocol.guidance)
    people = human_self_bleu(pairs, min(protocol.each, ALIKE), protocol.seed)
    rows: list[ControlRow] = []
    every: list[Made] = []
    for control, asked in by_control(targets).items():
        if kept is None:
            protocol.warm_up(lm, asked[0])
            start = time.perf_counter()
            made = written(lm, asked, protocol, partial(on_progress, f"{control}: writing"))
            seconds = time.perf_counter() - start
        else:
            made, seconds = [kept[id(target)] for target in asked], None
        every += made
        on_progress(f"{control}: measuring", 0, 1)
        rows.append(model_row(name, control, made, judge, checkers, seconds))
        rows.append(sentence_row(control, asked, judge, checkers, people))
    if texts and kept is None:
        write_texts(texts, every)
    shared = {
        "method": lm.config["method"],
        "tokenizer": f"{lm.tokenizer.kind}, {lm.tokenizer.size} entries, {lm.tokenizer.fingerprint()}",
        **(about or {"corpus": "e2e", "split": "valid"}),
        "target_set": fingerprint(targets),
        "each": protocol.each,
        "seed": protocol.seed,
        "judge": model_name(judge) if judge else None,
        "sampling": sampling,
    }
    said = [f"the texts stand in {texts.name}, made before"] if texts and kept is not None else []
    return ControlReport(rows, shared, [*notes, *said, *remarks(rows, lm, judge, people, checkers)])


def by_control(targets: Sequence[Target]) -> dict[str, list[Target]]:
    found: dict[str, list[Target]] = {}
    for target in targets:
        found.setdefault(target.control, []).append(target)
    return found


def written(
    lm: TextDiffusion, targets: Sequence[Target], protocol: Protocol, on_progress: Callable[[int, int], None]
) -> list[Made]:
    """The texts of all targets, made together."""
    found: list[dict[int, Generation]] = [{} for _ in targets]
    total = len(targets) * protocol.each
    for number, made in lm.run_jobs([protocol.make_job(lm, target, n) for n, target in enumerate(targets)]):
        found[number] |= made
        on_progress(sum(map(len, found)), total)
    return [Made(t, [texts[k] for k in range(protocol.each)]) for t, texts in zip(targets, found, strict=True)]


def write_texts(path: Path, made: Sequence[Made]) -> None:
    lines = [
        {"control": one.target.control, "asked": one.target.to_json()["asked"], "text": text.text, **calls_of(text)}
        for one in made
        for text in one.texts
    ]
    write_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def calls_of(text: Generation) -> dict[str, int]:
    return {"steps": text.steps, "denoiser_calls": text.denoiser_calls}


def read_texts(path: Path, targets: Sequence[Target], each: int) -> dict[int, Made]:
    """By target, texts that were made before, by this or any other system: each line says what it was made for. Targets
    that ask the same get theirs in the order of the file. They are checked anew."""
    texts: dict[tuple[str, str], list[Generation]] = {}
    for number, line in read_lines(path):
        try:
            one = json.loads(line)
            target = Target(one["control"], Request.model_validate(one["asked"]))
            calls = (int(one.get("steps", 0)), int(one.get("denoiser_calls", 0)))
            text = Generation(str(one["text"]), split_words(str(one["text"])), *calls, 0.0, 0)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):  # pydantic's own error is a ValueError
            raise UsageError(f'{path}, line {number} is no text such as {{"control", "asked", "text"}}.') from None
        texts.setdefault((target.control, target.key), []).append(text)
    found = {}
    for target in targets:
        own = texts.get((target.control, target.key), [])
        if len(own) < each:
            raise UsageError(f"{path} holds too few texts for {target.key}: {each} for each target. Lower --each.")
        controls = target.asked.controls()
        found[id(target)] = Made(target, [seen(own.pop(0), controls) for _ in range(each)])
    return found


def seen(text: Generation, controls: Sequence[Control]) -> Generation:
    return replace(text, controls=check_text(controls, text.text))


def fingerprint(targets: Sequence[Target]) -> str:
    lines = "\n".join(json.dumps(target.to_json(), ensure_ascii=False) for target in targets)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


# -- success ----------------------------------------------------------------------------------------------------------


def outcomes(target: Target, text: Generation) -> dict[str, float]:
    """How well one printed text obeys, between 0 and 1."""
    words = split_words(text.text)
    found: dict[str, float] = {}
    for control, check in zip(target.asked.controls(), text.controls, strict=True):
        if isinstance(control, Length):
            found["length_exact"] = float(check["satisfied"])
            found["length_within_2"] = float(abs(len(words) - control.words) <= 2)
        elif isinstance(control, Field):
            found["field_rule"] = float(check["satisfied"])
            found["field_verbatim"] = float(verbatim(words, control.head, control.value))
        elif isinstance(control, Tree):
            found["tree_f1"], found["tree_exact"] = check["score"], float(check["satisfied"])
        elif isinstance(control, Span):
            found["span_found"] = float(check["satisfied"])
        elif isinstance(control, Infill):
            found["infill_kept"] = float(check["satisfied"])
        else:
            found["tags_equal"], found["tags_whole"] = check["score"], float(check["satisfied"])
    if len(text.controls) > 1:
        found["all_at_once"] = float(all(check["satisfied"] for check in text.controls))
    return found


def target_means(made: Made) -> dict[str, float]:
    """Every outcome, meant over the samples of a target."""
    each = [outcomes(made.target, text) for text in made.texts]
    return {figure: float(np.mean([found[figure] for found in each])) for figure in each[0]}


def wilson(share: float, trials: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927)."""
    z2 = Z95**2 / trials
    centre, half = share + z2 / 2, Z95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials))
    return max(0.0, (centre - half) / (1 + z2)), min(1.0, (centre + half) / (1 + z2))


def interval(figure: str, values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of one value a target."""
    mean = float(np.mean(values))
    if not FIGURES[figure].graded or len(set(values)) == 1:
        return wilson(mean, len(values))
    half = Z95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return max(0.0, mean - half), min(1.0, mean + half)


# -- rows -------------------------------------------------------------------------------------------------------------


def model_row(
    name: str,
    control: str,
    made: Sequence[Made],
    judge: TextDiffusion | None,
    checkers: Checkers,
    seconds: float | None,
) -> ControlRow:
    means = [target_means(one) for one in made]
    values = {figure: [found[figure] for found in means] for figure in means[0]}
    texts = [text for one in made for text in one.texts]
    row = empty_row(name, control, len(made), len(texts), checkers.names(control))
    row.figures.update(checkers.agreements(control, [words for one in made for words in one.words if words]))
    values |= checkers.second_opinions(control, [(one.target, one.words) for one in made])
    for figure, found in values.items():
        row.figures[figure], row.intervals[figure] = float(np.mean(found)), interval(figure, found)
        row.texts[figure] = len(found) * len(made[0].texts)  # a second opinion may be of fewer targets
    judged(row, [[text.text for text in one.texts] for one in made], judge)
    some = [one.words[:ALIKE] for one in made]
    row.figures["self_bleu"] = float(np.mean([self_bleu(words) for words in some])) if len(some[0]) > 1 else None
    row.figures["distinct_4"] = distinct_n([words[0] for words in some], 4)
    row.figures["denoiser_calls"] = sum(text.denoiser_calls for text in texts) / len(texts)
    row.figures["seconds"] = seconds
    row.texts["self_bleu"], row.texts["distinct_4"] = sum(map(len, some)), len(made)
    return row


def sentence_row(
    control: str,
    targets: Sequence[Target],
    judge: TextDiffusion | None,
    checkers: Checkers,
    people: tuple[float, int] | None,
) -> ControlRow:
    """Real text beside the model's: the sentences that the targets were drawn from, which obey them."""
    sentences = [target.sentence for target in targets if target.sentence]
    row = empty_row(SENTENCES, control, len(targets), len(sentences), checkers.names(control))
    if people:
        row.figures["self_bleu"], row.texts["self_bleu"] = people
    if sentences:
        words = [split_words(sentence) for sentence in sentences]
        row.figures.update(checkers.agreements(control, words))
        judged(row, [[sentence] for sentence in sentences], judge)
        row.figures["distinct_4"] = distinct_n(words, 4)
    return row


def empty_row(name: str, control: str, targets: int, texts: int, checkers: list[str]) -> ControlRow:
    return ControlRow(name, control, targets, dict.fromkeys(FIGURES, texts), {}, checkers=checkers)


def judged(row: ControlRow, groups: Sequence[Sequence[str]], judge: TextDiffusion | None) -> None:
    """Nats/token of all texts, as the judge reads their print; the error is over groups, which are targets."""
    if judge is None:
        return
    rows = [judge.tokenizer.encode_batch(list(texts)) for texts in groups]
    kept = [[ids for ids in ids_of if 0 < len(ids) <= judge.model.max_words] for ids_of in rows]
    kept = [ids_of for ids_of in kept if ids_of]
    row.texts["judge_nats_per_token"] = sum(map(len, kept))
    if not kept:
        return
    nats = iter(score(judge, [ids for ids_of in kept for ids in ids_of], 0, 1, lambda done, total: None).tolist())
    sums = np.array([sum(next(nats) for _ in ids_of) for ids_of in kept])
    tokens = np.array([sum(len(ids) + 1.0 for ids in ids_of) for ids_of in kept])
    row.figures["judge_nats_per_token"], error = ratio(sums, tokens)
    if error is not None:
        row.errors["judge_nats_per_token"] = error


def human_self_bleu(pairs: Sequence[E2EPair], count: int, seed: int) -> tuple[float, int] | None:
    """How alike `count` sentences are that people wrote for one meaning, as a mean over meanings that have as many; and
    the number of these sentences."""
    meanings: dict[str, list[str]] = {}
    for pair in pairs:
        meanings.setdefault(json.dumps(pair.fields, sort_keys=True), []).append(pair.text)
    draw = random.Random(seed)
    groups = [draw.sample(texts, count) for texts in meanings.values() if len(texts) >= count > 1]
    if not groups:
        return None
    return float(np.mean([self_bleu([split_words(text) for text in texts]) for texts in groups])), count * len(groups)


def remarks(
    rows: Sequence[ControlRow],
    lm: TextDiffusion,
    judge: TextDiffusion | None,
    people: tuple[float, int] | None,
    checkers: Checkers,
) -> list[str]:
    """What a reader of the table must know."""
    said = [f"seconds: on {device_name(lm.device)}"]
    if judge is None:
        said.append("no judge: no judge figures")
    for row in rows:
        short = row.name != SENTENCES and row.texts["denoiser_calls"] - row.texts["judge_nats_per_token"]
        if judge is not None and short:
            said.append(f"{row.control}: {short} texts are empty or too long for the judge, and not judged")
    if people is None:
        said.append("no sentences of one meaning to compare self-BLEU with")
    if checkers.second_tagger is None and any(POS in row.control.split("+") for row in rows):
        said.append("spaCy is not installed: tags are told by the bundled tagger alone")
    if not all(row.texts["judge_nats_per_token"] for row in rows if row.name == SENTENCES):
        said.append("some targets come without a sentence")
    return said
