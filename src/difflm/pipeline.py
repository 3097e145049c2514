"""`TextDiffusion`: load a model, ask it for text."""

import difflib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from difflm.data.tokenizers import PAD, Bpe, Tokenizer
from difflm.data.words import split_words
from difflm.errors import UsageError
from difflm.generation import Tile, finished, frames, tiles
from difflm.model import LanguageModel, Sampling
from difflm.noise import Noise
from difflm.run import load_run
from difflm.samplers import Frame
from difflm.textmetrics import most_central

MOST_TEXTS, MOST_STEPS = 1_000_000, 10_000


@dataclass(frozen=True)
class Generation:
    """One text and how it came about; it prints as its text."""

    text: str
    tokens: list[str]  # its words
    steps: int
    denoiser_calls: int
    seconds: float  # wall clock of the batch that made it, or of all its candidates' batches
    seed: int
    controls: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Draft:
    """What a text looks like at one moment of its making."""

    sample: int
    step: int
    t: float  # the mean, where every position has its own time
    tokens: list[str]  # one a position; with byte pairs they are pieces of words
    confidence: list[float]
    changed: list[bool]


class TextDiffusion:
    """A model that writes text by denoising all positions at once (or, for the twin, word by word)."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self._pieces: dict[int, str] = {}

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> "TextDiffusion":
        """A bundled model such as "e2e", or the directory of a run, on "cpu", "cuda", or the better of both ("auto").

        `dtype` is the network's arithmetic; weights and everything around the network stay in float32."""
        chosen = check_device(device)
        check_dtype(dtype, chosen)
        model, tokenizer, config = load_run(name_or_path, chosen)
        model.compute_in(None if dtype is torch.float32 else dtype)
        return cls(model, tokenizer, config)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def sampling(self, **changes: Any) -> Sampling:
        """The model's own settings with some changed; `None` leaves one as it is."""
        check_names(changes)
        sampling = replace(self.model.sampling, **{k: v for k, v in changes.items() if v is not None})
        check_sampling(sampling, self.model)
        return sampling

    def generate(
        self, n: int = 1, seed: int = 0, mbr: int = 1, length: int | None = None, **settings: Any
    ) -> list[Generation]:
        """`n` texts in the order of their numbers; text k of a seed is the same whatever n is.

        `length` imposes the number of tokens of every text. `settings` are those of `Sampling`."""
        done: dict[int, Generation] = {}
        for batch in self.batches(n, seed, mbr, length, **settings):
            done |= batch
        return [done[k] for k in range(n)]

    def batches(
        self, n: int, seed: int = 0, mbr: int = 1, length: int | None = None, **settings: Any
    ) -> Iterator[dict[int, Generation]]:
        """Finished texts by number, a tile at a time."""
        check_request(n, seed, mbr)
        check_length(length, self.model)
        sampling = self.sampling(**settings)
        if mbr > 1:
            yield from self._chosen(n, seed, mbr, length, sampling)
            return
        for tile in tiles(self.model, 0, n, seed, self.device, length):
            yield self._finish(tile, seed, sampling)

    def _finish(self, tile: Tile, seed: int, sampling: Sampling) -> dict[int, Generation]:
        start = time.perf_counter()
        (frame,) = deque(frames(self.model, tile, seed, sampling), maxlen=1)
        rows = finished(self.model, tile, frame)
        seconds = time.perf_counter() - start
        return {sample: self._generation(ids, sampling, seconds, seed) for sample, ids in rows.items()}

    def _generation(self, ids: list[int], sampling: Sampling, seconds: float, seed: int) -> Generation:
        text = self.tokenizer.decode(ids)
        words = split_words(text) if isinstance(self.tokenizer, Bpe) else self.tokenizer.tokens(ids)
        return Generation(text, words, sampling.steps, self.model.calls(sampling, len(ids)), seconds, seed)

    def _chosen(
        self, n: int, seed: int, mbr: int, length: int | None, sampling: Sampling
    ) -> Iterator[dict[int, Generation]]:
        """Minimum Bayes risk: of `mbr` candidates, the one most like the others (Kumar & Byrne, 2004)."""
        for k in range(n):
            made = [
                self._finish(tile, seed, sampling)
                for tile in tiles(self.model, k * mbr, mbr, seed, self.device, length)
            ]
            candidates = {number: text for batch in made for number, text in batch.items()}
            ordered = [candidates[i] for i in sorted(candidates)]
            best = ordered[most_central([g.tokens for g in ordered])]
            calls = sum(g.denoiser_calls for g in ordered)
            seconds = sum(next(iter(batch.values())).seconds for batch in made)  # texts of a batch share its clock
            yield {k: replace(best, denoiser_calls=calls, seconds=seconds)}

    def stream(self, n: int = 1, seed: int = 0, length: int | None = None, **settings: Any) -> Iterator[list[Draft]]:
        """Every text at every step: one list of drafts a step, tile after tile."""
        check_request(n, seed, 1)
        check_length(length, self.model)
        sampling = self.sampling(**settings)
        for tile in tiles(self.model, 0, n, seed, self.device, length):
            for frame in frames(self.model, tile, seed, sampling):
                yield self._drafts(tile, frame)

    def _drafts(self, tile: Tile, frame: Frame) -> list[Draft]:
        changed = torch.ones_like(frame.mask) if frame.changed is None else frame.changed
        t = float(frame.t.mean())
        looked_at = (tile.samples, tile.lengths, frame.tokens, frame.confidence, changed)
        rows = zip(*(tensor[: tile.rows].tolist() for tensor in looked_at), strict=True)
        return [
            Draft(sample, frame.step, t, [self._piece(i) for i in ids[:length]], sure[:length], new[:length])
            for sample, length, ids, sure, new in rows
        ]

    def _piece(self, token: int) -> str:
        """How a token looks by itself; a special is nothing."""
        if token not in self._pieces:
            self._pieces[token] = "".join(self.tokenizer.tokens([token]))
        return self._pieces[token]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Word ids of texts; one that the model cannot hold is refused by its number."""
        rows = self.tokenizer.encode_batch(list(texts))
        room = self.model.room
        for number, row in enumerate(rows, start=1):
            if not row:
                raise UsageError(f"text {number} is empty.")
            if len(row) > room:
                raise UsageError(f"text {number} has {len(row)} tokens; this model holds {room}. Shorten or split it.")
        return rows

    @torch.no_grad()
    def score(self, texts: Sequence[str], seed: int = 0, draws: int = 16, batch_size: int = 64) -> list[float]:
        """−log p of each text, or its bound, in nats."""
        return [float(v) for v in self.score_ids(self.encode(texts), seed, draws, batch_size)]

    def score_ids(
        self, rows: list[list[int]], seed: int = 0, draws: int = 16, batch_size: int = 64, first: int = 0
    ) -> torch.Tensor:
        """The same for ids, in batches of like length; the answer does not depend on the batch size.

        `first` is the number of the first text, where a long list is scored in pieces."""
        nats = torch.zeros(len(rows))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            lengths = torch.tensor([len(rows[i]) for i in chosen])
            ids = torch.full((len(chosen), int(lengths.max())), PAD)
            for k, i in enumerate(chosen):
                ids[k, : len(rows[i])] = torch.tensor(rows[i])
            noise = Noise(seed, first + torch.tensor(chosen, device=self.device))
            nats[chosen] = self.model.nats(ids.to(self.device), lengths.to(self.device), noise, draws).float().cpu()
        return nats


def check_device(device: str) -> torch.device:
    """A device that is there; "auto" is a GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type not in ("cpu", "cuda"):  # others lack the float64 that lengths and draws need
            raise UsageError(f"difflm runs on cpu or cuda, not on {chosen.type}. Try --device cpu.")
        torch.zeros(1, device=chosen)
    except (RuntimeError, AssertionError):
        raise UsageError(f"device {device!r} is not available here. Try --device cpu.") from None
    return chosen


def check_dtype(dtype: torch.dtype | None, device: torch.device) -> None:
    known = [torch.float32, torch.bfloat16] + [torch.float16] * (device.type == "cuda")
    if dtype is not None and dtype not in known:
        raise UsageError(f"dtype must be {', '.join(map(str, known))} on {device.type}, not {dtype}.")


def check_request(n: int, seed: int, mbr: int) -> None:
    if not 1 <= n <= MOST_TEXTS:
        raise UsageError(f"-n must lie between 1 and {MOST_TEXTS:,}, not {n}.")
    if not 0 <= seed < 2**31:
        raise UsageError(f"--seed must lie between 0 and {2**31 - 1}, not {seed}.")
    if not 1 <= mbr <= 1000:
        raise UsageError(f"--mbr must lie between 1 and 1,000 candidates, not {mbr}.")


def check_length(length: int | None, model: LanguageModel) -> None:
    if length is None:
        return
    if not model.takes_length:
        raise UsageError("this method cannot be told a length yet: it writes where a text ends. Leave length out.")
    if not 1 <= length <= model.room:
        raise UsageError(f"length must lie between 1 and {model.room} tokens for this model, not {length}.")


def check_names(settings: dict[str, Any]) -> None:
    known = [f.name for f in fields(Sampling)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise UsageError(f"unknown setting {name!r}. {hint}")


def check_sampling(sampling: Sampling, model: LanguageModel) -> None:
    if not 1 <= sampling.steps <= MOST_STEPS:
        raise UsageError(f"--steps must lie between 1 and {MOST_STEPS:,}, not {sampling.steps}.")
    if sampling.sampler not in model.samplers:
        known = ", ".join(model.samplers)
        raise UsageError(f"unknown sampler {sampling.sampler!r} for this model. Known: {known}.")
    if not 0 <= sampling.temperature <= 10 or (sampling.temperature == 0 and not model.greedy):
        raise UsageError(f"--temperature must lie above 0 and up to 10, not {sampling.temperature}.")
    if not 0 <= sampling.noise_temperature <= 10:
        raise UsageError(f"--noise-temperature must lie between 0 and 10, not {sampling.noise_temperature}.")
    if not 0 < sampling.noise_top_p <= 1:
        raise UsageError(f"--noise-top-p must lie above 0 and up to 1, not {sampling.noise_top_p}.")
    if not 0 <= sampling.clamp_below <= 1:
        raise UsageError(f"--clamp-below must lie between 0 and 1, not {sampling.clamp_below}.")
    if sampling.top_k < 0:
        raise UsageError(f"--top-k must be at least 1 (0: all words), not {sampling.top_k}.")
    if not 0 < sampling.top_p <= 1:
        raise UsageError(f"--top-p must lie above 0 and up to 1, not {sampling.top_p}.")
    if not 0 <= sampling.beams <= 1000:
        raise UsageError(f"--beams must lie between 1 and 1,000 (0: draw instead), not {sampling.beams}.")
