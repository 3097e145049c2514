"""How far a bound's estimates for one sentence lie apart from seed to seed, and whether its ± says so.

    python -m benchmarks.tables.bound_spread --texts 50 --seeds 20 --draws 16

For each of some validation sentences: its nats at every seed, their standard deviation over their mean, how many lie
within 10 % of the mean, and how often the mean of all seeds lies within one printed ± of an estimate.
"""

import argparse
import json
import random

import torch

from difflm.evaluation.corpora import corpus_for
from difflm.generation.pipeline import TextDiffusion


def measure(lm: TextDiffusion, rows: list[list[int]], seeds: int, draws: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats and standard errors, both [seeds, texts]."""
    found = []
    for seed in range(seeds):
        found.append(torch.stack(lm.score_ids_with_errors(rows, seed, draws)))
        print(f"seed {seed}: {float(found[-1][0].mean()):.3f} nats a text", flush=True)
    nats, errors = torch.stack(found, 1).double()
    return nats, errors


def summarise(nats: torch.Tensor, errors: torch.Tensor, draws: int) -> dict[str, float | int]:
    mean, seeds = nats.mean(0), len(nats)
    spread = nats.std(0) / mean
    # The mean of all seeds holds the estimate itself: that makes the two look closer than they are.
    apart = (nats - mean).abs() * (seeds / (seeds - 1)) ** 0.5
    return {
        "texts": nats.shape[1],
        "seeds": seeds,
        "draws": draws,
        "nats a text": round(float(mean.mean()), 3),
        "standard deviation over mean, median": round(float(spread.median()), 4),
        "standard deviation over mean, 90th percentile": round(float(spread.quantile(0.9)), 4),
        "texts whose standard deviation is below 10 %": round(float((spread < 0.1).double().mean()), 3),
        "estimates within 10 % of the mean": round(float((apart < 0.1 * mean).double().mean()), 3),
        "estimates within one ±": round(float((apart < errors).double().mean()), 3),
        "± over standard deviation, root mean squares": round(
            float(errors.square().mean().sqrt() / nats.var(0).mean().sqrt()), 3
        ),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="e2e")
    parser.add_argument("--texts", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    lm = TextDiffusion.from_pretrained(asked.model, device=asked.device)
    texts = random.Random(0).sample(corpus_for(lm, None).texts, asked.texts)
    print(json.dumps(summarise(*measure(lm, lm.encode(texts), asked.seeds, asked.draws), asked.draws), indent=1))
