"""What a bundled model has seen: the spellings of its training texts, a file `words.txt` beside its weights, and how
many nats a token of a usual text has at most, a number in its config.

  python -m benchmarks.assets.lexicon words --data DIR --out models/english/difflm_english/english/words.txt
  python -m benchmarks.assets.lexicon nats RUN --data DIR

A word is kept if it occurs `LEAST` times: without a capital letter, or with one inside sentences; beside its small
form if this share (`CAPITAL`) of its occurrences has one.
"""

import argparse
import gzip
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from benchmarks.assets.english_texts import SOURCES
from difflm import TextDiffusion
from difflm.runtime.files import read_checked, write_atomic, write_checked

LEAST, CAPITAL, LONGEST = 3, 0.1, 30  # occurrences, a share, letters
INSIDE = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]+")  # words with a capital letter that do not begin a sentence
SPELLING = re.compile(r"\W*([A-Za-z]+(?:'[A-Za-z]+)*)\W*")
AT_ONCE = 20_000  # lines
TECHNICAL = "mdn"  # a source full of names of code
TEXTS, USUAL, SEED, SHARE = 1000, 0.99, 0, 0.01  # SHARE: of all lines, among which texts are drawn


def read_lines(data: Path) -> Iterator[str]:
    for name, source in SOURCES.items():
        path = data / source.file
        if source.file and name != TECHNICAL and path.is_file():
            with (lzma.open if path.suffix == ".xz" else gzip.open)(path, "rt", encoding="utf-8") as file:
                yield from islice(file, 0, None, round(1 / source.keep))  # as many as are learned from


def collect_words(data: Path) -> list[str]:
    """The spellings that are kept, sorted."""
    raw, large = Counter[str](), Counter[str]()
    lines = read_lines(data)
    while chunk := "".join(islice(lines, AT_ONCE)).replace("’", "'"):
        raw.update(chunk.split())
        large.update(INSIDE.findall(chunk))
    counts = Counter[str]()
    for word, count in raw.items():
        if (found := SPELLING.fullmatch(word)) and len(found[1]) <= LONGEST:
            counts[found[1].removesuffix("'s")] += count
    small = {word for word, count in counts.items() if word.islower() and count >= LEAST}
    names = {name for name, count in large.items() if count >= LEAST and len(name) <= LONGEST}
    return sorted(small | {n for n in names if n.lower() not in small or large[n] > CAPITAL * counts[n.lower()]})


def measure_usual(run: str, data: Path) -> float:
    """The nats a token that so many texts with a gap have at most."""
    lm, draw = TextDiffusion.from_pretrained(run, device="auto"), random.Random(SEED)
    some = (line.split() for line in read_lines(data) if draw.random() < SHARE)
    lines = [words for words in some if 7 < len(words) < 40]
    found = []
    for words in draw.sample(lines, TEXTS):
        begin, size = draw.randrange(1, len(words) - 4), draw.randrange(0, 4)
        given = f"{' '.join(words[:begin])} ___ {' '.join(words[begin + size :])}" if size else " ".join(words)
        found.append(lm.given_nats(given))
    return sorted(found)[int(USUAL * len(found))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("words", "nats"))
    parser.add_argument("run", nargs="?")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.what == "words":
        words = collect_words(asked.data)
        write_atomic(asked.out, "\n".join(words))
        print(f"{len(words):,} words, {asked.out.stat().st_size:,} bytes")
        return
    nats = measure_usual(asked.run, asked.data)
    path = Path(asked.run) / "config.json"
    config = read_checked(path)
    config["gaps"]["usual_nats"] = round(nats, 2)
    write_checked(path, config)
    print(f"{nats:.2f} nats a token")


if __name__ == "__main__":
    main()
