"""Tokenizers that others trained: the `tokenizer.json` of any fast tokenizer of Hugging Face."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflm.data.tokenizers import SPECIALS, UNK, Tokenizer, spell_bytes
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import read_json

if TYPE_CHECKING:
    import tokenizers


class PretrainedTokenizer(Tokenizer):
    """The pieces of a `tokenizer.json`, in their order, after difflm's own START, END, UNK and PAD. Its own special
    tokens are left out: no model here needs them, and no text can spell them. What it does not know is UNK."""

    kind = "pretrained"

    def __init__(self, definition: Any) -> None:
        self.definition = definition
        decoder = definition.get("decoder") if isinstance(definition, dict) else None
        self.byte_level = self.spells = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
        encoder = make_encoder(definition)
        encoder.encode_special_tokens = True  # in a text, its spelling is plain text
        self._encoder = encoder
        special = {number for number, token in encoder.get_added_tokens_decoder().items() if token.special}
        if (unknown := _unknown_piece(definition, encoder)) is not None:
            special.add(unknown)
        vocabulary = encoder.get_vocab(with_added_tokens=True)
        kept = sorted((number, piece) for piece, number in vocabulary.items() if number not in special)
        super().__init__([piece for _, piece in kept])
        self.theirs = [number for number, _ in kept]  # theirs[our id - 4]
        self._ours = [UNK] * (1 + max(vocabulary.values(), default=0))
        for own, number in enumerate(self.theirs, len(SPECIALS)):
            self._ours[number] = own

    @classmethod
    def read(cls, path: Path) -> "PretrainedTokenizer":
        """Read the tokenizer of a directory, or a `tokenizer.json` itself."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(read_json(file))
        except ValueError as error:
            raise DifflmError(f"{file} is not a tokenizer: {error}.") from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encoded = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # such as an unknown word, if there is no token for it
            reason = str(error).splitlines()[0]
            raise UsageError(f"this tokenizer cannot read the texts: {reason}. Choose one that can.") from None
        return [[self._ours[number] for number in one.ids] for one in encoded]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        return [self.decode([i]) for i in ids if i >= len(SPECIALS)]

    def decode(self, ids: Iterable[int]) -> str:
        theirs = [self.theirs[i - len(SPECIALS)] for i in ids if i >= len(SPECIALS)]
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

    try:
        encoder = Encoder.from_str(json.dumps(definition))
    except Exception as error:  # the library raises plain exceptions
        raise ValueError(f"the tokenizers library cannot read it: {str(error).splitlines()[0]}") from None
    encoder.no_truncation()
    encoder.no_padding()
    return encoder
