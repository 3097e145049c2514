"""`evaluate --task language` measures how well a model writes, next to real text and the twin's samples.

`figures.yaml` defines the figures.
"""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice

import numpy as np
import torch

from difflm.data import text_metrics as metrics
from difflm.data.batches import Batch
from difflm.data.corpora import NAMES, corpus_path
from difflm.data.tokenizers import UNK, Tokenizer
from difflm.data.words import split_words
from difflm.diffusion.noise import Noise
from difflm.errors import DifflmError, UsageError
from difflm.evaluation import shared
from difflm.evaluation.corpora import MOST_TEXTS, Corpus, corpus_for, fits, named_corpus
from difflm.evaluation.options import DEFAULTS, SAMPLES, Options, Watcher, say
from difflm.evaluation.reports import LANGUAGE, Report, Row
from difflm.evaluation.shared import CHUNK, JUDGED, settings_for
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.ld4lg.model import LatentDiffusion
from difflm.models.batching import pad_token_rows
from difflm.runtime.files import Json
from difflm.training.run import peek_config

RECONSTRUCTED = "reconstructed"  # only for models with latents or pixels


def measure_language(runs: Sequence[str], options: Options, watch: Watcher) -> Report:
    """Measure all runs on their common corpus."""
    named = None if options.on is None else named_corpus(options.on, options.data, options.split)
    if named is None:
        for data in (peek_config(run).get("recipe", {}).get("data") for run in runs):
            if data in NAMES:
                corpus_path(data, options.data, options.split)  # rejects a missing one before anything is loaded
    models = shared.load_runs(runs, options.device)
    judge = shared.load_judge(options.judge, models.values(), options.device, watch.note)
    twin = shared.load_model(options.twin, options.device) if options.twin else None
    if named is None:
        ours = {name: lm for name, lm in models.items() if lm.config["recipe"]}
        if not ours:
            raise UsageError("what somebody else's model was trained on is not known: give --on NAME or FILE.")
        shared.check_same_data(ours, options.data, judge=judge, twin=twin)
        named = corpus_for(next(iter(ours.values())), options.data, options.split)
    return evaluate_language(models, named, judge, options, twin)


def evaluate_language(
    models: Mapping[str, TextDiffusion],
    corpus: Corpus,
    judge: TextDiffusion | None = None,
    options: Options = DEFAULTS,
    twin: TextDiffusion | None = None,
) -> Report:
    """Measure `samples` texts of each model, of the twin (of the judge if there is none) and of real text.

    `settings` change the models' sampling, not the twin's. Likelihoods and bounds are those of `score_texts` held-out
    texts with `draws` noise levels each; the cost is proportional to both."""
    options.check("language")
    seed, samples = options.seed, options.samples or SAMPLES
    if not corpus.texts:
        raise DifflmError(f"{corpus.name} has no held-out text to measure against.")
    rival = twin or judge
    writers = {**({"twin samples" if twin else "judge's own samples": rival} if rival else {}), **models}
    reference = random.Random(seed).sample(corpus.texts, min(len(corpus.texts), MOST_TEXTS))
    reader = Judge.of(judge, reference) if judge else None
    tokenizer = judge.tokenizer if judge else next(iter(writers.values())).tokenizer
    real = reference[:samples]
    sets = {f"real text ({corpus.split})": Texts(real, tokenizer.encode_batch(real), tokenizer)}
    for name, lm in writers.items():
        settings = options.settings if name in models else {}
        sets[name] = write_samples(lm, settings, samples, seed, f"{name}: writing")
        if isinstance(lm.model, LatentDiffusion):
            sets[f"{name}, random latents"] = write_random(lm, lm.model, samples, seed)
    say("looking for copies")
    written = (text for made in sets.values() for text in made.texts)
    copied = None if corpus.training is None else metrics.copied_among(written, corpus.training())
    lengths, smallest = [len(split_words(text)) for text in reference], min(len(made.texts) for made in sets.values())
    rows = [measure_texts(name, made, smallest, lengths, copied, seed) for name, made in sets.items()]
    scored, note = choose_scored(reference, list(writers.values()), options.score_texts)
    for row in rows:
        if reader is None:
            row.notes[JUDGED] = "no judge: no judge figures"
        else:
            reader.add_figures(row, sets[row.name])
        if row.name in writers:
            add_likelihood(row, writers[row.name], scored, note, (seed, options.draws))
    repeated = round((rows[0].figures["copied"] or 0) * len(real))
    if repeated and corpus.split != "train":
        rows[0].notes["copied"] = f"{repeated:,} of {len(real):,} held-out texts also occur in training"
    about = {"corpus": corpus.name, "split": corpus.split, "samples": samples, "seed": seed, "draws": options.draws}
    about |= {"judge": reader and reader.name, "judge_p99": reader and reader.p99}
    title = f"{corpus.name} ({corpus.split}), {samples:,} samples, seed {seed}"
    return Report("language", title, rows, about, explain_rows(rows, about))


def explain_rows(rows: Sequence[Row], about: Json) -> list[str]:
    """What a reader of the table must know."""
    lines = [f"judge: {about['judge']}"] if about["judge"] else []
    if any(row.notes.get("likelihood") == "bound" for row in rows):
        lines.append(f"≤: a variational bound, {about['draws']} draws per text")
    if len({row.about["tokenizer"] for row in rows}) > 1:
        lines.append("nats/token: not comparable between models with different tokenizers")
    return lines + sorted({note for row in rows for key, note in row.notes.items() if key in LANGUAGE})


# -- texts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """Printed texts, their token ids, and how they were generated."""

    texts: list[str]
    ids: list[list[int]]
    tokenizer: Tokenizer
    method: str = "people"
    figures: dict[str, float | None] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def write_samples(lm: TextDiffusion, changes: Json, n: int, seed: int, doing: str = "") -> Texts:
    """Generate the texts of `generate` with their ids: an unknown word is in the ids, not in the text."""
    settings = settings_for(lm, changes)
    job = lm.make_job(n, seed, **settings)
    # The first call is slower than the next ones: two steps of one batch are not counted.
    deque(islice(lm.stream(1, seed, **settings), 2), maxlen=0)
    rows, seconds = shared.write_rows(lm, job, doing)
    ids = [row.ids for row in rows]
    notes = {
        "seconds": f"seconds: on {shared.device_name(lm.device)}",
        "sampling": shared.describe_sampling(job.sampling),
    }
    figures: dict[str, float | None] = {"denoiser_calls": sum(row.calls for row in rows) / n, "seconds": seconds}
    return Texts([lm.tokenizer.decode(row) for row in ids], ids, lm.tokenizer, lm.config["method"], figures, notes)


def write_random(lm: TextDiffusion, model: LatentDiffusion, n: int, seed: int) -> Texts:
    """What the decoder of a model writes from random latents: a fluent decoder makes texts without any diffusion."""
    samples = torch.arange(n, device=lm.device).split(CHUNK)
    ids = [model.lengths.words(row) for some in samples for row in model.write_random(Noise(seed, some)).tolist()]
    return Texts([lm.tokenizer.decode(row) for row in ids], ids, lm.tokenizer, lm.config["method"])


# -- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """An autoregressive model that scores texts, and the 99th percentile of its nats/token on real text."""

    lm: TextDiffusion
    name: str
    p99: float

    @classmethod
    def of(cls, lm: TextDiffusion, reference: list[str]) -> "Judge":
        rows = lm.tokenizer.encode_batch([*compress(reference, fits([lm], reference))])
        if not rows:
            raise UsageError("all texts are too long for the judge. Use another judge.")
        nats = shared.score(lm, rows, 0, 1, "judge: reading real text")
        return cls(lm, shared.model_name(lm), float(np.quantile(nats / shared.tokens_of(rows), 0.99)))

    def add_figures(self, row: Row, made: Texts) -> None:
        """A judge of byte pairs tokenizes any text itself; others can only score texts of their own vocabulary."""
        same = self.lm.tokenizer.fingerprint() == made.tokenizer.fingerprint()
        if not same and not self.lm.tokenizer.byte_level:
            row.notes[JUDGED] = f"{row.name}: the judge reads other tokens, so it cannot judge this model"
            return
        rows = made.ids if same else self.lm.tokenizer.encode_batch(made.texts)
        written = [ids for ids in rows if ids and (same or len(ids) <= self.lm.model.max_words)]
        high = empty = sum(not ids for ids in rows)
        if long := len(rows) - empty - len(written):
            row.notes["above_p99"] = f"{row.name}: {long} texts are too long for the judge and were left out"
        if empty:
            row.notes[JUDGED] = f"{row.name}: {empty} empty texts, not judged but counted above the 99th percentile"
        if written:
            each = shared.add_nats(row, JUDGED, self.lm, written, doing=f"{row.name}: judging")
            high += int((each > self.p99).sum())
        row.figures["above_p99"] = high / max(1, empty + len(written))


def measure_texts(
    name: str, made: Texts, smallest: int, lengths: Sequence[int], copied: set[str] | None, seed: int
) -> Row:
    """The figures of a row but those of a judge. Variety is measured on as many texts as the smallest row has;
    `lengths` are those of all held-out texts, and None are `copied` if the training texts are unknown."""
    words, count = [split_words(text) for text in made.texts], len(made.texts)
    first, own = words[:smallest], list(map(len, words))
    figures: dict[str, float | None] = dict.fromkeys(name for name in LANGUAGE if name != RECONSTRUCTED)
    figures |= {f"distinct_{n}": metrics.distinct_n(first, n) for n in range(1, 5)}
    figures |= {
        "self_bleu": metrics.self_bleu(first, seed=seed) if smallest > 1 else None,
        "copied": None if copied is None else metrics.copied_share(made.texts, copied),
        "unknown": metrics.unknown_share(made.ids, UNK) if any(made.ids) else None,
        "unique": metrics.unique_share(made.texts),
        "length_mean": sum(own) / count,
        "length_distance": metrics.length_distance(own, lengths),
        **made.figures,
    }
    texts = {figure: smallest if figure.startswith(("distinct", "self")) else count for figure in figures}
    about = {"method": made.method, "tokenizer": shared.describe_tokenizer(made.tokenizer)}
    row = Row(name, figures, about, texts=texts, notes=dict(made.notes))
    if smallest < count:
        row.notes["distinct_4"] = f"distinct-n and self-BLEU: on {smallest:,} texts of each, as many as all have"
    return row


def choose_scored(reference: Sequence[str], lms: Sequence[TextDiffusion], count: int) -> tuple[list[str], str]:
    """Choose the first `count` held-out texts that fit all models; a note counts those left out."""
    chosen = [number for number, fit in enumerate(fits(lms, reference)) if fit][:count]
    read = chosen[-1] + 1 if len(chosen) == count else len(reference)
    skipped = read - len(chosen)
    note = f"{skipped} of {read} held-out texts are too long for a model and were not scored" if skipped else ""
    return [reference[i] for i in chosen], note


def add_likelihood(row: Row, lm: TextDiffusion, texts: list[str], note: str, noise: tuple[int, int]) -> None:
    """Add the likelihood of held-out texts, or its bound, and the share of them that a whole-text model restores."""
    ids, kind = lm.tokenizer.encode_batch(texts), lm.model.capabilities.likelihood
    if kind is None:
        row.notes["nats_per_token"] = f"{row.name}: {row.about['method']} has no likelihood and no bound"
    else:
        row.notes["likelihood"] = kind
        if note:
            row.notes["nats_per_token"] = note
        if ids:
            shared.add_nats(row, "nats_per_token", lm, ids, noise=noise, doing=f"{row.name}: likelihood")
    if lm.model.capabilities.whole_text and ids:
        row.figures[RECONSTRUCTED] = reconstructed_share(lm, ids)
        row.texts[RECONSTRUCTED] = len(ids)


def reconstructed_share(lm: TextDiffusion, rows: list[list[int]]) -> float:
    """The share of known tokens that are restored at their positions through the latents or pixels of a text. Unknown
    ones, which no model writes, do not count."""
    same = total = 0
    for start in range(0, len(rows), CHUNK):
        chosen = rows[start : start + CHUNK]
        ids, lengths = pad_token_rows(chosen)
        back = lm.model.reconstruct(Batch(ids.to(lm.device), lengths.to(lm.device))).tolist()
        for row, found in zip(chosen, map(lm.model.lengths.words, back), strict=True):
            same += sum(a == b != UNK for a, b in zip(row, found, strict=False))
            total += max(len(row), len(found)) - row.count(UNK)
    return same / total
