"""The public corpora: where they live, their licences, how to know a whole file, and what difflm reads of them."""

import csv
import difflib
import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from difflm.data.texts import read_lines
from difflm.data.words import split_words
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import replace_atomically, write_atomic


@dataclass(frozen=True)
class Kept:
    """A file as it ends up on the disk, and how to know that it is whole: None is not known, never guessed."""

    file: str
    size: int | None = None
    sha256: str | None = None
    inside: str | None = None  # its name in the zip archive that is fetched


@dataclass(frozen=True)
class Download:
    url: str
    kept: tuple[Kept, ...]

    @property
    def is_archive(self) -> bool:
        return any(kept.inside for kept in self.kept)

    def address(self, base: str | None) -> str:
        """The URL, or the same path on another server."""
        return self.url if base is None else base.rstrip("/") + urlsplit(self.url).path


@dataclass(frozen=True)
class Corpus:
    name: str
    title: str
    purpose: str
    home: str
    licence: str
    downloads: tuple[Download, ...] = ()
    obtain: str = ""  # what to do where nothing can be fetched
    research_only: bool = False
    train: str = ""  # arguments of `difflm train`, with {out} for the directory of all corpora
    read_by: str = ""  # the command that reads it, where that is not `difflm train`
    convert: Callable[[Path], list[Path]] | None = None  # makes what difflm reads, in the corpus's own directory

    @property
    def kept(self) -> list[Kept]:
        return [kept for download in self.downloads for kept in download.kept]

    @property
    def checks(self) -> str:
        """What a fetched file is compared with, besides the length that its server states."""
        for fact in ("sha256", "size"):
            known = sum(getattr(kept, fact) is not None for kept in self.kept)
            if known:
                return (
                    f"{fact} known" if known == len(self.kept) else f"{fact} known of {known} of {len(self.kept)} files"
                )
        return "size and sha256 not known"


def find_corpus(name: str) -> Corpus:
    if name in CATALOGUE:
        return CATALOGUE[name]
    near = difflib.get_close_matches(name.lower(), CATALOGUE, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"no corpus {name!r}. {hint}Known: {', '.join(CATALOGUE)}.")


# -- what is made of them ---------------------------------------------------------------------------------------------

E2E_FIELDS = {"eatType": "Type", "priceRange": "price", "familyFriendly": "family friendly"}  # others keep their name
_FIELD = r"([^\[\],|:]+)\[([^\[\]|]*)\]\s*"
_FIELDS = re.compile(f"{_FIELD}(?:,{_FIELD})*")
LINE = 128  # characters: 39 pieces of words on average (on 7 MB of enwik8 in text8's letters); `own-text` holds 64


def convert_e2e(folder: Path) -> list[Path]:
    """The challenge's tables as the lines that `--data` reads. What is there already stays as it is."""
    made = []
    for table, split in (("trainset.csv", "train"), ("devset.csv", "valid")):
        path = folder / f"{split}.txt.gz"
        if not path.exists():
            lines = "".join(f"{line}\n" for line in e2e_lines(folder / table))
            write_atomic(path, gzip.compress(lines.encode(), mtime=0))
        made.append(path)
    return made


def e2e_lines(table: Path) -> Iterator[str]:
    """`name[The Eagle], eatType[pub]` and its reference as `name : The Eagle | Type : pub||words of it `."""
    rows = csv.reader((line for _, line in read_lines(table)), strict=True)
    try:
        if [name.strip() for name in next(rows, [])][:2] != ["mr", "ref"]:
            raise DifflmError(
                f"{table} does not begin with the E2E challenge's columns mr and ref. Delete it and fetch it again."
            )
        for row in rows:
            if row:
                yield _e2e_line(row, f"line {rows.line_num} of {table}")
    except csv.Error as error:
        raise DifflmError(f"line {rows.line_num} of {table} is not CSV: {error}.") from None


def _e2e_line(row: list[str], where: str) -> str:
    if len(row) < 2 or not _apart(row[1]) or not _FIELDS.fullmatch(row[0]):
        raise DifflmError(f"{where} is not 'name[…], field[…]' and a text. Delete the file and fetch it again.")
    fields = [(name.strip(), _apart(value)) for name, value in re.findall(_FIELD, row[0])]
    return " | ".join(f"{E2E_FIELDS.get(name, name)} : {value}" for name, value in fields) + f"||{_apart(row[1])} "


def _apart(text: str) -> str:
    """The words with a space between them; a line end inside a text is a space too.

    The released lines have "£ 20- £ 25" for £20-£25: there the pound sign was set apart before hyphens were looked at.
    """
    return " ".join(split_words(" ".join(text.replace("£", " £ ").split())))


def convert_text8(folder: Path) -> list[Path]:
    """One line of 100 million characters as lines that hold whole words."""
    path = folder / "text8.txt"
    if not path.exists():
        data = (folder / "text8").read_bytes().strip()
        with replace_atomically(path) as temporary, temporary.open("wb") as file:
            file.writelines(line + b"\n" for line in cut_lines(data, LINE))
    return [path]


def cut_lines(data: bytes, width: int) -> Iterator[bytes]:
    """Cut at the last space that leaves at most `width` bytes; a longer word is cut inside."""
    start = 0
    while len(data) - start > width:
        space = data.rfind(b" ", start, start + width + 1)
        end = space if space > start else start + width
        yield data[start:end]
        start = end + (data[end : end + 1] == b" ")
    yield data[start:]


# -- the corpora ------------------------------------------------------------------------------------------------------


def _files(base: str, *names: tuple[str, str]) -> tuple[Download, ...]:
    """Plain files of which neither size nor checksum is known: (name there, name here)."""
    return tuple(Download(f"{base}/{there}", (Kept(here),)) for there, here in names)


_GITHUB = "https://raw.githubusercontent.com"
_ALL = (
    Corpus(
        name="e2e",
        title="E2E NLG challenge",
        purpose="restaurant descriptions with their fields: control, infilling, language",
        home="https://github.com/tuetschek/e2e-dataset",
        licence="CC BY-SA 4.0",
        downloads=_files(
            f"{_GITHUB}/tuetschek/e2e-dataset/master", ("trainset.csv", "trainset.csv"), ("devset.csv", "devset.csv")
        ),
        train="e2e --data {out}",
        convert=convert_e2e,
    ),
    Corpus(
        name="rocstories",
        title="ROCStories",
        purpose="five-sentence stories: language, infilling",
        home="https://cs.rochester.edu/nlp/rocstories/",
        licence="research use on request",
        research_only=True,
        obtain="its authors send it to those who fill in the form at https://cs.rochester.edu/nlp/rocstories/. "
        "Save its tables as roc/train.csv and roc/valid.csv in the folder of --data.",
        train="roc --data {out}",
    ),
    Corpus(
        name="anlg",
        title="aNLG (abductive reasoning)",
        purpose="the sentence between two others: infilling",
        home="https://github.com/allenai/abductive-commonsense-reasoning",
        licence="Apache-2.0",
        downloads=_files(
            "https://storage.googleapis.com/ai2-mosaic/public/abductive-commonsense-reasoning-iclr2020",
            ("anlg.zip", "anlg.zip"),
        ),
        read_by="difflm evaluate RUN --task infill --sets anlg --data DIR (once anlg.zip is unpacked)",
    ),
    Corpus(
        name="qqp",
        title="Quora question pairs",
        purpose="pairs of questions: paraphrase",
        home="https://quoradata.quora.com/First-Quora-Dataset-Release-Question-Pairs",
        licence="Quora's own terms, non-commercial",
        research_only=True,
        downloads=_files("http://qim.fs.quoracdn.net", ("quora_duplicate_questions.tsv", "questions.tsv")),
    ),
    Corpus(
        name="wiki-auto",
        title="Wiki-Auto",
        purpose="sentences of Wikipedia with simpler ones: simplification",
        home="https://github.com/chaojiang06/wiki-auto",
        licence="see its repository",
        downloads=_files(
            f"{_GITHUB}/chaojiang06/wiki-auto/master/wiki-auto/GEM2021/full_with_split",
            ("train.tsv", "train.tsv"),
            ("valid.tsv", "valid.tsv"),
        ),
    ),
    Corpus(
        name="asset",
        title="ASSET",
        purpose="ten simplifications a sentence: measuring simplification",
        home="https://github.com/facebookresearch/asset",
        licence="CC BY-NC 4.0",
        research_only=True,
        downloads=_files(
            f"{_GITHUB}/facebookresearch/asset/main/dataset",
            ("asset.valid.orig", "valid.orig.txt"),
            *((f"asset.valid.simp.{i}", f"valid.simp.{i}.txt") for i in range(10)),
        ),
        train="own-text data={out}/asset/valid.orig.txt",
    ),
    Corpus(
        name="multi30k",
        title="Multi30k",
        purpose="captions in German and English: translation",
        home="https://github.com/multi30k/dataset",
        licence="Flickr30k's terms, research use",
        research_only=True,
        downloads=_files(
            f"{_GITHUB}/multi30k/dataset/master/data/task1/raw",
            *((f"{s}.{tongue}.gz", f"{s}.{tongue}.txt.gz") for s in ("train", "val") for tongue in ("de", "en")),
        ),
        train="own-text data={out}/multi30k/train.en.txt.gz",
    ),
    Corpus(
        name="commongen",
        title="CommonGen",
        purpose="sentences that hold given words: lexical control",
        home="https://inklab.usc.edu/CommonGen/",
        licence="MIT",
        downloads=(
            Download(
                "https://storage.googleapis.com/huggingface-nlp/datasets/common_gen/commongen_data.zip",
                (
                    Kept("train.jsonl", inside="commongen.train.jsonl"),
                    Kept("dev.jsonl", inside="commongen.dev.jsonl"),
                ),
            ),
        ),
    ),
    Corpus(
        name="wikitext-2",
        title="WikiText-2",
        purpose="good articles of Wikipedia: language",
        home="https://wikitext.smerity.com/",
        licence="CC BY-SA 3.0",
        downloads=(
            Download(
                "https://wikitext.smerity.com/wikitext-2-v1.zip",
                (Kept("train.txt", inside="wiki.train.tokens"), Kept("valid.txt", inside="wiki.valid.tokens")),
            ),
        ),
        train="own-text data={out}/wikitext-2/train.txt",
    ),
    Corpus(
        name="ptb",
        title="Penn Treebank",
        purpose="newspaper sentences: language, parsing",
        home="https://catalog.ldc.upenn.edu/LDC99T42",
        licence="LDC user agreement",
        research_only=True,
        obtain="the Linguistic Data Consortium hands it to its licensees: https://catalog.ldc.upenn.edu/LDC99T42. "
        "Save its sentences, one a line, as ptb/train.txt.",
        train="ptb data={out}/ptb/train.txt",
    ),
    Corpus(
        name="enwik8",
        title="enwik8",
        purpose="the first 10⁸ bytes of a Wikipedia dump: bytes and characters",
        home="http://mattmahoney.net/dc/textdata.html",
        licence="GFDL and CC BY-SA (Wikipedia)",
        downloads=(
            Download(
                "http://mattmahoney.net/dc/enwik8.zip",
                (
                    Kept(
                        "enwik8.txt",
                        size=100_000_000,
                        sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
                        inside="enwik8",
                    ),
                ),
            ),
        ),
        train="own-text data={out}/enwik8/enwik8.txt",
    ),
    Corpus(
        name="text8",
        title="text8",
        purpose="10⁸ letters and spaces of Wikipedia: characters",
        home="http://mattmahoney.net/dc/textdata.html",
        licence="GFDL and CC BY-SA (Wikipedia)",
        downloads=(
            Download("http://mattmahoney.net/dc/text8.zip", (Kept("text8", size=100_000_000, inside="text8"),)),
        ),
        train="own-text data={out}/text8/text8.txt",
        convert=convert_text8,
    ),
    Corpus(
        name="ud-english-ewt",
        title="UD English EWT",
        purpose="sentences with Universal tags and dependencies: taggers, syntax control",
        home="https://universaldependencies.org/treebanks/en_ewt/",
        licence="CC BY-SA 4.0",
        downloads=_files(
            f"{_GITHUB}/UniversalDependencies/UD_English-EWT/master",
            ("en_ewt-ud-train.conllu", "train.conllu"),
            ("en_ewt-ud-dev.conllu", "dev.conllu"),
        ),
        read_by="python -m benchmarks.train_tagger --data DIR",
    ),
    Corpus(
        name="tinyshakespeare",
        title="tinyshakespeare",
        purpose="40,000 lines of plays: a first model of your own",
        home="https://github.com/karpathy/char-rnn",
        licence="public domain",
        downloads=(
            Download(
                f"{_GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                (
                    Kept(
                        "tinyshakespeare.txt",
                        size=1_115_394,
                        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                    ),
                ),
            ),
        ),
        train="own-text data={out}/tinyshakespeare/tinyshakespeare.txt",
    ),
)
CATALOGUE = {corpus.name: corpus for corpus in _ALL}
