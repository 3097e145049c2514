"""Texts per second of the bundled model against its judge-sized rival, as ratios: `python -m benchmarks.sampling`.

Ratios survive a change of machine, seconds do not. Each figure is the median of three runs after one to warm up.
"""

import json
import statistics
import time
from collections.abc import Callable

from difflm.pipeline import TextDiffusion

TEXTS = 8


def seconds(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    lm, twin = TextDiffusion.from_pretrained("e2e"), TextDiffusion.from_pretrained("judge")
    base = seconds(lambda: lm.generate(TEXTS, steps=50))
    ratios = {
        "20 steps / 50 steps": seconds(lambda: lm.generate(TEXTS, steps=20)) / base,
        "clamped / plain": seconds(lambda: lm.generate(TEXTS, steps=50, clamp=True)) / base,
        "judge (4.4M, left to right) / e2e (17.1M, 50 steps)": seconds(lambda: twin.generate(TEXTS)) / base,
    }
    report = {"texts": TEXTS, "seconds_50_steps": base, "ratios": ratios}
    print(
        json.dumps(
            {k: round(v, 3) if isinstance(v, float) else v for k, v in report.items()}
            | {"ratios": {k: round(v, 3) for k, v in ratios.items()}},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
