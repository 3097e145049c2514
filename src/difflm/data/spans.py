"""Continuous paragraph denoising (Lin et al., 2023): one span of a text is cut out, and is written from the rest."""

import random
from collections.abc import Sequence

from difflm.data.tokenizers import START

HIDDEN = START  # the token in place of the span: no source contains START
SHARE = 0.3  # of a text's tokens


def cut_span(ids: Sequence[int], number: int) -> tuple[list[int], list[int]]:
    """Cut one span out of the text with this number: the source, with one token in place of the span, and the span."""
    size = max(1, round(SHARE * len(ids)))
    first = random.Random(number).randint(0, max(0, len(ids) - size))
    return [*ids[:first], HIDDEN, *ids[first + size :]], list(ids[first : first + size])
