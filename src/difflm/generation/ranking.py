"""Rank candidates by how likely a model finds them: the model that wrote them, or another one, such as its twin."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Union

import torch
from torch.nn.functional import cross_entropy

from difflm.data.tokenizers import END
from difflm.errors import UsageError
from difflm.generation.jobs import Chosen, Ids
from difflm.models.autoregressive import Autoregressive

if TYPE_CHECKING:
    from difflm.generation.pipeline import TextDiffusion

Rank = Union[Literal["bound"], "TextDiffusion"]  # the writer's own likelihood or bound, or another model's
VECTOR_DRAWS, TOKEN_DRAWS = 4, 8  # of a bound, per candidate: docs/log.md, "Ranking candidates"
MOST_REPAIRS = 100
CPU_TEXTS, GPU_TEXTS = 64, 1024  # candidates that are scored at once


@dataclass(frozen=True)
class Ranking:
    """Chooses the candidate with the fewest nats per token (words and END) under `scorer`. Candidates of one text share
    the noise of a bound, so that only their words differ. Those too long for the scorer come last.

    Before that, a left-to-right scorer may repair every candidate `repairs` times (`repair_row`); the original and all
    its repairs compete."""

    scorer: "TextDiffusion"
    sources: Sequence[Ids]  # by the number of the text, as the scorer reads them; empty if texts have no source
    seed: int
    repairs: int = 0

    @property
    def draws(self) -> int:
        return VECTOR_DRAWS if "vectors" in self.scorer.model.families else TOKEN_DRAWS

    def __call__(self, numbers: Sequence[int], ids: list[list[Ids]], _: object = None) -> list[Chosen]:
        """On a CPU each text is ranked by itself, so that no choice depends on how a batch is rounded."""
        calls = self.scorer.model.nats_calls(self.draws)
        size = 1 if self.scorer.device.type == "cpu" else max(1, len(ids))
        found = []
        for start in range(0, len(ids), size):
            begun = time.perf_counter()
            rows, costs = self.read_versions(numbers[start : start + size], ids[start : start + size])
            seconds = time.perf_counter() - begun
            for own, some, group in zip(rows, costs, ids[start : start + size], strict=True):
                best = min(range(len(some)), key=some.__getitem__)
                index = best % len(group)
                changed = None if best == index else own[best]
                found.append(Chosen(index, calls * sum(map(math.isfinite, some)), seconds, ids=changed))
        return found

    def read_versions(self, numbers: Sequence[int], ids: list[list[Ids]]) -> tuple[list[list[Ids]], list[list[float]]]:
        """All candidates of each text, behind them their first repairs, and so on; and the nats per token of each. What
        a repair left as it was is not read again, unless it changed another candidate of this text."""
        rows, costs = [[*group] for group in ids], [list[float]() for _ in ids]
        left, current = [*range(len(ids))], ids
        for repairs in reversed(range(self.repairs + 1)):
            own = [numbers[k] for k in left]
            nats, repaired = self.nats_and_repairs(own, current) if repairs else (self.nats_per_token(own, current), [])
            for k, some in zip(left, nats, strict=True):
                costs[k] += some
            changed = [(k, group) for k, group in zip(left, repaired, strict=False) if group != rows[k][-len(group) :]]
            left, current = [k for k, _ in changed], [group for _, group in changed]
            for k, group in changed:
                rows[k] += group
            if not left:
                break
        return rows, costs

    def nats_per_token(self, numbers: Sequence[int], ids: list[list[Ids]]) -> list[list[float]]:
        """The nats per token of each candidate of each text; infinite if it is too long for the scorer."""
        costs = torch.full((sum(map(len, ids)),), math.inf)
        if (reading := self.lay_out(numbers, ids)) is not None:
            held, own, rows, size, sources, each = reading
            nats = self.scorer.score_ids(rows, self.seed, self.draws, size, own, sources, each)
            costs[held] = nats / torch.tensor([len(row) + 1 for row in rows])
        found: list[list[float]] = costs.view(len(ids), -1).tolist()
        return found

    def nats_and_repairs(
        self, numbers: Sequence[int], ids: list[list[Ids]]
    ) -> tuple[list[list[float]], list[list[Ids]]]:
        """The same, and each candidate repaired, from one reading."""
        flat = [row for group in ids for row in group]
        costs, repaired = torch.full((len(flat),), math.inf), [*flat]
        if (reading := self.lay_out(numbers, ids)) is not None:
            held, _, rows, size, sources, each = reading
            nats, places, words = self.scorer.doubt_ids(rows, size, sources, each)
            costs[held] = nats / torch.tensor([len(row) + 1 for row in rows])
            most = self.scorer.model.max_words
            for k, place, word in zip(held, places.tolist(), words.tolist(), strict=True):
                repaired[k] = repair_row(flat[k], place, word, most)
        rest = iter(repaired)
        return costs.view(len(ids), -1).tolist(), [[next(rest) for _ in group] for group in ids]

    def lay_out(
        self, numbers: Sequence[int], ids: list[list[Ids]]
    ) -> tuple[list[int], list[int], list[Ids], int, list[Ids], int] | None:
        """The indices of those candidates that the scorer can read, their texts' numbers, their ids, how many are read
        at once, their sources, and how many candidates in a row have the same one; None: it can read none."""
        flat = [(number, row) for number, group in zip(numbers, ids, strict=True) for row in group]
        held = [k for k, (_, row) in enumerate(flat) if 0 < len(row) <= self.scorer.model.max_words]
        if not held:
            return None
        own, rows = [flat[k][0] for k in held], [flat[k][1] for k in held]
        each = len(rows) // len(ids) if len(held) == len(flat) else 1
        sources = [self.sources[number] for number in own[::each]] if self.sources else []
        return held, own, rows, CPU_TEXTS if self.scorer.device.type == "cpu" else GPU_TEXTS, sources, each


def repair_row(row: Ids, place: int, word: int, most: int) -> Ids:
    """The text as a reader expects it up to `place`, where `word` is likelier than what is there; −1: nowhere. It is
    put there, unless it comes next anyway, in which case the word before it is left out. After END there is nothing."""
    if place < 0 or (place == len(row) and len(row) >= most):
        return row
    if word == END:
        return row[:place] or row
    following = row[place + 1 :]
    return [*row[:place], *following] if following[:1] == [word] else [*row[:place], word, *following]


def check_repairs(repairs: int, rank: Rank | None, controls: Sequence[object] = ()) -> None:
    """Reject repairs that nobody can make, or that could undo what was asked for."""
    if isinstance(repairs, bool) or not isinstance(repairs, int) or not 0 <= repairs <= MOST_REPAIRS:
        raise UsageError(f"--repairs must be between 0 and {MOST_REPAIRS}, not {repairs!r}.")
    if rank is None or isinstance(rank, str) or not isinstance(rank.model, Autoregressive):
        raise UsageError("--repairs needs a left-to-right model that ranks the candidates: give --rank RUN.")
    if controls:
        raise UsageError("--repairs may undo what controls ask for: leave one of them out.")


@dataclass(frozen=True)
class GapFit:
    """Chooses the candidate whose gaps fit best: the fewest nats per token, each given all others (Salazar et al.,
    2020), from the token before its first gap to the one after its last."""

    writer: "TextDiffusion"
    before: int  # tokens before the first gap, and after the last
    behind: int

    def __call__(self, _: Sequence[int], ids: list[list[Ids]], __: object = None) -> list[Chosen]:
        found = []
        for group in ids:
            begun = time.perf_counter()
            best = min(range(len(group)), key=[self.nats_per_token(row) for row in group].__getitem__)
            found.append(Chosen(best, self.count_calls(group), time.perf_counter() - begun))
        return found

    def find_window(self, row: Ids) -> tuple[int, int]:
        return max(0, self.before - 1), min(len(row), len(row) - self.behind + 1)

    def nats_per_token(self, row: Ids) -> float:
        begin, end = self.find_window(row)
        logits = self.writer.token_logits(row, begin=begin, end=end)
        return float(cross_entropy(logits, torch.tensor(row[begin:end], device=logits.device)))

    def count_calls(self, group: Sequence[Ids]) -> int:
        """One call per masked token; for word vectors, one call for all tokens."""
        masks = self.writer.check_reads_tokens().process.mask_id >= 0
        return sum(self.find_window(row)[1] - self.find_window(row)[0] if masks else 1 for row in group)


def make_ranking(
    writer: "TextDiffusion",
    rank: Rank,
    candidates: int,
    sources: list[Ids],
    texts: int,
    seed: int,
    repairs: int = 0,
) -> Ranking:
    """Set up the ranking of candidates for this many texts, equally many per source, whose ids the writer encoded.
    Rejects a model that cannot score the writer's texts."""
    if candidates < 2 and not repairs:
        raise UsageError("--rank chooses among candidates: give --candidates 2 or more.")
    if isinstance(rank, str) and rank != "bound":
        raise UsageError(f"rank must be 'bound' or a model, not {rank!r}.")
    scorer = writer if isinstance(rank, str) else rank
    if scorer.model.likelihood is None:
        raise UsageError(f"{scorer.name} has no likelihood and no bound: it cannot rank candidates.")
    if writer.model.source_longest and not scorer.model.source_longest:
        raise UsageError(f"{scorer.name} reads no source: it cannot rank texts that are written from one.")
    if scorer.tokenizer.fingerprint() != writer.tokenizer.fingerprint():
        raise UsageError(f"{scorer.name} has another vocabulary than {writer.name} and cannot rank its texts.")
    if scorer.model.source_longest and not sources:
        raise UsageError(f"{scorer.name} scores texts that are written from a source, and none is given.")
    if scorer is not writer and sources:
        scorer.check_sources(sources)
    return Ranking(scorer, [row for row in sources for _ in range(texts // len(sources))], seed, repairs)
