"""`TextDiffusion`: load a model, ask it for text."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from difflm.data.tokenizers import Tokenizer
from difflm.errors import UsageError
from difflm.generation import Tile, finished, frames, tiles
from difflm.model import LanguageModel, Sampling
from difflm.noise import Noise
from difflm.run import load_run
from difflm.samplers import STEPS, Frame
from difflm.textmetrics import most_central

MOST_TEXTS, MOST_STEPS = 1_000_000, 10_000


@dataclass(frozen=True)
class Generation:
    """One text and how it came about; it prints as its text."""

    text: str
    tokens: list[str]
    steps: int
    denoiser_calls: int
    seconds: float  # wall clock of the batch that made it
    seed: int
    controls: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Draft:
    """What a text looks like at one moment of its making."""

    sample: int
    step: int
    t: float
    tokens: list[str]
    confidence: list[float]
    changed: list[bool]


class TextDiffusion:
    """A model that writes text by denoising all positions at once (or, for the twin, word by word)."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> "TextDiffusion":
        """A bundled model such as "e2e", or the directory of a run."""
        model, tokenizer, config = load_run(name_or_path, check_device(device))
        return cls(model if dtype is None else model.to(dtype), tokenizer, config)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def sampling(self, **changes: Any) -> Sampling:
        """The model's own settings with some changed; `None` leaves one as it is."""
        sampling = replace(self.model.sampling, **{k: v for k, v in changes.items() if v is not None})
        check_sampling(sampling, self.config["method"])
        return sampling

    def generate(self, n: int = 1, seed: int = 0, mbr: int = 1, **settings: Any) -> list[Generation]:
        """`n` texts in the order of their numbers; text k of a seed is the same whatever n is."""
        done: dict[int, Generation] = {}
        for batch in self.batches(n, seed, mbr, **settings):
            done |= batch
        return [done[k] for k in range(n)]

    def batches(self, n: int, seed: int = 0, mbr: int = 1, **settings: Any) -> Iterator[dict[int, Generation]]:
        """Finished texts by number, a tile at a time."""
        check_request(n, seed, mbr)
        sampling = self.sampling(**settings)
        if mbr > 1:
            yield from self._chosen(n, seed, mbr, sampling)
            return
        for tile in tiles(self.model, 0, n, seed, self.device):
            yield self._finish(tile, seed, sampling)

    def _finish(self, tile: Tile, seed: int, sampling: Sampling) -> dict[int, Generation]:
        start = time.perf_counter()
        (frame,) = deque(frames(self.model, tile, seed, sampling), maxlen=1)
        rows = finished(self.model, tile, frame)
        seconds = time.perf_counter() - start
        calls = self.model.calls(sampling)
        return {
            sample: Generation(
                self.tokenizer.decode(ids), self.tokenizer.tokens(ids), sampling.steps, calls, seconds, seed
            )
            for sample, ids in rows.items()
        }

    def _chosen(self, n: int, seed: int, mbr: int, sampling: Sampling) -> Iterator[dict[int, Generation]]:
        """Minimum Bayes risk: of `mbr` candidates, the one most like the others (Kumar & Byrne, 2004)."""
        for k in range(n):
            candidates: dict[int, Generation] = {}
            for tile in tiles(self.model, k * mbr, mbr, seed, self.device):
                candidates |= self._finish(tile, seed, sampling)
            ordered = [candidates[i] for i in sorted(candidates)]
            best = ordered[most_central([g.tokens for g in ordered])]
            yield {k: replace(best, denoiser_calls=sum(g.denoiser_calls for g in ordered))}

    def stream(self, n: int = 1, seed: int = 0, **settings: Any) -> Iterator[list[Draft]]:
        """Every text at every step: one list of drafts a step, tile after tile."""
        check_request(n, seed, 1)
        sampling = self.sampling(**settings)
        for tile in tiles(self.model, 0, n, seed, self.device):
            for frame in frames(self.model, tile, seed, sampling):
                yield self._drafts(tile, frame)

    def _drafts(self, tile: Tile, frame: Frame) -> list[Draft]:
        changed = torch.ones_like(frame.mask) if frame.changed is None else frame.changed
        drafts = []
        for row in range(tile.rows):
            length = int(tile.lengths[row])
            ids = frame.tokens[row, :length].tolist()
            drafts.append(
                Draft(
                    int(tile.samples[row]),
                    frame.step,
                    float(frame.t),
                    [self.tokenizer.tokens([i])[0] if self.tokenizer.tokens([i]) else "" for i in ids],
                    frame.confidence[row, :length].tolist(),
                    changed[row, :length].tolist(),
                )
            )
        return drafts

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Word ids of texts; one that the model cannot hold is refused by its number."""
        rows = self.tokenizer.encode_batch(list(texts))
        longest = self.model.longest - 2 if self.config["method"] == "diffusion-lm" else self.model.longest
        for number, row in enumerate(rows, start=1):
            if not row:
                raise UsageError(f"text {number} is empty.")
            if len(row) > longest:
                raise UsageError(
                    f"text {number} has {len(row)} tokens; this model holds {longest}. Shorten or split it."
                )
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
            ids = torch.full((len(chosen), int(lengths.max())), 3)
            for k, i in enumerate(chosen):
                ids[k, : len(rows[i])] = torch.tensor(rows[i])
            noise = Noise(seed, first + torch.tensor(chosen, device=self.device))
            nats[chosen] = self.model.nats(ids.to(self.device), lengths.to(self.device), noise, draws).float().cpu()
        return nats


def check_device(device: str) -> torch.device:
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen)
    except (RuntimeError, AssertionError):
        raise UsageError(f"device {device!r} is not available here. Try --device cpu.") from None
    return chosen


def check_request(n: int, seed: int, mbr: int) -> None:
    if not 1 <= n <= MOST_TEXTS:
        raise UsageError(f"-n must lie between 1 and {MOST_TEXTS:,}, not {n}.")
    if not 0 <= seed < 2**31:
        raise UsageError(f"--seed must lie between 0 and {2**31 - 1}, not {seed}.")
    if not 1 <= mbr <= 1000:
        raise UsageError(f"--mbr must lie between 1 and 1,000 candidates, not {mbr}.")


def check_sampling(sampling: Sampling, method: str) -> None:
    if not 1 <= sampling.steps <= MOST_STEPS:
        raise UsageError(f"--steps must lie between 1 and {MOST_STEPS:,}, not {sampling.steps}.")
    known = ["autoregressive"] if method == "autoregressive" else list(STEPS)
    if sampling.sampler not in known:
        raise UsageError(f"unknown sampler {sampling.sampler!r} for {method}. Known: {', '.join(known)}.")
    if not 0 <= sampling.temperature <= 10 or (sampling.temperature == 0 and method != "autoregressive"):
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
