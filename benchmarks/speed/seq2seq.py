"""The speed of the flagship of pairs beside its twin's beam search, in two minutes on a GPU.

  python -m benchmarks.speed.seq2seq --data DIR --out runs/pairs-speed

Both have the sizes of the table (`benchmarks/tables/seq2seq.py`). The twin is trained just long enough to write texts
of usual lengths; the flagship begins with the twin's network and learns lengths. Nothing is said about quality.
"""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

from benchmarks.tables.seq2seq import TWIN, Asked, answers, put_speed, train, write_pairs

FLAGSHIP = "begun-both"
SETTINGS = {
    TWIN: {"beams": 5, "length_penalty": 1.0},
    FLAGSHIP: {"sampler": "confidence", "temperature": 0.2, "steps": 4, "mbr": 4, "length_beam": 4, "rank": TWIN},
}
TWIN_MINUTES, FLAGSHIP_MINUTES = 0.8, 0.4  # the first steps, which are captured, take most of half a minute


def make_runs(asked: Asked) -> None:
    """Train both runs, unless they are there, and write the settings that are timed."""
    asked.out.mkdir(parents=True, exist_ok=True)
    write_pairs(asked)
    train(f"{TWIN}-0", replace(asked, minutes=asked.minutes * TWIN_MINUTES))
    shutil.copy(asked.out / "train.jsonl", answers(asked, "both", "0"))  # in the place of the twin's answers
    train(f"{FLAGSHIP}-0", replace(asked, minutes=asked.minutes * FLAGSHIP_MINUTES))
    lines = [json.dumps({"run": f"{name}-0", "settings": settings}) for name, settings in SETTINGS.items()]
    asked.results.write_text("".join(f"{line}\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--share", type=float, default=1.0, help="of the time of training")
    parser.add_argument("more", nargs="*", help="key=value changes to both recipes")
    given = parser.parse_args()
    out, device = given.out.resolve() / "multi30k", given.device
    asked = Asked("multi30k", out, given.share, 0.0, 1, given.data, [], [0], device, "", 0.0, None, False, given.more)
    make_runs(asked)
    put_speed(asked)


if __name__ == "__main__":
    main()
