"""Encoders of the tokenizers library, from the `tokenizer.json` of any fast tokenizer of Hugging Face."""

import base64
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from difflm.errors import UsageError, explain_library
from difflm.runtime.files import Json, read_json

if TYPE_CHECKING:
    import tokenizers


MOST_GROWTH = 1000  # times as long as a text may become by replacements
MOST_IDS = 1 << 24


def unreadable(reason: str) -> UsageError:
    return UsageError(f"this tokenizer cannot read the texts: {reason}. Choose one that can.")


def is_pretrained(path: Path) -> bool:
    """Whether a directory holds a tokenizer that difflm did not write, or a file is one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return False
    found = read_json(file)
    return isinstance(found, dict) and "kind" not in found


def make_encoder(definition: Json) -> "tokenizers.Tokenizer":
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


def check_parts(definition: Json) -> None:
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


def find_nodes(parts: list[object]) -> list[Json]:
    """All objects in some parts of a definition, however deep."""
    found = [*parts]
    for part in found:  # the list grows during the loop
        found += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return [part for part in found if isinstance(part, dict)]
