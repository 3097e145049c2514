"""Gaps per second of a list of sentences: `python -m benchmarks.speed.gaps --device cuda --count 2000`.

The sentences are those of tests/support/english_gaps.jsonl, again and again with other seeds; every request has the
candidates that the model has for gaps. A first list, not counted, captures the steps of each shape. Printed are
gaps per second, CPU seconds per sentence, and the most memory of the process and of the GPU.
"""

import argparse
import json
import resource
import time
from itertools import cycle, islice
from pathlib import Path

import torch

from difflm.controls import Infill
from difflm.generation.pipeline import TextDiffusion

SENTENCES = Path("tests/support/english_gaps.jsonl")


def fill(lm: TextDiffusion, templates: list[str], candidates: int | None) -> int:
    """Fill the gaps of all templates as one list, and return how many gaps there were."""
    how = {"usual": True} if candidates is None else {"candidates": candidates}
    jobs = [lm.make_job(1, seed, controls=[Infill(one)], **how) for seed, one in enumerate(templates)]
    made = sum(len(texts) for _, texts in lm.run_jobs(jobs))
    assert made == len(templates), f"{made} of {len(templates)} texts"
    return sum(one.count("___") for one in templates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="english")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--count", type=int, default=1000, help="sentences")
    parser.add_argument("--candidates", type=int, help="per sentence; else as many as the model has for gaps")
    asked = parser.parse_args()
    lm = TextDiffusion.from_pretrained(asked.model, device=asked.device)
    told = [json.loads(line)["text"] for line in SENTENCES.read_text(encoding="utf-8").splitlines()]
    templates = [*islice(cycle(told), asked.count)]
    for name in ("first", "counted"):
        begun, worked = time.perf_counter(), time.process_time()
        gaps = fill(lm, templates, asked.candidates)
        seconds, worked = time.perf_counter() - begun, time.process_time() - worked
        rates = f"{gaps / seconds:.1f} gaps/s, {len(templates) / seconds:.1f} sentences/s"
        print(f"{name}: {rates}, {worked / len(templates):.3f} CPU seconds per sentence", flush=True)
    memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB"
    if lm.device.type == "cuda":
        memory += f", {torch.cuda.max_memory_allocated() / 2**20:.0f} MB of the GPU"
    print(memory)


if __name__ == "__main__":
    main()
