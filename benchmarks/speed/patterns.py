"""Texts under patterns: what a step costs with and without one, and how the texts read.

  python -m benchmarks.speed.patterns --device cuda                # both tables
  python -m benchmarks.speed.patterns --part cost --texts 50 1024
  python -m benchmarks.speed.patterns --part texts --each 100 --plain 2000

Cost: seconds of one sampling step, captured where the device has graphs, without and with a pattern; `e2e` is the
bundled model, `mdlm` an untrained one of a recipe's size, which costs what a trained one does. Below, the rule alone
for automata of several sizes, one over 50,000 pieces. Texts: ten kinds of pattern, by forward–backward, by drawing
plain texts of which those that match are kept, and by the gradient of log Z (Kim et al., 2026) at two strengths: how
many obey by `re.fullmatch`, and of these nats/token by the bundled judge, and self-BLEU.
"""

import argparse
import math
import random
import re
import string
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from difflm.app.bench import time_work
from difflm.controls.guidance import STANDARD, Guidance
from difflm.controls.patterns.json_schema import schema_tree
from difflm.controls.patterns.pattern import Pattern
from difflm.controls.patterns.regular import Node, compile_characters
from difflm.controls.patterns.token_automata import (
    TokenAutomaton,
    chain_of,
    compile_pattern,
    plain_chain,
    spell_columns,
)
from difflm.controls.plan import ControlPlan
from difflm.controls.rules import ImposePattern
from difflm.data.text_metrics import self_bleu
from difflm.data.words import split_words
from difflm.diffusion.base import Belief
from difflm.diffusion.forward_backward import TokenChain
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Steering
from difflm.fast.cuda_graphs import CapturedFunction
from difflm.fast.inference import Inference
from difflm.generation.checks import check_device
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import TextSpec
from difflm.models.batching import Layout, pad_batch
from difflm.models.batching import Row as Sample
from difflm.models.diffusion import DiffusionModel
from difflm.training.recipe import load_recipe

STEPS = 10  # of the step whose cost is measured
USUAL = r"The [A-Z]\w+( \w+)? is an? [^.]* near [^.]*\. (It|They) [^.]*£[0-9]+[^.]*\.( [A-Z][^.]*\.){0,2}"
LARGE = r"(\S+ ){20,60}\S+"
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "price": {"type": "number", "minimum": 0, "maximum": 500},
        "tags": {"type": "array", "items": {"enum": ["new", "cheap", "quiet"]}, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["name", "price", "open"],
}
KINDS = {
    "beginning": r"The [A-Z].*",
    "end": r".* riverside\.",
    "phrase": r".*coffee shop.*",
    "two in order": r".*food.* near .*",
    "either": r"(The|A) .*(pub|restaurant) .*",
    "twelve words": r"\S+( \S+){11}",
    "no comma": r"[^,]*",
    "two sentences": r"[A-Z][^.]*\. [A-Z][^.]*\.",
    "a price": r".*£[0-9]+.*",
    "template": r"[A-Z]\w+ \w+ is an? .* in the .*\.",
}


# -- what a step costs -------------------------------------------------------------------------------------------------


def time_steps(
    inference: Inference, texts: int, places: int, automaton: TokenAutomaton | None, kernel: bool = False
) -> float:
    """Seconds of one step of so many texts from noise to ids."""
    device, layout = inference.denoiser.codec.bias.device, Layout(places)
    batch = pad_batch([Sample(0, sample, layout) for sample in range(texts)], layout.width, device)
    inside = torch.arange(batch.width, device=device) < batch.lengths.unsqueeze(1)
    chains = [] if automaton is None else [(chain_of if kernel else plain_chain)(automaton, device)]
    rules = [ImposePattern(inference.denoiser.codec, chain, inside) for chain in chains]
    sampling = replace(inference.model.sampling, steps=STEPS)

    def run() -> None:
        noise = Noise(batch.seeds, batch.samples)
        deque(inference.stream(noise, batch.lengths, batch.width, sampling, Steering(rules=rules)), maxlen=1)

    seconds = time_work(device, run, repeats=5, max_seconds=2.0).seconds / STEPS
    inference.clear_recorded()
    return seconds


def time_rule(
    automaton: TokenAutomaton, texts: int, places: int, device: torch.device, kernel: bool = False
) -> tuple[float, float]:
    """Seconds of the rule alone on random beliefs, without and with a draw of whole texts."""
    chain, noise = (chain_of if kernel else plain_chain)(automaton, device), torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(texts, places, len(automaton.classes), generator=noise)).to(device)
    inside, found = torch.ones(texts, places, dtype=torch.bool, device=device), list[float]()
    if kernel:
        compare_chains(plain_chain(automaton, device), chain, logits, inside)
    rule, u = ImposePattern(None, chain, inside), torch.rand(texts, places, device=device)  # type: ignore[arg-type]
    check_no_sync(lambda: rule(Belief(logits), logits, u), device)
    for drawn in (False, True):

        def work(drawn: bool = drawn) -> None:
            belief = rule(Belief(logits), logits, u)
            if drawn and belief.draw is not None:
                belief.draw(u)

        captured = CapturedFunction(work, device)
        for _ in range(3):  # warm up and capture
            captured()
        found.append(time_work(device, captured, repeats=5, max_seconds=1.0).seconds)
        captured.close()
    return found[0], found[1]


def compare_chains(one: TokenChain, other: Any, logits: Tensor, inside: Tensor) -> None:
    """Say so where what kernels find differs from what torch's operations find by more than floats may."""
    ours, theirs = (chain.pass_messages(logits, inside) for chain in (one, other))
    evidence = (ours.log_evidence() - theirs.log_evidence()).abs().max().item()
    beliefs = (message.posterior_logits(logits).softmax(-1) for message in (ours, theirs))
    off = (next(beliefs) - next(beliefs)).nan_to_num().abs().max().item()  # NaN where no text of that length matches
    u = torch.rand(inside.shape, device=inside.device)
    same = (ours.likeliest() == theirs.likeliest()).float().mean().item()
    drawn = (ours.draw(u) == theirs.draw(u)).float().mean().item()
    if not (evidence < 1e-2 and off < 1e-3 and same > 0.999 and drawn > 0.95):
        print(f"THE KERNELS DIFFER: evidence {evidence:.2g} nats, beliefs {off:.2g}, ways {same:.4f}, {drawn:.4f}")


def check_no_sync(work: Callable[[], object], device: torch.device) -> None:
    """Run it where a GPU's waiting for the host is an error."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            work()
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def compile_over_pieces(pattern: str | Node, count: int) -> TokenAutomaton:
    """An automaton over made-up pieces of words: all printable characters, and random ones with and without a space."""
    draw = random.Random(0)
    pieces = dict.fromkeys(string.printable[:95])
    while len(pieces) < count:
        word = "".join(draw.choice(string.ascii_lowercase) for _ in range(draw.randint(2, 8)))
        pieces[draw.choice(("", " ")) + word] = None
    characters = compile_characters(pattern, string.printable[:95])
    return spell_columns(characters, [*pieces]).smallest(characters.accepting)


def cost_rows(asked: argparse.Namespace, device: torch.device) -> Iterator[Sequence[str]]:
    lm = TextDiffusion.from_pretrained(asked.model, asked.device)
    usual, places = compile_pattern(USUAL, lm.tokenizer), min(asked.places, lm.model.max_words)
    torch.manual_seed(0)
    masked = load_recipe(asked.masked).build_method().build(TextSpec(lm.tokenizer.size, places)).to(device)
    kernels = [False, True] if device.type == "cuda" and find_spec("triton") else [False]
    yield "model", "texts × places", "states, classes, transitions", "step, ms", "with it, ms", "ratio"
    for name, inference in ((asked.model, lm.inference), ("mdlm", Inference(masked, lm.inference.dtype))):
        for texts in asked.texts:
            before = time_steps(inference, texts, places, None)
            for kernel in kernels:
                after, how = time_steps(inference, texts, places, usual, kernel), " (kernel)" * kernel
                ratio = f"{after / before:.2f}"
                yield name + how, f"{texts} × {places}", size_of(usual), milli(before), milli(after), ratio
    yield "rule alone", "texts × places", "states, classes, transitions", "belief, ms", "and a draw, ms", ""
    large, record = compile_pattern(LARGE, lm.tokenizer), compile_over_pieces(schema_tree(RECORD), asked.pieces)
    contains = compile_over_pieces(".*river.*", asked.pieces)
    cases = [(usual, n, places) for n in asked.texts] + [(large, n, places) for n in asked.texts]
    for automaton, n, width in [*cases, (contains, 8, 2 * places), (record, 8, 2 * places)]:
        name = "words" if len(automaton.classes) == lm.tokenizer.size else f"{asked.pieces} pieces"
        for kernel in kernels:
            both, how = time_rule(automaton, n, width, device, kernel), " (kernel)" * kernel
            yield name + how, f"{n} × {width}", size_of(automaton), milli(both[0]), milli(both[1]), ""


def size_of(automaton: TokenAutomaton) -> str:
    return f"{len(automaton.table)}, {automaton.table.shape[1]}, {len(automaton.edges)}"


def milli(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


# -- how texts read ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvidenceGuidance(Guidance):
    """∇ log P(the text matches | x_s), through the denoiser; positions are taken as independent (Kim et al., 2026)."""

    chain: TokenChain | None = None
    inside: Tensor | None = None

    def nats_apiece(self, x: Tensor, s: Tensor) -> list[Tensor]:
        assert self.chain is not None and self.inside is not None
        logits = self.denoiser(x, self.denoiser.process.at(s), self.mask).logits
        return [-self.chain.pass_messages(logits, self.inside).log_evidence()]


def write_by_gradient(lm: TextDiffusion, pattern: str, n: int, size: float, **settings: Any) -> list[str]:
    """Texts of lengths that match; the pattern is climbed, and never imposed."""
    usual = ControlPlan.steer

    def climb(plan: ControlPlan, *given: Any) -> Steering:
        steering = usual(plan, *given)
        *rules, own = steering.rules
        assert isinstance(own, ImposePattern)
        batch, settings = given[0], replace(STANDARD, size=size)
        mask = torch.arange(batch.width, device=batch.lengths.device) < batch.lengths.unsqueeze(1)
        chain: Any = getattr(own.chain, "plain", own.chain)  # which has gradients
        model = lm.model
        assert isinstance(model, DiffusionModel)  # itself: the copy that writes may have layers without gradients
        guide = EvidenceGuidance((), model.denoiser, mask, settings, chain, own.inside)
        return replace(steering, rules=rules, guide=guide)

    recorded, lm.inference.record = lm.inference.record, False
    ControlPlan.steer = climb  # type: ignore[assignment, method-assign]
    try:
        return [str(text) for text in lm.generate(n, controls=[Pattern(pattern)], **settings)]
    finally:
        ControlPlan.steer, lm.inference.record = usual, recorded  # type: ignore[method-assign]


def text_rows(asked: argparse.Namespace) -> Iterator[Sequence[str]]:
    """A row of each kind, and one of their means; of each way what share obeys, nats/token and self-BLEU."""
    lm, judge = (TextDiffusion.from_pretrained(name, asked.device) for name in (asked.model, asked.judge))
    settings = {"steps": asked.steps} if asked.steps else {}
    plain = [str(text) for text in lm.generate(asked.plain, seed=1, **settings)]
    ways: dict[str, Callable[[str], Sequence[Any]]] = {
        "forward–backward": lambda pattern: lm.generate(asked.each, controls=[Pattern(pattern)], **settings),
        "drawn and rejected": lambda pattern: plain,
    }
    for size in asked.sizes:
        ways[f"∇ log Z × {size:g}"] = partial(write_by_gradient, lm, n=asked.each, size=size, **settings)
    yield "obeyed, nats/token, self-BLEU", *ways
    found, seconds = {way: list[list[float]]() for way in ways}, dict.fromkeys(ways, 0.0)
    for kind, pattern in KINDS.items():
        for way, write in ways.items():
            begun = time.perf_counter()
            texts = [str(text) for text in write(pattern)]
            seconds[way] += time.perf_counter() - begun
            matching = [text for text in texts if re.fullmatch(pattern, text)]
            told = judge_texts(judge, matching[: asked.each]) if len(matching) > 1 else (math.nan, math.nan)
            found[way].append([100 * len(matching) / len(texts), *told])
        yield kind, *(show_cell(rows[-1]) for rows in found.values())
    yield "mean", *(show_cell(torch.tensor(rows).nanmean(0).tolist()) for rows in found.values())
    yield "seconds", *(f"{spent:.1f}" for spent in seconds.values())


def show_cell(told: Sequence[float]) -> str:
    obeyed, nats, bleu = told
    return f"{obeyed:.1f} %, " + ("–" if math.isnan(nats) else f"{nats:.3f}, {bleu:.2f}")


def judge_texts(judge: TextDiffusion, texts: Sequence[str]) -> tuple[float, float]:
    """Nats/token under the judge, of texts that it can read, and self-BLEU."""
    ids = [row for row in judge.encode(texts) if row and len(row) <= judge.model.max_words]
    nats = judge.score_ids(ids, 0, 1).sum().item() / sum(map(len, ids)) if ids else math.nan
    return nats, self_bleu([split_words(text) for text in texts])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="e2e")
    parser.add_argument("--judge", default="judge")
    parser.add_argument("--masked", default="e2e-mdlm", help="the recipe of the masked model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--part", choices=("cost", "texts"), action="append")
    parser.add_argument("--texts", type=int, nargs="+", default=[50, 1024])
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--pieces", type=int, default=50_000)
    parser.add_argument("--each", type=int, default=100, help="texts of each pattern and way")
    parser.add_argument("--plain", type=int, default=2000, help="texts that are drawn, of which some match")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--sizes", type=float, nargs="*", default=[1.0, 10.0], help="strengths of the gradient")
    asked = parser.parse_args(arguments)
    device = check_device(asked.device)
    asked.device, begun = str(device), time.perf_counter()
    for part in asked.part or ("cost", "texts"):
        for row in cost_rows(asked, device) if part == "cost" else text_rows(asked):
            print(" | ".join(row), flush=True)
        print(flush=True)
    print(f"{time.perf_counter() - begun:.0f} s in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
