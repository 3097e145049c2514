"""The public corpora: where they are published, their licences, their files, and what difflm makes of them."""

import gzip
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from difflm.data.texts import read_csv
from difflm.data.words import split_words
from difflm.errors import DifflmError, UsageError, suggest
from difflm.runtime.files import read_own_table, replace_atomically, write_atomic


class Entry(BaseModel):
    """A part of `catalogue.yaml`, which says what each key means."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CorpusFile(Entry):
    file: str
    size: int | None = None
    sha256: str | None = None
    inside: str | None = None


class Download(Entry):
    url: str
    files: tuple[CorpusFile, ...]


class Corpus(Entry):
    name: str
    title: str
    purpose: str
    home: str
    licence: str
    research_only: bool = False
    obtain: str | None = None
    train: str | None = None
    read_by: str | None = None
    convert: str | None = None
    downloads: tuple[Download, ...] = ()

    @property
    def files(self) -> list[CorpusFile]:
        return [one for download in self.downloads for one in download.files]

    @property
    def checks(self) -> str:
        """What a fetched file is compared with, besides the length that its server states."""
        for fact in ("sha256", "size"):
            if known := sum(getattr(one, fact) is not None for one in self.files):
                of = "" if known == len(self.files) else f" of {known} of {len(self.files)} files"
                return f"{fact} known{of}"
        return "size and sha256 not known"


CATALOGUE: dict[str, Corpus] = {
    name: Corpus(name=name, **facts) for name, facts in read_own_table("catalogue.yaml", __file__).items()
}


def find_corpus(name: str) -> Corpus:
    if name in CATALOGUE:
        return CATALOGUE[name]
    raise UsageError(f"no corpus {name!r}. {suggest(name.lower(), CATALOGUE)}Known: {', '.join(CATALOGUE)}.")


E2E_FIELDS = {"eatType": "Type", "priceRange": "price", "familyFriendly": "family friendly"}  # others keep their name
_FIELD = r"([^\[\],|:]+)\[([^\[\]|]*)\]\s*"
_FIELDS = re.compile(f"{_FIELD}(?:,{_FIELD})*")
LINE = 128  # characters: 39 pieces of words on average (on 7 MB of enwik8 in text8's letters); `own-text` holds 64


def convert_e2e(folder: Path) -> list[Path]:
    """Write the challenge's tables as the lines that `--data` reads; existing files are not replaced."""
    made = []
    for table, split in (("trainset.csv", "train"), ("devset.csv", "valid"), ("testset_w_refs.csv", "test")):
        path = folder / f"{split}.txt.gz"
        if not path.exists():
            lines = "".join(f"{line}\n" for line in e2e_lines(folder / table))
            write_atomic(path, gzip.compress(lines.encode(), mtime=0))
        made.append(path)
    return made


def e2e_lines(table: Path) -> Iterator[str]:
    """Turn `name[The Eagle], eatType[pub]` and its reference into `name : The Eagle | Type : pub||words of it `."""
    rows = read_csv(table)
    if next(rows, (1, []))[1][:2] != ["mr", "ref"]:
        raise DifflmError(
            f"{table} does not begin with the E2E challenge's columns mr and ref. Delete it and fetch it again."
        )
    for number, row in rows:
        if row and (len(row) < 2 or not separate_words(row[1]) or not _FIELDS.fullmatch(row[0])):
            where = f"line {number} of {table}"
            raise DifflmError(f"{where} is not 'name[…], field[…]' and a text. Delete the file and fetch it again.")
        if row:
            fields = [(name.strip(), separate_words(value)) for name, value in re.findall(_FIELD, row[0])]
            left = " | ".join(f"{E2E_FIELDS.get(name, name)} : {value}" for name, value in fields)
            yield f"{left}||{separate_words(row[1])} "


def separate_words(text: str) -> str:
    """Put a space between words; a line break inside a text counts as a space.

    The released lines have "£ 20- £ 25" for £20-£25: their pound signs were separated before their hyphens."""
    return " ".join(split_words(" ".join(text.replace("£", " £ ").split())))


def convert_text8(folder: Path) -> list[Path]:
    """Split the one line of 100 million characters into lines of whole words."""
    path = folder / "text8.txt"
    if not path.exists():
        data = (folder / "text8").read_bytes().strip()
        with replace_atomically(path) as temporary, temporary.open("wb") as file:
            file.writelines(line + b"\n" for line in cut_lines(data, LINE))
    return [path]


def cut_lines(data: bytes, width: int) -> Iterator[bytes]:
    """Cut at the last space within `width` bytes; a longer word is cut inside."""
    start = 0
    while len(data) - start > width:
        space = data.rfind(b" ", start, start + width + 1)
        end = space if space > start else start + width
        yield data[start:end]
        start = end + (data[end : end + 1] == b" ")
    yield data[start:]


CONVERSIONS: dict[str, Callable[[Path], list[Path]]] = {"e2e": convert_e2e, "text8": convert_text8}
