"""Train on a synthetic corpus that is larger than what is kept of it in memory, and measure how much that is.

python -m benchmarks.speed.corpus_memory --out DIR                        # 2 GB of documents
python -m benchmarks.speed.corpus_memory --out DIR --bytes 2e8 --steps 50

A small model learns packed rows in a process of its own: of a corpus of 2 MB, then of the large one. The difference of
the two peaks is what the corpus adds to the model and the libraries.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

WORDS, BLOCK = 50_000, 1 << 16  # of the language, and drawn at a time
SMALL = 2e6  # bytes of the corpus that the large one is compared with
MODEL = ("method=mdlm", "model.hidden=64", "model.layers=2", "model.heads=2")
SETTINGS = ("rows=packed", "longest=256", "batch_size=4", "vocabulary=2000", "validate_every=100000", "sample_every=0")


def write_corpus(path: Path, size: float, seed: int = 0) -> int:
    """Write documents, a line of JSON each, of words in Zipf's proportions; how many there are."""
    draw = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlu"))
    words = np.array(["".join(draw.choice(letters, n)) for n in draw.integers(2, 10, WORDS)])
    shares = np.cumsum(1 / np.arange(1, WORDS + 1))
    written = documents = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            text = words[np.searchsorted(shares, draw.random(BLOCK) * shares[-1])].tolist()
            begin = 0
            for length in draw.lognormal(5.3, 0.9, BLOCK // 250).astype(int) + 10:
                line = json.dumps({"text": " ".join(text[begin : begin + length])}) + "\n"
                begin += length
                if begin > BLOCK:
                    break
                written += file.write(line)
                documents += 1
    return documents


def train(data: Path, out: Path, steps: int) -> dict[str, float]:
    """Train in a process of its own; its peak resident memory in bytes, and the seconds it took."""
    settings = [*MODEL, *SETTINGS, f"steps={steps}", f"data={data}"]
    command = [sys.executable, "-m", "difflm", "train", "own-text", *settings, "--out", str(out), "--json"]
    measure = (
        "import resource, runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_module('difflm', run_name='__main__')\n"
        "finally: print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", measure, *command[2:]], capture_output=True, text=True)
    peaks = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("peak ")]
    if done.returncode or not peaks:
        sys.exit(done.stderr)
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak": int(peaks[0]) * unit, "seconds": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="an empty directory for the corpora and the runs")
    parser.add_argument("--bytes", type=float, default=2e9)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True)
    found = {}
    for name, size in (("small", SMALL), ("large", asked.bytes)):
        data = asked.out / f"{name}.jsonl"
        documents = write_corpus(data, size)
        found[name] = train(data, asked.out / name, asked.steps)
        tokens = json.loads((asked.out / name / "data" / "train" / "meta.json").read_text())["tokens"]
        about = {"bytes": data.stat().st_size, "documents": documents, "tokens": tokens}
        print(json.dumps({"corpus": name, **about, **{key: round(value) for key, value in found[name].items()}}))
    print(f"beyond the model: {(found['large']['peak'] - found['small']['peak']) / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
