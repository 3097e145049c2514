"""Train, dev and test of the great table's tasks. All choices are made on dev; test is read once, after them."""

import gzip
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING

from benchmarks.tables.ledger import Ledger, Task

if TYPE_CHECKING:
    from difflm.data.tokenizers import Tokenizer
    from difflm.evaluation.corpora import PairSet

ROC_DEV = 2500  # of the 5,000 validation stories; the others are test
PTB_TEST = 2000  # the last lines of training, which are not trained on
PIECE = 120  # characters of texts that are pretrained on
ROOM = 2  # tokens of a source that some methods spend on its ends: sources are the same for all


@dataclass(frozen=True)
class Texts:
    """The texts of a task without sources; real texts that are trained on are streamed. Where dev and test are of other
    meanings than training (`apart`), samples are like training texts at best, and are compared with those."""

    dev: list[str]
    test: list[str]
    training: Callable[[], Iterator[str]]
    apart: bool = False


def hash_texts(texts: Sequence[str], references: Sequence[Sequence[str]] = ()) -> str:
    """How many there are, and a fingerprint of them: rows on other sets are not compared."""
    return f"{len(texts)} {hashlib.sha256(json.dumps([texts, references]).encode()).hexdigest()[:12]}"


def read_lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.strip() for line in file if line.strip()]


def read_language(corpus: str, root: Path) -> Texts:
    """Dev and test in a seeded order, since corpora group texts of one meaning or one article."""
    from difflm.data.corpora import corpus as read

    training: Callable[[], Iterator[str]] = lambda: read(corpus, root, "train")  # noqa: E731
    if corpus == "ptb":
        lines, dev = (read_lines(root / "ptb" / f"{split}.txt.gz") for split in ("train", "valid"))
        test, training = lines[-PTB_TEST:], lambda: iter(lines[:-PTB_TEST])
    elif corpus == "roc":
        held_out = list(read("roc", root, "valid"))
        half = min(ROC_DEV, len(held_out) // 2)
        dev, test = held_out[:half], held_out[half : 2 * half]
    else:
        dev, test = list(read(corpus, root, "valid")), list(read(corpus, root, "test"))
    mixed = [random.Random(0).sample(texts, len(texts)) for texts in (dev, test)]
    return Texts(mixed[0], mixed[1], training, apart=corpus == "e2e")


def read_pairs(corpus: str, root: Path, tokenizer: "Tokenizer", room: int) -> tuple["PairSet", "PairSet"]:
    """Dev and test: sources that every method can read."""
    from difflm.evaluation.corpora import read_pair_set

    def read(split: str) -> "PairSet":
        pairs = read_pair_set(corpus, None, root, split)  # type: ignore[arg-type]
        lengths = [len(ids) for ids in tokenizer.for_sources.encode_batch(list(pairs.sources))]
        return pairs.keep(0 < length <= room - ROOM for length in lengths)

    return read("valid"), read("test")


def write_pairs(corpus: str, root: Path, count: int, path: Path) -> Path:
    """Some pairs of training, drawn once."""
    from difflm.data.corpora import corpus_examples
    from difflm.runtime.files import write_atomic

    if not path.exists():
        pairs = random.Random(0).sample(list(corpus_examples(corpus, root, "train")), count)
        lines = (json.dumps({"src": one.source, "trg": one.target}) for one in pairs)
        write_atomic(path, "".join(f"{line}\n" for line in lines))
    return path


def write_pieces(prepared: Path) -> Path:
    """The training texts of a task, cut at the ends of sentences to the length of captions."""
    from difflm.data.texts import split_long
    from difflm.runtime.files import write_atomic

    path = prepared / "pieces.txt"
    if not path.exists():
        texts = (prepared / "train.txt").read_text(encoding="utf-8").splitlines()
        write_atomic(path, "".join(f"{piece}\n" for text in texts for piece in split_long(text, PIECE)))
    return path


def prepare_task(ledger: Ledger, task: Task, work: Path, root: Path) -> Path:
    """Learn the words of a task and read its training texts once: all its runs share them. Corpora whose test texts
    are part of a published split are trained from a file without them."""
    import torch

    from difflm.runtime.files import write_atomic, write_checked
    from difflm.training.fit import prepare_model
    from difflm.training.recipe import load_recipe
    from difflm.training.texts import Setup

    folder = work / "prepared" / task.name
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if task.corpus in ("roc", "ptb"):
        texts = read_language(task.corpus, root).training()
        write_atomic(folder / "train.txt", "".join(f"{text}\n" for text in texts))
    recipe = load_recipe(task.recipe, spell_changes(data_changes(task, folder)))
    ready = prepare_model(Setup(recipe, folder, torch.device("cpu"), lambda *_: None, root, resume=False))
    write_checked(folder / "config.json", ready.config)
    return folder


def spell_changes(changes: Mapping[str, object]) -> list[str]:
    """Changes of a recipe as the command takes them."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]


def data_changes(task: Task, folder: Path) -> dict[str, object]:
    own = folder / "train.txt"
    small = {"model.hidden": 32, "model.layers": 1, "model.heads": 1} if not (folder / "config.json").exists() else {}
    return {"data": str(own) if own.exists() else task.corpus, **task.changes, **small}


def copy_read_texts(prepared: Path, out: Path) -> None:
    if not (out / "data").exists():
        copytree(prepared / "data", out / "data")
