"""Sources with all references that people wrote for them."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from difflm.data.corpora import NAMES, corpus_examples, corpus_path
from difflm.data.e2e import Split
from difflm.data.pair_corpora import is_text, read_aligned
from difflm.data.texts import Example, check_any, file_kind, known_columns, no_column, read_examples, read_jsonl
from difflm.errors import DifflmError, UsageError


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
    return PairSet.group(",".join(path.name for path in paths), "file", read_references(paths, column))


def find_pair_files(given: str, root: Path | None) -> list[Path]:
    """A file with two columns, or parallel files with commas between them."""
    parts = [given] if Path(given).exists() else given.split(",")  # a name may have a comma
    return [corpus_path(part.strip(), root) for part in parts]


def read_references(paths: Sequence[Path], column: str | None) -> Iterator[Example]:
    """Yield each source with each of its targets, in the order of the files."""
    if len(paths) > 2 and column is None:
        return (Example(target, source) for source, *targets in read_aligned(paths) for target in targets)
    if len(paths) == 1 and file_kind(paths[0]) == ".jsonl":
        return check_any(read_target_lists(paths[0], column), f"there is no text in {paths[0]}.")
    return read_examples(paths, column)


def read_target_lists(path: Path, column: str | None) -> Iterator[Example]:
    """Lines with a source and one target or a list of them."""
    names = [name.strip() for name in column.split(",")] if column else [*known_columns(path, ".jsonl", 2)]
    if len(names) != 2 or not all(names):
        raise UsageError(f"--column {column} does not name two columns. Give SOURCE,TARGET.")
    for number, row in read_jsonl(path, names[0]):
        for name in names:
            if name not in row:
                raise no_column(path, name, list(row), number)
        source, target = (row[name] for name in names)
        targets = target if isinstance(target, list) else [target]
        if not is_text(source) or not targets or not all(map(is_text, targets)):
            raise DifflmError(f"line {number} of {path} lacks a text as its {names[0]} or {names[1]}.")
        yield from (Example(text.strip(), source.strip()) for text in targets)
