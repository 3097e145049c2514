"""Copy a run as the package holds it: half-precision weights, or matrices of eight or four bits; no optimiser, no data.

python -m benchmarks.assets.export_run runs/e2e src/difflm/pretrained/e2e --bits 8
python -m benchmarks.assets.export_run runs/english src/difflm/pretrained/english --bits 8
python -m benchmarks.assets.export_run runs/adapted runs/small --bits 4
python -m benchmarks.assets.export_run runs/again/again src/difflm/pretrained/e2e-fast --base e2e

With --base, what is stored is the difference to a bundled model, rounded to a fifteenth of each row's range.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.assets.quantise import quantise_groups, quantise_rows
from difflm.data.corpora import file_names
from difflm.runtime.files import write_atomic, write_checked
from difflm.runtime.tensors import load_tensors, save_tensors
from difflm.training.run import find_run, read_config

LARGEST = 7  # of a rounded difference


def export_run(run: Path, target: Path, bits: int = 16, base: str | None = None) -> None:
    config = read_config(run)
    tensors = load_tensors(run / "model.safetensors")
    if base is not None:
        config["base"] = {"run": base, "sha256": read_config(find_run(base))["sha256"]}
        tensors = subtract_base(tensors, load_tensors(find_run(base) / "model.safetensors"))
    # Tables in float64 are schedules and rates, which half precision would distort.
    halves = {name: t.half() if t.dtype is torch.float32 else t for name, t in tensors.items()}
    if base is not None:
        stored = quantise_rows(halves, LARGEST)
    elif bits == 4:  # words are too sensitive
        words = {name: t for name, t in halves.items() if t.dim() == 2 and len(t) == config["vocabulary"]}
        stored = quantise_rows(words) | quantise_groups({name: t for name, t in halves.items() if name not in words})
    else:
        stored = quantise_rows(halves) if bits == 8 else halves
    config["sha256"] = save_tensors(target / "model.safetensors", stored)
    if config["recipe"].get("init"):
        config["recipe"]["init"] = Path(config["recipe"]["init"]).name
    config["recipe"]["data"] = file_names(config["recipe"]["data"])  # without the directories of somebody's machine
    write_checked(target / "config.json", config)
    for name in ("tokenizer.json", "metrics.jsonl", "README.md"):
        if (run / name).exists():
            write_atomic(target / name, (run / name).read_bytes())


def subtract_base(tensors: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
    """What tensors add to a base, without those that differ by no more than rounding to bfloat16."""
    own = {name: tensor.float() for name, tensor in tensors.items()}
    same = {name for name in own if torch.allclose(own[name], base[name].float(), rtol=2**-8, atol=0)}
    return {name: tensor - base[name].float() for name, tensor in own.items() if name not in same}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=16)
    parser.add_argument("--base", help="a bundled model that the run was trained from")
    asked = parser.parse_args()
    export_run(asked.run, asked.target, asked.bits, asked.base)
