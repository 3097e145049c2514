"""Round a trained classifier to eight bits a weight, as the package holds it; counts of words stay exact. A config
beside it gets its checksum.

python -m benchmarks.narrow runs/guide/model.safetensors src/difflm/pretrained/e2e/guide/model.safetensors
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from difflm.runtime.files import read_json, write_json
from difflm.runtime.tensors import SCALE, load_tensors, save_tensors

EXACT = "word_counts"


def quantise_rows(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantise matrices to int8, with one scale a row."""
    quantised: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() == 2:
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
            quantised[name + SCALE], quantised[name] = scale, (weight.float() / scale).round().to(torch.int8)
        else:
            quantised[name] = weight.clone()
    return quantised


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    weights = load_tensors(asked.source)
    exact = {name: weight for name, weight in weights.items() if EXACT in name}
    small = {name: weight.half() for name, weight in weights.items() if name not in exact}
    sha256 = save_tensors(asked.out, {**quantise_rows(small), **exact})
    if (config := asked.out.with_name("config.json")).exists():
        write_json(config, {**read_json(config), "sha256": sha256})


if __name__ == "__main__":
    main()
