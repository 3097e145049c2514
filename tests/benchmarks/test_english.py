"""Texts of everyday English: sentences, passages, held-out documents, copies, and gaps that were written for them."""

import gzip
import random
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.assets import english, english_texts
from benchmarks.assets.english import (
    GAPS,
    WINDOW,
    find_fills,
    hash_windows,
    join_sources,
    put_fills,
    read_row,
    share_copied,
)
from benchmarks.assets.english_texts import (
    SIZES,
    Source,
    cut_passages,
    is_prose,
    prepare,
    read_passages,
    split_sentences,
)
from benchmarks.tables.timed import read_results

PARAGRAPH = (
    "Mr. Hill came home at 5.30 p.m. today. “Where is J. Hill?” he asked. Nobody knew! The dog (an old one) slept. "
    "It was late, and in the kitchen, where the light had been left on since the morning, the soup was getting cold."
)


def test_sentences_end_where_they_do() -> None:
    found = split_sentences(PARAGRAPH)
    assert [one.split()[0] for one in found] == ["Mr.", "“Where", "Nobody", "The", "It"]
    assert " ".join(found) == PARAGRAPH


def test_passages_are_the_paragraph_in_pieces() -> None:
    for seed in range(20):
        passages = list(cut_passages(PARAGRAPH, random.Random(seed)))
        assert " ".join(passages) == PARAGRAPH
        sentences = set(split_sentences(PARAGRAPH))
        assert all(len(one) <= max(SIZES) or one in sentences for one in passages)


def test_what_is_no_prose_is_left_out() -> None:
    assert is_prose("She said that it was late.") and is_prose("“Come in!”") is False  # two words
    for text in (
        "CHAPTER ONE AND TWO.",
        "The Night of the Tragedy",
        "Use <b> for bold text.",
        "1 + 2 - 3 / 4 : 5 ; 6.",
    ):
        assert not is_prose(text)
    assert is_prose("The value of innerText is read.") and not is_prose(
        "The value of innerText is read.", technical=True
    )


def test_held_out_documents_are_not_learned(tmp_path: Path, monkeypatch) -> None:
    """Whole documents are held out, each passage is there once, and joined token files know which is whose."""
    nouns = ("dog", "cat", "man", "boy", "girl", "king", "cook", "bird")
    pairs = [(n, a, b) for n in range(2, 8) for a in nouns for b in nouns]
    for name, verb in (("one", "saw"), ("two", "met")):
        with gzip.open(tmp_path / f"{name}.txt.gz", "wt", encoding="utf-8") as file:
            texts = (f"The {a} {verb} the {b} at {n} in the town.\nThey were there again." for n, a, b in pairs)
            file.write("\n\n".join(texts))
    sources = {name: Source(f"{name}.txt.gz", "CC0 1.0", "", "", name, held_out=10) for name in ("one", "two")}
    for module in (english_texts, english):
        monkeypatch.setattr(module, "SOURCES", sources)
    seen: set[int] = set()
    found = [read_passages(name, tmp_path, seen) for name in sources]
    assert [len(training) + len(held) for training, held in found] == [len(pairs) + 1, len(pairs)]  # what all say, once
    assert all(not {*training} & {*held} and 20 < len(held) < 60 for training, held in found)
    prepare(tmp_path, tmp_path / "tokens", vocabulary=300)
    whole, numbers = join_sources(tmp_path / "tokens" / "train")
    assert [len(own) for own in numbers.values()] == [len(training) for training, _ in found]
    tokenizer = english_texts.Bpe.load(tmp_path / "tokens" / "tokenizer.json")
    decoded = [tokenizer.decode(read_row(whole, number)) for number in numbers["two"]]
    assert sorted(decoded) == sorted(found[1][0])


def test_copies_are_found() -> None:
    ids = np.random.default_rng(0).integers(0, 9000, 5000)
    known = np.unique(hash_windows(ids))
    assert share_copied(known, [ids[100:150].tolist(), [1, 2, 3]]) == 1.0
    other = np.random.default_rng(1).integers(0, 9000, 50)
    half = [*ids[7 : 7 + WINDOW], *other]
    assert share_copied(known, [half]) == 1 / (len(half) - WINDOW + 1)


def test_a_hundred_sentences_have_gaps() -> None:
    rows = read_results(GAPS)
    assert Counter(row["domain"] for row in rows) == dict.fromkeys(
        ("news", "letters", "recipes", "reviews", "stories"), 20
    )
    for row in rows:
        assert 1 <= len(row["words"]) <= 3
        assert find_fills(row["text"], put_fills(row["text"], row["words"])) == row["words"]
