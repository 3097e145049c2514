"""From a treebank to a small parser of E2E texts: a teacher on a pretrained encoder, then a student on its trees.

    python -m benchmarks.assets.distil_parser --data DATA --treebank gum --encoder MINILM --device cuda --out OUT/gum
    python -m benchmarks.assets.distil_parser --data DATA --treebank ptb --encoder MINILM --device cuda --out OUT/ptb
    python -m benchmarks.assets.distil_parser --data DATA --compare OUT/gum OUT/ptb --out OUT

The first two may run in parallel. Each writes the student (parser.json, model.safetensors) and the teacher's trees of
E2E's validation texts (valid.jsonl.gz), with GUM also those of its training texts (train.jsonl.gz). The third command
measures how far the two agree and writes compare.json.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.assets.train_parser import make_options, measure, save_parser, train_new
from benchmarks.assets.treebanks import E2E_SPLITS, Treebank, e2e_texts, read_trees, treebank, write_trees
from difflm.annotators.parser import SpanParser, load_parser, parse_texts
from difflm.annotators.trees import Agreement, Tree, agreements, join_sentences, phrases, split_sentences
from difflm.runtime.files import write_atomic

STUDENT_EPOCHS, STUDENT_BATCH = 12, 128
Sentence = tuple[str, ...]


def distil(given: argparse.Namespace) -> None:
    bank, began = given.treebank, time.monotonic()

    def log(what: object) -> None:
        print(f"{bank}, {time.monotonic() - began:.0f} s: {what}", flush=True)

    kept, held = (trees[: given.limit] for trees in treebank(bank, given.data))
    texts = {split: e2e_texts(given.data, split)[: given.limit] for split in E2E_SPLITS}
    sentences = {split: sentences_of(texts[split]) for split in E2E_SPLITS}
    log(f"{len(kept)} trees, {len(sentences['train'])} E2E sentences")

    plan = {"epochs": given.epochs, "minutes": given.minutes}
    teacher = train_new(f"{bank}, teacher", kept, given.encoder, given.device, given.seed, **plan)
    result = teacher_figures(teacher, held, given)
    log(json.dumps(result))

    every = list(dict.fromkeys(sentences["train"] + sentences["valid"]))
    trees = dict(zip(every, teacher.parse(every), strict=True))
    for split in ("valid",) if bank == "ptb" else E2E_SPLITS:
        write_trees(given.out / f"{split}.jsonl.gz", text_trees(texts[split], trees))
    log("E2E parsed")

    plan = {"epochs": STUDENT_EPOCHS, "minutes": given.minutes, "batch_size": STUDENT_BATCH}
    lessons = [trees[s] for s in sentences["train"]]
    save_parser(train_new(f"e2e-{bank}", lessons, None, given.device, given.seed, **plan), given.out)
    student = load_parser(given.out, given.device)  # measure what was saved
    found = parse_texts(student, texts["valid"])
    result["student = teacher, E2E valid"] = shares(agreements(text_trees(texts["valid"], trees), found))
    unseen = [trees[s] for s in dict.fromkeys(sentences["valid"]) if s not in set(sentences["train"])]
    result["student = teacher, E2E valid sentences not in train"] = measure(student, unseen)
    result["student, released spans"] = released_spans(student, given.data)
    about = {"trained_on": f"E2E train as parsed by a parser trained on {bank}", "seed": given.seed}
    save_parser(student, given.out, {**about, "measured": result})
    log(json.dumps(result, indent=1))


def teacher_figures(teacher: SpanParser, held: list[Tree], given: argparse.Namespace) -> dict[str, object]:
    """Measure a teacher on the held-out trees of both treebanks and against the spans that another parser found."""
    other: Treebank = "gum" if given.treebank == "ptb" else "ptb"
    return {
        "teacher, held out": measure(teacher, held),
        f"teacher, {other} held out": measure(teacher, treebank(other, given.data)[1][: given.limit]),
        "teacher, released spans": released_spans(teacher, given.data),
    }


def sentences_of(texts: list[list[str]]) -> list[Sentence]:
    """Return the distinct sentences of the texts."""
    return list(dict.fromkeys(tuple(sentence) for words in texts for sentence in split_sentences(words)))


def text_trees(texts: list[list[str]], trees: dict[Sentence, Tree]) -> Iterator[Tree]:
    return (join_sentences([trees[tuple(sentence)] for sentence in split_sentences(words)]) for words in texts)


def shares(counts: Agreement) -> dict[str, float]:
    exact = counts.exact / counts.trees
    return {"f1": round(100 * counts.f1, 2), "exact": round(100 * exact, 2), "trees": counts.trees}


def released_spans(parser: SpanParser, data: Path) -> float | None:
    """Return the share of Diffusion-LM's released span targets (made with benepar) that the parser finds."""
    path = data / "control_targets" / "target_spans.json"
    if not path.exists():
        return None
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [[word for word in row["words_"] if word not in ("START", "END", "\n")] for row in rows]
    found = [{*tree.spans(), *phrases(tree)} for tree in parse_texts(parser, texts)]  # the targets have both
    hits = [tuple(span) in spans for row, spans in zip(rows, found, strict=True) for span in row["spans"]]
    return round(100 * sum(hits) / len(hits), 1)


def compare(data: Path, first: Path, second: Path, limit: int | None, out: Path) -> None:
    texts = e2e_texts(data, "valid")[:limit]
    teachers = [list(read_trees(place / "valid.jsonl.gz")) for place in (first, second)]
    students = [parse_texts(load_parser(place), texts) for place in (first, second)]
    result = {
        f"teachers {first.name} and {second.name}": shares(agreements(*teachers)),
        f"students {first.name} and {second.name}": shares(agreements(*students)),
        f"student {second.name} and teacher {first.name}": shares(agreements(teachers[0], students[1])),
    }
    write_atomic(out / "compare.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def main() -> None:
    parser = make_options(__doc__)
    parser.add_argument("--compare", nargs=2, type=Path, metavar="DIR")
    given = parser.parse_args()
    if given.compare:
        first, second = given.compare
        compare(given.data, first, second, given.limit, given.out)
    else:
        distil(given)


if __name__ == "__main__":
    main()
