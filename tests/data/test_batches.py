"""Ids on disk and batches out of them: nothing lost, nothing twice, the same after a restart."""

import errno
import itertools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difflm.data.batches import Batch, Batches, Permutation, held_out, prefetch, split
from difflm.data.texts import Example
from difflm.data.tokenfile import Limits, TokenFile, select_texts, source_fingerprint
from difflm.data.tokenizers import PAD, SPECIALS, Words
from difflm.errors import DifflmError, UsageError
from tests.support.tiny import change_json

words = Words([*SPECIALS, *"abcdefgh"])


def token_file(texts: list[list[int]]) -> TokenFile:
    """In memory, for tests about order: text i holds the id 4 + i."""
    lengths = [len(text) for text in texts]
    offsets = np.array([0, *itertools.accumulate(lengths)], np.uint64)
    ids = np.array([i for text in texts for i in text], np.uint16)
    return TokenFile(ids, offsets)


def build(directory: Path, texts: Iterable[str], tokenizer: Words = words, origin: Any = None) -> TokenFile:
    """The token file of texts without sources."""
    return TokenFile.build(directory, map(Example, texts), tokenizer, origin or {})


def numbered(n: int) -> TokenFile:
    return token_file([[4 + i] * (1 + i % 7) for i in range(n)])


def texts_of(batch: Batch) -> list[int]:
    return [int(i) - 4 for i in batch.ids[:, 0]]


@given(n=st.integers(1, 5000), seed=st.integers(-(2**63), 2**64))
def test_a_permutation_is_a_bijection(n: int, seed: int) -> None:
    shuffled = Permutation(n, seed)(np.arange(n))
    assert np.array_equal(np.sort(shuffled), np.arange(n))


@given(n=st.integers(10**9, 2**40), seed=st.integers(0, 2**32), some=st.lists(st.integers(0, 10**9 - 1), unique=True))
def test_a_permutation_of_more_than_memory_has_no_collisions(n: int, seed: int, some: list[int]) -> None:
    shuffled = Permutation(n, seed)(np.array(some, np.int64))
    assert len(set(shuffled.tolist())) == len(some)
    assert np.all((shuffled >= 0) & (shuffled < n))


@pytest.mark.long
def test_permutations_of_four_are_about_equally_likely() -> None:
    draws = 1200
    seen = Counter(tuple(Permutation(4, seed)(np.arange(4)).tolist()) for seed in range(draws))
    chi_squared = sum((count - draws / 24) ** 2 / (draws / 24) for count in seen.values())
    assert len(seen) == 24
    assert chi_squared < 62  # 23 degrees of freedom: one in 20,000


@pytest.mark.long
@settings(deadline=None)
@given(n=st.integers(1, 400), batch_size=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_each_text_comes_once_an_epoch(n: int, batch_size: int, seed: int) -> None:
    """Epochs and groups begin together after lcm(n, group) texts; up to there every text came equally often."""
    batches = Batches(numbered(n), batch_size, seed, (7,))
    group = batch_size * min(32, max(1, n // batch_size))
    whole = math.lcm(n, group)
    steps = min(whole, 5 * group + n) // batch_size
    seen = Counter(itertools.chain.from_iterable(texts_of(batches.batch(step)) for step in range(steps)))
    counts = [seen[i] for i in range(n)]
    if steps * batch_size == whole:
        assert set(counts) == {whole // n}
    assert max(counts) - min(counts) <= 2  # a group holds no more than two epochs


def test_an_epoch_that_fits_its_groups_is_exact() -> None:
    batches = Batches(numbered(640), 10, 5, (7,))
    epochs = [[i for step in range(e * 64, e * 64 + 64) for i in texts_of(batches.batch(step))] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(640))
    assert epochs[0] != epochs[1]


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(steps=st.lists(st.integers(0, 500), min_size=1, max_size=10), seed=st.integers(0, 99))
def test_a_batch_depends_on_its_step_alone(steps: list[int], seed: int) -> None:
    """In any order, after any other, and from a fresh object: resuming needs no state."""
    tokens = numbered(333)
    used = Batches(tokens, 8, seed, (4, 7))
    for step in steps:
        here, fresh = used.batch(step), Batches(tokens, 8, seed, (4, 7)).batch(step)
        assert np.array_equal(here.ids, fresh.ids)
        assert np.array_equal(here.lengths, fresh.lengths)


def test_threads_may_ask_for_batches_of_different_groups() -> None:
    tokens = numbered(333)
    used, alone = Batches(tokens, 8, 0, (7,)), Batches(tokens, 8, 0, (7,))
    steps = [step for k in range(100) for step in (k % 20, 400 + k % 20)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda step: texts_of(used.batch(step)), steps))
    assert found == [texts_of(alone.batch(step)) for step in steps]


def test_another_seed_gives_another_order() -> None:
    first, second = (Batches(numbered(333), 8, seed, (7,)) for seed in (0, 1))
    assert any(texts_of(first.batch(step)) != texts_of(second.batch(step)) for step in range(5))


def test_batches_are_as_narrow_as_their_longest_text() -> None:
    rng = np.random.default_rng(0)
    tokens = token_file([[4] * int(n) for n in rng.integers(1, 65, 4096)])
    batches = Batches(tokens, 64, 0, (8, 16, 24, 32, 40, 48, 56, 64))
    padding = total = 0
    for step in range(64):
        batch = batches.batch(step)
        width = batch.ids.shape[1]
        assert width - 8 < batch.lengths.max() <= width
        assert np.array_equal((batch.ids != PAD).sum(1), batch.lengths)
        padding, total = padding + int((batch.ids == PAD).sum()), total + batch.ids.size
    assert padding / total < 0.15  # half of a step of 8 in 32 on average; unsorted it is one half


def test_texts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="7 tokens do not fit in 4"):
        Batches(numbered(20), 2, 0, (2, 4))


@given(n=st.integers(2, 2000), seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_a_held_out_text_is_held_out_once(n: int, seed: int, share: float) -> None:
    numbers = held_out(n, seed, share, at_least=1, at_most=500)
    assert np.all(np.diff(numbers) > 0) and numbers[0] >= 0 and numbers[-1] < n
    assert 1 <= len(numbers) <= min(500, n - 1)


def kept_of(n: int, long: set[int]) -> np.ndarray:
    """The numbers of n texts but those that are too long."""
    return np.array([k for k in range(n) if k not in long])


@settings(deadline=None)
@given(n=st.integers(12, 900), seed=st.integers(0, 99), data=st.data())
def test_a_split_is_whole_and_does_not_move_with_what_is_left_out(n: int, seed: int, data: st.DataObject) -> None:
    long = data.draw(st.sets(st.integers(0, n - 1), max_size=10))
    train, valid = (set(subset.tolist()) for subset in split(np.arange(n), n, seed))
    assert train | valid == set(range(n)) and not train & valid
    assert [set(subset.tolist()) for subset in split(kept_of(n, long), n, seed)] == [train - long, valid - long]


def test_batches_of_a_split_stay_in_it() -> None:
    train, _ = split(kept_of(2000, {5, 77}), 2000, 3)
    batches = Batches(numbered(2000), 10, 0, (7,), indices=train)
    seen = Counter(i for step in range(256) for i in texts_of(batches.batch(step)))
    assert set(seen) == set(train.tolist()) and not {5, 77} & set(seen)


def test_one_text_cannot_be_split() -> None:
    with pytest.raises(UsageError, match="at least two"):
        split(np.arange(1), 1, 0)
    only = set(held_out(8, 0).tolist())
    with pytest.raises(UsageError, match="1 text fits, and it is held out"):
        split(np.array(sorted(only)), 8, 0)


def test_prefetching_gives_the_same_batches_and_ends_its_thread() -> None:
    batches = Batches(numbered(100), 8, 0, (7,))
    stream = prefetch(Batches(numbered(100), 8, 0, (7,)), start_step=5, depth=2)
    for expected in range(5, 30):
        assert np.array_equal(next(stream).ids, batches.batch(expected).ids)
    stream.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_an_error_while_prefetching_reaches_the_reader() -> None:
    class Broken(Batches):
        def batch(self, step: int) -> Batch:
            if step == 3:
                raise DifflmError("the disk went away")
            return super().batch(step)

    stream = prefetch(Broken(numbered(100), 8, 0, (7,)), 0)
    with pytest.raises(DifflmError, match="went away"):
        list(stream)


some_texts = st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=9).map(" ".join), min_size=1)


@settings(deadline=None, max_examples=40)
@given(texts=some_texts, data=st.data())
def test_tokens_come_back_from_disk(texts: list[str], data: st.DataObject, tmp_path_factory: Any) -> None:
    directory = tmp_path_factory.mktemp("tokens") / "ids"
    tokens = build(directory, iter(texts))
    chosen = np.array(data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1)))
    ids, lengths = tokens.rows(chosen, 12)
    assert ids.shape == (len(chosen), 12)
    for row, length, i in zip(ids, lengths, chosen, strict=True):
        assert words.decode(row[:length]) == texts[i]
        assert np.all(row[length:] == PAD)
        assert tokens.lengths[i] == length


def test_many_texts_are_written_in_pieces(tmp_path: Path) -> None:
    """More texts than one piece of the writer holds."""
    texts = [" ".join("abcdefgh"[: 1 + i % 8]) for i in range(5000)]
    tokens = build(tmp_path / "ids", iter(texts))
    assert len(tokens) == 5000
    assert select_texts(tokens, Limits(7)).kept.tolist() == [i for i in range(5000) if i % 8 < 7]
    ids, lengths = tokens.rows(np.arange(5000), 8)
    assert [words.decode(row[:n]) for row, n in zip(ids, lengths, strict=True)] == texts


def test_texts_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    tokens = build(tmp_path / "ids", ["a b c", "a b", "c"])
    selection = select_texts(tokens, Limits(2))
    assert (selection.kept.tolist(), selection.too_long, selection.repeated) == ([1, 2], 1, 0)
    with pytest.raises(ValueError, match="does not fit"):
        tokens.rows(np.array([0]), 1)
    with pytest.raises(DifflmError, match="all 2 texts have more than 1 tokens"):
        select_texts(build(tmp_path / "other", ["a b", "b c"]), Limits(1))


@settings(deadline=None, max_examples=40)
@given(texts=some_texts.filter(lambda texts: min(len(t.split()) for t in texts) <= 4), seed=st.integers(0, 99))
def test_each_text_is_there_once_where_that_is_asked_for(texts: list[str], seed: int, tmp_path_factory: Any) -> None:
    """The first of equal ones stays; one that is held out is not learned from under another number."""
    tokens = build(tmp_path_factory.mktemp("tokens") / "ids", iter(texts))
    selection = select_texts(tokens, Limits(4), distinct=True)
    short = [text for text in texts if len(text.split()) <= 4]
    ids, lengths = tokens.rows(selection.kept, 4)
    assert [words.decode(row[:n]) for row, n in zip(ids, lengths, strict=True)] == list(dict.fromkeys(short))
    assert selection.kept.tolist() == [texts.index(text) for text in dict.fromkeys(short)]
    assert (len(tokens), selection.too_long) == (len(texts), len(texts) - len(short))
    assert selection.repeated == len(short) - len(set(short))
    if not set(selection.kept.tolist()) <= set(held_out(len(texts), seed).tolist() if len(texts) > 1 else [0]):
        kept, held = split(selection.kept, len(tokens), seed)
        assert not {texts[i] for i in kept} & {texts[i] for i in held}


def test_equal_texts_are_found_in_different_pieces_of_the_writer(tmp_path: Path) -> None:
    texts = [" ".join("abcdefgh"[: 1 + i % 8]) for i in range(5000)]
    selection = select_texts(build(tmp_path / "ids", iter(texts)), Limits(8), distinct=True)
    assert (selection.kept.tolist(), selection.repeated) == ([*range(8)], 4992)


some_pairs = st.lists(
    st.tuples(*[st.lists(st.sampled_from("abc"), min_size=1, max_size=6).map(" ".join)] * 2), min_size=1
)


@settings(deadline=None, max_examples=40)
@given(pairs=some_pairs, distinct=st.booleans())
def test_sources_stay_with_their_texts(pairs: list[tuple[str, str]], distinct: bool, tmp_path_factory: Any) -> None:
    """A pair is kept if both of its texts fit, and is repeated if both occurred together before."""
    fits = [pair for pair in pairs if len(pair[0].split()) <= 4 and len(pair[1].split()) <= 5]
    kept, directory = list(dict.fromkeys(fits)) if distinct else fits, tmp_path_factory.mktemp("tokens") / "ids"
    tokens = TokenFile.build(directory, [Example(target, source) for source, target in pairs], words, {})
    assert tokens.sources is not None
    assert len({tokens.key(i) for i in range(len(tokens))}) == len(set(pairs))
    if not kept:
        with pytest.raises(DifflmError, match=r"more than|none of"):
            select_texts(tokens, Limits(5, 4), distinct)
        return
    selection = select_texts(tokens, Limits(5, 4), distinct)
    columns = (tokens.sources.rows(selection.kept, 4), tokens.rows(selection.kept, 5))
    assert list(zip(*([words.decode(row) for row in ids] for ids, _ in columns), strict=True)) == kept
    assert (selection.too_long, selection.repeated) == (len(pairs) - len(fits), len(fits) - len(kept))
    targets_fit = sum(len(target.split()) <= 5 for _, target in pairs)
    assert selection.source_too_long == targets_fit - len(fits)


def test_batches_of_pairs_are_narrow_on_both_sides(tmp_path: Path) -> None:
    """Source and text have widths of their own, the smallest that hold them; each text keeps its source."""
    rng = np.random.default_rng(0)
    pairs = [(" ".join(rng.choice(list("abcdefgh"), rng.integers(1, 33))), i) for i in range(2048)]
    numbers = Words([*SPECIALS, *"abcdefgh", *(f"n{i}" for i in range(2048))])
    examples = [Example(" ".join([f"n{i}"] * (1 + i % 16)), source) for source, i in pairs]
    tokens = TokenFile.build(tmp_path / "ids", examples, numbers, {})
    batches = Batches(tokens, 16, 0, (8, 16), source_widths=(8, 16, 24, 32))
    seen, keys, padding, total = Counter(), set(), 0, 0
    for step in range(128):
        batch = batches.batch(step)
        seen.update(i - 12 for i in batch.ids[:, 0].tolist())
        keys.add(batch.key)
        for width, lengths in ((batch.ids.shape[1], batch.lengths), (batch.source.shape[1], batch.source_lengths)):
            assert width - 8 < lengths.max() <= width
        for row, first, length in zip(batch.source, batch.ids[:, 0] - 12, batch.source_lengths, strict=True):
            assert numbers.decode(row[:length]) == numbers.decode(numbers.encode_batch([pairs[first][0]])[0])
        padding, total = padding + int((batch.source == PAD).sum()), total + batch.source.size
    assert seen == Counter(range(2048)) and len(keys) == 8  # shapes: two widths of texts times four of sources
    assert padding / total < 0.25


def test_large_vocabularies_get_wider_ids(tmp_path: Path) -> None:
    large = Words([*SPECIALS, *(f"w{i}" for i in range(70_000))])
    tokens = build(tmp_path / "ids", ["w69999 w0"], large)
    assert tokens.meta["dtype"] == "<u4"
    assert tokens.rows(np.array([0]), 2)[0].tolist() == [[70_003, 4]]


def test_a_build_that_fails_leaves_the_old_tokens(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield from ["c"] * 2000
        raise DifflmError("line 2001 is not UTF-8")

    build(tmp_path / "ids", ["a b"])
    with pytest.raises(DifflmError, match="UTF-8"):
        build(tmp_path / "ids", broken())
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]
    assert len(TokenFile.open(tmp_path / "ids")) == 1
    assert len(build(tmp_path / "ids", ["a", "b", "c"])) == 3


@pytest.mark.parametrize(("code", "message"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "no permission")])
def test_what_the_disk_refuses_is_explained(
    code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(DifflmError, match=message):
        build(tmp_path / "ids", ["a"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["ids.bin", "offsets.bin"])
def test_cut_files_are_named(name: str, tmp_path: Path) -> None:
    build(tmp_path / "ids", ["a b", "c d e", "a b c d e f"])
    path = tmp_path / "ids" / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DifflmError, match="damaged"):
        TokenFile.open(tmp_path / "ids")
    (tmp_path / "ids" / "meta.json").write_text(json.dumps({"count": 3}))
    with pytest.raises(DifflmError, match="damaged"):
        TokenFile.open(tmp_path / "ids")


def test_tokens_know_what_they_were_made_from(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("a b\n")
    fingerprint = source_fingerprint(source)
    tokens = build(tmp_path / "ids", ["a b"], words, fingerprint)
    assert tokens.complete and tokens.matches(words, source_fingerprint(source))
    assert not tokens.matches(Words([*words.words, "i"]), fingerprint)
    source.write_text("a c\n")
    assert not tokens.matches(words, source_fingerprint(source))


def test_tokens_of_an_earlier_version_that_left_texts_out_are_not_complete(tmp_path: Path) -> None:
    build(tmp_path / "ids", ["a b"])
    for counts, complete in (({"too_long": 0, "repeated": 0}, True), ({"too_long": 1, "repeated": 0}, False)):
        change_json(tmp_path / "ids" / "meta.json", **counts)
        assert TokenFile.open(tmp_path / "ids").complete == complete


def test_batches_keep_up_with_training(tmp_path: Path) -> None:
    """512 texts of up to 64 tokens, at least 200 times a second of this thread's own time, which others' work on the
    same cores does not lengthen."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 65, 60_000)
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.uint64)
    ids = rng.integers(4, 800, lengths.sum()).astype(np.uint16)
    batches = Batches(TokenFile(ids, offsets), 512, 0, (16, 32, 48, 64))
    batches.batch(0)
    start = time.thread_time()
    for step in range(100):
        batches.batch(step)
    assert time.thread_time() - start < 4 * 0.5  # room for a slow machine
