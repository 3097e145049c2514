"""Copy a run as the package holds it: half-precision weights, or matrices of eight bits; no optimiser, no data.

python -m benchmarks.export_run runs/e2e src/difflm/pretrained/e2e
python -m benchmarks.export_run runs/english src/difflm/pretrained/english --bits 8
"""

import argparse
from pathlib import Path

import torch

from benchmarks.narrow import quantise_rows
from difflm.data.corpora import file_names
from difflm.runtime.files import write_atomic, write_json
from difflm.runtime.tensors import load_tensors, save_tensors
from difflm.training.run import read_config


def export_run(run: Path, target: Path, bits: int = 16) -> None:
    config = read_config(run)
    tensors = load_tensors(run / "model.safetensors")
    # Tables in float64 are schedules and rates, which half precision would distort.
    halves = {name: t.half() if t.dtype is torch.float32 else t for name, t in tensors.items()}
    config["sha256"] = save_tensors(target / "model.safetensors", quantise_rows(halves) if bits == 8 else halves)
    if config["recipe"].get("init"):
        config["recipe"]["init"] = Path(config["recipe"]["init"]).name
    config["recipe"]["data"] = file_names(config["recipe"]["data"])  # without the directories of somebody's machine
    write_json(target / "config.json", config)
    for name in ("tokenizer.json", "metrics.jsonl", "README.md"):
        if (run / name).exists():
            write_atomic(target / name, (run / name).read_bytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--bits", type=int, choices=(8, 16), default=16)
    asked = parser.parse_args()
    export_run(asked.run, asked.target, asked.bits)
