"""Round a trained classifier to eight bits a weight, as the package holds it; counts of words stay exact. A config
beside it gets its checksum.

python -m benchmarks.assets.narrow runs/guide/model.safetensors src/difflm/pretrained/e2e/guide/model.safetensors
"""

import argparse
from pathlib import Path

from benchmarks.assets.quantise import quantise_rows
from difflm.runtime.files import read_checked, write_checked
from difflm.runtime.tensors import load_tensors, save_tensors

EXACT = "word_counts"


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
        write_checked(config, {**read_checked(config), "sha256": sha256})


if __name__ == "__main__":
    main()
