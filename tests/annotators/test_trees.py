"""Trees: brackets there and back, spans there and back, agreement by hand, treebanks as the archives hold them."""

import io
import tarfile
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.assets.treebanks import in_our_words, read_gum, read_penn_sample, split_documents
from difflm.annotators.trees import (
    TEXT,
    Agreement,
    Span,
    Tree,
    agreement,
    agreements,
    clean,
    join_sentences,
    parse_tree,
    phrases,
    read_brackets,
    split_sentences,
    tree_of,
)
from difflm.errors import UsageError

LABELS = st.sampled_from(["S", "NP", "VP", "PP"])
WORDS = st.sampled_from(["the", "Mill", "£", "(", ")", ".", "*", "NN", "\n"])
TREES = st.recursive(
    st.builds(Tree, LABELS, st.lists(WORDS, min_size=1, max_size=3).map(tuple)),
    lambda inner: st.builds(Tree, LABELS, st.lists(inner | WORDS, min_size=1, max_size=3).map(tuple)),
    max_leaves=8,
)
PENN = """
( (S (NP-SBJ-1 (DT The) (NN pub) (-NONE- *T*-1))
     (VP (VBZ is) (RB n't) (ADJP-PRD (JJ family-friendly)) (S (NP-SBJ (-NONE- *-1))))
     (. .)) )
"""


@given(TREES)
def test_brackets_are_read_back_as_written(tree):
    assert parse_tree(str(tree)) == tree


@given(TREES)
def test_spans_and_words_make_the_tree_again(tree):
    assert tree_of(tree.words(), tree.spans()) == tree


@given(TREES)
def test_joined_phrases_are_those_of_the_tree(tree):
    """Joining labels over the same words neither adds nor loses a phrase."""
    joined = phrases(tree)
    assert tree_of(tree.words(), joined) == tree
    assert len({(first, last) for first, last, _ in joined}) == len(joined)


def test_spans_count_both_ends_from_nought():
    tree = parse_tree("(S (NP * *) (VP * (PP * *)))")
    assert tree.spans() == [Span(0, 4, "S"), Span(0, 1, "NP"), Span(2, 4, "VP"), Span(3, 4, "PP")]
    assert tree_of(["It", "is"], [Span(0, 1, "S::VP")]) == Tree("S", (Tree("VP", ("It", "is")),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(S (NP *)", "closing bracket is missing"),
        ("(S (NP *", "2 closing brackets are missing"),
        ("(S (NP *)))", "unexpected closing bracket"),
        ("S (NP *)", "outside"),
        ("", "not 0"),
        ("(S *) (S *)", "not 2"),
        ("(S (NP))", "no words"),
        ("((NP *) (VP *))", "no label"),
        ("(S (NP *) (* *))", "no label"),
        ("(S " * 300 + "*" + ")" * 300, "deeper"),
    ],
)
def test_bad_brackets_are_refused_with_the_reason(text, said):
    with pytest.raises(UsageError, match=said):
        parse_tree(text)


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([Span(0, 1, "NP")], "no phrase covers"),
        ([], "no phrase covers"),
        ([Span(0, 2, "S"), Span(0, 1, "NP"), Span(1, 2, "VP")], "cross"),
        ([Span(0, 2, "S"), Span(2, 3, "NP")], "not a phrase within 3 words"),
        ([Span(0, 2, "S"), Span(2, 1, "NP")], "not a phrase within 3 words"),
    ],
)
def test_spans_that_are_no_tree_are_refused(spans, said):
    with pytest.raises(UsageError, match=said):
        tree_of(["a", "b", "c"], spans)


def test_cleaning_leaves_phrases_and_words():
    (raw,) = read_brackets(PENN)
    assert str(clean(raw)) == "(S (NP The pub) (VP is n't (ADJP family-friendly)) .)"
    assert clean(parse_raw("(ROOT (-NONE- *))")) is None
    assert clean(parse_raw("(TOP (NP=2 (NN a)) (PRT|ADVP (RB b)))")) == parse_tree("(TEXT (NP a) (PRT b))")


def parse_raw(text):
    (tree,) = read_brackets(text)
    return tree


def test_words_of_a_treebank_become_ours():
    assert str(in_our_words(clean(parse_raw(PENN)))) == "(S (NP The pub) (VP isn ' t (ADJP family - friendly)) .)"
    assert in_our_words(parse_tree("(S (NP I) (VP 've been))")).words() == ["I", "'", "ve", "been"]
    assert in_our_words(Tree("S", (Tree("NP", ("ai",)), "n't", "-", "10-12"))).words() == [
        "ai",
        "n",
        "'",
        "t",
        "-",
        "10",
        "-",
        "12",
    ]
    assert in_our_words(Tree("X", ("``", "a", "''"))).words() == ['"', "a", '"']


def test_agreement_counts_phrases_as_multisets():
    gold = parse_tree("(S (NP (NP a) b) (VP c d))")  # S04 NP01 NP00 VP23
    found = parse_tree("(S (NP (NP a b)) (VP c d))")  # S04 NP01 NP01 VP23
    counts = agreement(gold, found)
    assert (counts.matched, counts.gold, counts.found, counts.exact) == (3, 4, 4, 0)
    assert counts.f1 == pytest.approx(0.75)
    total = agreements([gold, gold], [gold, found])
    assert total == Agreement(matched=7, gold=8, found=8, exact=1, trees=2)


def test_too_many_phrases_lower_f1():
    counts = agreement(parse_tree("(S a b c)"), parse_tree("(S (NP a b) c)"))
    assert (counts.matched, counts.gold, counts.found, counts.f1) == (1, 1, 2, pytest.approx(2 / 3))


@given(TREES, TREES)
def test_agreement_is_symmetric_and_full_for_a_tree_itself(a, b):
    assert agreement(a, b).f1 == agreement(b, a).f1
    assert (agreement(a, b).gold, agreement(a, b).found) == (agreement(b, a).found, agreement(b, a).gold)
    assert agreement(a, a).f1 == 1 and agreement(a, a).exact == 1
    assert agreement(a, b).exact == (sorted(a.spans()) == sorted(b.spans()))


def test_the_node_over_sentences_does_not_count():
    a, b = parse_tree("(S (NP a) .)"), parse_tree("(FRAG b .)")
    text = join_sentences([a, b])
    assert text.label == TEXT and agreement(text, text).gold == 3
    assert join_sentences([a]) == a


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It is cheap .", ["It is cheap ."]),
        ("It is cheap . Near St. Ives", ["It is cheap .", "Near St. Ives"]),
        ("Really ! ? ) Yes .", ["Really ! ? )", "Yes ."]),
        (". a", [".", "a"]),
        ("", []),
    ],
)
def test_sentences_end_with_their_marks(text, sentences):
    assert [" ".join(words) for words in split_sentences(text.split())] == sentences


@given(st.lists(st.sampled_from(["a", "b", ".", "!", "?", ")", ","])))
def test_no_word_is_lost_between_sentences(words):
    cut = split_sentences(words)
    assert [word for sentence in cut for word in sentence] == words and all(cut)


@pytest.fixture
def gum(tmp_path):
    files = {
        "GUM_news_one": "(ROOT (S (NP-SBJ (NNP Aromi)) (VP (VBZ is) (ADJP-PRD (JJ cheap))) (. .)))",
        "GUM_news_two": "(ROOT (NP (NN news)))\n\n(ROOT (NN word))",
        "GUM_fiction_three": "(ROOT (NP (NN story)))",
        "GUM_reddit_four": "(ROOT (NP (NN ____) (NN _)))",
    }
    with tarfile.open(tmp_path / "gum.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"gum_const/{name}.ptb")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return tmp_path / "gum.tar.gz"


def test_gum_is_read_without_blanked_words(gum):
    assert {name: list(map(str, trees)) for name, trees in read_gum(gum).items()} == {
        "GUM_news_one": ["(S (NP Aromi) (VP is (ADJP cheap)) .)"],
        "GUM_news_two": ["(NP news)"],
        "GUM_fiction_three": ["(NP story)"],
    }


def test_whole_documents_are_held_out(gum):
    kept, held = split_documents(read_gum(gum), 0.34, seed=1)
    assert (kept, held) == split_documents(read_gum(gum), 0.34, seed=1)
    assert len(kept) == 2 and len(held) == 1


def test_the_penn_sample_is_read_from_its_zip(tmp_path):
    path = tmp_path / "sample.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("treebank/combined/wsj_0001.mrg", PENN)
        archive.writestr("treebank/raw/wsj_0001", "The pub")
    assert [tree.words() for tree in read_penn_sample(path)["wsj_0001"]] == [
        ["The", "pub", "isn", "'", "t", "family", "-", "friendly", "."]
    ]
