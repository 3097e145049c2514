"""Sources with all references that people wrote for them."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from difflm.data.corpora import NAMES, corpus_examples, corpus_path
from difflm.data.known_corpora import Split
from difflm.data.texts import Example, read_examples
from difflm.errors import UsageError


@dataclass(frozen=True)
class PairSet:
    """Sources, and the references of each."""

    name: str
    split: str
    sources: Sequence[str]
    references: Sequence[Sequence[str]]

    @classmethod
    def group(cls, name: str, split: str, examples: Iterable[Example]) -> "PairSet":
        """Group the targets of each source; repeated ones count once."""
        found: dict[str, dict[str, None]] = {}
        for example in examples:
            found.setdefault(str(example.source), {})[example.target] = None
        return cls(name, split, list(found), [list(targets) for targets in found.values()])

    def keep(self, chosen: Iterable[bool]) -> "PairSet":
        marked = list(chosen)
        return PairSet(
            self.name, self.split, list(compress(self.sources, marked)), list(compress(self.references, marked))
        )

    def sample(self, count: int | None, skip: int, seed: int) -> "PairSet":
        """Keep `count` sources after the first `skip` in the seed's order, which depends on neither number."""
        if count is None and not skip:
            return self
        total = len(self.sources)
        order = random.Random(seed).sample(range(total), total)
        chosen = {*order[skip : None if count is None else skip + count]}
        if not chosen:
            raise UsageError(f"{self.name} has {total:,} sources: --skip {skip} leaves none.")
        return self.keep(k in chosen for k in range(total))


def read_pair_set(given: str, column: str | None, root: Path | None, split: Split) -> PairSet:
    """Read a known corpus, a file with two columns, or parallel files SOURCES,TARGETS,MORE_TARGETS… A source may be
    there several times; a .jsonl file may also have a list of targets."""
    if given in NAMES:
        return PairSet.group(given, split, corpus_examples(given, root, split, column))
    paths = find_pair_files(given, root)
    return PairSet.group(",".join(path.name for path in paths), "file", read_examples(paths, column))


def find_pair_files(given: str, root: Path | None) -> list[Path]:
    """A file with two columns, or parallel files with commas between them."""
    parts = [given] if Path(given).exists() else given.split(",")  # a name may have a comma
    return [corpus_path(part.strip(), root) for part in parts]
