"""The E2E restaurant corpus in the format of Diffusion-LM: one `field : value | field : value||reference` per line."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from difflm.data.texts import check_any, check_readable, read_lines
from difflm.errors import DifflmError, UsageError

Split = Literal["train", "valid", "test"]
TWO_SPLITS = ("train", "valid")
THREE_SPLITS = (*TWO_SPLITS, "test")  # of corpora whose test set is published as a file of its own


@dataclass(frozen=True)
class E2EPair:
    fields: dict[str, str]
    text: str  # as in the file, with spaces between words: "£ 30 ."

    @property
    def source(self) -> str:
        """The fields as the file has them."""
        return " | ".join(f"{name} : {value}" for name, value in self.fields.items())


def read_e2e(path: Path) -> Iterator[E2EPair]:
    check_readable(path)
    return check_any(_read_pairs(path), f"there is no text in {path}.")


def e2e_path(root: Path | None, split: Split) -> Path:
    """Find the file of a split under `root` ($DIFFLM_DATA where None); releases name it differently."""
    stems = (f"e2e/{split}.txt", f"e2e/src1_{split}.txt", f"e2e_data/src1_{split}.txt")
    return find_corpus_file(root, "E2E", stems, f"e2e/{split}.txt[.gz], e2e_data/src1_{split}.txt", split, THREE_SPLITS)


def find_corpus_file(
    root: Path | None,
    title: str,
    stems: tuple[str, ...],
    names: str,
    split: Split = "train",
    splits: tuple[str, ...] = TWO_SPLITS,
) -> Path:
    """Find the first of several files of a split, plain or gzipped, under `root` or $DIFFLM_DATA."""
    if split not in splits:
        raise UsageError(f"{title} has no split {split!r} here: {' or '.join(splits)}.")
    if root is None and "DIFFLM_DATA" not in os.environ:
        there = f"Give --data DIR, or set DIFFLM_DATA, to the directory that holds {names}."
        raise UsageError(f"where is {title}? {there}\nTo get it, see: difflm data list")
    root = root or Path(os.environ["DIFFLM_DATA"])
    for path in (root / f"{stem}{packed}" for stem in stems for packed in (".gz", "")):
        if path.is_file():
            return path
    raise UsageError(f"no {title} in {root}: none of {names} was found.\nPoint --data or DIFFLM_DATA at its folder.")


def _read_pairs(path: Path) -> Iterator[E2EPair]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        left, bar, text = line.partition("||")
        cells = [cell.partition(":") for cell in left.split("|")]
        if not bar or not text.strip() or not all(colon for _, colon, _ in cells):
            raise DifflmError(f"line {number} of {path} is not 'field : value | field : value||reference'.")
        yield E2EPair({name.strip(): value.strip() for name, _, value in cells}, text.strip())
