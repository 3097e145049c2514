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


def bleu_counts(candidate: Tokens, references: Sequence[Tokens]) -> list[int]:
    """What corpus BLEU-4 adds up over texts: matched and all n-grams of order 1 … 4, the candidate's length, and that
    of the nearest reference (of two equally near the shorter)."""
    own, others = _grams(candidate), [_grams(reference) for reference in references]
    counts = []
    for order, grams in enumerate(own):
        pool = [other[order] for other in others]
        counts += [sum(min(n, max(other.get(gram, 0) for other in pool)) for gram, n in grams.items()), grams.total()]
    length = len(candidate)
    return [*counts, length, min((len(r) for r in references), key=lambda n: (abs(n - length), n))]


def corpus_bleu(counts: Sequence[float]) -> float:
    """BLEU-4 of a whole set in [0, 1] (Papineni et al., 2002), not smoothed, from sums of `bleu_counts`."""
    *pairs, length, nearest = counts
    if not all(pairs[::2]):
        return 0.0
    logs = sum(math.log(matched / total) for matched, total in zip(pairs[::2], pairs[1::2], strict=True))
    return math.exp(logs / ORDERS + min(0.0, 1 - nearest / length))


def rouge_l(candidate: Tokens, references: Sequence[Tokens], beta: float = 1.2) -> float:
    """The longest common subsequence as an F measure in [0, 1] (Lin, 2004). As in the captioning task's code (Chen et
    al., 2015): best precision and best recall over the references, recall counting β² times."""
    if not candidate:
        return 0.0
    common = [_common(candidate, reference) for reference in references]
    precision = max(common) / len(candidate)
    recall = max(n / len(reference) for n, reference in zip(common, references, strict=True))
    both = recall + beta**2 * precision
    return (1 + beta**2) * precision * recall / both if both else 0.0


def cider(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]], sigma: float = 6.0) -> list[float]:
    """CIDEr-D of each text, in [0, 10] (Vedantam et al., 2015): cosine of the tf-idf weights of n-grams, clipped at the
    reference's, averaged over orders 1 … 4 and over its references; unlike lengths count less.

    How rare an n-gram is, the references of the whole set say: among how many texts' references it stands."""
    grams = [[_grams(reference) for reference in many] for many in references]
    seen = Counter(gram for many in grams for gram in {g for one in many for order in one for g in order})
    known = math.log(len(references))

    def weights(counts: Counter[tuple[Hashable, ...]]) -> dict[tuple[Hashable, ...], float]:
        return {gram: n * (known - math.log(max(1, seen[gram]))) for gram, n in counts.items()}

    scores = []
    for candidate, many in zip(candidates, grams, strict=True):
        own = [weights(order) for order in _grams(candidate)]
        total = 0.0
        for reference in many:
            apart = len(candidate) - reference[0].total()
            alike = sum(_clipped_cosine(mine, weights(order)) for mine, order in zip(own, reference, strict=True))
            total += alike / ORDERS * math.exp(-(apart**2) / (2 * sigma**2))
        scores.append(10 * total / len(many))
    return scores


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


def _clipped_cosine(a: dict[tuple[Hashable, ...], float], b: dict[tuple[Hashable, ...], float]) -> float:
    norms = math.sqrt(sum(w * w for w in a.values()) * sum(w * w for w in b.values()))
    return sum(min(w, b[gram]) * b[gram] for gram, w in a.items() if gram in b) / norms if norms else 0.0


def _common(a: Tokens, b: Tokens) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b):
            before, row[j + 1] = row[j + 1], before + 1 if x == y else max(row[j], row[j + 1])
    return row[-1]


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
