"""Numbers of the great table: BLEU from counts, paired bootstrap, verdicts by the protocol's rule, curves at equal
variety, and divergence of generated from real text. Only numpy."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Verdict = Literal["holds", "reversed", "not seen", "undecided"]

DRAWS = 2000  # of the bootstrap
# Gained in the last quarter of the updates.
STILL_LEARNING = {"bleu": 1.0, "nats": 0.03, "judge": 0.03, "mauve_like": 0.02}
ORDERS = 4


# -- BLEU -------------------------------------------------------------------------------------------------------------


def bleu_of(counts: NDArray[Any]) -> Floats:
    """Corpus BLEU in [0, 100] from sums of sacrebleu's counts, [..., 10]: matches and n-grams of orders 1 to 4, length,
    length of the references. Orders without a match are smoothed as sacrebleu does by default (`exp`)."""
    sums = np.asarray(counts, np.float64)
    matched, total = sums[..., :ORDERS], sums[..., ORDERS : 2 * ORDERS]
    length, wanted = sums[..., -2], sums[..., -1]
    missed = np.cumsum(matched == 0, -1)
    found = np.where(matched == 0, 0.5**missed, matched) / np.maximum(total, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(found).mean(-1) + np.minimum(0, 1 - wanted / length)
    none = (matched[..., 0] == 0) | (total[..., -1] == 0) | (length == 0)
    return np.where(none, 0.0, 100 * np.exp(logs))


# -- verdicts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How much better one side is: over seeds, and by the bootstrap over test items. `sign` −1: less is better."""

    mean: float
    error: float  # standard error over seeds
    low: float
    high: float  # 95 % of the bootstrap

    def verdict(self, effect: float) -> Verdict:
        """The protocol's rule: beyond two standard errors, beyond the bootstrap's interval and beyond the smallest
        effect of interest; not seen where the interval lies within that effect."""
        if self.low > 0 and self.mean > 2 * self.error and self.mean > effect:
            return "holds"
        if self.high < 0 and -self.mean > 2 * self.error and -self.mean > effect:
            return "reversed"
        return "not seen" if -effect < self.low and self.high < effect else "undecided"


def compare_seeds(better: Sequence[float], worse: Sequence[float], boot: Floats, sign: float = 1.0) -> Difference:
    """`boot` are differences of the bootstrap, better minus worse, before the sign is applied."""
    a, b = np.array(better, float) * sign, np.array(worse, float) * sign
    error = math.sqrt(sum(x.var(ddof=1) / len(x) if len(x) > 1 else math.inf for x in (a, b)))
    low, high = np.quantile(boot * sign, (0.025, 0.975))
    return Difference(float(a.mean() - b.mean()), error, float(low), float(high))


@lru_cache(maxsize=8)
def draw_items(count: int, seed: int = 0, draws: int = DRAWS) -> Ints:
    """How often each item is in each draw, [draws, count]."""
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)


def bootstrap_bleu(better: Sequence[NDArray[Any]], worse: Sequence[NDArray[Any]], seed: int = 0) -> Floats:
    """Differences of corpus BLEU for items drawn anew, the same for both sides and all seeds; [items, 10] each."""
    times = draw_items(len(better[0]), seed).astype(np.float64)
    sides = [np.mean([bleu_of(times @ np.asarray(one, np.float64)) for one in side], 0) for side in (better, worse)]
    return np.asarray(sides[0] - sides[1])


def bootstrap_ratio(
    better: Sequence[NDArray[Any]], worse: Sequence[NDArray[Any]], paired: bool = True, seed: int = 0
) -> Floats:
    """The same for Σ nats / Σ tokens, [texts, 2] each; `paired`: both sides scored the same texts."""

    def side(rows: Sequence[NDArray[Any]], number: int) -> Floats:
        sums = [draw_items(len(one), number).astype(np.float64) @ np.asarray(one, np.float64) for one in rows]
        return np.asarray(np.mean([one[:, 0] / one[:, 1] for one in sums], 0))

    return side(better, seed) - side(worse, seed if paired else seed + 1)


def still_learning(curve: Mapping[str, float], kind: str) -> bool:
    """Whether a run gained much in the last quarter of its updates; larger is better in a curve of scores."""
    return curve["100"] - curve["75"] > STILL_LEARNING[kind]


def interpolate(curve: Sequence[tuple[float, float]], at: float) -> float | None:
    """Quality at a given variety, from (variety, quality); None outside of the curve: nothing is extrapolated."""
    points = sorted(curve)
    if not points or not points[0][0] <= at <= points[-1][0]:
        return None
    return float(np.interp(at, [point[0] for point in points], [point[1] for point in points]))


# -- divergence of generated from real text ---------------------------------------------------------------------------

BUCKETS, COMPONENTS, CELLS, KMEANS = 2048, 64, 100, 5
FEATURES = f"hashed n-grams (words 1-2, letters 3; tf-idf, {COMPONENTS} principal components)"
SCALE = 5.0  # of divergences, as in MAUVE (Pillutla et al., 2021)


def count_hashed(texts: Sequence[str]) -> Floats:
    """Hashed counts of words, pairs of words and letters of three, [texts, buckets]; words have spaces between them."""
    found = np.zeros((len(texts), BUCKETS))
    for row, text in enumerate(texts):
        words = text.split()
        letters = " ".join(words)
        grams = [*words, *map(" ".join, pairwise(words))]
        grams += [letters[k : k + 3] for k in range(len(letters) - 2)]
        places, counts = np.unique([zlib.crc32(gram.encode()) % BUCKETS for gram in grams] or [0], return_counts=True)
        found[row, places] = counts
    return found


class Features:
    """Vectors of texts, frozen by real training texts: a stand-in where no encoder is at hand."""

    def __init__(self, real: Sequence[str]) -> None:
        counts = count_hashed(real)
        self.idf = np.log((1 + len(real)) / (1 + (counts > 0).sum(0))) + 1
        weighted = self.weigh(counts)
        self.mean = weighted.mean(0)
        centred = weighted - self.mean
        values, rows = np.linalg.eigh(centred @ centred.T)  # texts are fewer than buckets
        kept = np.argsort(-values)[: min(COMPONENTS, len(real) - 1)]
        self.axes = centred.T @ rows[:, kept] / np.sqrt(np.maximum(values[kept], 1e-9))

    def weigh(self, counts: Floats) -> Floats:
        weighted = np.log1p(counts) * self.idf
        return np.asarray(weighted / np.maximum(np.linalg.norm(weighted, axis=1, keepdims=True), 1e-9))

    def __call__(self, texts: Sequence[str]) -> Floats:
        return np.asarray((self.weigh(count_hashed(texts)) - self.mean) @ self.axes)


def fit_cells(vectors: Floats, cells: int, seed: int, rounds: int = 20) -> Ints:
    """The cell of each vector by k-means, begun with vectors drawn by the seed."""
    centres = vectors[np.random.default_rng(seed).choice(len(vectors), cells, replace=False)]
    for _ in range(rounds):
        apart = (vectors**2).sum(1)[:, None] - 2 * vectors @ centres.T + (centres**2).sum(1)
        nearest = apart.argmin(1)
        sums, counts = np.zeros_like(centres), np.bincount(nearest, minlength=cells)[:, None]
        np.add.at(sums, nearest, vectors)
        centres = np.where(counts > 0, sums / np.maximum(counts, 1), centres)
    return np.asarray(nearest)


def frontier_area(p: NDArray[Any], q: NDArray[Any]) -> float:
    """The area under the divergence frontier of two histograms, in [0, 1] (Pillutla et al., 2021)."""
    p, q = p / p.sum(), q / q.sum()
    points = [(0.0, 1.0), (1.0, 0.0)]
    for share in np.linspace(0.01, 0.99, 25):
        mixed = share * p + (1 - share) * q

        def apart(one: NDArray[Any], mixed: NDArray[Any] = mixed) -> float:
            used = one > 0
            return float((one[used] * np.log(one[used] / mixed[used])).sum())

        points.append((math.exp(-SCALE * apart(q)), math.exp(-SCALE * apart(p))))
    points.sort(key=lambda point: (point[0], -point[1]))
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))


def measure_divergence(real: Floats, made: Floats, draws: int = KMEANS) -> tuple[float, Ints]:
    """The mean area over draws of k-means, and histograms of real and made texts by draw, [draws, 2, cells]."""
    both = np.concatenate([real, made])
    cells = min(CELLS, len(both) // 10)
    found = []
    for seed in range(draws):
        nearest = fit_cells(both, cells, seed)
        found.append([np.bincount(part, minlength=cells) for part in (nearest[: len(real)], nearest[len(real) :])])
    counts = np.array(found)
    return float(np.mean([frontier_area(p, q) for p, q in counts])), counts


def bootstrap_divergence(better: Sequence[Ints], worse: Sequence[Ints], seed: int = 0, draws: int = 200) -> Floats:
    """Differences of the area when texts are drawn anew from each histogram; the real texts are drawn anew, too."""
    draw = np.random.default_rng(seed)

    def side(all_counts: Sequence[Ints]) -> float:
        areas = []
        for counts in all_counts:
            p, q = counts[int(draw.integers(len(counts)))]
            again = [draw.multinomial(int(one.sum()), one / one.sum()) for one in (p, q)]
            areas.append(frontier_area(again[0], again[1]))
        return float(np.mean(areas))

    return np.array([side(better) - side(worse) for _ in range(draws)])
