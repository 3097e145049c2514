"""Metrics of source-to-target tasks, and the choice among candidates. They need neither a model nor torch.

Sentence-BLEU, ROUGE-L, dist-1, self-BLEU and div-4 are counted as in DiffuSeq's evaluation (Gong et al., 2023), so that
published figures can be compared. Texts are split at white space and keep their case: lower both sides to compare with
models of lower-case words.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache, reduce
from itertools import combinations, zip_longest
from operator import or_

from difflm.data.text_metrics import ORDERS, Grams, count_ngrams, distinct_n, rouge_l
from difflm.errors import UsageError

SMOOTHING = 5  # K of Chen & Cherry (2014), NLTK's default
WORD = re.compile(r"[^\W_]+")


def sentence_bleu_nltk4(text: str, references: Sequence[str]) -> float:
    """Return BLEU-4 of one text in [0, 1], as NLTK's `sentence_bleu` with smoothing method 4 (Chen & Cherry, 2014).

    The k-th order without a match counts ln(length) / (2^k · 5) matches, also where the text is too short to have
    n-grams of that order: a text of two or three words scores less than 1 against itself. One word is not smoothed.
    A text that shares no word with a reference scores 0."""
    own, others = word_ngrams(text), [word_ngrams(reference) for reference in references]
    length = own[0].total()
    logs, missed = 0.0, 0
    for n in range(ORDERS):
        pool = others[0][n] if len(others) == 1 else reduce(or_, (other[n] for other in others), Counter())
        matched: float = sum(min(own[n][gram], pool[gram]) for gram in own[n].keys() & pool.keys())
        if not matched and not n:
            return 0.0
        if not matched and length > 1:
            missed += 1
            matched = math.log(length) / (2**missed * SMOOTHING)
        if matched:
            logs += math.log(matched / max(1, own[n].total()))
    nearest = min((other[0].total() for other in others), key=lambda words: (abs(words - length), words))
    return math.exp(logs / ORDERS + min(0.0, 1 - nearest / length))


@lru_cache(maxsize=4096)  # a candidate is compared with all the others of its source
def word_ngrams(text: str) -> Grams:
    return count_ngrams(text.split())


def corpus_sacrebleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[float, str]:
    """Return sacreBLEU of a whole set in [0, 100], with 13a tokens, and the signature that tells how it was counted.
    Texts may differ in their number of references."""
    from sacrebleu.metrics import BLEU  # late: few commands need it

    check_references(texts, references)
    streams = [list(own) for own in zip_longest(*references)]  # the k-th references; None where there is none
    metric = BLEU(tokenize="13a", force=True)  # force: no warning about texts that look tokenized
    return float(metric.corpus_score(texts, streams).score), str(metric.get_signature())


def rouge_l_f1(text: str, references: Sequence[str]) -> float:
    """Return F1 of the longest common subsequence in [0, 1] (Lin, 2004), with the best reference. Words are runs of
    letters and digits in lower case, as in torchmetrics, but letters may be of any alphabet."""
    words, *others = (WORD.findall(one.lower()) for one in (text, *references))
    return max((rouge_l(words, [other], beta=1.0) for other in others if other), default=0.0)


def sari(text: str, source: str, references: Sequence[str]) -> float:
    """Return SARI of a simplification in [0, 1] (Xu et al., 2016): the mean of F1 of n-grams kept, F1 of those added
    and precision of those deleted, each in the mean over the orders 1 to 4, in lower case. As in the authors' code,
    what there is none of counts 0."""
    own, before, *others = (word_ngrams(one.lower()) for one in (text, source, *references))
    total = 0.0
    for n in range(ORDERS):
        wanted = sum((other[n] for other in others), Counter[tuple[Hashable, ...]]())
        old, new = ({gram: len(others) * count for gram, count in grams[n].items()} for grams in (before, own))
        kept, dropped = Counter(old) & Counter(new), Counter(old) - Counter(new)
        good, to_keep = kept & wanted, Counter(old) & wanted
        total += f1(share_found(good, kept), share_found(good, to_keep)) + share_found(dropped - wanted, dropped)
        added, to_add = own[n].keys() - before[n].keys(), wanted.keys() - before[n].keys()
        hits = len(added & to_add)
        total += f1(hits / max(1, len(added)), hits / max(1, len(to_add)))
    return total / (3 * ORDERS)


def share_found(found: Counter[tuple[Hashable, ...]], among: Counter[tuple[Hashable, ...]]) -> float:
    """Return the mean over n-grams of how much of their count was found."""
    return sum(count / among[gram] for gram, count in found.items()) / max(1, len(among))


def f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def pairwise_self_bleu(samples: Sequence[str]) -> float:
    """Return how similar the samples of one source are: the mean `sentence_bleu_nltk4` of each sample against each
    later one. Like DiffuSeq's it counts a pair once, in one direction, so it depends a little on the order."""
    scores = [sentence_bleu_nltk4(text, [later]) for text, later in combinations(samples, 2)]
    return sum(scores) / len(scores) if scores else 0.0


def div_4(samples: Sequence[str]) -> float:
    """Return distinct 4-grams over all 4-grams of the samples of one source, 0 if they have none. It falls with the
    number of samples."""
    return distinct_n([text.split() for text in samples], 4)


def copy_rate(texts: Sequence[str], sources: Sequence[str]) -> float:
    """Return the share of texts that equal their source, up to white space."""
    check_counts(texts, sources, "sources")
    return sum(text.split() == source.split() for text, source in zip(texts, sources, strict=True)) / len(texts)


def measure_texts(
    texts: Sequence[str], sources: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[dict[str, float], str]:
    """Return the figures of one text for each source, by name, and the signature of sacreBLEU. For the copy baseline
    give the sources as texts."""
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


def choose_oracle(candidates: Sequence[str], references: Sequence[str]) -> int:
    """Return the index of the candidate with the largest BLEU against the references. This is an upper limit, not a
    result: it needs the answer."""
    gains = [sentence_bleu_nltk4(own, references) for own in candidates]
    return gains.index(max(gains))


def check_references(texts: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Refuse anything but a list of references for each text or source."""
    check_counts(texts, references, "references")
    for number, many in enumerate(references, 1):
        if isinstance(many, str):
            raise UsageError(f"text {number:,} has one string for its references. Give a list of strings.")
        if not many or not all(map(str.strip, many)):
            raise UsageError(f"text {number:,} has no reference, or an empty one.")


def check_counts(texts: Sequence[str], others: Sequence[object], what: str) -> None:
    if not texts:
        raise UsageError("there is no text to measure.")
    if len(texts) != len(others):
        raise UsageError(f"there are {len(texts):,} texts, but {what} for {len(others):,}.")
