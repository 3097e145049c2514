"""Public corpora of sources and targets, read from their released files. A source with several targets occurs once for
each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from difflm.data.e2e import THREE_SPLITS, TWO_SPLITS, Split, find_corpus_file
from difflm.data.texts import Example, check_any, check_readable, read_examples, read_jsonl, read_lines
from difflm.errors import DifflmError

CAPTIONS = 5  # of an image of Multi30k
SIMPLIFICATIONS = 10  # of a sentence of ASSET
HELD_OUT_SOURCES = 4  # simplification: every fourth source is held out, in the order of the file
HELD_OUT_DIALOGUES = 100


@dataclass(frozen=True)
class PairCorpus:
    """A corpus of pairs that has a name: its files, and how they are read."""

    about: str  # what its targets are, in a few words
    title: str
    files: Callable[[Split], Sequence[tuple[str, ...]]]  # the names of each file in releases, without .gz
    read: Callable[[Sequence[Path], Split], Iterable[Example]]
    splits: tuple[str, ...] = TWO_SPLITS

    def paths(self, root: Path | None, split: Split) -> list[Path]:
        """Find the files of a split under `root` ($DIFFLM_DATA where None)."""
        found = [
            find_corpus_file(root, self.title, stems, f"{stems[0]}[.gz]", split, self.splits)
            for stems in self.files(split)
        ]
        for path in found:
            check_readable(path)
        return found

    def examples(self, root: Path | None, split: Split) -> Iterator[Example]:
        paths = self.paths(root, split)
        return check_any(self.read(paths, split), f"there is no text in {paths[0]}.")


def release_split(split: Split) -> str:
    """The name of a split in Multi30k's files."""
    return "val" if split == "valid" else split


def multi30k_files(split: Split) -> list[tuple[str, ...]]:
    own = release_split(split)
    return [
        (f"multi30k/task1.{own}.{side}", f"multi30k/{own}.{side}.txt", f"multi30k/task1/raw/{own}.{side}")
        for side in ("en", "de")
    ]


def caption_files(split: Split) -> list[tuple[str, ...]]:
    own = release_split(split)
    return [(f"multi30k/task2.{own}.{k}.en", f"multi30k/task2/raw/{own}.{k}.en") for k in range(1, CAPTIONS + 1)]


def read_captions(paths: Sequence[Path], split: Split) -> Iterator[Example]:
    """From one caption of an image to each other one: in training from all of them, held out from the first alone."""
    for captions in read_aligned(paths):
        for k, source in enumerate(captions if split == "train" else captions[:1]):
            yield from (Example(target, source) for j, target in enumerate(captions) if j != k)


def read_aligned(paths: Sequence[Path]) -> Iterator[tuple[str, ...]]:
    """Yield line k of all files together."""
    counts = [sum(1 for _ in read_lines(path)) for path in paths]
    for path, count in zip(paths, counts, strict=True):
        if count != counts[0]:
            raise DifflmError(f"{paths[0]} has {counts[0]:,} lines and {path} has {count:,}: they are not parallel.")
    for rows in zip(*map(read_lines, paths), strict=True):
        texts = tuple(text.strip() for _, text in rows)
        if "" in texts:
            path = paths[texts.index("")]
            raise DifflmError(f"line {rows[0][0]} of {path} is empty.")
        yield texts


def read_dialogues(paths: Sequence[Path], split: Split) -> Iterator[Example]:
    """From what a user says to the answer: dialogues with one turn per line and an empty line between them. A dialogue
    with an odd number of lines lacks a turn, and is left out."""
    for number, turns in enumerate(read_paragraphs(paths[0])):
        held_out = number % HELD_OUT_DIALOGUES == HELD_OUT_DIALOGUES - 1
        if held_out == (split == "valid") and not len(turns) % 2:
            yield from map(Example, turns[1::2], turns[::2])


def read_paragraphs(path: Path) -> Iterator[list[str]]:
    lines: list[str] = []
    for _, line in read_lines(path):
        if line.strip():
            lines.append(line.strip())
        elif lines:
            yield lines
            lines = []
    if lines:
        yield lines


def read_wiki_auto(paths: Sequence[Path], split: Split) -> Iterator[Example]:
    """Lines of a sentence, a tab and a simpler one."""
    numbers: dict[str, int] = {}
    for number, line in read_lines(paths[0]):
        source, _, target = (part.strip() for part in line.partition("\t"))
        if not source or not target:
            raise DifflmError(f"line {number} of {paths[0]} is not a sentence, a tab and a simpler sentence.")
        if is_held_out(numbers.setdefault(source, len(numbers))) == (split == "valid"):
            yield Example(target, source)


def is_held_out(source: int) -> bool:
    """Whether the simplifications of a source are held out. Wiki-Auto and ASSET have the same sources in the same
    order, so that no source that a model was trained on in one is held out in the other."""
    return source % HELD_OUT_SOURCES == HELD_OUT_SOURCES - 1


def asset_files(split: Split) -> list[tuple[str, ...]]:
    parts = ["orig", *(f"simp.{k}" for k in range(SIMPLIFICATIONS))]
    return [(f"asset/asset.valid.{part}", f"asset/valid.{part}.txt") for part in parts]


def read_asset(paths: Sequence[Path], split: Split) -> Iterator[Example]:
    for number, (source, *targets) in enumerate(read_aligned(paths)):
        if is_held_out(number) == (split == "valid"):
            yield from (Example(target, source) for target in targets)


def read_commongen(paths: Sequence[Path], split: Split) -> Iterator[Example]:
    """From a set of words to each sentence with them."""
    for number, row in read_jsonl(paths[0], "concept_set"):
        words, sentences = row.get("concept_set"), row.get("scene")
        if not isinstance(words, str) or not isinstance(sentences, list) or not all(map(is_text, sentences)):
            shape = '{"concept_set": "field#look", "scene": ["..."]}'
            raise DifflmError(f"line {number} of {paths[0]} is not an object such as {shape}.")
        yield from (Example(sentence.strip(), words.replace("#", " ")) for sentence in sentences)


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def split_file(split: Split) -> str:
    return "dev" if split == "valid" else split


PAIRS = {
    "multi30k": PairCorpus(
        "German captions", "Multi30k", multi30k_files, lambda paths, _: read_examples(paths), THREE_SPLITS
    ),
    "multi30k-captions": PairCorpus(
        "captions of the same image", "Multi30k", caption_files, read_captions, THREE_SPLITS
    ),
    "sgd": PairCorpus(
        "answers in task dialogues",
        "Schema-Guided Dialogue",
        lambda _: [("sgd/sgd.txt", "english/sgd.txt")],
        read_dialogues,
    ),
    "simplification": PairCorpus(
        "simpler sentences",
        "Wiki-Auto",
        lambda _: [("simplification/wiki_auto_valid.tsv", "wiki-auto/valid.tsv")],
        read_wiki_auto,
    ),
    "asset": PairCorpus("simpler sentences", "ASSET", asset_files, read_asset),
    "qqp": PairCorpus(
        "questions that mean the same",
        "Quora question pairs",
        lambda split: [(f"qqp/{split}.jsonl", f"QQP/{split}.jsonl")],
        lambda paths, _: read_examples(paths),
    ),
    "commongen": PairCorpus(
        "sentences with given words",
        "CommonGen",
        lambda split: [(f"commongen/{split_file(split)}.jsonl",)],
        read_commongen,
    ),
}
