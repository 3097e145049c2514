"""What the tasks share: runs that are loaded and may be compared, the texts that they write, and a judge's nats."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import compress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from difflm.data.corpora import NAMES, resolve_data
from difflm.data.tokenizers import Tokenizer
from difflm.errors import UsageError
from difflm.evaluation.corpora import fits
from difflm.evaluation.options import Options, say
from difflm.evaluation.reports import Row
from difflm.generation.jobs import FinishedRow, Generation, GenerationJob
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.rivals import DECODERS
from difflm.models import batching
from difflm.models.open_models import find_open_model
from difflm.models.sampling import FAMILIES, Sampling, understood_by
from difflm.runtime.distributed import current
from difflm.runtime.files import Json
from difflm.training.run import find_run, read_config

Nats = NDArray[np.float64]
CHUNK = 256  # texts scored between two calls of `say`
JUDGED = "judge_nats_per_token"


# -- loading ----------------------------------------------------------------------------------------------------------


class DividedTextDiffusion(TextDiffusion):
    """Divides jobs, or the texts of few jobs, among the processes. A text does not depend on the process that writes
    it, so measurements are the same as with one process."""

    def finished_rows(
        self, jobs: Sequence[GenerationJob], is_own: Callable[[GenerationJob, batching.Row], bool] | None = None
    ) -> Iterator[tuple[int, list[FinishedRow], float]]:
        """Generate this process's rows of all jobs, and yield those of all processes, job by job."""
        begun, (rank, count) = time.perf_counter(), (current().rank, current().count)
        turns = {id(job): number for number, job in enumerate(jobs)} if len(jobs) >= count else {}

        def is_here(job: GenerationJob, row: batching.Row) -> bool:
            return turns.get(id(job), row.sample // job.each) % count == rank  # candidates of a text stay together

        made = [(owner, row) for owner, rows, _ in super().finished_rows(jobs, is_here) for row in rows]
        # A decoder knows only afterwards where the given words are.
        told = [[owner, asdict(row), [*jobs[owner].given.get(row.sample, {}).items()]] for owner, row in made]
        found: list[list[FinishedRow]] = [[] for _ in jobs]
        for owner, row, given in (one for own in current().gather_json(told) for one in own):
            found[owner].append(FinishedRow(**row))
            jobs[owner].given[row["sample"]] = dict(given)
        seconds = time.perf_counter() - begun
        for owner, rows in enumerate(found):
            yield owner, sorted(rows, key=lambda one: one.sample), seconds


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


def load_judge(
    name: str | None, models: Iterable[TextDiffusion], device: str, note: Callable[[str], None]
) -> TextDiffusion | None:
    """Load the requested judge, or the bundled one if it shares a tokenizer with one of the models."""
    if name is None:
        tokenizer = read_config(find_run("judge"))["tokenizer"]
        if any(lm.tokenizer.fingerprint() == tokenizer for lm in models):
            return load_model("judge", device)
        note("The bundled judge has a different vocabulary, so its figures are left out. Give one with --judge RUN.")
        return None
    lm = load_model(name, device)
    if lm.model.capabilities.likelihood != "exact":
        lacks = f"a judge needs an exact likelihood, which {lm.config['method']} does not have"
        raise UsageError(f"{lacks}. Use an autoregressive run.")
    return lm


def find_decoders(models: dict[str, TextDiffusion], options: Options) -> dict[str, list[str]]:
    """Return the decoders that decode each model; one that decodes none of them is refused."""
    kinds = {method: DECODERS[method].decodes for method in options.methods}
    found = {name: [m for m, kind in kinds.items() if isinstance(lm.model, kind)] for name, lm in models.items()}
    for method in kinds:
        if not any(method in some for some in found.values()):
            there = ", ".join(dict.fromkeys(lm.config["method"] for lm in models.values()))
            raise UsageError(f"{method} decodes {DECODERS[method].family}; there are none among these runs ({there}).")
    return found


def check_same_data(models: Mapping[str, TextDiffusion], root: Path | None, **others: TextDiffusion | None) -> None:
    """Refuse runs that were trained on different data, and those, `others` among them, that held out different texts of
    one file: the seed decides which."""

    def source(lm: TextDiffusion) -> str:
        """The corpus or file, and the column, that a model was trained on."""
        recipe = lm.config["recipe"]
        more = (recipe["column"], recipe.get("chunk"), recipe.get("split"))
        return " ".join([resolve_data(recipe["data"], root), *(str(part) for part in more if part)])

    sources = {name: source(lm) for name, lm in models.items()}
    if len(set(sources.values())) > 1:
        texts = ", ".join(f"{name}: {source}" for name, source in sources.items())
        raise UsageError(f"these runs were trained on different data ({texts}). Compare runs trained on the same data.")
    first, *_ = models
    recipe = models[first].config["recipe"]
    named = {**models, **{f"the {role}": lm for role, lm in others.items() if lm}}
    for name, lm in named.items() if recipe["data"] not in NAMES else ():
        if source(lm) == sources[first] and lm.config["recipe"]["seed"] != recipe["seed"]:
            seeds = f"{first}: seed {recipe['seed']}, {name}: seed {lm.config['recipe']['seed']}"
            raise UsageError(f"these runs held out different texts ({seeds}). Compare runs with the same seed.")


# -- writing ----------------------------------------------------------------------------------------------------------


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


def model_name(lm: TextDiffusion) -> str:
    """Name a model by method, size and a fingerprint of its weights."""
    digest = hashlib.sha256()
    state = lm.model.state_dict()
    for name in sorted(state):
        digest.update(name.encode() + state[name].float().cpu().numpy().tobytes())
    size = sum(p.numel() for p in lm.model.parameters())
    return f"{lm.config['method']} {size / 1e6:.2f}M {digest.hexdigest()[:16]}"


def run_all(lm: TextDiffusion, jobs: Sequence[GenerationJob], doing: str = "") -> list[list[Generation]]:
    """Generate the texts of all jobs together."""
    found: list[dict[int, Generation]] = [{} for _ in jobs]
    for number, made in lm.run_jobs(jobs):
        found[number] |= made
        say(doing, sum(map(len, found)), sum(job.n for job in jobs))
    return [[texts[k] for k in sorted(texts)] for texts in found]


def write_rows(lm: TextDiffusion, job: GenerationJob, doing: str = "") -> tuple[list[FinishedRow], float]:
    """Return all candidates of a job as ids, in their order, and the seconds; nothing is chosen or checked."""
    rows: dict[int, FinishedRow] = {}
    start = time.perf_counter()
    for made in lm.run_unchecked([job]):
        rows |= {row.sample: row for row in made}
        say(doing, len(rows), job.n * job.each)
    seconds = time.perf_counter() - start
    return [rows[k] for k in sorted(rows)], seconds


# -- scoring ----------------------------------------------------------------------------------------------------------


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


def add_nats(
    row: Row,
    figure: str,
    lm: TextDiffusion,
    ids: list[list[int]],
    groups: Sequence[int] = (),
    noise: tuple[int, int] = (0, 1),
    doing: str = "",
) -> Nats:
    """Add a model's nats/token to a row, with the error over texts, or over groups of this size; return nats/token of
    each text. `noise` is the seed and the number of draws of a bound."""
    nats, tokens = score(lm, ids, *noise, doing), tokens_of(ids)
    starts = np.cumsum([0, *groups])[:-1] if groups else np.arange(len(ids))
    row.figures[figure], error = ratio(np.add.reduceat(nats, starts), np.add.reduceat(tokens, starts))
    row.texts[figure] = len(ids)
    if error is not None:
        row.errors[figure] = error
    return nats / tokens


def judge_texts(judge: TextDiffusion, row: Row, groups: Sequence[Sequence[str]]) -> None:
    """Add the judge's nats/token of the texts that it can read, with the error over groups of texts."""
    fitting = [list(compress(group, fits([judge], group))) for group in groups]
    ids = judge.tokenizer.encode_batch([text for group in fitting for text in group])
    row.texts[JUDGED] = len(ids)
    if ids:
        add_nats(row, JUDGED, judge, ids, [len(group) for group in fitting if group])
