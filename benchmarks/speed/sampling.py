"""Texts per second of the bundled model against its rival, as ratios: `python -m benchmarks.speed.sampling`.

Ratios survive a change of machine, seconds do not. Each figure is the median of three runs after one to warm up.
`difflm bench` has the seconds of this machine.
"""

import json
import math
from collections.abc import Callable

from difflm.app.bench import median_seconds, rounded
from difflm.generation.pipeline import TextDiffusion

TEXTS = 8


def seconds(work: Callable[[], object]) -> float:
    return median_seconds(work, repeats=3, max_seconds=math.inf)


def main() -> None:
    lm, twin = TextDiffusion.from_pretrained("e2e"), TextDiffusion.from_pretrained("judge")
    base = seconds(lambda: lm.generate(TEXTS, steps=50))
    ratios = {
        "20 steps / 50 steps": seconds(lambda: lm.generate(TEXTS, steps=20)) / base,
        "clamped / plain": seconds(lambda: lm.generate(TEXTS, steps=50, clamp=True)) / base,
        "judge (4.4M, left to right) / e2e (17.1M, 50 steps)": seconds(lambda: twin.generate(TEXTS)) / base,
    }
    report = {
        "texts": TEXTS,
        "seconds_50_steps": rounded(base),
        "ratios": {name: rounded(ratio) for name, ratio in ratios.items()},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
