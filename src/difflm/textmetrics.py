"""What can be counted on texts alone: overlap, variety, copying, length. No model, no torch.

Every function is pure. A *token list* is one text as a list of tokens; tokens may be words or ids.
"""

import math
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from difflm.errors import DifflmError

Tokens = Sequence[Hashable]
Grams = list[Counter[tuple[Hashable, ...]]]  # one counter per order, 1 to ORDERS

ORDERS = 4


def distinct_n(token_lists: Iterable[Tokens], n: int) -> float:
    """Different n-grams over all n-grams, counted over the whole set (Li et al., 2016); 0 where there is no n-gram."""
    grams = Counter(gram for tokens in token_lists for gram in _windows(tokens, n))
    return len(grams) / grams.total() if grams else 0.0


def sentence_bleu(candidate: Tokens, references: Sequence[Tokens], smooth: bool = True) -> float:
    """BLEU-4 of one text in [0, 1] (Papineni et al., 2002): mean log precision of n-grams, and a brevity penalty.

    Smoothed, orders 2 to 4 count one match and one n-gram more (Lin & Och, 2004), so that a text equal to a reference
    scores 1 however short it is, and a missing 4-gram does not hide the rest. A candidate that shares no word scores 0.
    A gram is clipped at its largest count in any one reference; the penalty is against the nearest reference length.
    """
    return _bleu(_grams(candidate), [_grams(reference) for reference in references], smooth)


def self_bleu(token_lists: Sequence[Tokens], references: int = 100, seed: int = 0) -> float:
    """How alike the texts of a set are (Zhu et al., 2018): the mean smoothed `sentence_bleu` of each text
    against `references` other texts of the set, drawn without replacement by `seed`; all others where there are fewer.

    Lower is more varied. More references give a higher value: compare only values with the same number.
    """
    others = len(token_lists) - 1
    if others < 1:
        raise DifflmError("self-BLEU compares texts with each other: give it at least two.")
    grams = [_grams(tokens) for tokens in token_lists]
    draw = random.Random(seed)
    total = 0.0
    for i, own in enumerate(grams):
        sample = draw.sample(range(others), min(references, others))
        total += _bleu(own, [grams[j + (j >= i)] for j in sample])
    return total / len(grams)


def most_central(candidates: Sequence[Tokens]) -> int:
    """Minimum Bayes risk: the index of the candidate with the highest mean smoothed BLEU against each other one
    (Kumar & Byrne, 2004). The first of equals."""
    if not candidates:
        raise DifflmError("there is no candidate to choose from.")
    grams = [_grams(tokens) for tokens in candidates]
    gains = [sum(_bleu(own, [other]) for j, other in enumerate(grams) if j != i) for i, own in enumerate(grams)]
    return gains.index(max(gains))


def copied_share(texts: Iterable[str], training_texts: Iterable[str]) -> float:
    """The share of texts that stand verbatim in the training texts, white space aside: a corpus may write "£ 30 ."
    where a model prints "£30.".

    The training texts are streamed: a corpus need not fit in memory."""
    counts = Counter(map(_unspaced, texts))
    copied = {text for text in map(_unspaced, training_texts) if text in counts}
    return _share(sum(counts[text] for text in copied), counts.total())


def copied_among(texts: Iterable[str], training_texts: Iterable[str]) -> set[str]:
    """Those training texts that are, white space aside, among `texts`: one pass over a corpus for many sets."""
    known = set(map(_unspaced, texts))
    return {text for text in training_texts if _unspaced(text) in known}


def unique_share(texts: Iterable[str]) -> float:
    """Different texts over all texts, runs of whitespace read as one space."""
    counts = Counter(map(_spaced, texts))
    return _share(len(counts), counts.total())


def unknown_share(token_lists: Iterable[Tokens], unknown: Hashable) -> float:
    """The share of all tokens that are `unknown`: the word or the id which stands for what the vocabulary lacks."""
    hits = total = 0
    for tokens in token_lists:
        hits += sum(token == unknown for token in tokens)
        total += len(tokens)
    return _share(hits, total)


def length_histogram(lengths: Iterable[int], bin: int = 5) -> dict[int, float]:
    """The share of lengths in each [k, k + bin), by k, ascending; empty bins are left out."""
    counts = Counter(int(length) // bin * bin for length in lengths)
    return {k: _share(counts[k], counts.total()) for k in sorted(counts)}


def length_distance(a: Iterable[int], b: Iterable[int], bin: int = 5) -> float:
    """Total variation between the histograms of two sets of lengths: 0 when equal, 1 when they share no bin."""
    p, q = length_histogram(a, bin), length_histogram(b, bin)
    if not p or not q:
        raise DifflmError("there is no text to compare the lengths of.")
    return sum(abs(p.get(k, 0.0) - q.get(k, 0.0)) for k in p.keys() | q.keys()) / 2


def _bleu(candidate: Grams, references: Sequence[Grams], smooth: bool = True) -> float:
    length = candidate[0].total()
    if not length or not references:
        return 0.0
    logs = 0.0
    for order, grams in enumerate(candidate):
        added = int(smooth and order > 0)
        pool = [reference[order] for reference in references]
        matched = sum(min(count, max(other.get(gram, 0) for other in pool)) for gram, count in grams.items()) + added
        if not matched:
            return 0.0
        logs += math.log(matched / (grams.total() + added))
    nearest = min((reference[0].total() for reference in references), key=lambda n: (abs(n - length), n))
    return math.exp(logs / ORDERS + min(0.0, 1 - nearest / length))


def _grams(tokens: Tokens) -> Grams:
    return [Counter(_windows(tokens, n)) for n in range(1, ORDERS + 1)]


def _windows(tokens: Tokens, n: int) -> Iterable[tuple[Hashable, ...]]:
    return zip(*(tokens[i:] for i in range(n)), strict=False)


def _unspaced(text: str) -> str:
    return "".join(text.split())


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _share(part: int, whole: int) -> float:
    if not whole:
        raise DifflmError("there is no text to measure.")
    return part / whole
