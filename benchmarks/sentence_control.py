"""Steer a model by an ordinary sentence classifier, and count how often a second one agrees: a JSON line a row.

  python -m benchmarks.sentence_control label dialogue=sgd.txt.gz prose=standardebooks.txt.gz --out kind.jsonl
  python -m benchmarks.sentence_control fit --encoder MINILM --texts kind.jsonl --out kind --device cuda
  difflm train e2e-ssd-lm data=kind.jsonl more_than=50 licence=none --out runs/kind --device cuda
  difflm train e2e-judge data=kind.jsonl more_than=50 licence=none --out runs/judge --device cuda
  python -m benchmarks.sentence_control measure runs/kind --guide kind/guide --second kind/second --judge runs/judge

`label` takes paragraphs of a few words, as many of each label. `fit` fine-tunes the encoder twice, on even and on odd
lines of clean text: one classifier guides, the other judges what it had no part in.
"""

import argparse
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from difflm.app.commands.options import load_model
from difflm.controls import Label
from difflm.controls.guidance import GuidanceSettings
from difflm.data.text_metrics import distinct_n
from difflm.data.words import split_words
from difflm.generation.pipeline import TextDiffusion

WORDS = (6, 40)  # of a text
BATCH, RATE = 64, 5e-5


def short_paragraphs(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for line in lines:
            if WORDS[0] <= len(split_words(line.strip())) <= WORDS[1]:
                yield line.strip()


def write_labelled(files: dict[str, Path], out: Path, most: int, seed: int = 0) -> None:
    """As many texts of each label, in random order."""
    draw = random.Random(seed)
    texts = {label: [*dict.fromkeys(short_paragraphs(path))] for label, path in files.items()}
    count = min(most, *map(len, texts.values()))
    rows = [{"text": text, out.stem: label} for label, own in texts.items() for text in draw.sample(own, count)]
    draw.shuffle(rows)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def fit_classifier(encoder: str, rows: Sequence[tuple[str, str]], out: Path, steps: int, device: str) -> None:
    """A sentence classifier of (text, label) rows, saved as the library saves it."""
    import transformers

    labels = sorted({label for _, label in rows})
    pieces = transformers.AutoTokenizer.from_pretrained(encoder, local_files_only=True)
    body = transformers.AutoModelForSequenceClassification.from_pretrained(
        encoder, local_files_only=True, use_safetensors=True, id2label=dict(enumerate(labels))
    ).to(device)
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


@torch.no_grad()
def classify(folder: str, texts: Sequence[str], device: str) -> list[str]:
    """The likeliest label of each text."""
    import transformers

    pieces = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    body = transformers.AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
    body, found = body.eval().to(device), []
    for start in range(0, len(texts), BATCH):
        part = [*texts[start : start + BATCH]]
        told = pieces(part, padding=True, truncation=True, return_tensors="pt").to(device)
        found += [body.config.id2label[k] for k in body(**told).logits.argmax(-1).tolist()]
    return found


def measure(lm: TextDiffusion, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for texts without guidance, and one for each label and strength."""
    judge = load_model(asked.judge, asked.device) if asked.judge else None
    *_, (head, labelling) = lm.guided_by(asked.guide).labellings.items()
    cases: list[tuple[str | None, float]] = [(None, 0.0)]
    cases += [(label, size) for label in labelling.values[1:] for size in asked.sizes]
    for label, size in cases:
        controls = [] if label is None else [Label(head, label)]
        texts = lm.generate(asked.n, steps=asked.steps, controls=controls, guidance=GuidanceSettings(size=size))
        printed = [text.text for text in texts]
        row: dict[str, Any] = {"label": label, "guidance": size}
        for name, folder in (("guide", asked.guide), ("second", asked.second)):
            found = classify(folder, printed, asked.device)
            row[name] = {one: found.count(one) / len(found) for one in labelling.values[1:]}
        if judge is not None:
            rows = [ids for text in printed if (ids := judge.tokenizer.encode(text)[: judge.model.max_words])]
            row["judge_nats_per_token"] = float(judge.score_ids(rows).sum()) / sum(len(ids) + 1 for ids in rows)
        row["distinct_4"] = distinct_n([text.tokens for text in texts], 4)
        yield {**row, "calls": sum(text.denoiser_calls for text in texts) / len(texts), "example": printed[0]}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    label, fit, read = (verbs.add_parser(name) for name in ("label", "fit", "measure"))
    label.add_argument("files", nargs="+", help="LABEL=FILE")
    label.add_argument("--most", type=int, default=30_000, help="texts of each label")
    fit.add_argument("--encoder", required=True)
    fit.add_argument("--texts", type=Path, required=True)
    fit.add_argument("--steps", type=int, default=600)
    for one in (label, fit):
        one.add_argument("--out", type=Path, required=True)
    read.add_argument("run")
    for name in ("guide", "second"):
        read.add_argument(f"--{name}", required=True)
    read.add_argument("--judge")
    read.add_argument("-n", type=int, default=500)
    read.add_argument("--steps", type=int)
    read.add_argument("--sizes", type=float, nargs="+", default=[1.0, 3.0, 10.0, 20.0])
    for one in (fit, read):
        one.add_argument("--device", default="cpu")
    asked = parser.parse_args(argv)
    if asked.verb == "label":
        named = (pair.partition("=") for pair in asked.files)
        write_labelled({name: Path(file) for name, _, file in named}, asked.out, asked.most)
    elif asked.verb == "fit":
        lines = [json.loads(line) for line in asked.texts.read_text(encoding="utf-8").splitlines()]
        rows = [(line["text"], line[asked.texts.stem]) for line in lines]
        for half, name in enumerate(("guide", "second")):
            fit_classifier(asked.encoder, rows[half::2], asked.out / name, asked.steps, asked.device)
    else:
        for row in measure(load_model(asked.run, asked.device), asked):
            print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
