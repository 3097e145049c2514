"""The tokenizer of an open model: `tokenizer.json`, or `vocab.json` with `merges.txt`, and the special tokens of
`tokenizer_config.json`."""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from difflm.data.tokenizers import END, SPECIALS, LibraryTokenizer, byte_pair_encoder, make_encoder, unreadable
from difflm.errors import DifflmError, explain_library
from difflm.runtime.files import Json, read_json

if TYPE_CHECKING:
    import tokenizers

MASKS = ("<|mdm_mask|>", "[MDM_MASK]", "<|mask|>", "<[MASK]>")  # spellings of the mask in released tokenizers
ENDS = ("<|endoftext|>", "</s>", "[SEP]")
# How Qwen's byte pairs split a text; GPT-2's way is the library's default.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class TokenizerFiles:
    """The tokenizer files of a directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "tokenizer_config.json"
        found = read_json(path) if path.is_file() else {}
        self.settings: Json = found if isinstance(found, dict) else {}

    @cached_property
    def definition(self) -> Json:
        """The tokenizer in the format of the tokenizers library."""
        if (path := self.folder / "tokenizer.json").is_file():
            return read_json(path)
        vocabulary, merges = self.folder / "vocab.json", self.folder / "merges.txt"
        if not vocabulary.is_file() or not merges.is_file():
            raise DifflmError(f"{self.folder} holds no tokenizer.json.")
        return json.loads(read_byte_pairs(vocabulary, merges, self.settings).to_str())

    @cached_property
    def encoder(self) -> "tokenizers.Tokenizer":
        return load_encoder(self.definition, self.folder)

    def find(self, name: str) -> int | None:
        """The id of a token by its name in the settings, such as `eos_token`."""
        spelt = self.settings.get(name)
        spelt = spelt.get("content") if isinstance(spelt, dict) else spelt
        found: int | None = self.encoder.token_to_id(spelt) if isinstance(spelt, str) else None
        return found

    def find_among(self, spellings: Iterable[str]) -> list[int]:
        """The ids of those tokens that exist."""
        return [found for spelt in spellings if (found := self.encoder.token_to_id(spelt)) is not None]

    @property
    def template(self) -> str | None:
        """The chat template, in Jinja's language."""
        if (path := self.folder / "chat_template.jinja").is_file():
            return path.read_text(encoding="utf-8")
        found = self.settings.get("chat_template")
        if isinstance(found, list):  # several templates, by name
            found = next((one.get("template") for one in found if one.get("name") == "default"), None)
        return found if isinstance(found, str) else None


def load_encoder(definition: Json, where: Path) -> "tokenizers.Tokenizer":
    try:
        return make_encoder(definition)
    except ValueError as error:
        raise DifflmError(f"the tokenizer of {where} cannot be read: {error}.") from None


def read_byte_pairs(vocabulary: Path, merges: Path, settings: Json) -> "tokenizers.Tokenizer":
    """A byte-pair tokenizer of GPT-2's or Qwen's kind, with the special tokens that its settings list."""
    from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

    lines = merges.read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    known = read_json(vocabulary)
    with explain_library(lambda reason: DifflmError(f"{vocabulary} and {merges.name} make no tokenizer: {reason}.")):
        encoder = byte_pair_encoder(vocab=known, merges=[(left, right) for left, _, right in pairs])
    if not settings.get("tokenizer_class", "").startswith("GPT2"):
        encoder.normalizer = normalizers.NFC()
        cut = pre_tokenizers.Split(Regex(QWEN), behavior="isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoder.pre_tokenizer = pre_tokenizers.Sequence([cut, whole])
    added = settings.get("added_tokens_decoder") or {}
    for number in sorted(added, key=int):
        spelt = added[number]["content"]
        encoder.add_special_tokens([AddedToken(spelt, special=True, normalized=False)])
        if encoder.token_to_id(spelt) != int(number):
            raise DifflmError(f"{vocabulary.parent}/tokenizer_config.json: {spelt} is not token {number}.")
    return encoder


class OpenTokenizer(LibraryTokenizer):
    """All tokens of a model but its mask. START, END, UNK and PAD are its own tokens of that kind, `specials`, and the
    others follow in their order. `encode_marked` reads the special tokens of a chat template."""

    kind = "open"
    length_unit = "tokens"

    def __init__(
        self, definition: Json, specials: Sequence[int], left_out: Iterable[int], rows: int, where: Path
    ) -> None:
        self.definition, self.where, encoder = definition, where, load_encoder(definition, where)
        beyond = {number for number in encoder.get_vocab(with_added_tokens=True).values() if number >= rows}
        super().__init__(encoder, specials, {*specials, *left_out, *beyond})
        self._ours[specials[END]] = END  # which may be START, UNK and PAD as well
        special = {number for number, token in encoder.get_added_tokens_decoder().items() if token.special}
        # Further special tokens: marks of a chat, which no text contains.
        self.marks = {own for own, number in enumerate(self.theirs) if number in special and own >= len(SPECIALS)}
        inside, alone = self.encode_batch([" a", "a"])
        self.adds_space = len(inside) > len(alone) and inside[-len(alone) :] == alone

    @cached_property
    def _marked_encoder(self) -> "tokenizers.Tokenizer":
        return load_encoder(self.definition, self.where)

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a rendered chat template, whose marks are special tokens."""
        with explain_library(unreadable):
            found = self._marked_encoder.encode(text, add_special_tokens=False).ids
        return [self.our_id(number) for number in found]

    def find_marks(self, text: str) -> list[str]:
        """The special tokens that a text spells."""
        added = self._encoder.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special and token.content in text]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        return super().tokens(i for i in ids if i not in self.marks)

    def spellings(self) -> list[str]:
        """Spellings of byte pairs; a mark is spelt with a character that no text contains."""
        return ["\udc00" if own in self.marks else text for own, text in enumerate(super().spellings(), len(SPECIALS))]

    def contents(self) -> Json:
        return {"tokenizer": self.definition, "theirs": self.theirs}
