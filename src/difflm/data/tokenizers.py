"""Words, characters, byte pairs, or the tokens of others: text to ids and back. Ids 0 to 3 are START, END, UNK and PAD.

The tokenizers of open models, with their own special tokens, are in `open_tokenizer.py`."""

import base64
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from difflm.data.words import Given, join_words, split_words, word_shape
from difflm.errors import DifflmError, UsageError, explain_library, is_unicode
from difflm.runtime.files import Json, hash_json, read_json, write_atomic

if TYPE_CHECKING:
    import tokenizers

SPECIALS = ("START", "END", "UNK", "PAD")
START, END, UNK, PAD = range(4)
MOST_GROWTH = 1000  # times as long as a text may become by replacements
MOST_IDS = 1 << 24


class Tokenizer(ABC):
    """Text ⇄ ids, the first four of which are specials. `encode` adds none of them; `decode` and `tokens` drop them."""

    kind: str
    unit = "tokens"  # what one token is
    whole_words = False  # whether one token is one word, so that words can be counted in advance
    length_unit: str | None = None  # what the length of a text counts; None: it cannot be asked for
    between = ""  # what separates the pieces of a text
    adds_space = False  # whether it adds a space before every text
    byte_level = False  # whether pieces are in the byte alphabet, a space before a word as its first sign
    spells = False  # whether a text is the concatenation of its pieces' spellings
    fragments: frozenset[int] = frozenset()  # ids of parts of characters: no model draws them, so that none is broken

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)  # pieces[id - 4]: a text may contain the word END, so the specials are not pieces
        self._ids = {piece: i for i, piece in enumerate(self.pieces, len(SPECIALS))}
        if len(self._ids) != len(self.pieces):
            raise ValueError("a token occurs twice")
        self.for_sources: Tokenizer = self  # a different one if sources have their own words

    @property
    def size(self) -> int:
        """Number of ids, specials included."""
        return len(SPECIALS) + len(self.pieces)

    @property
    def known_words(self) -> list[str]:
        """The words that have a token of their own, if tokens are words."""
        return self.pieces if self.whole_words else []

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_inside(self, phrase: str) -> list[int]:
        """The ids of a phrase inside of a text, where subwords spell a word with the space before it."""
        plain = self.whole_words or self.adds_space
        return self.encode(phrase.strip() if plain else f" {phrase.strip()}")

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str: ...

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The readable pieces of the text, in order."""
        return [self.decode([i]) for i in ids if i >= len(SPECIALS)]

    def fill_words(self, ids: Iterable[int], given: Given) -> tuple[list[str], Given]:
        """The words of a text, with those that are given in their places; and what is given by their new places."""
        return self.tokens(ids), {}

    def spellings(self) -> list[str]:
        """Every piece as text; bytes that are no text by themselves as Python's surrogates (PEP 383)."""
        return self.pieces

    def readable_pieces(self) -> list[str | None]:
        """Every piece as text; None if it is none by itself, or if its spacing depends on a whole text."""
        if not self.spells:
            raise UsageError(f"pattern: the {self.kind} tokenizer of this model does not say how its tokens are spelt.")
        return [text if is_unicode(text) else None for text in self.spellings()]

    @abstractmethod
    def contents(self) -> Json:
        """The contents of a file besides the kind."""

    def to_json(self) -> Json:
        """The whole contents of a file, including the tokenizer of sources."""
        own = {} if self.for_sources is self else {"for_sources": self.for_sources.to_json()}
        return {"kind": self.kind, **self.contents(), **own}

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The first character of each token and the one behind its last; of part of a character, those of the whole."""
        raise NotImplementedError

    def unknown(self, text: str) -> list[str]:
        """The words of a text that have no id, in order; byte pairs spell every word, characters too."""
        return []

    def foreign_share(self, text: str) -> float:
        """The share of a text's letters that no piece spells, so that the model has hardly seen them."""
        return 0.0

    def fingerprint(self) -> str:
        """Equal for equal tokenizers, on any machine."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return hash_json(self.to_json())[:16]

    def save(self, path: Path) -> None:
        write_atomic(path, json.dumps(self.to_json(), ensure_ascii=False) + "\n")

    @staticmethod
    def load(path: Path) -> "Tokenizer":
        try:
            return Tokenizer.from_json(read_json(path))
        except (ValueError, RecursionError) as error:
            raise DifflmError(f"{path} is not a tokenizer that difflm wrote: {error}.") from None

    @staticmethod
    def from_json(data: object) -> "Tokenizer":
        """The inverse of `to_json`; anything else raises a ValueError that explains it."""
        found: Json = data if isinstance(data, dict) else {}
        match found.get("kind"):
            case "words":
                made: Tokenizer = Words(_strings(found, "words"))
            case "bpe":
                made = Bpe(_strings(found, "pieces"), [_pair(merge) for merge in _strings(found, "merges")])
            case "characters":
                made = Characters(_strings(found, "characters"))
            case "pretrained":
                made = PretrainedTokenizer(found.get("tokenizer", {}))
            case kind:
                raise ValueError(f"its kind is {kind!r}, not 'words', 'bpe', 'characters', 'pretrained'")
        if "for_sources" in found:
            made.for_sources = Tokenizer.from_json(found["for_sources"])
        return made


class Words(Tokenizer):
    """One id per word of `split_words`, case kept; a word that is not in `words` is UNK."""

    kind = unit = length_unit = "words"
    whole_words = True
    between = " "

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)  # words[id]
        if tuple(self.words[: len(SPECIALS)]) != SPECIALS:
            raise ValueError(f"its words do not begin with {', '.join(SPECIALS)}")
        super().__init__(self.words[len(SPECIALS) :])

    @classmethod
    def build(cls, texts: Iterable[str], more_than: int = 10) -> "Words":
        """The words seen more than `more_than` times, by first appearance (Li et al., 2022). Like the original, count
        each text with the newline that ends it."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(split_words(text))
            counts["\n"] += 1
        kept = [word for word, count in counts.items() if count > more_than]
        if not set(kept) - {"\n"}:
            raise DifflmError(f"no word occurs more than {more_than} times: give more texts or a lower limit.")
        return cls([*SPECIALS, *kept])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids.get(word, UNK) for word in split_words(text)] for text in texts]

    def unknown(self, text: str) -> list[str]:
        return [word for word in split_words(text) if word not in self._ids]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        return self.fill_words(ids, {})[0]

    def fill_words(self, ids: Iterable[int], given: Given) -> tuple[list[str], Given]:
        words = [given.get(k, ("", None))[1] or ("" if i < len(SPECIALS) else self.words[i]) for k, i in enumerate(ids)]
        inside = [k for k, word in enumerate(words) if word not in ("", "\n")]  # a text does not end in a newline
        kept = [k for k in range(inside[0], inside[-1] + 1) if words[k]] if inside else []
        places = {k: place for place, k in enumerate(kept)}
        return [words[k] for k in kept], {places[k]: own for k, own in given.items() if k in places}

    def decode(self, ids: Iterable[int]) -> str:
        return join_words(self.tokens(ids))

    def readable_pieces(self) -> list[str | None]:
        return [None if word_shape(word) is None else word for word in self.pieces]

    def contents(self) -> Json:
        return {"words": self.words}


class Characters(Tokenizer):
    """One id per character; one that is not in `pieces` is UNK."""

    kind = unit = length_unit = "characters"
    spells = True

    def __init__(self, pieces: Sequence[str]) -> None:
        super().__init__(pieces)
        if any(len(one) != 1 for one in self.pieces):
            raise ValueError("one of its characters is longer than one")

    @classmethod
    def build(cls, texts: Iterable[str], more_than: int = 0) -> "Characters":
        """The characters seen more than `more_than` times, in their order."""
        counts = Counter(chain.from_iterable(texts))
        return cls(sorted(one for one, count in counts.items() if count > more_than))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids.get(one, UNK) for one in text] for text in texts]

    def spans(self, text: str) -> list[tuple[int, int]]:
        return [(k, k + 1) for k in range(len(text))]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.pieces[i - len(SPECIALS)] for i in ids if i >= len(SPECIALS))

    def contents(self) -> Json:
        return {"characters": self.pieces}


class LibraryTokenizer(Tokenizer):
    """Tokens of an encoder of the tokenizers library, but for those `left_out`. `specials` are its own START, END, UNK
    and PAD, if they are used. No text can spell a special token."""

    def __init__(
        self, encoder: "tokenizers.Tokenizer", specials: Sequence[int] = (), left_out: Collection[int] = ()
    ) -> None:
        from tokenizers.decoders import ByteLevel

        self._encoder = encoder
        encoder.encode_special_tokens = True  # in a text, its spelling is plain text
        vocabulary = encoder.get_vocab(with_added_tokens=True)
        kept = sorted((number, piece) for piece, number in vocabulary.items() if number not in left_out)
        super().__init__([piece for _, piece in kept])
        self.theirs = [*specials, *(number for number, _ in kept)]
        self._offset = len(SPECIALS) - len(specials)  # theirs[our id - offset]
        self._ours = [UNK] * (1 + max([*vocabulary.values(), *specials], default=0))
        for own, number in reversed([*enumerate(self.theirs, self._offset)]):
            self._ours[number] = own
        self.byte_level = self.spells = isinstance(encoder.decoder, ByteLevel)
        if self.byte_level and not specials:  # others write all scripts, whose rarer characters take several tokens
            self.fragments = frozenset(i for i, one in enumerate(self._spelt, len(SPECIALS)) if not is_unicode(one))

    def our_id(self, number: int) -> int:
        """Our id for one of theirs."""
        return self._ours[number] if number < len(self._ours) else UNK

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with explain_library(unreadable):  # such as an unknown word, if there is no token for it
            encoded = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[self._ours[number] for number in one.ids] for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        ids = [i for i in ids if i >= len(SPECIALS)]
        theirs = [self.theirs[i - self._offset] for i in ids]
        with explain_library(unreadable):
            text: str = self._encoder.decode(theirs, skip_special_tokens=False)
        if self.byte_level and "\ufffd" in text:  # bytes that make no character are left out
            spelt = "".join(self._spelt[i - len(SPECIALS)] for i in ids)
            return spelt.encode("utf-8", "surrogateescape").decode("utf-8", "ignore")
        return text

    @cached_property
    def _spelt(self) -> list[str]:
        """The pieces as text; those that are not in the byte alphabet, such as added tokens, are text already."""
        byte = byte_alphabet() if self.byte_level else {}
        return [
            bytes(map(byte.__getitem__, piece)).decode("utf-8", "surrogateescape") if byte.keys() >= {*piece} else piece
            for piece in self.pieces
        ]

    def spellings(self) -> list[str]:
        return self._spelt

    def spans(self, text: str) -> list[tuple[int, int]]:
        return list(self._encoder.encode(text, add_special_tokens=False).offsets)

    def unknown(self, text: str) -> list[str]:
        ids, spans = self.encode(text), self.spans(text)
        return [text[begin:end] for i, (begin, end) in zip(ids, spans, strict=True) if i == UNK]


class Bpe(LibraryTokenizer):
    """Byte-level byte-pair encoding: any text comes back exactly. `pieces` are in the byte alphabet.

    The ids of the pieces start after the specials, which the encoder does not know: no text can spell one."""

    kind = "bpe"
    length_unit = "words"

    def __init__(self, pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        self.merges, known = list(merges), {piece: i for i, piece in enumerate(pieces)}
        if len(known) != len(pieces):
            raise ValueError("a token occurs twice")
        if missing := byte_alphabet().keys() - known.keys():
            raise ValueError(f"{len(missing)} of the 256 bytes are missing")
        if not all({a, b, a + b} <= known.keys() for a, b in self.merges):
            raise ValueError("a merge makes a token that is not in the vocabulary")
        super().__init__(byte_pair_encoder(vocab=known, merges=self.merges))

    @classmethod
    def build(cls, texts: Iterable[str], size: int) -> "Bpe":
        """At most `size` ids: 4 specials, 256 bytes, and the commonest pairs of pieces."""
        if size < 260:
            raise UsageError(f"a byte-pair vocabulary of {size} is too small: 4 specials and 256 bytes are 260.")
        from tokenizers.trainers import BpeTrainer

        letters = sorted(byte_alphabet())
        trainer = BpeTrainer(vocab_size=size - 4, min_frequency=2, initial_alphabet=letters, show_progress=False)
        encoder = byte_pair_encoder()
        encoder.train_from_iterator(texts, trainer)
        model = json.loads(encoder.to_str())["model"]
        pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
        return cls(pieces, [_pair(merge) for merge in model["merges"]])

    @cached_property
    def _letters(self) -> set[str]:
        return set("".join(self.spellings()))

    def foreign_share(self, text: str) -> float:
        letters = [letter for letter in text if letter.isalpha()]
        return sum(letter not in self._letters for letter in letters) / max(1, len(letters))

    def contents(self) -> Json:
        return {"pieces": self.pieces, "merges": [f"{a} {b}" for a, b in self.merges]}


class PretrainedTokenizer(LibraryTokenizer):
    """The pieces of a `tokenizer.json`, in their order, after difflm's own START, END, UNK and PAD. Its own special
    tokens are left out: no model here needs them. What it does not know is UNK."""

    kind = "pretrained"

    def __init__(self, definition: Json) -> None:
        self.definition, encoder = definition, make_encoder(definition)
        special = {number for number, token in encoder.get_added_tokens_decoder().items() if token.special}
        # The token for unknown words is not always among the special tokens.
        model = definition["model"]
        unknown = model.get("unk_id")
        unknown = unknown if unknown is not None else encoder.token_to_id(model.get("unk_token") or "")
        super().__init__(encoder, (), special if unknown is None else {*special, unknown})
        self.length_unit = "words" if self.byte_level else None

    @classmethod
    def read(cls, path: Path) -> "PretrainedTokenizer":
        """Read the tokenizer of a directory, or a `tokenizer.json` itself."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(read_json(file))
        except ValueError as error:
            raise DifflmError(f"{file} is not a tokenizer: {error}.") from None

    def contents(self) -> Json:
        return {"tokenizer": self.definition}


def byte_alphabet() -> dict[str, int]:
    """The byte of each character of the byte alphabet: printable ones are themselves, others are from 256 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted({*range(256)} - {*own})
    return {chr(byte): byte for byte in own} | {chr(k): byte for k, byte in enumerate(others, 256)}


def byte_pair_encoder(
    vocab: dict[str, int] | None = None, merges: list[tuple[str, str]] | None = None
) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Encoder
    from tokenizers import decoders, models, pre_tokenizers

    encoder = Encoder(models.BPE(vocab, merges))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    return encoder


def unreadable(reason: str) -> UsageError:
    return UsageError(f"this tokenizer cannot read the texts: {reason}. Choose one that can.")


def is_pretrained(path: Path) -> bool:
    """Whether a directory holds a tokenizer that difflm did not write, or a file is one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    found = read_json(file) if file.suffix == ".json" and file.is_file() else None
    return isinstance(found, dict) and "kind" not in found


def make_encoder(definition: Json) -> "tokenizers.Tokenizer":
    """The library's tokenizer of a `tokenizer.json`, without the cutting and padding that this may ask for."""
    from tokenizers import Tokenizer as Encoder

    _check_parts(definition)
    with explain_library(lambda reason: ValueError(f"the tokenizers library cannot read it: {reason}")):
        encoder = Encoder.from_str(json.dumps(definition))
    encoder.no_truncation()
    encoder.no_padding()
    if max(encoder.get_vocab(with_added_tokens=True).values(), default=0) >= MOST_IDS:
        raise ValueError(f"a token has an id above {MOST_IDS:,}")
    return encoder


def _check_parts(definition: Json) -> None:
    """Refuse parts that would take all memory: replacements of replacements, and a table larger than its file."""
    parts = [definition.get(key) for key in ("normalizer", "decoder")] if isinstance(definition, dict) else []
    for part in parts:  # the list grows during the loop
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    nodes = [part for part in parts if isinstance(part, dict)]
    growth = (len(str(node.get("content"))) for node in nodes if node.get("type") == "Replace")
    if math.prod(max(1, factor) for factor in growth) > MOST_GROWTH:
        raise ValueError(f"its replacements make a text more than {MOST_GROWTH} times as long")
    for table in (node["precompiled_charsmap"] for node in nodes if "precompiled_charsmap" in node):
        data = base64.b64decode(table) if isinstance(table, str) else b""
        if not 4 <= int.from_bytes(data[:4], "little") + 4 <= len(data):
            raise ValueError("its table of characters is damaged")


def _strings(data: Json, key: str) -> list[str]:
    value = data.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"it has no list of texts under {key!r}")
    return value


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    """A merge as the two pieces it joins. A space is no piece of the byte alphabet, so "a b" is not ambiguous."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right
