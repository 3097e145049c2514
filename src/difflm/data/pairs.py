"""Pairs of text and noise for reflow, as `difflm generate --json` writes them."""

from collections import Counter
from pathlib import Path

import numpy as np

from difflm.data.texts import read_jsonl
from difflm.data.tokenfile import Ints
from difflm.errors import UsageError

HOW = "Generate such a file: difflm generate MODEL -n 100000 --sampler ddim --json > pairs.jsonl."


def read_pairs(path: Path, text_column: str) -> tuple[Ints, Ints]:
    """Read the seed and sample number of every text of a file: the k-th line of a seed, from 0 on, is its sample k.

    Outputs of several seeds may be concatenated; each begins with its first sample. The lines do not tell whether a
    deterministic sampler such as ddim wrote them.
    """
    if ".jsonl" not in path.suffixes:
        raise UsageError(f"{path} has no noise for its texts. {HOW}")
    seeds, samples = [], []
    following: Counter[int] = Counter()
    for number, row in read_jsonl(path):
        seed = row.get("seed")
        if type(seed) is not int or not 0 <= seed < 2**31:
            raise UsageError(f"line {number} of {path} does not state its seed. {HOW}")
        if row.get("controls"):
            raise UsageError(f"line {number} of {path} was generated under a control, not from its noise alone. {HOW}")
        # Of several candidates one is kept, whose sample number differs from the line's.
        if row.get("denoiser_calls") != row.get("steps"):
            raise UsageError(f"line {number} of {path} did not take one call per step: generate without candidates.")
        if str(row[text_column]).strip():
            seeds.append(seed)
            samples.append(following[seed])
        following[seed] += 1
    return np.array(seeds, np.int64), np.array(samples, np.int64)
