"""The warning that somebody gets who gives a model words that it does not know."""

from collections.abc import Sequence
from typing import Any

from difflm.data.corpora import describe_texts
from difflm.data.tokenizers import SPECIALS, Tokenizer, Words

SHOWN = 8  # unknown words that are named


def warn_of_unknown_words(name: str, config: dict[str, Any], tokenizer: Tokenizer, unknown: Sequence[str]) -> list[str]:
    """One sentence that says what the model knows and which of the given words it does not; none where it knows all."""
    if not unknown:
        return []
    known = [word for word in tokenizer.words[len(SPECIALS) :] if word.strip()] if isinstance(tokenizer, Words) else []
    named = ", ".join(repr(word) for word in unknown[:SHOWN])
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    them = "it" if len(unknown) == 1 else "them"
    data = config.get("recipe", {}).get("data")  # a model that was put together by hand has no recipe
    about = f" of {describe_texts(data)}" if data else ""
    return [
        f"{name} knows {len(known):,} words{about}; "
        f"it does not know {named}{more}, and cannot take {them} into account."
    ]
