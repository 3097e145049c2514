"""Metrics of texts: overlap, variety, copying, length, and the choice among candidates. They need neither a model nor
torch.

A *token list* is one text as a list of tokens, which may be words or ids. Metrics of source-to-target tasks are counted
as in DiffuSeq's evaluation (Gong et al., 2023), so that published figures can be compared: their texts are split at
white space and keep their case, so lower both sides to compare with models of lower-case words.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import combinations, count, zip_longest
from typing import TYPE_CHECKING

from difflm.errors import DifflmError, UsageError

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU
Tokens = Sequence[Hashable]
Gram = tuple[Hashable, ...]
Grams = list[Counter[Gram]]  # one counter per order, 1 to ORDERS

ORDERS = 4
SMOOTHING = 5  # K of Chen & Cherry (2014), NLTK's default
WORD = re.compile(r"[^\W_]+")


def count_ngrams(tokens: Tokens) -> Grams:
    return [Counter(_windows(tokens, n)) for n in range(1, ORDERS + 1)]


def _windows(tokens: Tokens, n: int) -> Iterable[Gram]:
    return zip(*(tokens[i:] for i in range(n)), strict=False)


@lru_cache(maxsize=4096)  # a candidate is compared with all the others of its source
def word_ngrams(text: str) -> Grams:
    return count_ngrams(text.split())


def strip_spaces(text: str) -> str:
    return "".join(text.split())


def _share(part: int, whole: int) -> float:
    if not whole:
        raise DifflmError("there is no text to measure.")
    return part / whole


# -- BLEU -------------------------------------------------------------------------------------------------------------


def smoothed_bleu(candidate: Grams, references: Sequence[Grams]) -> float:
    """Return BLEU-4 of one text in [0, 1] (Papineni et al., 2002): mean log precision of n-grams and a brevity penalty
    by the nearest reference length. A candidate that shares no word scores 0.

    Orders 2 to 4 count one match and one n-gram more (Lin & Och, 2004), so that a text equal to a reference scores 1
    however short it is; sacrebleu's `add-k` gives texts of fewer than four words 0."""
    matched = _count_matches(candidate, references)
    if not matched[0]:
        return 0.0
    added = (0, 1, 1, 1)
    precisions = [(m + k) / (own.total() + k) for m, k, own in zip(matched, added, candidate, strict=True)]
    return _mean_precision(precisions, candidate, references)


def sentence_bleu_nltk4(text: str, references: Sequence[str]) -> float:
    """Return BLEU-4 of one text in [0, 1], as NLTK's `sentence_bleu` with smoothing method 4 (Chen & Cherry, 2014).

    The k-th order without a match counts ln(length) / (2^k · 5) matches, also where the text is too short to have
    n-grams of that order: a text of two or three words scores less than 1 against itself. One word is not smoothed.
    A text that shares no word with a reference scores 0."""
    candidate, others = word_ngrams(text), [word_ngrams(reference) for reference in references]
    length, missed = candidate[0].total(), count(1)
    matched = _count_matches(candidate, others)
    if not matched[0]:
        return 0.0
    precisions = [
        (hits or math.log(length) / (2 ** next(missed) * SMOOTHING)) / max(1, own.total())
        for hits, own in zip(matched, candidate, strict=True)
        if hits or length > 1
    ]
    return _mean_precision(precisions, candidate, others)


def _count_matches(candidate: Grams, references: Sequence[Grams]) -> list[int]:
    """Return how many n-grams of each order are in a reference too, each at most as often as there."""
    if len(references) == 1:  # as in choosing among candidates, which should take no time
        both = zip(candidate, *references, strict=True)
        return [sum(min(own[gram], other[gram]) for gram in own.keys() & other.keys()) for own, other in both]
    return [
        sum(min(times, max((other[n].get(gram, 0) for other in references), default=0)) for gram, times in own.items())
        for n, own in enumerate(candidate)
    ]


def _mean_precision(precisions: Iterable[float], candidate: Grams, references: Sequence[Grams]) -> float:
    """Return the geometric mean of the precisions of all orders, with the brevity penalty."""
    length, logs = candidate[0].total(), 0.0
    for precision in precisions:
        logs += math.log(precision)
    nearest = min((reference[0].total() for reference in references), key=lambda words: (abs(words - length), words))
    return math.exp(logs / ORDERS + min(0.0, 1 - nearest / length))


def bleu_counts(candidate: Sequence[str], references: Sequence[Sequence[str]]) -> list[int]:
    """Return sacrebleu's statistics of one text, which corpus BLEU-4 adds over texts: matched and all n-grams of order
    1 … 4, the candidate's length, and that of the nearest reference (the shorter of two equally near)."""
    score = _sacrebleu().sentence_score(" ".join(candidate), [*map(" ".join, references)])
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


def corpus_sacrebleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[float, str]:
    """Return sacreBLEU of a whole set in [0, 100], with 13a tokens, and the signature that tells how it was counted.
    Texts may differ in their number of references."""
    from sacrebleu.metrics import BLEU

    check_references(texts, references)
    streams = [list(own) for own in zip_longest(*references)]  # the k-th references; None where there is none
    metric = BLEU(tokenize="13a", force=True)  # force: no warning about texts that look tokenized
    return float(metric.corpus_score(texts, streams).score), str(metric.get_signature())


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


def _longest_common(a: Tokens, b: Tokens) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b):
            before, row[j + 1] = row[j + 1], before + 1 if x == y else max(row[j], row[j + 1])
    return row[-1]


def rouge_l_f1(text: str, references: Sequence[str]) -> float:
    """Return F1 of the longest common subsequence in [0, 1] (Lin, 2004), with the best reference. Words are runs of
    letters and digits in lower case, as in torchmetrics, but letters may be of any alphabet."""
    words, *others = (WORD.findall(one.lower()) for one in (text, *references))
    return max((rouge_l(words, [other], beta=1.0) for other in others if other), default=0.0)


def cider(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]], sigma: float = 6.0) -> list[float]:
    """Return CIDEr-D of each text, in [0, 10] (Vedantam et al., 2015): the cosine of the tf-idf weights of n-grams,
    clipped at the reference's, averaged over orders 1 … 4 and over references, with a penalty for different lengths.

    Document frequencies count the texts whose references contain an n-gram."""
    grams = [[count_ngrams(reference) for reference in many] for many in references]
    seen = Counter(gram for many in grams for gram in {g for one in many for order in one for g in order})
    known = math.log(len(references))

    def weights(counts: Counter[Gram]) -> dict[Gram, float]:
        return {gram: n * (known - math.log(max(1, seen[gram]))) for gram, n in counts.items()}

    def clipped_cosine(a: dict[Gram, float], b: dict[Gram, float]) -> float:
        norms = math.sqrt(sum(w * w for w in a.values()) * sum(w * w for w in b.values()))
        return sum(min(w, b[gram]) * b[gram] for gram, w in a.items() if gram in b) / norms if norms else 0.0

    scores = []
    for candidate, many in zip(candidates, grams, strict=True):
        own = [weights(order) for order in count_ngrams(candidate)]
        total = 0.0
        for reference in many:
            apart = len(candidate) - reference[0].total()
            alike = sum(clipped_cosine(mine, weights(order)) for mine, order in zip(own, reference, strict=True))
            total += alike / ORDERS * math.exp(-(apart**2) / (2 * sigma**2))
        scores.append(10 * total / len(many))
    return scores


def sari(text: str, source: str, references: Sequence[str]) -> float:
    """Return SARI of a simplification in [0, 1] (Xu et al., 2016): the mean of F1 of n-grams kept, F1 of those added
    and precision of those deleted, each in the mean over the orders 1 to 4, in lower case. As in the authors' code,
    what there is none of counts 0."""
    own, before, *others = (word_ngrams(one.lower()) for one in (text, source, *references))
    total = 0.0
    for n in range(ORDERS):
        wanted = sum((other[n] for other in others), Counter[Gram]())
        old, new = ({gram: len(others) * count for gram, count in grams[n].items()} for grams in (before, own))
        kept, dropped = Counter(old) & Counter(new), Counter(old) - Counter(new)
        good, to_keep = kept & wanted, Counter(old) & wanted
        total += _f1(_share_found(good, kept), _share_found(good, to_keep)) + _share_found(dropped - wanted, dropped)
        added, to_add = own[n].keys() - before[n].keys(), wanted.keys() - before[n].keys()
        hits = len(added & to_add)
        total += _f1(hits / max(1, len(added)), hits / max(1, len(to_add)))
    return total / (3 * ORDERS)


def _share_found(found: Counter[Gram], among: Counter[Gram]) -> float:
    """Return the mean over n-grams of how much of their count was found."""
    return sum(count / among[gram] for gram, count in found.items()) / max(1, len(among))


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


# -- variety, copying, length -----------------------------------------------------------------------------------------


def distinct_n(token_lists: Iterable[Tokens], n: int) -> float:
    """Return distinct n-grams over all n-grams of the whole set (Li et al., 2016); 0 if there is no n-gram."""
    grams = Counter(gram for tokens in token_lists for gram in _windows(tokens, n))
    return len(grams) / grams.total() if grams else 0.0


def div_4(samples: Sequence[str]) -> float:
    """Return the share of distinct 4-grams of the samples of one source, or 0. It falls with their number."""
    return distinct_n([text.split() for text in samples], 4)


def self_bleu(token_lists: Sequence[Tokens], references: int = 100, seed: int = 0) -> float:
    """Return how similar the texts of a set are (Zhu et al., 2018): the mean `smoothed_bleu` of each text
    against `references` other texts of the set, drawn without replacement by `seed`, or all others if there are fewer.

    Lower is more varied. More references give a higher value: compare only values with the same number."""
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


def pairwise_self_bleu(samples: Sequence[str]) -> float:
    """Return how similar the samples of one source are: the mean `sentence_bleu_nltk4` of each sample against each
    later one. Like DiffuSeq's it counts a pair once, in one direction, so it depends a little on the order."""
    scores = [sentence_bleu_nltk4(text, [later]) for text, later in combinations(samples, 2)]
    return sum(scores) / len(scores) if scores else 0.0


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


def copy_rate(texts: Sequence[str], sources: Sequence[str]) -> float:
    """Return the share of texts that equal their source, up to white space."""
    _check_counts(texts, sources, "sources")
    return sum(text.split() == source.split() for text, source in zip(texts, sources, strict=True)) / len(texts)


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
    return {k: counts[k] / counts.total() for k in sorted(counts)}


def length_distance(a: Iterable[int], b: Iterable[int], bin: int = 5) -> float:
    """Return the total variation between the histograms of two sets of lengths."""
    p, q = length_histogram(a, bin), length_histogram(b, bin)
    if not p or not q:
        raise DifflmError("there is no text to compare the lengths of.")
    return sum(abs(p.get(k, 0.0) - q.get(k, 0.0)) for k in p.keys() | q.keys()) / 2


def measure_texts(
    texts: Sequence[str], sources: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[dict[str, float], str]:
    """Return figures of one text for each source, by name, and sacreBLEU's signature."""
    bleu, signature = corpus_sacrebleu(texts, references)  # checks its input
    pairs, count = list(zip(texts, references, strict=True)), len(texts)
    figures = {
        "bleu_sentence_nltk4": sum(sentence_bleu_nltk4(*pair) for pair in pairs) / count,
        "bleu_sacre": bleu,
        "rouge_l": sum(rouge_l_f1(*pair) for pair in pairs) / count,
        "sari": 100 * sum(map(sari, texts, sources, references)) / count,
        "dist_1": sum(distinct_n([text.split()], 1) for text in texts) / count,
        "copy_rate": copy_rate(texts, sources),
    }
    return figures, signature


def most_central(candidates: Sequence[Tokens]) -> int:
    """Return the index of the candidate with the highest mean smoothed BLEU against the others, the first of equals:
    minimum Bayes risk (Kumar & Byrne, 2004)."""
    if not candidates:
        raise DifflmError("there is no candidate to choose from.")
    grams = [count_ngrams(tokens) for tokens in candidates]
    gains = [sum(smoothed_bleu(own, [other]) for j, other in enumerate(grams) if j != i) for i, own in enumerate(grams)]
    return gains.index(max(gains))


def choose_oracle(candidates: Sequence[str], references: Sequence[str]) -> int:
    """Return the index of the candidate with the largest BLEU: an upper limit, no result, since it needs the answer."""
    gains = [sentence_bleu_nltk4(own, references) for own in candidates]
    return gains.index(max(gains))


def check_references(texts: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Refuse anything but a list of references for each text or source."""
    _check_counts(texts, references, "references")
    for number, many in enumerate(references, 1):
        if isinstance(many, str):
            raise UsageError(f"text {number:,} has one string for its references. Give a list of strings.")
        if not many or not all(map(str.strip, many)):
            raise UsageError(f"text {number:,} has no reference, or an empty one.")


def _check_counts(texts: Sequence[str], others: Sequence[object], what: str) -> None:
    if not texts:
        raise UsageError("there is no text to measure.")
    if len(texts) != len(others):
        raise UsageError(f"there are {len(texts):,} texts, but {what} for {len(others):,}.")
