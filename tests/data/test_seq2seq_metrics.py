"""Metrics of source-to-target tasks against NLTK, torchmetrics and cases worked by hand; properties; the report."""

import json
import math
from dataclasses import FrozenInstanceError
from io import StringIO
from typing import Any

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from difflm.data.text_metrics import (
    choose_oracle,
    copy_rate,
    corpus_sacrebleu,
    div_4,
    measure_texts,
    pairwise_self_bleu,
    rouge_l_f1,
    sari,
    sentence_bleu_nltk4,
)
from difflm.errors import UsageError
from difflm.evaluation.reports import SEQ2SEQ, Report
from difflm.evaluation.seq2seq import COPY, Outputs, measure_outputs

checked = settings(deadline=None)  # the machine may be busy
texts = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12).map(" ".join)
several = st.lists(texts, min_size=1, max_size=4)

NLTK = [  # NLTK 3.10.3: sentence_bleu([r.split() …], text.split(), smoothing_function=SmoothingFunction().method4)
    ("how can i learn to cook ?", ["what is the best way to learn to cook ?"], 0.267828495913),
    ("why is the sky blue ?", ["what makes the sky look blue ?", "why does the sky look so blue ?"], 0.123005439314),
    ("a dog runs over the grass", ["a dog runs over the green grass", "the dog runs"], 0.673182138242),
    ("the the the the", ["the cat sat on the mat"], 0.044022686634),
    ("a b c d", ["d c b a"], 0.08631400792),
    ("a b c", ["a b c"], 0.575719730127),
    ("a b", ["a b"], 0.221388588625),
    ("a", ["a b c"], 0.135335283237),
    ("nothing shared", ["a b c"], 0.0),
    ("", ["a"], 0.0),
]


# -- one text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, references, value", NLTK, ids=lambda case: str(case)[:20])
def test_sentence_bleu_is_that_of_nltk(text: str, references: list[str], value: float) -> None:
    assert sentence_bleu_nltk4(text, references) == pytest.approx(value, abs=1e-11)


def test_sentence_bleu_by_hand() -> None:
    """ "a b x c" shares 3 of 4 words and 1 of 3 pairs with "a b c d"; the first order without a match counts ln 4 / 10
    of 2 triples, the second ln 4 / 20 of one 4-gram."""
    expected = (3 / 4 * 1 / 3 * math.log(4) / 10 / 2 * math.log(4) / 20) ** 0.25
    assert sentence_bleu_nltk4("a b x c", ["a b c d"]) == pytest.approx(expected)


@checked
@given(texts)
def test_a_text_scores_one_against_itself_unless_it_has_two_or_three_words(text: str) -> None:
    short = len(text.split()) in (2, 3)
    assert (sentence_bleu_nltk4(text, [text]) == pytest.approx(1)) is not short
    assert rouge_l_f1(text, [text]) == pytest.approx(1)


@checked
@given(texts, several, st.randoms(use_true_random=False))
def test_overlap_is_a_share_and_ignores_the_order_of_references(text: str, references: list[str], chance: Any) -> None:
    shuffled = chance.sample(references, len(references))
    for measure in (sentence_bleu_nltk4, rouge_l_f1):
        assert 0 <= measure(text, references) <= 1 + 1e-12
        assert measure(text, references) == pytest.approx(measure(text, shuffled))
        assert measure(text, references * 2) == pytest.approx(measure(text, references))


@pytest.mark.parametrize(
    "text, references, value",
    [  # torchmetrics 1.9.0: rouge_score(text, [references], rouge_keys="rougeL")
        ("How can I learn to cook?", ["What is the best way to learn to cook?"], 0.4),
        ("Why is the sky blue?", ["What makes the sky look blue?", "Why does the sky look so blue?"], 2 / 3),
        ("state-of-the-art", ["the state of art"], 0.75),
        ("", ["a"], 0.0),
        ("a", ["?"], 0.0),
    ],
)
def test_rouge_l_is_that_of_torchmetrics(text: str, references: list[str], value: float) -> None:
    assert rouge_l_f1(text, references) == pytest.approx(value)


def test_rouge_l_keeps_letters_of_any_alphabet() -> None:
    """torchmetrics would read "f r" and find half of it in "f"."""
    assert rouge_l_f1("Für", ["f"]) == 0
    assert rouge_l_f1("FÜR alle", ["für alle."]) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("About 95 you now get in .", 0.2682782411698074),
        ("About 95 species are now agreed .", 0.5889995423074248),
        ("About 95 species are currently agreed .", 0.5071608864657479),
    ],
)
def test_sari_is_that_of_its_authors(text: str, expected: float) -> None:
    """Xu et al. (2016) give these figures with their code."""
    references = [
        "About 95 species are currently known .",
        "About 95 species are now accepted .",
        "95 species are now accepted .",
    ]
    assert sari(text, "About 95 species are currently accepted .", references) == pytest.approx(expected)
    assert sari(references[0], references[0], ["something else"]) == 0  # nothing is right about a copy


def test_dist_1_is_the_mean_over_texts() -> None:
    assert measure_texts(["a b a c", ""], ["x", "y"], [["x"], ["y"]])[0]["dist_1"] == 3 / 8


# -- samples of one source --------------------------------------------------------------------------------------------


def test_self_bleu_counts_each_pair_once() -> None:
    samples = ["a b c d", "a b c d", "e f g h i"]
    assert pairwise_self_bleu(samples) == pytest.approx(1 / 3)
    one_way = [sentence_bleu_nltk4("a b c d e", ["a b c d"]), sentence_bleu_nltk4("a b c d", ["a b c d e"])]
    assert pairwise_self_bleu(["a b c d e", "a b c d"]) == one_way[0] != one_way[1]
    assert pairwise_self_bleu(["a b"]) == 0


def test_div_4_is_over_all_samples() -> None:
    assert div_4(["a b c d e", "a b c d"]) == 2 / 3
    assert div_4(["a b c"] * 3) == 0


@checked
@given(several, st.randoms(use_true_random=False))
def test_variety_is_a_share(samples: list[str], chance: Any) -> None:
    assert 0 <= pairwise_self_bleu(samples) <= 1 + 1e-12
    assert 0 <= div_4(samples) <= 1
    assert div_4(chance.sample(samples, len(samples))) == div_4(samples)
    long = [f"{text} v w x y z" for text in samples]
    assert pairwise_self_bleu([long[0]] * 3) == pytest.approx(1)
    assert div_4(long * 3) == pytest.approx(div_4(long) / 3)


# -- whole sets -------------------------------------------------------------------------------------------------------


def test_sacrebleu_counts_13a_tokens_and_says_so() -> None:
    written, references = (
        ["The cat sat, then left.", "A dog ran."],
        [["The cat sat, then it left."], ["A dog ran home."]],
    )
    value, signature = corpus_sacrebleu(written, references)
    assert value == sacrebleu.corpus_bleu(written, [[many[0] for many in references]]).score
    assert signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"


def test_sacrebleu_takes_several_references_not_equally_many() -> None:
    written = ["a b c d e", "f g h i"]
    assert corpus_sacrebleu(written, [["x"], ["y"]])[0] < 5
    value, signature = corpus_sacrebleu(written, [["x", "a b c d e"], ["f g h i"]])
    assert value == pytest.approx(100) and signature.startswith("nrefs:var|")
    assert corpus_sacrebleu(written, [["x", "a b c d e"], ["f g h i", "y"]])[1].startswith("nrefs:2|")
    assert corpus_sacrebleu(["", ""], [["x"], ["y"]])[0] == 0


def test_copy_rate_ignores_white_space_alone() -> None:
    assert copy_rate(["a  b ", "A b", "a b c", "a b"], ["a b"] * 4) == 2 / 4


@checked
@given(st.lists(st.tuples(texts, texts, several), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_figures_do_not_depend_on_the_order_of_texts(rows: list[Any], chance: Any) -> None:
    figures, _ = measure_texts(*zip(*rows, strict=True))
    assert figures == pytest.approx(measure_texts(*zip(*chance.sample(rows, len(rows)), strict=True))[0])
    assert all(
        0 <= value <= (100 + 1e-9 if name in ("bleu_sacre", "sari") else 1 + 1e-12) for name, value in figures.items()
    )
    sources = [row[1] for row in rows]
    assert measure_texts(sources, sources, [row[2] for row in rows])[0]["copy_rate"] == 1


# -- choices ----------------------------------------------------------------------------------------------------------


@checked
@given(several, several)
def test_no_choice_beats_the_oracle(candidates: list[str], references: list[str]) -> None:
    best = sentence_bleu_nltk4(candidates[choose_oracle(candidates, references)], references)
    assert best == max(sentence_bleu_nltk4(one, references) for one in candidates)


# -- the report -------------------------------------------------------------------------------------------------------

SOURCES = ["a b c d e", "f g h i j"]
REFERENCES = [["a b c d x", "a b c d y"], ["f g h i j"]]
CANDIDATES = [["q r s t u", "a b c d x", "a b c d z"], ["f g h i j", "f g h i k", "f g l m n"]]


MADE: dict[str, Any] = {
    "mbr": {"how": "MBR of 3", "chosen": [1, 0]},
    "oracle": {"how": "oracle of 3", "chosen": [1, 0]},
    "first": {"how": "first of 3"},
}


def measure(**selections: Any) -> Report:
    systems = {name: [Outputs(CANDIDATES, 60, 1.5, selection=how, **MADE[how])] for name, how in selections.items()}
    return measure_outputs(SOURCES, REFERENCES, systems)


def test_the_report_has_a_row_for_each_system_and_the_copy_baseline() -> None:
    report = measure(ours="mbr", best="oracle", beam="first")
    assert [(row.name, row.about["how"]) for row in report.rows] == [
        ("ours", "MBR of 3"),
        ("best", "oracle of 3"),
        ("beam", "first of 3"),
        (COPY, ""),
    ]
    ours, best, beam, copy = (row.figures for row in report.rows)
    assert all(list(figures) == list(SEQ2SEQ) for figures in (ours, best, beam, copy))
    assert ours["bleu_sentence_nltk4"] == pytest.approx((1 + 1) / 2) == best["bleu_sentence_nltk4"]
    assert beam["bleu_sentence_nltk4"] == pytest.approx((0 + 1) / 2)
    assert ours["self_bleu"] == beam["self_bleu"] == pytest.approx(sum(map(pairwise_self_bleu, CANDIDATES)) / 2)
    assert ours["div_4"] == sum(map(div_4, CANDIDATES)) / 2
    assert (ours["copy_rate"], ours["calls"], ours["seconds"]) == (0.5, 60, 1.5)
    assert (copy["copy_rate"], copy["calls"], copy["seconds"], copy["self_bleu"]) == (1, 0, 0, None)
    assert copy["bleu_sentence_nltk4"] == pytest.approx((sentence_bleu_nltk4("a b c d e", REFERENCES[0]) + 1) / 2)
    assert report.about["bleu_sacre_signature"].startswith("nrefs:var|case:mixed")
    with pytest.raises(FrozenInstanceError):
        report.rows = []  # type: ignore[misc]


def test_variety_is_of_three_candidates_however_many_there_are() -> None:
    more = [[*some, "a b c d", "a b c d"] for some in CANDIDATES]
    systems = {"five": [Outputs(more, 100, 1)], "two": [Outputs([some[:2] for some in more], 40, 1)]}
    five, two, _ = (row.figures for row in measure_outputs(SOURCES, REFERENCES, systems).rows)
    assert five["div_4"] == measure(ours="first").rows[0].figures["div_4"]
    assert two["div_4"] is None and two["self_bleu"] is None


def test_the_report_is_printed_as_a_table_and_as_json() -> None:
    report = measure(ours="mbr", best="oracle")
    console = Console(width=200, file=StringIO())
    console.print(report.table())
    shown = console.file.getvalue()
    for part in ("2 sources, 3 references", "MBR of 3", COPY, "sacreBLEU: nrefs:var|", "oracle: chosen by", "first 3"):
        assert part in shown
    assert "BERTScore" not in shown
    first, *_, last = [json.loads(json.dumps(one)) for one in report.objects()]
    assert first["bleu_sentence_nltk4"] == pytest.approx(1) and first["candidates"] == 3
    assert (last["name"], last["copy_rate"], last["bert_score"]) == (COPY, 1, None)
    records = {record["name"]: record for record in report.records("ours")}
    assert records["div_4"]["samples"] == 6 and records["bleu_sacre"]["samples"] == 2
    assert "bleu_sacre_signature" in records["bleu_sacre"] and "bert_score" not in records


# -- bad input --------------------------------------------------------------------------------------------------------

NONE: dict[str, list[Outputs]] = {}


@pytest.mark.parametrize(
    "message, work",
    [
        ("no text", lambda: measure_outputs([], [], NONE)),
        ("no text", lambda: copy_rate([], [])),
        ("2 texts, but sources for 1", lambda: copy_rate(["a", "b"], ["a"])),
        ("1 texts, but references for 2", lambda: corpus_sacrebleu(["a"], [["a"], ["b"]])),
        ("2 texts, but references for 1", lambda: measure_outputs(SOURCES, [["a"]], NONE)),
        ("text 2 has no reference", lambda: measure_outputs(SOURCES, [["a"], []], NONE)),
        ("text 1 has no reference", lambda: corpus_sacrebleu(["a"], [["b", " "]])),
        ("a list of strings", lambda: measure_outputs(SOURCES, ["a", "b"], NONE)),
    ],
)
def test_bad_input_is_refused_in_one_line(message: str, work: Any) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        work()
    assert "\n" not in str(refused.value)
