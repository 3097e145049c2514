"""What a model of one's own text writes, as a language model reads it that had no part in training.

  difflm train my.txt --out my-run
  difflm generate my-run -n 50 --json > after.jsonl
  python -m benchmarks.tables.own_text after.jsonl --real other.txt --texts my.txt --judge DIR

For each file of samples it prints how many the judge accepts, the mean of their nats per token, and how many of their
sentences are in the texts of training. A sample is accepted if it has at most as many nats per token as 90 % of the
real texts; these, one per line, are of the same kind as the texts of training and not among them.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.assets.english import make_judge

SENTENCES = re.compile(r"(?<=[.!?])\s+")


def read_lines(path: Path) -> list[str]:
    """The texts of a file: one per line, or those that `difflm generate --json` wrote."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [json.loads(line)["text"] if path.suffix == ".jsonl" else " ".join(line.split()) for line in lines]


def count_copies(samples: Sequence[str], texts: Sequence[str]) -> dict[str, int]:
    """Samples, and sentences of samples, that are in the texts word by word."""
    known = set(texts) | {sentence for text in texts for sentence in SENTENCES.split(text)}
    sentences = [sentence for sample in samples for sentence in SENTENCES.split(sample)]
    return {
        "copied_texts": sum(sample in known for sample in samples),
        "sentences": len(sentences),
        "copied_sentences": sum(sentence in known for sentence in sentences),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", nargs="+", type=Path)
    parser.add_argument("--real", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--judge", type=Path, required=True)
    parser.add_argument("--show", action="store_true", help="print each sample with its nats per token")
    asked = parser.parse_args()
    judge = make_judge(asked.judge)

    def score(texts: Sequence[str]) -> "np.ndarray[Any, Any]":
        return np.array([judge(text, 0) if text.strip() else np.inf for text in texts])

    real, texts = score(read_lines(asked.real)), read_lines(asked.texts)
    limit = float(np.quantile(real, 0.9))
    print(
        json.dumps({"real_texts": len(real), "nats_per_token": round(float(real.mean()), 3), "limit": round(limit, 3)})
    )
    for path in asked.samples:
        samples = read_lines(path)
        nats = score(samples)
        about = {"samples": path.name, "texts": len(samples), "accepted": int((nats <= limit).sum())}
        words = round(float(np.mean([len(sample.split()) for sample in samples])), 1)
        mean = round(float(nats.mean()), 3)
        print(json.dumps({**about, "nats_per_token": mean, "words": words, **count_copies(samples, texts)}), flush=True)
        for sample, nat in zip(samples, nats, strict=True) if asked.show else ():
            print(f"  {nat:.2f} {'' if nat <= limit else '✗ '}{sample}")


if __name__ == "__main__":
    main()
