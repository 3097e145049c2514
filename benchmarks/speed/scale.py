"""What training takes on many GPUs: memory, tokens a second, hours and cost.

    python -m benchmarks.speed.scale [--layers 16 --hidden 2048 …] [--gpus 64] [--price 3] [--json]

Compute and memory are those that one H200 was measured with (docs/performance.md); how long gradients and weights take
on their way is calculated from a bandwidth that is assumed:

    compute    = needed operations of a share of the batch / (matrix rate · share of it that was reached)
    all-reduce = 2 (N − 1)/N · 4 bytes · weights / bandwidth      of gradients, with every process holding all weights
    gathering  = 3 (N − 1)/N · 4 bytes · weights / bandwidth      with --shard: weights for the forward and the backward
                                                                  pass, and gradients; of what is whole for a step, 2
    step       = accumulate · (compute + gathering) + all-reduce  nothing is hidden behind computing: the slowest case
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.speed.large import Size
from difflm.methods import TextSpec
from difflm.networks.head import CHUNK
from difflm.runtime.tensors import SkipInit
from difflm.training.estimate import ACTIVATION, PART, WEIGHT

# One H200, 2026-11-16 (docs/performance.md): `mdlm`, 32 × 1,024 tokens; hidden size → share of the matrix rate.
MATRIX_RATE = 771e12
REACHED = {0: 0.452, 1024: 0.529}
PLAIN = (
    0.366 / 0.452
)  # of that, what a plain loop in torch reached: --shard trains without captured steps and fused update
CHECKPOINT = 16  # bytes a weight: itself, its average, two moments
NODE = 8  # GPUs of a machine
NVLINK = 450.0  # GB/s of each GPU to the others of its machine, assumed
TRAVEL = 4  # bytes of a weight or gradient on its way: float32
HELD = 139.0  # GiB of an H200


@dataclass(frozen=True)
class Cluster:
    gpus: int
    network: float  # GB/s of each GPU to other machines
    reached: float  # share of a bandwidth that is reached
    price: float  # of a GPU for an hour

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the slowest link that a ring of all GPUs goes over."""
        return 1e9 * self.reached * (NVLINK if self.gpus <= NODE else min(NVLINK, self.network))

    def seconds(self, weights: float, passes: int) -> float:
        """Of so many passes of the weights around the ring, each once of an all-gather or a reduce-scatter."""
        return passes * (self.gpus - 1) / self.gpus * TRAVEL * weights / self.bandwidth


@dataclass(frozen=True)
class Plan:
    """A model and how it is trained; `whole` are the weights that --shard does not divide within a step."""

    size: Size  # its texts are those of one GPU
    accumulate: int
    weights: int
    whole: int
    largest: int  # weights of the largest part that is put together

    @classmethod
    def of(cls, size: Size, accumulate: int = 1) -> "Plan":
        """Count the weights on the model itself, without memory for them."""
        with torch.device("meta"), SkipInit():
            model = size.recipe("mdlm").build_method().build(TextSpec(size.vocabulary, size.words))
        divided = model.denoiser.network.position_parts()
        parts = [sum(p.numel() for p in part.parameters()) for part in divided]
        total = sum(p.numel() for p in model.parameters())
        return cls(size, accumulate, total, total - sum(parts), max(parts))

    @property
    def tokens(self) -> int:
        """Of one GPU, in one of its micro-batches."""
        return self.size.texts * self.size.words

    def compute_seconds(self, shards: bool) -> float:
        share = [one for least, one in REACHED.items() if self.size.hidden >= least][-1] * (PLAIN if shards else 1)
        return self.tokens * self.size.needed_flops(causal=False) / (MATRIX_RATE * share)

    def activations(self) -> float:
        """Bytes of one micro-batch, logits included; 12 to 13 % more than was measured at 12 × 768 and 24 × 1,024."""
        kept = ACTIVATION["bf16"] * self.tokens * self.size.layers * self.size.hidden
        return kept + PART * min(self.tokens * self.size.vocabulary, CHUNK["cuda"])

    def gib(self, gpus: int, shards: bool) -> float:
        """Memory of one GPU. Sums of gradients are on their way when activations are gone. With --shard autograd keeps
        a bfloat16 copy of each weight from the forward to the backward pass."""
        if not shards:
            return (WEIGHT * self.weights + max(self.activations(), TRAVEL * self.weights * (gpus > 1))) / 2**30
        divided = 20 * self.weights / gpus  # weight, average, two moments, gradient
        gathered = 2 * TRAVEL * self.whole + 3 * TRAVEL * self.largest + 2 * self.weights
        return (divided + gathered + self.activations()) / 2**30

    def step_seconds(self, cluster: Cluster, shards: bool) -> float:
        compute = self.compute_seconds(shards)
        if not shards:
            return self.accumulate * compute + cluster.seconds(self.weights, 2)
        gathering = cluster.seconds(self.weights - self.whole, 3) + cluster.seconds(self.whole, 2)
        return self.accumulate * (compute + gathering)


def rows(plan: Plan, cluster: Cluster, tokens: float) -> Iterator[dict[str, object]]:
    """One GPU, one machine, and all machines; each with all weights, and divided."""
    for gpus in dict.fromkeys((1, min(NODE, cluster.gpus), cluster.gpus)):
        some = Cluster(gpus, cluster.network, cluster.reached, cluster.price)
        for shards in (False, True) if gpus > 1 else (False,):
            step = plan.step_seconds(some, shards)
            rate = gpus * plan.accumulate * plan.tokens / step
            hours = tokens / rate / 3600
            yield {
                "gpus": gpus,
                "shard": shards,
                "tokens_a_step": gpus * plan.accumulate * plan.tokens,
                "gib_a_gpu": round(plan.gib(gpus, shards), 1),
                "step_ms": round(1000 * step, 1),
                "communication_share": round(1 - plan.accumulate * plan.compute_seconds(shards) / step, 3),
                "tokens_per_second": round(rate),
                "hours": round(hours, 1),
                "cost": round(gpus * hours * cluster.price),
            }


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.scale", description=__doc__.split("\n")[0])
    whole = {"layers": 16, "hidden": 2048, "heads": 16, "vocabulary": 50_257, "texts": 16, "words": 1024}
    for name, default in {**whole, "accumulate": 1, "gpus": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=float, default=0.0, help="to train on. [20 a weight]")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s of each GPU to other machines, assumed.")
    parser.add_argument("--reached", type=float, default=0.8, help="share of the bandwidth that is reached, assumed.")
    parser.add_argument("--price", type=float, default=3.0, help="of a GPU for an hour, assumed.")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = read_arguments(sys.argv[1:] if argv is None else argv)
    size = Size(given.layers, given.hidden, given.heads, given.vocabulary, given.texts, given.words)
    plan, cluster = Plan.of(size, given.accumulate), Cluster(given.gpus, given.network, given.reached, given.price)
    tokens = given.tokens or 20.0 * plan.weights
    if given.json:
        for row in rows(plan, cluster, tokens):
            print(json.dumps({"weights": plan.weights, **row}))
        return 0
    print(f"{plan.weights:,} weights, {tokens:.3g} tokens; checkpoint {CHECKPOINT * plan.weights / 2**30:.1f} GiB\n")
    print("| GPUs | | tokens per step | GiB a GPU | ms a step | communication | tokens/s | hours | cost |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows(plan, cluster, tokens):
        kind = "`--shard`" if row["shard"] else ""
        full = " (too much)" if float(str(row["gib_a_gpu"])) > HELD else ""
        print(
            f"| {row['gpus']} | {kind} | {row['tokens_a_step']:,} | {row['gib_a_gpu']}{full} | {row['step_ms']:,} | "
            f"{row['communication_share']:.0%} | {row['tokens_per_second']:,} | {row['hours']:,} | {row['cost']:,} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
