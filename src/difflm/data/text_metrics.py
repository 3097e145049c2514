"""Metrics of texts alone: overlap, variety, copying, length. They need neither a model nor torch.

A *token list* is one text as a list of tokens, which may be words or ids.
"""

import math
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from difflm.errors import DifflmError

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU
Tokens = Sequence[Hashable]
Grams = list[Counter[tuple[Hashable, ...]]]  # one counter per order, 1 to ORDERS

ORDERS = 4


def distinct_n(token_lists: Iterable[Tokens], n: int) -> float:
    """Return distinct n-grams over all n-grams of the whole set (Li et al., 2016); 0 if there is no n-gram."""
    grams = Counter(gram for tokens in token_lists for gram in _windows(tokens, n))
    return len(grams) / grams.total() if grams else 0.0


def self_bleu(token_lists: Sequence[Tokens], references: int = 100, seed: int = 0) -> float:
    """Return how similar the texts of a set are (Zhu et al., 2018): the mean `smoothed_bleu` of each text
    against `references` other texts of the set, drawn without replacement by `seed`, or all others if there are fewer.

    Lower is more varied. More references give a higher value: compare only values with the same number.
    """
    others = len(token_lists) - 1
    if others < 1:
        raise DifflmError("self-BLEU compares texts with each other: give it at least two.")
    grams = [count_ngrams(tokens) for tokens in token_lists]
    draw = random.Random(seed)
    total = 0.0
    for i, own in enumerate(grams):
        sample = draw.sample(range(others), min(references, others))
        total += smoothed_bleu(own, [grams[j + (j >= i)] for j in sample])
    return total / len(grams)


def bleu_counts(candidate: Sequence[str], references: Sequence[Sequence[str]]) -> list[int]:
    """Return sacrebleu's statistics of one text, which corpus BLEU-4 adds over texts: matched and all n-grams of order
    1 … 4, the candidate's length, and that of the nearest reference (the shorter of two equally near)."""
    score = _sacrebleu().sentence_score(" ".join(candidate), [" ".join(reference) for reference in references])
    return [*score.counts, *score.totals, score.sys_len, score.ref_len]


def corpus_bleu(counts: Sequence[float]) -> float:
    """Return BLEU-4 of a whole set in [0, 1] (Papineni et al., 2002), not smoothed, from sums of `bleu_counts`."""
    *grams, length, nearest = map(round, counts)  # sacrebleu formats them as integers
    score = _sacrebleu().compute_bleu(grams[:ORDERS], grams[ORDERS:], length, nearest, smooth_method="none")
    return float(score.score) / 100


@cache
def _sacrebleu() -> "BLEU":
    from sacrebleu.metrics import BLEU  # late: few commands need it

    return BLEU(tokenize="none", force=True, effective_order=True)


def rouge_l(candidate: Tokens, references: Sequence[Tokens], beta: float = 1.2) -> float:
    """Return the longest common subsequence as an F measure in [0, 1] (Lin, 2004). As in the captioning task's code
    (Chen et al., 2015), with the best precision and best recall over the references, and recall weighted by β²."""
    if not candidate:
        return 0.0
    common = [_longest_common(candidate, reference) for reference in references]
    precision = max(common) / len(candidate)
    recall = max(n / len(reference) for n, reference in zip(common, references, strict=True))
    both = recall + beta**2 * precision
    return (1 + beta**2) * precision * recall / both if both else 0.0


def cider(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]], sigma: float = 6.0) -> list[float]:
    """Return CIDEr-D of each text, in [0, 10] (Vedantam et al., 2015): the cosine of the tf-idf weights of n-grams,
    clipped at the reference's, averaged over orders 1 … 4 and over references, with a penalty for different lengths.

    Document frequencies count the texts whose references contain an n-gram."""
    grams = [[count_ngrams(reference) for reference in many] for many in references]
    seen = Counter(gram for many in grams for gram in {g for one in many for order in one for g in order})
    known = math.log(len(references))

    def weights(counts: Counter[tuple[Hashable, ...]]) -> dict[tuple[Hashable, ...], float]:
        return {gram: n * (known - math.log(max(1, seen[gram]))) for gram, n in counts.items()}

    scores = []
    for candidate, many in zip(candidates, grams, strict=True):
        own = [weights(order) for order in count_ngrams(candidate)]
        total = 0.0
        for reference in many:
            apart = len(candidate) - reference[0].total()
            alike = sum(_clipped_cosine(mine, weights(order)) for mine, order in zip(own, reference, strict=True))
            total += alike / ORDERS * math.exp(-(apart**2) / (2 * sigma**2))
        scores.append(10 * total / len(many))
    return scores


def most_central(candidates: Sequence[Tokens]) -> int:
    """Return the index of the candidate with the highest mean smoothed BLEU against the others, the first of equals:
    minimum Bayes risk (Kumar & Byrne, 2004)."""
    if not candidates:
        raise DifflmError("there is no candidate to choose from.")
    grams = [count_ngrams(tokens) for tokens in candidates]
    gains = [sum(smoothed_bleu(own, [other]) for j, other in enumerate(grams) if j != i) for i, own in enumerate(grams)]
    return gains.index(max(gains))


def copied_share(texts: Iterable[str], training_texts: Iterable[str]) -> float:
    """Return the share of texts that occur in the training texts, which are streamed. White space is ignored: a corpus
    may write "£ 30 ." where a model prints "£30."."""
    made = list(texts)
    copied = set(map(strip_spaces, copied_among(made, training_texts)))
    return _share(sum(strip_spaces(text) in copied for text in made), len(made))


def copied_among(texts: Iterable[str], training_texts: Iterable[str]) -> set[str]:
    """Return the training texts that are among `texts`, ignoring white space: one pass over a corpus for many sets."""
    known = set(map(strip_spaces, texts))
    return {text for text in training_texts if strip_spaces(text) in known}


def unique_share(texts: Iterable[str]) -> float:
    """Return distinct texts over all texts; runs of white space count as one space."""
    counts = Counter(" ".join(text.split()) for text in texts)
    return _share(len(counts), counts.total())


def unknown_share(token_lists: Iterable[Tokens], unknown: Hashable) -> float:
    """Return the share of all tokens that are `unknown`, the word or id for what the vocabulary lacks."""
    tokens = [token for tokens in token_lists for token in tokens]
    return _share(tokens.count(unknown), len(tokens))


def length_histogram(lengths: Iterable[int], bin: int = 5) -> dict[int, float]:
    """Return the share of lengths in each [k, k + bin), by k, ascending, without empty bins."""
    counts = Counter(int(length) // bin * bin for length in lengths)
    return {k: _share(counts[k], counts.total()) for k in sorted(counts)}


def length_distance(a: Iterable[int], b: Iterable[int], bin: int = 5) -> float:
    """Return the total variation between the histograms of two sets of lengths."""
    p, q = length_histogram(a, bin), length_histogram(b, bin)
    if not p or not q:
        raise DifflmError("there is no text to compare the lengths of.")
    return sum(abs(p.get(k, 0.0) - q.get(k, 0.0)) for k in p.keys() | q.keys()) / 2


def smoothed_bleu(candidate: Grams, references: Sequence[Grams]) -> float:
    """Return BLEU-4 of one text in [0, 1] (Papineni et al., 2002): mean log precision of n-grams and a brevity penalty
    by the nearest reference length. A candidate that shares no word scores 0.

    Orders 2 to 4 count one match and one n-gram more (Lin & Och, 2004), so that a text equal to a reference scores 1
    however short it is; sacrebleu's `add-k` gives texts of fewer than four words 0."""
    length = candidate[0].total()
    if not length or not references:
        return 0.0
    logs = 0.0
    for order, grams in enumerate(candidate):
        added = int(order > 0)
        pool = [reference[order] for reference in references]
        matched = sum(min(count, max(other.get(gram, 0) for other in pool)) for gram, count in grams.items()) + added
        if not matched:
            return 0.0
        logs += math.log(matched / (grams.total() + added))
    nearest = min((reference[0].total() for reference in references), key=lambda n: (abs(n - length), n))
    return math.exp(logs / ORDERS + min(0.0, 1 - nearest / length))


def _clipped_cosine(a: dict[tuple[Hashable, ...], float], b: dict[tuple[Hashable, ...], float]) -> float:
    norms = math.sqrt(sum(w * w for w in a.values()) * sum(w * w for w in b.values()))
    return sum(min(w, b[gram]) * b[gram] for gram, w in a.items() if gram in b) / norms if norms else 0.0


def _longest_common(a: Tokens, b: Tokens) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b):
            before, row[j + 1] = row[j + 1], before + 1 if x == y else max(row[j], row[j + 1])
    return row[-1]


def count_ngrams(tokens: Tokens) -> Grams:
    return [Counter(_windows(tokens, n)) for n in range(1, ORDERS + 1)]


def _windows(tokens: Tokens, n: int) -> Iterable[tuple[Hashable, ...]]:
    return zip(*(tokens[i:] for i in range(n)), strict=False)


def strip_spaces(text: str) -> str:
    return "".join(text.split())


def _share(part: int, whole: int) -> float:
    if not whole:
        raise DifflmError("there is no text to measure.")
    return part / whole
