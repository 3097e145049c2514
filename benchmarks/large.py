"""Rows of `benchmarks.speed --only large`: masked training and sampling at the sizes of GPT-2, beside a plain loop in
torch and the autoregressive twin.

Needed work counts, for every token, six operations a weight of the blocks, attention forward and backward, and six a
weight of the head at the positions that are learned: half of them under masks, where a causal model learns all and
attends to half. What a program computes beyond that, such as logits of words that are not masked, does not count.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.speed_rows import time_batch
from difflm.app import bench
from difflm.app.bench import Row, rounded, time_work
from difflm.methods import TextSpec
from difflm.models.inference import Inference
from difflm.training.recipe import Recipe, check


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
        asked = {"method": method, "model": sizes, "data": "none", "steps": 1000, "batch_size": self.texts}
        return check({**asked, **changes}).model_copy(update={"longest": self.words})

    def needed_flops(self, causal: bool) -> float:
        """Of one token, forward and backward."""
        blocks = 12 * self.layers * self.hidden**2
        attention = 12 * self.layers * self.words * self.hidden
        head = self.vocabulary * self.hidden
        return 6 * blocks + attention * (0.5 if causal else 1) + 6 * head * (1 if causal else 0.5)


SMALL, MEDIUM = Size(12, 768, 12, 50_257, 32, 1024), Size(24, 1024, 16, 50_257, 32, 1024)  # GPT-2's
TINY = Size(2, 64, 2, 500, 4, 32)
SIZES = {"cuda": {"small": SMALL, "medium": MEDIUM}, "cpu": {"tiny": TINY}}
SAMPLED = {"cuda": (("small", (1, 16), 512, 64),), "cpu": (("tiny", (1, 2), 32, 4),)}  # size, texts, positions, steps


def large_rows(device: torch.device, gflops: float) -> Iterator[Callable[[], Row]]:
    for name, size in SIZES[device.type].items():
        yield partial(training_row, name, size, "mdlm", device, gflops)
        yield partial(training_row, name, size, "mdlm", device, gflops, recompute="light")
        yield partial(training_row, name, size, "autoregressive", device, gflops)
        yield partial(plain_row, name, size, device, gflops)
    for name, batches, positions, steps in SAMPLED[device.type]:
        for texts in batches:
            yield partial(sampling_row, name, SIZES[device.type][name], texts, positions, steps, device)


def rate_row(name: str, size: Size, rival: str, causal: bool, seconds: float, gflops: float) -> Row:
    tokens = size.texts * size.words / seconds
    rate = 1e-9 * tokens * size.needed_flops(causal)
    about = {"size": name, "by": rival, "texts": size.texts, "words": size.words, "tokens_per_second": rounded(tokens)}
    return {**about, "needed_gflops": rounded(rate), "share_of_matrix_rate": rounded(rate / gflops)}


def training_row(name: str, size: Size, method: str, device: torch.device, gflops: float, **changes: Any) -> Row:
    row = bench.training_speed(size.recipe(method, **changes), size.vocabulary, device, size.texts, size.words)
    return {**row, **rate_row(name, size, method, method == "autoregressive", row["seconds"], gflops), **changes}


def sampling_row(name: str, size: Size, texts: int, positions: int, steps: int, device: torch.device) -> Row:
    """Texts of one length by an untrained model, from masks to ids."""
    torch.manual_seed(0)
    model = size.recipe("mdlm").build_method().build(TextSpec(size.vocabulary, size.words)).to(device).eval()
    inference = Inference(model, torch.bfloat16 if device.type == "cuda" else None)
    timing = time_batch(inference, texts, positions, device, steps)[0]
    about = {"size": name, "by": "mdlm", "texts": texts, "words": positions, "steps": steps}
    return {**about, **timing.figures(), "tokens_per_second": rounded(texts * positions / timing.seconds)}


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
