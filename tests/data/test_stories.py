"""ROCStories and aNLG as people have them on their disks, and the forms in which models learn them."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from difflm.data.corpora import KNOWN, anlg_path, corpus, counted_texts
from difflm.data.stories import (
    ANSWER,
    BLANK,
    Gap,
    asked,
    read_anlg,
    read_stories,
    rearranged,
    sentences,
    story_gaps,
    with_excerpts,
)
from difflm.data.tokenizers import Words
from difflm.data.words import split_words
from difflm.errors import DifflmError, UsageError

STORY = ["Ann ran.", "She fell!", "Was it bad?", '"No," she said.', "Ann got up."]
TOLD = " ".join(STORY)


def write_roc(root: Path, stories: list[str], split: str = "train") -> Path:
    path = root / "roc" / f"{split}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps([story]) + "\n" for story in stories), encoding="utf-8")
    return path


# -- sentences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TOLD, STORY),
        ("It cost $5.50 at St. Ives.  50 people came.", ["It cost $5.50 at St.", "Ives.", "50 people came."]),
        ('He said "Go." Then he went.', ['He said "Go."', "Then he went."]),
        ("one without an end", ["one without an end"]),
        ("Wait... what is it? that one.", ["Wait... what is it? that one."]),
    ],
)
def test_sentences_end_before_a_capital(text, found):
    """An abbreviation before a name is cut, too: of 18,172 stories 40 have another number of sentences than five."""
    assert sentences(text) == found


words = st.text("abcdefgh", min_size=1, max_size=5)
stories = st.lists(
    st.lists(words, min_size=1, max_size=5).map(lambda ws: " ".join(ws).capitalize() + "."), min_size=5, max_size=5
)


@given(stories)
def test_a_rearranged_story_can_be_put_back(story):
    texts = list(rearranged(iter([" ".join(story)])))
    assert len(texts) == 6
    back = []
    for text in texts:
        sides, middle = text.split(f" {ANSWER} ")
        left, right = sides.split(f" {BLANK} ")
        assert text.startswith(asked(left, right))
        back.append(f"{left} {middle} {right}")
    assert back[::2] == [" ".join(story)] * 3
    assert back[1::2] == [" ".join((story[0], story[k], story[4])) for k in (1, 2, 3)]
    assert list(with_excerpts(iter([" ".join(story)]))) == [" ".join(story), *back[1::2]]


def test_the_marks_are_words():
    assert split_words(asked("It was.", "He left.")) == ["It", "was", ".", BLANK, "He", "left", ".", ANSWER]


def test_a_story_of_other_than_five_sentences_has_no_gap():
    short = "Ann ran. She fell."
    assert list(with_excerpts(iter([short]))) == [short]
    assert list(rearranged(iter([short]))) == []
    assert list(story_gaps(iter([short]), 0)) == []


def test_gaps_depend_on_seed_and_story_alone():
    many = [f"{name} ran. She fell! Was it bad? It was. She got up." for name in ("Ann", "Bea", "Cat", "Dora", "Eve")]
    gaps = list(story_gaps(iter(many), 0))
    assert gaps[1:] == list(story_gaps(iter(many[1:]), 0))
    for story, gap in zip(many, gaps, strict=True):
        assert f"{gap.left} {gap.references[0]} {gap.right}" == story
    chosen = {gap.references[0] for seed in range(9) for gap in story_gaps(iter(many[:1]), seed)}
    assert chosen == {"She fell!", "Was it bad?", "It was."}


# -- files ------------------------------------------------------------------------------------------------------------


def test_stories_are_found_under_their_names(tmp_path):
    path = write_roc(tmp_path, [TOLD, f" {TOLD}  "])
    assert KNOWN["roc"].paths(tmp_path, "train") == [path]
    assert list(corpus("roc", tmp_path)) == [TOLD, TOLD]
    (tmp_path / "ROCstory").mkdir()
    released = tmp_path / "ROCstory" / "roc_valid.json.gz"
    released.write_bytes(gzip.compress(json.dumps([TOLD]).encode()))
    assert list(corpus("roc", tmp_path, "valid")) == [TOLD]
    assert len(list(corpus("roc-excerpts", tmp_path))) == 8
    assert len(list(corpus("roc-rearranged", tmp_path))) == 12


def test_the_authors_table_is_read(tmp_path):
    (tmp_path / "roc").mkdir()
    names = ",".join(f"sentence{k}" for k in range(1, 6))
    row = ",".join('"' + sentence.replace('"', '""') + '"' for sentence in STORY)
    (tmp_path / "roc" / "train.csv").write_text(f"storyid,storytitle,{names}\n1,A fall,{row}\n", encoding="utf-8")
    assert list(corpus("roc", tmp_path)) == [TOLD]


def test_a_vocabulary_counts_each_story_once(tmp_path):
    """A story is told in six rearranged forms; its words are as rare as before, and the marks are among them."""
    write_roc(tmp_path, [TOLD, "Ann ran. Ann ran. Ann ran. Ann ran. Ann ran."])
    plain = Words.build(counted_texts("roc-excerpts", tmp_path), 1)
    marked = Words.build(counted_texts("roc-rearranged", tmp_path), 1)
    assert "fell" not in plain.words
    assert set(marked.words) - set(plain.words) == {BLANK, ANSWER}


@pytest.mark.parametrize("line", ["no json", '{"a": 1}', '["one", "two"]', "[3]", '[" "]'])
def test_a_line_that_is_no_story_is_named(tmp_path, line):
    path = write_roc(tmp_path, [TOLD])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DifflmError, match=r"line 2 of .* is not a story"):
        list(read_stories(path))


def test_missing_stories_say_where_they_belong(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"no ROCStories in .*roc/valid\.json"):
        KNOWN["roc"].paths(tmp_path, "valid")
    monkeypatch.delenv("DIFFLM_DATA", raising=False)
    with pytest.raises(UsageError, match="where is aNLG"):
        anlg_path(None)


def test_both_layouts_of_anlg_hold_the_same(tmp_path):
    """One object with all answers, or a line for each pair of answers and which one is the better."""
    (tmp_path / "anlg").mkdir()
    whole, lines = tmp_path / "anlg" / "dev.json", tmp_path / "anlg" / "dev.jsonl"
    pair = {"obs1": "It rained.", "obs2": "Ann was wet."}
    whole.write_text(json.dumps({"a-1": {**pair, "gold_labels": ["Ann had no hat.", "Ann  ran."]}}))
    rows = [
        {**pair, "hyp1": "Ann had no hat.", "hyp2": "Ann stayed in.", "label": "1"},
        {**pair, "hyp1": "Ann flew.", "hyp2": "Ann ran.", "label": 2},
        {**pair, "hyp1": "Ann ran.", "hyp2": "Ann sat.", "label": 1},
    ]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_anlg(whole) == read_anlg(lines) == [Gap(*pair.values(), ("Ann had no hat.", "Ann ran."))]
    assert anlg_path(tmp_path) == whole


@pytest.mark.parametrize(
    "content",
    ["[]", "{", "{}", '{"a": {"obs1": "x", "obs2": "y"}}', '{"a": {"obs1": 1, "obs2": "y", "gold_labels": ["z"]}}'],
)
def test_a_damaged_anlg_is_refused(tmp_path, content):
    path = tmp_path / "dev.json"
    path.write_text(content)
    with pytest.raises(DifflmError):
        read_anlg(path)
