"""Tokenizers that others trained: the `tokenizer.json` of any fast tokenizer of Hugging Face."""

import base64
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflm.data.tokenizers import SPECIALS, UNK, Tokenizer, spell_bytes
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import read_json

if TYPE_CHECKING:
    import tokenizers


MOST_GROWTH = 1000  # times as long as a text may become by replacements
MOST_IDS = 1 << 24


@contextmanager
def explain_library(explain: Callable[[str], Exception]) -> Iterator[None]:
    """Raise an error of the tokenizers library by its first line; its panics are no `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise explain(next(iter(str(error).splitlines()), type(error).__name__)) from None


def unreadable(reason: str) -> UsageError:
    return UsageError(f"this tokenizer cannot read the texts: {reason}. Choose one that can.")


class LibraryTokenizer(Tokenizer):
    """Tokens of an encoder of the tokenizers library, but for those `left_out`. `specials` are its own START, END, UNK
    and PAD, if they are used. No text can spell a special token."""

    def __init__(
        self, definition: Any, encoder: "tokenizers.Tokenizer", specials: Sequence[int], left_out: Collection[int]
    ) -> None:
        self.definition, self._encoder = definition, encoder
        encoder.encode_special_tokens = True  # in a text, its spelling is plain text
        vocabulary = encoder.get_vocab(with_added_tokens=True)
        kept = sorted((number, piece) for piece, number in vocabulary.items() if number not in left_out)
        super().__init__([piece for _, piece in kept])
        self.theirs = [*specials, *(number for number, _ in kept)]
        self._offset = len(SPECIALS) - len(specials)  # theirs[our id - offset]
        self._ours = [UNK] * (1 + max([*vocabulary.values(), *specials], default=0))
        for own, number in reversed([*enumerate(self.theirs, self._offset)]):
            self._ours[number] = own
        decoder = definition.get("decoder") if isinstance(definition, dict) else None
        self.byte_level = self.spells = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"

    def our_id(self, number: int) -> int:
        """Our id for one of theirs."""
        return self._ours[number] if number < len(self._ours) else UNK

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with explain_library(unreadable):  # such as an unknown word, if there is no token for it
            encoded = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[self._ours[number] for number in one.ids] for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        theirs = [self.theirs[i - self._offset] for i in ids if i >= len(SPECIALS)]
        with explain_library(unreadable):
            text: str = self._encoder.decode(theirs, skip_special_tokens=False)
        return text

    def spellings(self) -> list[str]:
        return spell_bytes(self.pieces) if self.byte_level else self.pieces

    def spans(self, text: str) -> list[tuple[int, int]]:
        return list(self._encoder.encode(text, add_special_tokens=False).offsets)

    def unknown(self, text: str) -> list[str]:
        found = self._encoder.encode(text, add_special_tokens=False)
        spans = zip(found.ids, found.offsets, strict=True)
        return [text[begin:end] for number, (begin, end) in spans if self._ours[number] == UNK]


class PretrainedTokenizer(LibraryTokenizer):
    """The pieces of a `tokenizer.json`, in their order, after difflm's own START, END, UNK and PAD. Its own special
    tokens are left out: no model here needs them. What it does not know is UNK."""

    kind = "pretrained"

    def __init__(self, definition: Any) -> None:
        encoder = make_encoder(definition)
        special = {number for number, token in encoder.get_added_tokens_decoder().items() if token.special}
        if (unknown := _unknown_piece(definition, encoder)) is not None:
            special.add(unknown)
        super().__init__(definition, encoder, (), special)
        self.length_unit = "words" if self.byte_level else None

    @classmethod
    def read(cls, path: Path) -> "PretrainedTokenizer":
        """Read the tokenizer of a directory, or a `tokenizer.json` itself."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(read_json(file))
        except ValueError as error:
            raise DifflmError(f"{file} is not a tokenizer: {error}.") from None

    def contents(self) -> dict[str, Any]:
        return {"tokenizer": self.definition}


def _unknown_piece(definition: Any, encoder: Any) -> int | None:
    """The id of the token for unknown words, which is not always among the special tokens."""
    model = definition["model"]
    number: int | None = model.get("unk_id")
    return number if number is not None else encoder.token_to_id(model.get("unk_token") or "")


def is_pretrained(path: Path) -> bool:
    """Whether a directory holds a tokenizer that difflm did not write, or a file is one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return False
    found = read_json(file)
    return isinstance(found, dict) and "kind" not in found


def make_encoder(definition: Any) -> "tokenizers.Tokenizer":
    """The library's tokenizer of a `tokenizer.json`, without the cutting and padding that it may ask for."""
    from tokenizers import Tokenizer as Encoder

    check_parts(definition)
    with explain_library(lambda reason: ValueError(f"the tokenizers library cannot read it: {reason}")):
        encoder = Encoder.from_str(json.dumps(definition))
    encoder.no_truncation()
    encoder.no_padding()
    if max(encoder.get_vocab(with_added_tokens=True).values(), default=0) >= MOST_IDS:
        raise ValueError(f"a token has an id above {MOST_IDS:,}")
    return encoder


def check_parts(definition: Any) -> None:
    """Refuse parts that would take all memory: replacements of replacements, and a table larger than its file."""
    nodes = find_nodes(
        [definition.get(key) for key in ("normalizer", "decoder")] if isinstance(definition, dict) else []
    )
    growth = (len(str(node.get("content"))) for node in nodes if node.get("type") == "Replace")
    if math.prod(max(1, factor) for factor in growth) > MOST_GROWTH:
        raise ValueError(f"its replacements make a text more than {MOST_GROWTH} times as long")
    for table in (node["precompiled_charsmap"] for node in nodes if "precompiled_charsmap" in node):
        data = base64.b64decode(table) if isinstance(table, str) else b""
        if not 4 <= int.from_bytes(data[:4], "little") + 4 <= len(data):
            raise ValueError("its table of characters is damaged")


def find_nodes(parts: list[Any]) -> list[dict[str, Any]]:
    """All objects in some parts of a definition, however deep."""
    found = [*parts]
    for part in found:  # the list grows during the loop
        found += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return [part for part in found if isinstance(part, dict)]
