"""Steer SSD-LM by an ordinary sentence classifier, and count how often a second one agrees.

  python -m benchmarks.tables.sentence_control dialogue=sgd.txt.gz prose=standardebooks.txt.gz --encoder MINILM --out a

Paragraphs of a few words are taken, as many of each label. The encoder is fine-tuned twice, on even and on odd lines of
clean text: one classifier guides, the other judges what it had no part in. Beside them a writer and a judge learn the
same texts, for equal minutes; 1,000 texts nobody learns. Then texts are written without guidance, and for each label
with several strengths: a line each in OUT/rows.jsonl. A command that ran out of time is continued by the next one.
"""

import argparse
import gzip
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tables.timed import UNTIMED, read_results, run_side_by_side, train_for_minutes

if TYPE_CHECKING:
    from difflm.generation.pipeline import TextDiffusion

WORDS = (6, 40)  # of a text
HELD_BACK = 1000  # texts, of small files a tenth
BATCH, RATE = 64, 5e-5
CLASSIFIERS = ("guide", "second")
RUNS = {"writer": "e2e-ssd-lm", "judge": "e2e-judge"}
SHORT = ["compile=false", "warmup=200", "ema=0.998", "sample_every=0", "licence=none"]


# -- texts ------------------------------------------------------------------------------------------------------------


def short_paragraphs(path: Path) -> Iterator[str]:
    from difflm.data.words import split_words

    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.count(" ") < WORDS[1] and WORDS[0] <= len(split_words(line.strip())) <= WORDS[1]:
                yield line.strip()


def write_labelled(files: dict[str, Path], out: Path, most: int, seed: int = 0) -> None:
    """Write as many texts of each label, in random order: those to learn and those that are held back."""
    from difflm.runtime.files import write_atomic

    draw = random.Random(seed)
    texts = {label: [*dict.fromkeys(short_paragraphs(path))] for label, path in files.items()}
    count = min(most, *map(len, texts.values()))
    rows = [{"text": text, "kind": label} for label, own in texts.items() for text in draw.sample(own, count)]
    draw.shuffle(rows)
    back = min(HELD_BACK, len(rows) // 10)
    for name, some in (("held_back.jsonl", rows[:back]), ("texts.jsonl", rows[back:])):
        write_atomic(out / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in some))


def read_labelled(path: Path) -> list[tuple[str, str]]:
    return [(row["text"], row["kind"]) for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())]


# -- what is learned, each in a process of its own --------------------------------------------------------------------


def fit_classifier(encoder: str, rows: Sequence[tuple[str, str]], out: Path, steps: int, device: str) -> None:
    """A sentence classifier of (text, label) rows, saved as the library saves it."""
    import torch
    import transformers
    from torch.nn import functional as F

    labels = sorted({label for _, label in rows})
    pieces = transformers.AutoTokenizer.from_pretrained(encoder, local_files_only=True)
    body = transformers.AutoModelForSequenceClassification.from_pretrained(
        encoder, local_files_only=True, use_safetensors=True, id2label=dict(enumerate(labels))
    ).to(device, torch.float32)
    optimiser, draw = torch.optim.AdamW(body.parameters(), lr=RATE), random.Random(0)
    body.train()
    for step in range(steps):
        texts, answers = zip(*draw.choices(rows, k=BATCH), strict=True)
        told = pieces([*texts], padding=True, truncation=True, max_length=128, return_tensors="pt").to(device)
        wanted = torch.tensor([labels.index(answer) for answer in answers], device=device)
        loss = F.cross_entropy(body(**told).logits, wanted)
        optimiser.zero_grad()
        loss.backward()
        for group in optimiser.param_groups:
            group["lr"] = RATE * min((step + 1) / 50, 1 - step / steps)
        optimiser.step()
    body.eval().save_pretrained(out)
    pieces.save_pretrained(out)


def train(name: str, asked: argparse.Namespace) -> None:
    from difflm.training.recipe import load_recipe

    changes = [*UNTIMED, *SHORT, f"data={(asked.out / 'texts.jsonl').resolve()}", "more_than=50", *asked.more]
    recipe = load_recipe(RUNS[name], changes)
    train_for_minutes(recipe, asked.out / name, asked.minutes, asked.until, asked.device, None)


# -- what is measured -------------------------------------------------------------------------------------------------


def classify(folder: Path, texts: Sequence[str], device: str) -> list[str]:
    """The likeliest label of each text."""
    import torch
    import transformers

    pieces = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    body = transformers.AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
    body, found = body.eval().to(device), []
    for start in range(0, len(texts), BATCH):
        part = [*texts[start : start + BATCH]]
        told = pieces(part, padding=True, truncation=True, max_length=128, return_tensors="pt").to(device)
        with torch.no_grad():
            found += [body.config.id2label[k] for k in body(**told).logits.argmax(-1).tolist()]
    return found


def describe(texts: Sequence[str], judge: "TextDiffusion", asked: argparse.Namespace) -> dict[str, Any]:
    """What both classifiers and the judge say about texts."""
    from difflm.data.text_metrics import distinct_n
    from difflm.data.words import split_words

    row: dict[str, Any] = {}
    for name in CLASSIFIERS:
        found = classify(asked.out / name, texts, asked.device)
        row[name] = {label: found.count(label) / len(found) for label in sorted(asked.files)}
    ids = [own for text in texts if (own := judge.tokenizer.encode(text)[: judge.model.max_words])]
    row["judge_nats_per_token"] = float(judge.score_ids(ids).sum()) / sum(len(one) + 1 for one in ids)
    return {**row, "distinct_4": distinct_n([split_words(text) for text in texts], 4)}


def measure(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for real texts of each label, one for texts without guidance, and one for each label and strength."""
    from difflm.app.commands.options import load_model
    from difflm.controls import Label
    from difflm.controls.guidance import GuidanceSettings

    lm, judge = (load_model(str(asked.out / name), asked.device) for name in RUNS)
    lm, done = lm.guided_by(str(asked.out / "guide")), read_results(asked.out / "rows.jsonl")
    (head,) = [name for name, one in lm.labellings.items() if {*asked.files} <= {*one.values}]
    real = read_labelled(asked.out / "held_back.jsonl")
    cases = [("real", label, 0.0) for label in sorted(asked.files)] + [("written", "", 0.0)]
    cases += [("written", label, size) for label in sorted(asked.files) for size in asked.sizes]
    for what, label, size in cases:
        case = {"texts": what, "label": label, "guidance": size}
        if any(case.items() <= row.items() for row in done):
            continue
        if what == "real":
            yield {**case, **describe([text for text, own in real if own == label], judge, asked)}
            continue
        controls = [Label(head, label)] if label else []
        made = lm.generate(asked.n, steps=asked.steps, controls=controls, guidance=GuidanceSettings(size=size))
        calls = sum(text.denoiser_calls for text in made) / len(made)
        texts = [text.text for text in made]
        yield {**case, **describe(texts, judge, asked), "calls": calls, "examples": texts[:8]}


def make(name: str, asked: argparse.Namespace) -> None:
    from difflm.generation.checks import check_device
    from difflm.runtime.files import append_line

    asked.device = check_device(asked.device).type
    if name in RUNS:
        train(name, asked)
    elif name in CLASSIFIERS:
        rows = read_labelled(asked.out / "texts.jsonl")[CLASSIFIERS.index(name) :: 2]
        fit_classifier(asked.encoder, rows, asked.out / name, asked.classifier_steps, asked.device)
    else:
        for row in measure(asked):
            append_line(asked.out / "rows.jsonl", json.dumps(row, ensure_ascii=False))


def main() -> None:
    def pair(text: str) -> tuple[str, Path]:
        label, _, file = text.partition("=")
        return label, Path(file)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pair, help="LABEL=FILE")
    parser.add_argument("--encoder", required=True, help="the directory of a Hugging Face encoder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=30_000, help="texts of each label")
    parser.add_argument("--classifier-steps", type=int, default=600)
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, for the writer and the judge")
    parser.add_argument("--seconds", type=float, default=560.0, help="of the whole command")
    parser.add_argument("-n", type=int, default=500, help="texts to write, for each row")
    parser.add_argument("--steps", type=int, help="of a block")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0, 3.0, 10.0, 20.0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--more", nargs="*", default=[], help="key=value changes to both recipes")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.files = dict(asked.files)
    if asked.one:
        return make(asked.one, asked)
    asked.out.mkdir(parents=True, exist_ok=True)
    if not (asked.out / "texts.jsonl").exists():
        write_labelled(asked.files, asked.out, asked.most)
    marks = {name: asked.out / name / "done" for name in RUNS}
    marks |= {name: asked.out / name / "tokenizer.json" for name in CLASSIFIERS}
    names = [name for name, mark in marks.items() if not mark.exists()]

    def ready(name: str) -> bool:
        return name in marks or all(mark.exists() for mark in marks.values())

    run_side_by_side([*names, "rows"], asked.out, len(marks), asked.seconds, ready, sys.argv[1:])
    for row in read_results(asked.out / "rows.jsonl"):
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
