"""Measurements behind docs/performance.md that `difflm bench` does not make: growth, profiles, rivals, control.

A profile compares a step with its floor: operations over the measured matrix rate, or bytes over the measured copy
rate, whichever takes longer. Bytes are those that must move between steps. Denoising: every weight read once at the
width of the arithmetic, logits written once in float32. Training: AdamW reads four float32 numbers a weight (weight,
gradient, two moments) and writes three, the average reads two and writes one, the gradient is written once, and the
bf16 copy of the weight is written once and read twice. Activations between layers count in neither.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from difflm.app import bench
from difflm.app.bench import Row, rounded, time_work
from difflm.data.batches import Batch
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Steering
from difflm.evaluation.control import System
from difflm.evaluation.shared import ratio, score, tokens_of
from difflm.evaluation.targets import Target
from difflm.fast.inference import Inference
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import TextSpec
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import LanguageModel
from difflm.models.batching import Layout, pad_batch
from difflm.models.batching import Row as Sample
from difflm.models.diffusion import DiffusionModel
from difflm.runtime.threads import SHARES
from difflm.training.recipe import Recipe

STEPS = 10  # of growth and of profiles, where the cost of one step is measured
MAX_KERNELS = 12
COUNTED = 32  # texts that operations are counted on
GPT2_TOKENS = 64
LENGTHS, VOCABULARIES, BATCHES = (64, 128, 256, 512, 1024), (1000, 5000, 10_000, 50_000), (1, 4, 16, 64, 256, 1024)
GROWTH: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"length": LENGTHS, "vocabulary": VOCABULARIES, "batch": BATCHES},
    "cpu": {"length": LENGTHS[::2], "vocabulary": VOCABULARIES[::3], "batch": BATCHES[:3]},
}


class FlopCounter(TorchDispatchMode):
    """Counts operations of matrix products, forward and backward; torch's own counter watches modules as well, and
    fails on a pass without gradients inside one with them."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func._overloadpacket):
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def copy_rate(device: torch.device) -> Row:
    """Measure bytes read and written a second by one copy that no cache holds."""
    size = 2**30 if device.type == "cuda" else 2**26
    a = torch.zeros(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return {"bytes": size, "gb_per_second": rounded(2e-9 * size / time_work(device, lambda: b.copy_(a), 15).seconds)}


# -- training ---------------------------------------------------------------------------------------------------------


def training_row(
    name: str, recipe: Recipe, vocabulary: int, device: torch.device, texts: int, words: int, gflops: float
) -> Row:
    """A row of `difflm bench` with positions and operations; `gflops` is the rate of one matrix product."""
    with bench.training_step(recipe, vocabulary, device, texts, words) as (model, _, batch):
        flops, positions = count_flops(model, batch), count_positions(model, batch)
    row = bench.training_speed(recipe, vocabulary, device, texts, words)
    rate = 1e-9 * flops * row["texts"] / row["seconds"]
    return {
        "model": name,
        **row,
        "positions": positions,
        "positions_per_second": rounded(row["texts"] * positions / row["seconds"]),
        "gflops": rounded(rate),
        "share_of_matrix_rate": rounded(rate / gflops),
    }


def count_flops(model: LanguageModel, batch: Batch) -> float:
    """Operations of the matrix products in one text's forward and backward pass, counted on some texts: the head is
    asked of a share of the positions that shrinks with their number."""
    device = next(model.parameters()).device
    some = batch.map(lambda array: torch.from_numpy(array[:COUNTED]).to(device))
    with torch.compiler.set_stance("force_eager"), FlopCounter() as counted:
        model(some).means()["loss"].backward()
    model.zero_grad(set_to_none=True)
    return counted.total / len(some.ids)


def count_positions(model: LanguageModel, batch: Batch) -> int:
    """Positions of the network for each text: its words, and what a method adds to them."""
    if not isinstance(model, DiffusionModel):
        return batch.ids.shape[1] + 1
    device = next(model.parameters()).device
    some = [torch.from_numpy(array[:1]).to(device) for array in (batch.ids, batch.lengths)]
    return model.lengths.canvas(*some)[0].shape[1]


# -- texts ------------------------------------------------------------------------------------------------------------


def judge_texts(judge: TextDiffusion | None, texts: Sequence[str]) -> Row:
    """Nats a token of the texts that the judge can read."""
    rows = judge.tokenizer.encode_batch(list(texts)) if judge else []
    rows = [ids for ids in rows if judge and 0 < len(ids) <= judge.model.max_words]
    if not judge or not rows:
        return {}
    nats, error = ratio(score(judge, rows, 0, 1), tokens_of(rows))
    return {"judge_nats_per_token": round(nats, 3), "judge_error": rounded(error or 0.0), "judged_texts": len(rows)}


def captured_parts(lm: TextDiffusion, steps: int, seconds: float) -> Row:
    """Where the seconds of a request go, in milliseconds: the captured beginning of its batch, all captured steps, and
    what is outside of both, such as preparing the batch and reading its words. Nothing where no steps are captured."""
    if not lm.inference._recorded.idle:
        return {}
    _, sampler = lm.inference._recorded.idle[-1]  # the last batch, which is all of a request of few texts

    def replay() -> None:
        sampler.begin()
        for _ in range(steps):
            sampler.step()

    with torch.no_grad():
        begin, whole = time_work(lm.device, sampler.begin).seconds, time_work(lm.device, replay).seconds
    parts = {"begin_ms": begin, "steps_ms": whole - begin, "outside_ms": seconds - whole}
    return {name: rounded(1e3 * value) for name, value in parts.items()}


def control_row(
    lm: TextDiffusion, targets: Sequence[Target], texts: int, judge: TextDiffusion | None, **settings: Any
) -> Row:
    """Measure about so many texts for targets of one control, as many for each. Checkers are not part of it."""
    each, asked = max(1, texts // len(targets)), targets[:texts]
    system = System(lm, each=each, settings=settings)
    made: list[str] = []

    def make() -> None:
        jobs = [system.make_job(target, number) for number, target in enumerate(asked)]
        ended = (row.ids for rows in lm.run_unchecked(jobs) for row in rows)
        made[:] = [lm.tokenizer.decode(ids) for ids in ended]

    lm.inference.clear_recorded()
    timing = time_work(lm.device, make, bench.repeats_on(lm.device), max_seconds=5.0)
    about = {"control": asked[0].control, "texts": len(made), "targets": len(asked), "compiled": lm.inference.compiled}
    rate = {"steps": lm.sampling(**settings).steps, "texts_per_second": rounded(len(made) / timing.seconds)}
    parts = captured_parts(lm, lm.sampling(**settings).steps, timing.seconds)
    return {**about, **timing.figures(), **rate, **parts, **judge_texts(judge, made)}


def twin_row(name: str, twin: TextDiffusion, texts: int, judge: TextDiffusion | None, compiled: bool) -> Row:
    """Measure the twin at temperature 1, its step captured on a GPU; `compiled`: its blocks compiled as well."""
    assert isinstance(twin.model, Autoregressive)
    twin.inference.compiled = compiled
    try:
        row = bench.sampling_speed(name, twin, texts, temperature=1.0)
    finally:
        twin.inference.compiled = False
    del row["steps"]  # as many as the text has words
    read = judge_texts(judge, [g.text for g in twin.generate(texts, temperature=1.0)])
    return {"rival": "twin", "compiled": compiled, **row, **read}


def gpt2_row(texts: int, device: torch.device, tokens: int = GPT2_TOKENS) -> Row:
    """Measure transformers' `generate` with the sizes of GPT-2-small; random weights cost what trained ones do."""
    import transformers

    torch.manual_seed(0)
    sizes: Any = transformers.GPT2Config()
    model: Any = transformers.GPT2LMHeadModel(sizes)
    model.to(device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    start = torch.full((texts, 1), sizes.bos_token_id, device=device)
    asked: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "use_cache": True}
    asked |= {"attention_mask": torch.ones_like(start), "pad_token_id": sizes.eos_token_id}
    with torch.no_grad():
        timing = time_work(device, lambda: model.generate(start, **asked), repeats=3, max_seconds=5.0)
    about = {"rival": "gpt2-small", "texts": texts, "tokens": tokens}
    return {**about, **timing.figures(), "texts_per_second": rounded(texts / timing.seconds)}


# -- growth -----------------------------------------------------------------------------------------------------------


def growth_row(recipe: Recipe, along: str, size: int, device: torch.device, dtype: str) -> Row:
    """Measure an untrained model of the recipe's sizes: what it writes is nonsense, and costs what sense does."""
    usual = {"length": 64, "vocabulary": 1000, "batch": 16 if device.type == "cuda" else 4}
    sizes = {**usual, along: size}
    torch.manual_seed(0)
    model = recipe.build_method().build(TextSpec(sizes["vocabulary"], sizes["length"])).to(device)
    inference = Inference(model, None if dtype == "float32" else getattr(torch, dtype))
    timing = time_batch(inference, sizes["batch"], sizes["length"], device)[0]
    about = {"along": along, "size": size, "texts": sizes["batch"], "steps": STEPS}
    return {**about, **timing.figures(), "texts_per_second": rounded(sizes["batch"] / timing.seconds)}


def time_batch(
    inference: Inference, texts: int, positions: int, device: torch.device, steps: int = STEPS
) -> tuple[bench.Timing, Callable[[], None]]:
    """Measure so many texts of one length from noise to ids, as `generate` makes a batch whose end alone is read: on a
    CPU by one core."""
    sampling, layout = replace(inference.model.sampling, steps=steps), Layout(positions)
    batch = pad_batch([Sample(0, sample, layout) for sample in range(texts)], layout.width, device)

    def run() -> None:
        with SHARES.reserve():
            torch.set_num_threads(1 if device.type == "cpu" else torch.get_num_threads())
            noise, read = Noise(batch.seeds, batch.samples), Steering(watched_steps={steps - 1})
            deque(inference.stream(noise, batch.lengths, batch.width, sampling, read), maxlen=1)

    return time_work(device, run, repeats=3, max_seconds=5.0), run


# -- profiles ---------------------------------------------------------------------------------------------------------


def denoising_profile(lm: TextDiffusion, texts: int, positions: int, rates: Row) -> Row:
    """Profile one denoising step of a batch, as sampling runs it."""
    model, device = lm.model, lm.device
    assert isinstance(model, DiffusionModel)
    width = Layout(positions).width
    timing, run = time_batch(lm.inference, texts, positions, device)
    x = torch.zeros(2, *model.denoiser.codec.state_shape(width), device=device)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), FlopCounter() as counted:
        model.denoiser(x, torch.full((2,), 0.5, device=device), torch.ones_like(x[..., 0], dtype=torch.bool))
    weights = sum(p.numel() for p in model.parameters())
    bytes_moved = weights * (4 if bench.dtype_name(lm) == "float32" else 2) + texts * width * model.vocabulary * 4.0
    about = {"step": "denoising", "texts": texts, "positions": width}
    compared = compare_with_floor(counted.total / 2 * texts, bytes_moved, timing.seconds / STEPS, rates)
    return {**about, **compared, **list_kernels(device, run, STEPS)}


def training_profile(recipe: Recipe, vocabulary: int, device: torch.device, texts: int, rates: Row) -> Row:
    """Profile one training step."""
    words = min(recipe.widths or (recipe.longest,))
    with bench.training_step(recipe, vocabulary, device, texts, words) as (model, step, batch):
        flops = count_flops(model, batch) * texts
        bytes_moved = sum(p.numel() for p in model.parameters()) * (4.0 * (7 + 3 + 1) + 2 * 3)
        in_a_row = bench.STEPS_IN_A_ROW if device.type == "cuda" else 1
        run = lambda: [step() for _ in range(in_a_row)]  # noqa: E731
        seconds = time_work(device, run, repeats=3).seconds / in_a_row
        kernels = list_kernels(device, run, in_a_row)
    about = {"step": "training", "texts": texts, "words": words}
    return {**about, **compare_with_floor(flops, bytes_moved, seconds, rates), **kernels}


def compare_with_floor(flops: float, bytes_moved: float, seconds: float, rates: Row) -> Row:
    """`rates` has the measured `gflops` and `gb_per_second`."""
    floor = max(1e-9 * flops / rates["gflops"], 1e-9 * bytes_moved / rates["gb_per_second"])
    found = {"gigaoperations": 1e-9 * flops, "gigabytes": 1e-9 * bytes_moved, "seconds": seconds}
    found |= {"floor_seconds": floor, "times_the_floor": seconds / floor}
    return {name: rounded(value) for name, value in found.items()}


def list_kernels(device: torch.device, run: Callable[[], object], steps: int, most: int = MAX_KERNELS) -> Row:
    """The longest kernels (on a CPU: operators), milliseconds and calls a step, and the milliseconds of all of them."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    kernels = [
        (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count, event.key[:150])
        for event in found.key_averages()
        if not on_gpu or str(event.device_type).endswith("CUDA")
    ]
    longest = sorted(kernels, reverse=True)[:most]
    named = [{"name": n, "ms": rounded(us / 1e3 / steps), "calls": rounded(c / steps)} for us, c, n in longest]
    return {"busy_ms": rounded(sum(us for us, _, _ in kernels) / 1e3 / steps), "kernels": named}
