"""`evaluate --task language` measures how well a model writes, next to real text and the twin's samples.

`figures.yaml` defines the figures.
"""

import hashlib
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import compress, islice

import numpy as np
import torch
from numpy.typing import NDArray

from difflm.data import text_metrics as metrics
from difflm.data.batches import Batch
from difflm.data.tokenizers import UNK, Tokenizer
from difflm.data.words import split_words
from difflm.diffusion.noise import Noise
from difflm.errors import DifflmError, UsageError
from difflm.evaluation.corpora import MOST_TEXTS, Corpus, fits
from difflm.evaluation.options import DEFAULTS, SAMPLES, Options, say
from difflm.evaluation.reports import LANGUAGE, Report, Row
from difflm.generation.jobs import Generation, GenerationJob
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.ld4lg.model import LatentDiffusion
from difflm.models.base import Sampling
from difflm.models.batching import pad_token_rows
from difflm.models.sampling import FAMILIES, understood_by
from difflm.runtime.files import Json

Nats = NDArray[np.float64]

CHUNK = 256  # texts scored between two calls of `say`
JUDGED = "judge_nats_per_token"
RECONSTRUCTED = "reconstructed"  # only for models with latents or pixels


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
    seed, draws, samples = options.seed, options.draws, options.samples or SAMPLES
    if not corpus.texts:
        raise DifflmError(f"{corpus.name} has no held-out text to measure against.")
    rival = twin or judge
    rivals = {"twin samples" if twin else "judge's own samples": rival} if rival else {}
    writers = {**rivals, **models}
    reference = random.Random(seed).sample(corpus.texts, min(len(corpus.texts), MOST_TEXTS))
    reader = Judge.of(judge, reference) if judge else None
    tokenizer = judge.tokenizer if judge else next(iter(writers.values())).tokenizer
    real = reference[:samples]
    sets = {f"real text ({corpus.split})": Texts(real, tokenizer.encode_batch(real), tokenizer)}
    for name, lm in writers.items():
        changes = {} if name in rivals else options.settings
        sets[name] = write_samples(lm, changes, samples, seed, f"{name}: writing")
        if isinstance(lm.model, LatentDiffusion):
            sets[f"{name}, random latents"] = write_random(lm, lm.model, samples, seed)
    say("looking for copies")
    written = (text for made in sets.values() for text in made.texts)
    measure = Measure(
        reader,
        None if corpus.training is None else metrics.copied_among(written, corpus.training()),
        [len(split_words(text)) for text in reference],
        min(len(made.texts) for made in sets.values()),
        seed,
    )
    rows = [measure.row(name, made) for name, made in sets.items()]
    scored, note = choose_scored(reference, list(writers.values()), options.score_texts)
    for row, lm in ((row, writers[row.name]) for row in rows if row.name in writers):
        add_likelihood(row, lm, scored, note, seed, draws)
        if lm.model.capabilities.whole_text and scored:
            row.figures[RECONSTRUCTED] = reconstructed_share(lm, lm.tokenizer.encode_batch(scored))
            row.texts[RECONSTRUCTED] = len(scored)
    repeated = round((rows[0].figures["copied"] or 0) * len(real))
    if repeated and corpus.split != "train":
        rows[0].notes["copied"] = f"{repeated:,} of {len(real):,} held-out texts also occur in training"
    return make_report(rows, corpus, reader, samples, seed, draws)


def make_report(rows: list[Row], corpus: Corpus, judge: "Judge | None", samples: int, seed: int, draws: int) -> Report:
    about = {"corpus": corpus.name, "split": corpus.split, "samples": samples, "seed": seed, "draws": draws}
    about |= {"judge": judge.name if judge else None, "judge_p99": judge.p99 if judge else None}
    title = f"{corpus.name} ({corpus.split}), {samples:,} samples, seed {seed}"
    lines = [f"judge: {judge.name}"] if judge else []
    if any(row.notes.get("likelihood") == "bound" for row in rows):
        lines.append(f"≤: a variational bound, {draws} draws per text")
    if len({row.about["tokenizer"] for row in rows}) > 1:
        lines.append("nats/token: not comparable between models with different tokenizers")
    lines += sorted({note for row in rows for key, note in row.notes.items() if key in LANGUAGE})
    return Report("language", title, rows, about, lines)


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
    method, job = lm.config["method"], lm.make_job(n, seed, **settings_for(lm, changes))
    # The first call is slower than the next ones: two steps of one batch are not counted.
    deque(islice(lm.stream(1, seed, **settings_for(lm, changes)), 2), maxlen=0)
    rows: dict[int, list[int]] = {}
    calls = 0
    start = time.perf_counter()
    for made in lm.run_unchecked([job]):
        rows |= {row.sample: row.ids for row in made}
        calls += sum(row.calls for row in made)
        say(doing, len(rows), n)
    seconds = time.perf_counter() - start
    ids = [rows[k] for k in range(n)]
    return Texts(
        [lm.tokenizer.decode(row) for row in ids],
        ids,
        lm.tokenizer,
        method,
        {"denoiser_calls": calls / n, "seconds": seconds},
        {"seconds": f"seconds: on {device_name(lm.device)}", "sampling": describe_sampling(job.sampling)},
    )


def write_random(lm: TextDiffusion, model: LatentDiffusion, n: int, seed: int) -> Texts:
    """What the decoder of a model writes from random latents: a fluent decoder makes texts without any diffusion."""
    samples = torch.arange(n, device=lm.device).split(CHUNK)
    ids = [model.words(row) for some in samples for row in model.write_random(Noise(seed, some)).tolist()]
    return Texts([lm.tokenizer.decode(row) for row in ids], ids, lm.tokenizer, lm.config["method"])


def settings_for(lm: TextDiffusion, changes: Json) -> Json:
    """One set of changes serves diffusion models and left-to-right ones, which ignore settings of denoising."""
    families = lm.model.capabilities.settings
    known = understood_by(families) if "left-to-right" in families else FAMILIES
    return {key: value for key, value in changes.items() if key in known}


def describe_sampling(sampling: Sampling) -> str:
    """Name the sampler, the steps and every setting that is not the default."""
    always = ("sampler", "steps")
    named = [f for f in fields(Sampling) if f.name in always or getattr(sampling, f.name) != f.default]
    return " ".join(f"{f.name}={getattr(sampling, f.name)}" for f in named)


def describe_tokenizer(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind}, {tokenizer.size} entries, {tokenizer.fingerprint()}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def score(
    lm: TextDiffusion, rows: list[list[int]], seed: int, draws: int, doing: str = "", share_noise: int = 1
) -> Nats:
    """Return the nats of each text, as `TextDiffusion.score` does; `share_noise` consecutive texts share noise."""
    nats = []
    for start in range(0, len(rows), CHUNK):
        say(doing, start, len(rows))
        size = 64 if lm.device.type == "cpu" else CHUNK
        here = rows[start : start + CHUNK]
        piece = lm.score_ids(here, seed, draws, size, [k // share_noise for k in range(start, start + len(here))])
        nats.append(piece.double().numpy())
    return np.concatenate(nats)


def tokens_of(rows: Sequence[Sequence[int]]) -> Nats:
    """Count the tokens of each text, END included."""
    return np.array([len(row) + 1.0 for row in rows])


def ratio(nats: Nats, tokens: Nats) -> tuple[float, float | None]:
    """Return Σ nats / Σ tokens and its standard error over texts, by linearisation (Cochran, 1977, §2.11)."""
    value = nats.sum() / tokens.sum()
    if len(nats) < 2:
        return float(value), None
    return float(value), float(np.sqrt(len(nats)) * (nats - value * tokens).std(ddof=1) / tokens.sum())


def add_nats(row: Row, figure: str, nats: Nats, ids: Sequence[Sequence[int]], groups: Sequence[int] = ()) -> Nats:
    """Add nats/token to a row, with the error over texts, or over groups of this size; return nats/token of each
    text."""
    tokens = tokens_of(ids)
    starts = np.cumsum([0, *groups])[:-1] if groups else np.arange(len(ids))
    row.figures[figure], error = ratio(np.add.reduceat(nats, starts), np.add.reduceat(tokens, starts))
    row.texts[figure] = len(ids)
    if error is not None:
        row.errors[figure] = error
    return nats / tokens


def judge_texts(judge: TextDiffusion, row: Row, groups: Sequence[Sequence[str]]) -> None:
    """Add the judge's nats/token of the texts that it can read, with the error over groups of texts."""
    fitting = [list(compress(group, fits(judge, group))) for group in groups]
    ids = judge.tokenizer.encode_batch([text for group in fitting for text in group])
    row.texts[JUDGED] = len(ids)
    if ids:
        nats = score(judge, ids, 0, 1)
        add_nats(row, JUDGED, nats, ids, [len(group) for group in fitting if group])


def run_all(lm: TextDiffusion, jobs: Sequence[GenerationJob], doing: str = "") -> list[list[Generation]]:
    """Generate the texts of all jobs together."""
    found: list[dict[int, Generation]] = [{} for _ in jobs]
    for number, made in lm.run_jobs(jobs):
        found[number] |= made
        say(doing, sum(map(len, found)), sum(job.n for job in jobs))
    return [[texts[k] for k in sorted(texts)] for texts in found]


def model_name(lm: TextDiffusion) -> str:
    """Name a model by method, size and a fingerprint of its weights."""
    digest = hashlib.sha256()
    state = lm.model.state_dict()
    for name in sorted(state):
        digest.update(name.encode() + state[name].float().cpu().numpy().tobytes())
    size = sum(p.numel() for p in lm.model.parameters())
    return f"{lm.config['method']} {size / 1e6:.2f}M {digest.hexdigest()[:16]}"


@dataclass(frozen=True)
class Judge:
    """An autoregressive model that scores texts, and the 99th percentile of its nats/token on real text."""

    lm: TextDiffusion
    name: str
    p99: float

    @classmethod
    def of(cls, lm: TextDiffusion, reference: list[str]) -> "Judge":
        rows = lm.tokenizer.encode_batch([*compress(reference, fits(lm, reference))])
        if not rows:
            raise UsageError("all texts are too long for the judge. Use another judge.")
        nats = score(lm, rows, 0, 1, "judge: reading real text")
        return cls(lm, model_name(lm), float(np.quantile(nats / tokens_of(rows), 0.99)))

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
            nats = score(self.lm, written, 0, 1, f"{row.name}: judging")
            high += int((add_nats(row, JUDGED, nats, written) > self.p99).sum())
        row.figures["above_p99"] = high / max(1, empty + len(written))


def choose_scored(reference: Sequence[str], lms: Sequence[TextDiffusion], count: int) -> tuple[list[str], str]:
    """Choose the first `count` held-out texts that fit all models; a note counts those left out."""
    chosen = np.flatnonzero(np.all([fits(lm, reference) for lm in lms], axis=0))[:count].tolist()
    read = chosen[-1] + 1 if len(chosen) == count else len(reference)
    skipped = read - len(chosen)
    note = f"{skipped} of {read} held-out texts are too long for a model and were not scored" if skipped else ""
    return [reference[i] for i in chosen], note


def add_likelihood(row: Row, lm: TextDiffusion, texts: list[str], note: str, seed: int, draws: int) -> None:
    if lm.model.capabilities.likelihood is None:
        row.notes["nats_per_token"] = f"{row.name}: {row.about['method']} has no likelihood and no bound"
        return
    row.notes["likelihood"] = lm.model.capabilities.likelihood
    if note:
        row.notes["nats_per_token"] = note
    if texts:
        ids = lm.tokenizer.encode_batch(texts)
        nats = score(lm, ids, seed, draws, f"{row.name}: likelihood")
        add_nats(row, "nats_per_token", nats, ids)


def reconstructed_share(lm: TextDiffusion, rows: list[list[int]]) -> float:
    """The share of known tokens that are restored at their positions through the latents or pixels of a text. Unknown
    ones, which no model writes, do not count."""
    same = total = 0
    for start in range(0, len(rows), CHUNK):
        chosen = rows[start : start + CHUNK]
        ids, lengths = pad_token_rows(chosen)
        back = lm.model.reconstruct(Batch(ids.to(lm.device), lengths.to(lm.device))).tolist()
        for row, found in zip(chosen, map(lm.model.words, back), strict=True):
            same += sum(a == b != UNK for a, b in zip(row, found, strict=False))
            total += max(len(row), len(found)) - row.count(UNK)
    return same / total


@dataclass(frozen=True)
class Measure:
    """The comparisons for the texts of a row."""

    judge: Judge | None
    copied: set[str] | None  # None: the training texts are unknown
    lengths: list[int]  # of all held-out texts
    smallest: int  # texts of the smallest row
    seed: int

    def row(self, name: str, made: Texts) -> Row:
        words = [split_words(text) for text in made.texts]
        first, count = words[: self.smallest], len(words)
        lengths = [len(w) for w in words]
        figures: dict[str, float | None] = dict.fromkeys(name for name in LANGUAGE if name != RECONSTRUCTED)
        figures |= {f"distinct_{n}": metrics.distinct_n(first, n) for n in range(1, 5)}
        figures |= {
            "self_bleu": metrics.self_bleu(first, seed=self.seed) if self.smallest > 1 else None,
            "copied": None if self.copied is None else metrics.copied_share(made.texts, self.copied),
            "unknown": metrics.unknown_share(made.ids, UNK) if any(made.ids) else None,
            "unique": metrics.unique_share(made.texts),
            "length_mean": sum(lengths) / count,
            "length_distance": metrics.length_distance(lengths, self.lengths),
        }
        texts = {figure: self.smallest if figure.startswith(("distinct", "self")) else count for figure in figures}
        about = {"method": made.method, "tokenizer": describe_tokenizer(made.tokenizer)}
        row = Row(name, figures | made.figures, about, texts=texts, notes=dict(made.notes))
        if self.smallest < count:
            row.notes["distinct_4"] = (
                f"distinct-n and self-BLEU: on {self.smallest:,} texts of each, as many as all have"
            )
        if self.judge is None:
            row.notes[JUDGED] = "no judge: no judge figures"
        else:
            self.judge.add_figures(row, made)
        return row
