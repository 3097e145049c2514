"""Small corpora in the layouts of public ones, and where the public ones lie, if they do."""

import gzip
import json
import os
from itertools import product
from pathlib import Path

import pytest

from difflm.data.corpora import read_e2e
from difflm.data.words import split_words
from tests.support.tiny import write_grammar

DATA = Path(os.environ.get("DIFFLM_DATA") or "nowhere")
needs_e2e = pytest.mark.skipif(not (DATA / "e2e").is_dir(), reason="needs E2E under $DIFFLM_DATA")

FORMS = (
    "{name} is a {price} {Type} by the {area} , near {near} . It is {friendly} , rated {rating} , with {food} food .",
    "A {friendly} {price} {Type} , {name} , has {food} food , rated {rating} . It is in the {area} near {near} .",
    "{name} , in the {area} , near {near} , is {friendly} , rated {rating} , and a {price} {Type} with {food} food .",
)


def write_e2e(folder):
    """Each meaning in three sentences; the validation split has one sentence more, with a word that nobody knows."""
    (folder / "e2e").mkdir(parents=True)
    lines = []
    for name, near, food, price in product(
        ("Cotto", "The Mill"), ("Avalon", "Ranch"), ("French", "Indian"), ("cheap", "high")
    ):
        fields = {
            **{"name": name, "Type": "pub", "food": food, "price": price, "customer rating": "5 out of 5"},
            **{"area": "riverside", "family friendly": "yes", "near": near},
        }
        said = {"price": "cheap" if price == "cheap" else "expensive", "rating": "5 out of 5"}
        meaning = " | ".join(f"{key} : {value}" for key, value in fields.items())
        for form in FORMS:
            lines.append(f"{meaning}||{form.format(**{**fields, **said}, friendly='family friendly')}")
    (folder / "e2e" / "train.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    odd = ["name : Cotto||Cotto is zyzzyva .", f"name : Cotto||{'Cotto is a pub . ' * 20}"]
    (folder / "e2e" / "valid.txt").write_text("\n".join([*odd, *lines]) + "\n", encoding="utf-8")
    return list(read_e2e(folder / "e2e" / "valid.txt"))


def write_lines(root: Path, name: str, *lines: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


FOODS = ("Italian", "French", "Chinese", "English")


def write_labels(path) -> None:
    texts = write_grammar(path.parent / "grammar.txt", 60)
    rows = []
    for text in texts:
        words = split_words(text)
        row = {"text": text, "food": next(food for food in FOODS if food in text)}
        row["pos"] = ["NOUN" if word.isalpha() else "PUNCT" for word in words]
        rows.append({**row, "tree": [[0, len(words) - 1, "S"], [0, 2, "NP"]]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def multi30k(tmp_path) -> Path:
    """A small Multi30k."""
    for split, count in (("train", 12), ("val", 3)):
        for side, word in (("en", "dog"), ("de", "Hund")):
            write_lines(tmp_path, f"multi30k/task1.{split}.{side}", *(f"{word} {k} {split}" for k in range(count)))
    return tmp_path
