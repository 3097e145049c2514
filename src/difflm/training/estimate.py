"""Estimate what a training run will take before it starts: memory, and minutes on a machine of known speed. Everything
is counted on the model itself, except the constants below, which say where they were measured."""

from dataclasses import dataclass

from torch import nn

from difflm.methods.base import TextSpec
from difflm.networks.head import CHUNK
from difflm.runtime.tensors import SkipInit
from difflm.training.recipe import Recipe
from difflm.training.texts import load_tokenizer

# Bytes per weight: itself, two moments, its average and gradient; in bfloat16 also a copy, with a bfloat16 gradient.
WEIGHT = 20
# Bytes that a block keeps for backward, per position and hidden unit: what autograd keeps without a compiler (with one
# and our kernels: 30 in bfloat16), and with one that recomputes norms and GELUs (2026-11-18).
ACTIVATION = {"fp32": 72, "bf16": 40}
LIGHT = 27
INPUT = 4  # the same if blocks are recomputed: only their input is kept
LOGIT = 13  # bytes per logit of a loss that needs all of them: 34 GiB at GPT-2-small's sizes (H200, November 2026)
PART = 8  # the same if logits are computed in parts: the logits and their gradients
# Training's share of the rate of one large product, by the least hidden size. H200: docs/performance.md, `e2e`
# and 87M at 64 texts. CPU: e2e-mdlm-laptop and e2e-mdlm with 16 texts on an ARM core (2026-11-16).
REACHED = {"cuda": {0: 0.2, 768: 0.35}, "cpu": {0: 0.33, 384: 0.9}}
FIRST_ESTIMATE = 7 / 6  # work of a step in which every second text has a first estimate
UNKNOWN_LONGEST = 64


@dataclass(frozen=True)
class Estimate:
    texts: TextSpec
    parameters: int
    gib: dict[str, float]  # GiB of weights, activations and logits, each an upper limit
    gflop: float  # operations of matrix products in all steps
    reached: float  # share of the rate of a large matrix product

    def describe(self, gflops: float) -> str:
        """A line for a machine whose large matrix products run at this many Gflop/s."""
        minutes = self.gflop / (gflops * self.reached) / 60
        spoken = f"{minutes:,.0f}" if minutes >= 10 else f"{minutes:.2g}"
        parts = ", ".join(f"{name} {gib:.2g}" for name, gib in self.gib.items())
        size = f"{self.texts.vocabulary:,} words and texts of {self.texts.longest} tokens"
        memory = f"at most {sum(self.gib.values()):.2g} GiB ({parts})"
        time = f"about {spoken} minutes of steps at {gflops:,.0f} Gflop/s" if self.gflop else "steps for its minutes"
        return f"estimate for {size}: {self.parameters:,} parameters, {memory}, {time}"


def estimate_training(recipe: Recipe, kind: str) -> Estimate:
    """The cost of a recipe on a kind of device ("cuda", "cpu"). Sizes that depend on the texts are taken at the
    recipe's limits."""
    recipe, longest = recipe.adapt_to(kind), recipe.longest or UNKNOWN_LONGEST
    named = load_tokenizer(recipe.init or recipe.tokenizer)
    sources = (recipe.source_longest or longest) if recipe.has_sources else 0
    texts = TextSpec(named.size if named else recipe.vocabulary, longest, sources)
    with SkipInit():
        model = recipe.build_method().build(texts)
    rows = recipe.batch_size * texts.longest
    numbers, flops, hidden = 0, 0.0, 0
    for network in model.networks():
        if blocks := network.equal_blocks():
            width = next(part for part in blocks[0].modules() if isinstance(part, nn.Linear)).in_features
            numbers, hidden = numbers + rows * len(blocks) * width, max(hidden, width)
            seen = texts.longest / (2 if network.causal else 1)
            flops += 12.0 * rows * len(blocks) * width * seen  # attention
    weights = [part for part in model.modules() if isinstance(part, nn.Linear)]
    head = sum(part.weight.numel() for part in weights if part.out_features == texts.vocabulary)
    counted = 0.5 if model.trains_masked_words else 1.0  # share of the positions whose logits are computed
    flops += 6.0 * rows * (sum(part.weight.numel() for part in weights) - (1 - counted) * head)
    if model.capabilities.denoises and model.denoiser.self_conditioning:
        flops *= FIRST_ESTIMATE
    logits = rows * texts.vocabulary
    in_parts = model.trains_masked_words or model.capabilities.likelihood == "exact"
    parameters = sum(p.numel() for p in model.parameters())
    kept = INPUT if recipe.recompute is True else ACTIVATION[recipe.precision]
    if recipe.recompute == "light" and recipe.compile:
        kept = LIGHT
    gib = {
        "weights": WEIGHT * parameters / 2**30,
        "activations": kept * numbers / 2**30,
        "logits": (PART * min(logits, CHUNK[kind]) if in_parts else LOGIT * logits) / 2**30,
    }
    reached = [share for least, share in REACHED[kind].items() if hidden >= least][-1]
    return Estimate(texts, parameters, gib, 1e-9 * flops * recipe.accumulate * recipe.steps, reached)
