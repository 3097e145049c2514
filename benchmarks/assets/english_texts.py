"""The texts of the bundled model of everyday English: read, filtered, cut into passages of whole sentences, and written
as tokens that travel in one file.

A passage has one to a few sentences of one paragraph. Passages are of three sizes, so that single sentences are learned
as well as paragraphs. Of each source some whole documents are held out; nothing occurs twice.
"""

import gzip
import hashlib
import json
import lzma
import math
import random
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.assets.treebanks import FREE_GENRES, read_gum
from difflm.data.texts import Example, read_lines
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import Bpe, Tokenizer
from difflm.data.words import join_words
from difflm.runtime.files import read_json, write_atomic, write_json

LONGEST = 126  # tokens of a passage; the twin writes an end behind them
SIZES, SHARES = (110, 230, 460), (0.4, 0.35, 0.25)  # characters of a passage at most, and how often
LEARNED = 4  # byte pairs are learned from one passage of so many
LABELLED = 12_000  # passages of each register, of at most `SIZES[1]` characters
HELD = 1000  # passages held out of each source at most


@dataclass(frozen=True)
class Source:
    file: str  # below the folder of the data
    licence: str
    origin: str  # who made it
    about: str
    register: str = ""  # what its passages are labelled with
    repeat: int = 1  # how often each passage stands in an epoch
    held_out: int = 100  # one document of so many
    single: bool = False  # every paragraph is a document of its own
    technical: bool = False  # paragraphs that name code are left out


SOURCES = {
    "standardebooks": Source(
        "english/standardebooks.txt.gz", "CC0 1.0", "Standard Ebooks", "novels and stories, 1813 to the 1950s", "story"
    ),
    "commonvoice": Source(
        "english/commonvoice.txt.gz", "CC0 1.0", "Mozilla Common Voice", "single sentences", repeat=3, single=True
    ),
    "openstax": Source("english/openstax.txt.gz", "CC BY 4.0", "OpenStax", "textbooks", "textbook"),
    "sgd": Source(
        "english/sgd.txt.gz", "CC BY-SA 4.0", "Schema-Guided Dialogue (Google)", "task dialogues", "dialogue"
    ),
    "ewt": Source(
        "parsing/en_ewt-ud-train.conllu.gz",
        "CC BY-SA 4.0",
        "Universal Dependencies, English Web Treebank",
        "reviews, e-mails, weblogs, newsgroups and answers",
        repeat=4,
        held_out=20,
    ),
    "gum": Source(
        "parsing/gum_const.tar.gz",
        "CC BY 4.0, CC BY-SA 4.0",
        "GUM (Zeldes, 2017), its free genres",
        "news, travel guides, interviews, biographies, courts, papers",
        repeat=4,
        held_out=10,
    ),
    "mdn": Source(
        "english/mdn.txt.gz", "CC BY-SA 2.5", "MDN contributors", "web documentation", "manual", technical=True
    ),
}

# -- from files to passages --------------------------------------------------------------------------------------------

BEGIN, END = re.compile(r"[A-Z0-9“\"‘'(]"), re.compile(r"[.!?…][”\"’')]*$")
FOREIGN = re.compile(r"[<>{}\[\]_|\\=`@#^~*]|https?:|www\.")
CODE = re.compile(r"[a-z][A-Z]|\(\)|\w\.\w|\w-\w+-\w|\b[A-Z]{2,}\b.*\b[A-Z]{2,}\b")
STOP = re.compile(r"(?<=[.!?…])([”\"’')]*) +(?=[A-Z0-9“\"‘'(])")
SHORT = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Prof|Rev|Col|Gen|Capt|Lt|Sgt|Jr|Sr|vs|etc|No|e\.g|i\.e)|\b[A-Z])\.$")
TYPED = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'"})


def read_documents(path: Path, single: bool) -> Iterator[list[str]]:
    """Lists of paragraphs. A file has one a line and an empty line between documents, or is a treebank."""
    if path.name.startswith("gum"):
        free = {name: trees for name, trees in sorted(read_gum(path).items()) if name.split("_")[1] in FREE_GENRES}
        sentences = ([join_words(list(tree.words())) for tree in trees] for trees in free.values())
        yield from ([" ".join(filter(is_prose, own))] for own in sentences)
        return
    found: list[str] = []
    lines = (line.strip() for _, line in read_lines(path))
    for line in treebank_paragraphs(lines) if ".conllu" in path.name else lines:
        if (not line or single) and found:
            yield found
            found = []
        if line:
            found.append(line)
    if found:
        yield found


def treebank_paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Paragraphs of a treebank in CoNLL-U, an empty one between documents."""
    paragraph: list[str] = []
    for line in lines:
        if line.startswith(("# newdoc", "# newpar")):
            yield from (" ".join(paragraph),) if paragraph else ()
            paragraph = []
            if line.startswith("# newdoc"):
                yield ""
        elif line.startswith("# text = "):
            sentence = line.removeprefix("# text = ").strip()
            paragraph += [sentence] if is_prose(sentence) else []
    yield " ".join(paragraph)


def is_prose(text: str, technical: bool = False) -> bool:
    """Whether a paragraph is made of sentences, and of little but words."""
    ends = BEGIN.match(text) and END.search(text) and not FOREIGN.search(text)
    if not ends or len(text.split()) < 3 or text.isupper() or (technical and CODE.search(text)):
        return False
    return sum(c.isalpha() or c == " " for c in text) >= 0.85 * len(text)


def split_sentences(text: str) -> list[str]:
    found, begin = [], 0
    for stop in STOP.finditer(text):
        if not SHORT.search(text, begin, stop.start()):
            found.append(text[begin : stop.end(1)])
            begin = stop.end()
    return [*found, text[begin:]]


def cut_passages(paragraph: str, chance: random.Random) -> Iterator[str]:
    """Whole sentences, as many as a size that is drawn for each passage holds; one at least."""
    passage, size = "", chance.choices(SIZES, SHARES)[0]
    for sentence in split_sentences(paragraph):
        if passage and len(passage) + len(sentence) >= size:
            yield passage
            passage, size = "", chance.choices(SIZES, SHARES)[0]
        passage = f"{passage} {sentence}" if passage else sentence
    yield passage


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def read_passages(name: str, root: Path, seen: set[int]) -> tuple[list[str], list[str]]:
    """Passages to train on and held-out ones, without any that are among `seen`. Half of the documents have the quotes
    that keyboards have."""
    source, chance = SOURCES[name], random.Random(name)
    training: list[str] = []
    held: list[str] = []
    for number, document in enumerate(read_documents(root / source.file, source.single)):
        out = digest(f"{name} {number}") % source.held_out == 0
        typed = chance.random() < 0.5
        kept = (" ".join(text.split()) for text in document)
        prose = [text.translate(TYPED) if typed else text for text in kept if is_prose(text, source.technical)]
        if name == "sgd":  # turns follow each other as sentences do
            prose = [" ".join(prose)] if prose else []
        for paragraph in prose:
            for passage in cut_passages(paragraph, chance):
                key = digest(re.sub(r"\W+", " ", passage.lower()).strip())
                if key not in seen:
                    seen.add(key)
                    (held if out else training).append(passage)
    return training, chance.sample(held, min(len(held), HELD))


# -- from passages to tokens -------------------------------------------------------------------------------------------


def prepare(
    root: Path,
    out: Path,
    vocabulary: int,
    most: int = 0,
    tokenizer: Tokenizer | None = None,
    megabytes: float = 0.0,
) -> None:
    """Write tokens of all sources, their tokenizer, and labelled passages; and all of them as one file that travels.
    With `most`, so many passages of each source alone. With a `tokenizer` of others, its tokens and no labels, and of
    each source such a share that the file has about so many `megabytes`."""
    seen: set[int] = set()
    training, held, chance = dict[str, list[str]](), dict[str, list[str]](), random.Random(0)
    for name in SOURCES:
        training[name], held[name] = read_passages(name, root, seen)
        if most:
            training[name], held[name] = training[name][:most], held[name][: max(2, most // 50)]
        chance.shuffle(training[name])
        print(f"{name}: {len(training[name]):,} passages, {len(held[name]):,} held out", flush=True)
    texts = [text for name in SOURCES for text in training[name]]
    learns = tokenizer is None
    tokenizer = tokenizer or Bpe.build(texts[::LEARNED] if not most else texts, vocabulary)
    tokenizer.save(out / "tokenizer.json")
    if megabytes:
        share = find_share(texts, tokenizer, megabytes)
        training = {name: own[: math.ceil(share * len(own))] for name, own in training.items()}
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for name in SOURCES:
        for split, passages in (("train", training[name]), ("valid", held[name])):
            rows = TokenFile.build(out / split / name, map(Example, passages), tokenizer, {"corpus": name})
            counts.setdefault(name, {})[split] = {"texts": len(rows), "tokens": int(rows.offsets[-1])}
    about = {name: {"licence": one.licence, "about": one.about, **counts[name]} for name, one in SOURCES.items()}
    write_json(out / "sources.json", about)
    labelled = [
        {"text": text, "register": one.register}
        for name, one in SOURCES.items()
        if one.register and learns
        for text in [text for text in training[name] if len(text) <= SIZES[1]][:LABELLED]
    ]
    chance.shuffle(labelled)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in labelled)
    write_atomic(out / "registers.jsonl.gz", gzip.compress(lines.encode()))
    pack(out)
    print(json.dumps(about, indent=1))


def find_share(texts: Sequence[str], tokenizer: Tokenizer, megabytes: float) -> float:
    """The share of texts whose tokens, compressed, have so many megabytes, by those of some thousand."""
    some = texts[:: max(1, len(texts) // 8000)]
    ids = np.array([number for row in tokenizer.encode_batch(some) for number in row], "<u2")
    rate = len(lzma.compress(ids.tobytes(), preset=4)) / sum(map(len, some))
    return min(1.0, megabytes * 2**20 / (rate * sum(map(len, texts))))


PACKED = "tokens.tar.xz"


def pack(out: Path) -> None:
    with tarfile.open(out / PACKED, "w:xz", preset=4) as tar:
        for name in ("tokenizer.json", "sources.json", "registers.jsonl.gz", "train", "valid"):
            tar.add(out / name, name)
    print(f"{out / PACKED}: {(out / PACKED).stat().st_size / 2**20:.1f} MiB")


def unpack(folder: Path) -> None:
    """Unpack what travelled, once."""
    if not (folder / "train").exists():
        with tarfile.open(folder / PACKED) as tar:
            tar.extractall(folder, filter="data")


def read_sources(folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    found: dict[str, dict[str, dict[str, int]]] = read_json(folder / "sources.json")
    return found
