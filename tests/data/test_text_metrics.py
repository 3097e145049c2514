"""Metrics on texts: worked by hand, held to properties, compared with sacrebleu where both define the same thing."""

import math
import random
from itertools import pairwise

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from difflm.data.text_metrics import (
    bleu_counts,
    cider,
    copied_among,
    copied_share,
    corpus_bleu,
    count_ngrams,
    distinct_n,
    length_distance,
    length_histogram,
    most_central,
    rouge_l,
    self_bleu,
    smoothed_bleu,
    unique_share,
    unknown_share,
)
from difflm.errors import DifflmError

texts = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12)
lengths = st.lists(st.integers(0, 60), min_size=1, max_size=30)
checked = settings(deadline=None)  # the machine may be busy


def test_distinct_n_counts_over_the_whole_set():
    """'a b a' and 'a b' hold the words a, b, a, a, b and the pairs ab, ba, ab."""
    assert distinct_n([list("aba"), list("ab")], 1) == 2 / 5
    assert distinct_n([list("aba"), list("ab")], 2) == 2 / 3
    assert distinct_n([list("aba"), list("ab")], 4) == 0.0


@checked
@given(st.lists(texts, min_size=1, max_size=5), st.integers(1, 3))
def test_saying_everything_twice_halves_distinct_n(token_lists, n):
    assert distinct_n(token_lists * 2, n) == distinct_n(token_lists, n) / 2


def sentence_bleu(candidate, references):
    return smoothed_bleu(count_ngrams(candidate), [*map(count_ngrams, references)])


def test_bleu_of_a_hand_worked_case():
    """'the the cat' against 'the cat sat': 2 of 3 words (the is clipped at one), 1 of 2 pairs, no triple of 1,
    no 4-gram at all; with one added from order two on: 2/3, 2/3, 1/2, 1/1. Lengths are equal: no penalty."""
    expected = (2 / 3 * 2 / 3 * 1 / 2 * 1) ** (1 / 4)
    assert sentence_bleu(["the", "the", "cat"], [["the", "cat", "sat"]]) == pytest.approx(expected)


def test_bleu_penalises_short_texts_by_the_nearest_reference():
    """Every n-gram of 'a b c d' is in both references; the nearest one has six words: exp(1 − 6/4)."""
    references = [list("abcdef"), list("abcdefghi")]
    assert sentence_bleu(list("abcd"), references) == pytest.approx(math.exp(1 - 6 / 4))


@checked
@given(texts)
def test_bleu_of_a_text_against_itself_is_one(text):
    assert sentence_bleu(text, [text]) == pytest.approx(1.0)


@pytest.mark.parametrize("candidate, references", [([], ["a"]), (["a"], [["b"]]), (["a"], []), ([], [])])
def test_bleu_is_zero_where_nothing_is_shared(candidate, references):
    assert sentence_bleu(candidate, references) == 0.0


@checked
@given(texts, st.lists(texts, min_size=1, max_size=3), st.integers(1, 12))
def test_bleu_is_a_share_and_falls_with_every_foreign_word(text, references, wrong):
    """Replacing words by one that no reference has can only lose matches; the length stays."""
    scores = [sentence_bleu(["?"] * k + text[k:], references) for k in range(min(wrong, len(text)) + 1)]
    assert all(0.0 <= score <= 1.0 + 1e-12 for score in scores)
    assert all(after <= before + 1e-12 for before, after in pairwise(scores))


@checked
@given(texts, texts, st.integers(0, 8))
def test_another_reference_of_the_same_length_never_lowers_bleu(text, other, turn):
    turned = other[turn % len(other) :] + other[: turn % len(other)]
    assert sentence_bleu(text, [other, turned]) >= sentence_bleu(text, [other]) - 1e-12


@checked
@given(
    st.lists(st.sampled_from("abc"), min_size=4, max_size=20),
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=20), min_size=1, max_size=3),
)
def test_bleu_equals_sacrebleu(candidate, references):
    """From four words on every order has n-grams, and both define BLEU alike."""
    method = {"smooth_method": "add-k", "smooth_value": 1}
    metric = sacrebleu.BLEU(tokenize="none", force=True, effective_order=False, **method)
    theirs = metric.sentence_score(" ".join(candidate), [" ".join(r) for r in references]).score / 100
    assert sentence_bleu(candidate, references) == pytest.approx(theirs, abs=1e-9)


def test_self_bleu_of_copies_is_one_and_of_strangers_zero():
    assert self_bleu([list("abcde")] * 5) == pytest.approx(1.0)
    assert self_bleu([list("abcd"), list("efgh"), list("ijkl")]) == 0.0


def test_self_bleu_is_the_mean_against_all_others_when_they_are_few():
    token_lists = [list("abcde"), list("abcxy"), list("xycde")]
    by_hand = [sentence_bleu(t, [o for o in token_lists if o is not t]) for t in token_lists]
    assert self_bleu(token_lists) == pytest.approx(sum(by_hand) / 3)


def test_self_bleu_samples_by_seed_and_needs_two_texts():
    draw = random.Random(1)
    token_lists = [draw.choices("abcdefgh", k=10) for _ in range(30)]
    values = [self_bleu(token_lists, references=2, seed=seed) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]
    with pytest.raises(DifflmError, match="at least two"):
        self_bleu([["a"]])


def test_most_central_is_the_candidate_the_others_agree_with():
    assert most_central([list("vwxyz"), list("abcde"), list("abcdf"), list("abcxe")]) == 1
    assert most_central([["a"]]) == 0
    assert most_central([list("ab"), list("ab")]) == 0
    with pytest.raises(DifflmError, match="no candidate"):
        most_central([])


@checked
@given(st.lists(texts, min_size=2, max_size=5))
def test_most_central_has_the_highest_mean_bleu(candidates):
    def mean_bleu(i: int) -> float:
        others = candidates[:i] + candidates[i + 1 :]
        return sum(sentence_bleu(candidates[i], [other]) for other in others) / len(others)

    best = mean_bleu(most_central(candidates))
    assert best >= max(map(mean_bleu, range(len(candidates)))) - 1e-12


def test_a_copy_may_be_spaced_otherwise_and_is_found_in_one_pass():
    """The corpus writes words apart where a model prints them naturally; case and words still count."""
    made = ["Near Café Sicilia, £30.", "near Café Sicilia, £30.", "Another."]
    training = ["Near Café Sicilia , £ 30 .", "Unused ."]
    assert copied_share(made, iter(training)) == 1 / 3
    assert copied_among(made, iter(training)) == {training[0]}


def test_copied_and_unique_shares_read_runs_of_whitespace_as_one_space():
    made = ["The  Mill is cheap.", "The Mill is cheap. ", "A new text.", "the mill is cheap."]
    assert copied_share(made, iter(["Other.", " The Mill\tis cheap.", "The Mill is cheap."])) == 2 / 4
    assert copied_share(made, set()) == 0.0
    assert unique_share(made) == 3 / 4


def test_unknown_share_counts_tokens_not_texts():
    assert unknown_share([["UNK", "is", "UNK"], ["good"]], "UNK") == 2 / 4
    assert unknown_share([[5, 2], [7, 8, 9]], 2) == 1 / 5


def test_length_histogram_by_hand():
    assert length_histogram([0, 4, 5, 9, 22]) == {0: 2 / 5, 5: 2 / 5, 20: 1 / 5}


def test_length_distance_by_hand():
    """Bins of five: [½, ½] against [0, ½, ½] differ by ½ in two bins; total variation is half the sum."""
    assert length_distance([1, 6], [7, 12]) == 0.5
    assert length_distance([1, 6], [7, 12], bin=100) == 0.0
    assert length_distance([1], [30]) == 1.0


@checked
@given(lengths, lengths, lengths)
def test_length_distance_is_a_distance(a, b, c):
    assert length_distance(a, a * 2) == pytest.approx(0.0, abs=1e-12)
    assert length_distance(a, b) == pytest.approx(length_distance(b, a))
    assert length_distance(a, c) <= length_distance(a, b) + length_distance(b, c) + 1e-12


@pytest.mark.parametrize(
    "measure",
    [
        lambda: copied_share([], ["a"]),
        lambda: unique_share([]),
        lambda: unknown_share([[]], 2),
        lambda: length_distance([], [3]),
    ],
)
def test_a_share_of_nothing_is_refused(measure):
    with pytest.raises(DifflmError, match="no text"):
        measure()


# -- overlap with references --------------------------------------------------------------------------------------

TEXTS = [
    ("the cat sat on the mat", ["the cat is on the mat", "there is a cat on the mat"]),
    ("a dog ran home", ["the dog ran home quickly", "a dog ran to its home"]),
    ("she bought some new candy .", ["donna got some new candy .", "she refilled it at the end of the week ."]),
]
SPLIT = [(text.split(), [reference.split() for reference in references]) for text, references in TEXTS]


def test_bleu_of_a_set_by_hand():
    """4 words, a reference of 5 and one of 3, equally near: the shorter counts. 3 of 4 words, 2 of 3 pairs, 1 of 2
    triples match, and of the second text 1 of 1, 0 of 0 …: sums are taken over texts before anything is divided."""
    first = bleu_counts(["a", "b", "c", "d"], [["a", "b", "c", "x", "y"], ["q", "r", "s"]])
    assert first == [3, 2, 1, 0, 4, 3, 2, 1, 4, 3]
    assert corpus_bleu(first) == 0.0
    second = bleu_counts(["a", "b", "c", "d", "e"], [["a", "b", "c", "d", "e", "f"]])
    assert second == [5, 4, 3, 2, 5, 4, 3, 2, 5, 6]
    both = [a + b for a, b in zip(first, second, strict=True)]
    expected = (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** 0.25  # 9 words written, 9 asked for: no penalty
    assert corpus_bleu(both) == pytest.approx(expected)
    assert corpus_bleu(second) == pytest.approx(math.exp(1 - 6 / 5))


def test_bleu_of_a_set_is_sacrebleu_s():
    counts = [sum(column) for column in zip(*(bleu_counts(*pair) for pair in SPLIT), strict=True)]
    streams = [[references[k] for _, references in TEXTS] for k in range(2)]
    theirs = sacrebleu.corpus_bleu([text for text, _ in TEXTS], streams, tokenize="none", smooth_method="none")
    assert 100 * corpus_bleu(counts) == pytest.approx(theirs.score)
    assert theirs.score > 10


def test_rouge_l_by_hand():
    """Of "a b c d" the first reference has a c d in order (recall 3/5), the second a b (2/2); precision is 3/4 of the
    first, recall 1 of the second: (1 + 1.44)·0.75·1 / (1 + 1.44·0.75)."""
    references = [["a", "x", "c", "y", "d"], ["a", "b"]]
    assert rouge_l(["a", "b", "c", "d"], references) == pytest.approx(2.44 * 0.75 / (1 + 1.44 * 0.75))
    assert rouge_l(["a", "b", "c", "d"], [["a", "b", "c", "d"]]) == pytest.approx(1)
    assert rouge_l(["a", "b"], [["c", "d"]]) == 0
    assert rouge_l([], [["c", "d"]]) == 0


def test_cider_by_hand():
    """Two gaps: "a" stands in the references of both and weighs nothing, b and c weigh log 2 each. "a b" against "a b":
    words (0, 1)·(0, 1) = 1, the pair 1, no triples: 2 of 4 orders are alike. "a c" against "a b": nothing is."""
    assert cider([["a", "b"], ["a", "c"]], [[["a", "b"]], [["a", "c"]]]) == pytest.approx([5, 5])
    assert cider([["a", "c"], ["a", "b"]], [[["a", "b"]], [["a", "c"]]]) == [0, 0]
    # "b b d" against "b d": d and b weigh 1 (in log 2), so 2,1 is clipped to 1,1: (1 + 1)/(√5·√2). The pair "b d" of
    # two pairs: 1/(√2·1). Lengths differ by one.
    one, other = ["b", "b", "d"], [["b", "d"]]
    expected = 10 / 4 * (2 / math.sqrt(10) + 1 / math.sqrt(2)) * math.exp(-1 / 72)
    assert cider([one, ["c"]], [other, [["c"]]])[0] == pytest.approx(expected)


def test_cider_of_several_references_is_their_mean():
    several = cider([["a", "b"], ["c"]], [[["a", "b"], ["x", "y"]], [["c"]]])[0]
    assert several == pytest.approx(2.5)
