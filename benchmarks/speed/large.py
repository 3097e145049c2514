"""Rows of `benchmarks.speed --only large`: masked training and sampling at the sizes of GPT-2, short and long texts,
beside blocks, a plain loop in torch and the autoregressive twin; and training of a network of SmolLM2's shape.

Needed work counts, for every token, six operations a weight of the blocks, attention forward and backward, and six a
weight of the head at the positions that are learned: half of them under masks, where a causal model learns all and
attends to half. What a program computes beyond that, such as logits of words that are not masked, does not count.
"""

import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.speed.rows import list_kernels, time_batch
from difflm.app import bench
from difflm.app.bench import Row, rounded, time_work
from difflm.fast.inference import Inference
from difflm.methods import TextSpec
from difflm.training.recipe import Recipe, check

BLOCK = 16  # words of a block, and its steps


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    texts: int
    words: int

    def recipe(self, method: str, **changes: Any) -> Recipe:
        sizes = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "dropout": 0.0}
        sizes |= {"block": BLOCK} if method == "block-diffusion" else {}
        asked = {"method": method, "model": sizes, "data": "none", "steps": 1000, "batch_size": max(2, self.texts)}
        return check({**asked, **changes}).model_copy(update={"longest": self.words})

    def with_words(self, words: int) -> "Size":
        """Texts of so many words, and as many of them as make the same number of tokens together."""
        return replace(self, texts=max(1, self.texts * self.words // words), words=words)

    @property
    def block_weights(self) -> int:
        return 12 * self.hidden**2

    def needed_flops(self, causal: bool) -> float:
        """Of one token, forward and backward."""
        blocks = self.layers * self.block_weights
        attention = 12 * self.layers * self.words * self.hidden
        head = self.vocabulary * self.hidden
        return 6 * blocks + attention * (0.5 if causal else 1) + 6 * head * (1 if causal else 0.5)


@dataclass(frozen=True)
class LlamaSize(Size):
    """A network of Llama's shape, as a model of others has it: grouped heads, gated feed-forward layers."""

    kv_heads: int
    inner: int
    anneal: int = 0

    @property
    def block_weights(self) -> int:
        return (2 * self.hidden + 2 * self.hidden * self.kv_heads // self.heads + 3 * self.inner) * self.hidden

    def recipe(self, method: str, **changes: Any) -> Recipe:
        decoder = {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
        }
        recipe = super().recipe(method, **changes)
        return recipe.model_copy(update={"model": {**recipe.model, "decoder": decoder, "anneal": self.anneal}})


SMOLLM2 = LlamaSize(30, 576, 9, 49_152, 480, 128, 3, 1536)
TINY_LLAMA = LlamaSize(2, 48, 3, 500, 4, 32, 1, 96)
SMALL, MEDIUM = Size(12, 768, 12, 50_257, 32, 1024), Size(24, 1024, 16, 50_257, 32, 1024)  # GPT-2's
TINY = Size(2, 64, 2, 500, 4, 32)
LONGEST = {"cuda": 8192, "cpu": 64}
GROWN = {"cuda": (512, 8192), "cpu": (64,)}  # words of texts of as many tokens together as those of the size itself
STEPS_IN_A_ROW, KERNELS = 8, 24
KINDS = {  # of kernels, by what their names contain
    "products": "nvjet|gemm|cutlass|splitK|addmm|::mm",
    "attention": "sdpa|flash|fmha|attention",
    "reductions": "triton_red|triton_per",
    "elementwise": "triton_poi",
    "update": "^_step",
    "others": "",
}


def large_rows(device: torch.device, gflops: float) -> Iterator[Callable[[], Row]]:
    """What has to be compiled comes last: about a minute for the first row, and less for others."""
    small, medium = ("small", SMALL), ("medium", MEDIUM)
    if device.type == "cpu":
        small = medium = ("tiny", TINY)
    train = partial(training_row, device, gflops)
    batches, positions, steps = ((16, 1), 512, 64) if device.type == "cuda" else ((2, 1), 32, 4)
    for texts in batches:
        yield partial(sampling_row, *small, "mdlm", texts, positions, steps, device)
    yield partial(sampling_row, *small, "mdlm", 1, LONGEST[device.type], steps, device)
    for texts in batches:
        yield partial(sampling_row, *small, "block-diffusion", texts, positions, BLOCK, device)
    yield partial(train, *small, "mdlm")
    yield partial(train, *small, "mdlm", recompute="light")
    yield partial(train, *medium, "mdlm")
    for words in GROWN[device.type]:
        yield partial(train, small[0], small[1].with_words(words), "mdlm")
    yield partial(train, *(("smollm2", SMOLLM2) if device.type == "cuda" else ("tiny llama", TINY_LLAMA)), "mdlm")
    yield partial(plain_row, *small, device, gflops)
    yield partial(train, *small, "autoregressive")


def rate_row(name: str, size: Size, rival: str, causal: bool, seconds: float, gflops: float) -> Row:
    tokens = size.texts * size.words / seconds
    rate = 1e-9 * tokens * size.needed_flops(causal)
    about = {"size": name, "by": rival, "texts": size.texts, "words": size.words, "tokens_per_second": rounded(tokens)}
    return {**about, "needed_gflops": rounded(rate), "share_of_matrix_rate": rounded(rate / gflops)}


def training_row(
    device: torch.device, gflops: float, name: str, size: Size, method: str, recompute: bool | str = False
) -> Row:
    build_inference.cache_clear()
    torch.compiler.reset()  # blocks of another row, compiled to keep more or less, would serve this one as well
    gc.collect()  # the memory of that row's captured steps would count as this one's
    recipe, begin = size.recipe(method, recompute=recompute), time.perf_counter()
    in_a_row = STEPS_IN_A_ROW if device.type == "cuda" else 1
    with bench.training_step(recipe, size.vocabulary, device, size.texts, size.words) as (_, step, _):
        run = lambda: [step() for _ in range(in_a_row)]  # noqa: E731
        timing = time_work(device, run)
        kernels = longest_kernels(device, run, in_a_row) if size in (SMALL, TINY, SMOLLM2) and not recompute else {}
    seconds = timing.seconds / in_a_row
    row = rate_row(name, size, method, method == "autoregressive", seconds, gflops)
    about = {"recompute": recompute, "row_seconds": rounded(time.perf_counter() - begin)}
    return {**timing._replace(seconds=seconds).figures(), **row, **about, **kernels}


def longest_kernels(device: torch.device, run: Callable[[], object], steps: int) -> Row:
    """Milliseconds a step of all kernels, by their kind, and of the longest that are no products."""
    found = list_kernels(device, run, steps, 1000)
    kinds = dict.fromkeys(KINDS, 0.0)
    rest = Counter[str]()
    for one in found["kernels"]:
        kind = next(name for name, part in KINDS.items() if re.search(part, one["name"]))
        kinds[kind] += one["ms"]
        if kind != "products":
            rest[one["name"].replace("at::native::", "").removeprefix("void ")[:80]] += one["ms"]
    kinds_ms = {name: rounded(ms) for name, ms in kinds.items() if ms}
    longest = {name: rounded(ms) for name, ms in rest.most_common(KERNELS)}
    return {"busy_ms": found["busy_ms"], "kinds_ms": kinds_ms, "longest_ms": longest}


@lru_cache(maxsize=1)
def build_inference(size: Size, method: str, device: torch.device) -> Inference:
    """An untrained model: what it writes is nonsense, and costs what sense does."""
    torch.manual_seed(0)
    model = size.recipe(method).build_method().build(TextSpec(size.vocabulary, LONGEST[device.type])).to(device).eval()
    return Inference(model, torch.bfloat16 if device.type == "cuda" else None)


def sampling_row(
    name: str, size: Size, method: str, texts: int, positions: int, steps: int, device: torch.device
) -> Row:
    """Texts of one length, from masks to ids; of blocks, `steps` are those of a block."""
    begin, inference = time.perf_counter(), build_inference(size, method, device)
    inference.clear_recorded()
    timing, run = time_batch(inference, texts, positions, device, steps)
    about = {"size": name, "by": method, "texts": texts, "words": positions, "steps": steps}
    kernels = longest_kernels(device, run, 1) if texts > 1 and method == "mdlm" else {}
    rate = {"tokens_per_second": rounded(texts * positions / timing.seconds)}
    return {**about, **timing.figures(), **rate, "row_seconds": rounded(time.perf_counter() - begin), **kernels}


# -- a plain loop: masked diffusion in torch alone ---------------------------------------------------------------------


class PlainBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, hidden = size.heads, size.hidden
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class PlainModel(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.mask_id = size.vocabulary
        self.words, self.places = nn.Embedding(size.vocabulary + 1, size.hidden), nn.Embedding(size.words, size.hidden)
        self.blocks = nn.ModuleList(PlainBlock(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, -(-size.vocabulary // 64) * 64)

    def forward(self, ids: Tensor) -> Tensor:
        """The bound's integrand, in the mean over tokens: only masked words meet the head, 2,048 at a time, whose
        logits the backward pass computes again."""
        t = ((torch.arange(len(ids), device=ids.device) + torch.rand(1, device=ids.device)) / len(ids)).unsqueeze(1)
        masked = torch.rand(ids.shape, device=ids.device) < t
        x = self.words(torch.where(masked, self.mask_id, ids)) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        rows = masked.flatten().nonzero().squeeze(1)  # which waits for the GPU
        states, targets = self.norm(x.flatten(0, 1)[rows]), ids.flatten()[rows]
        weights = (1 / t.clamp(min=1e-4)).expand(ids.shape).flatten()[rows]
        total = torch.zeros((), device=ids.device)
        for parts in zip(*(one.split(2048) for one in (states, targets, weights)), strict=True):
            total = total + checkpoint(self.nats, *parts, use_reentrant=False)
        return total / ids.numel()

    def nats(self, states: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (F.cross_entropy(self.head(states).float(), targets, reduction="none") * weights).sum()


def plain_step(size: Size, device: torch.device) -> Callable[[], None]:
    torch.manual_seed(0)
    model: Any = PlainModel(size).to(device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        for block in model.blocks:
            block.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    ids = torch.randint(size.vocabulary, (size.texts, size.words), device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            loss = model(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def plain_row(name: str, size: Size, device: torch.device, gflops: float) -> Row:
    step, in_a_row = plain_step(size, device), 8 if device.type == "cuda" else 1
    timing = time_work(device, lambda: [step() for _ in range(in_a_row)])
    timing = timing._replace(seconds=timing.seconds / in_a_row)
    return {**timing.figures(), **rate_row(name, size, "plain torch", False, timing.seconds, gflops)}
