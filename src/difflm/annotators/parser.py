"""Constituency parsers: sentences of words in, trees out; kept as safetensors beside JSON, trained in minutes."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from difflm.annotators.span_scorer import HashedShape, PiecesShape, Sentences, SpanScorer, best_trees, margin_loss
from difflm.annotators.trees import CHAIN, Span, Tree, join_sentences, split_sentences, tree_of
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import read_json, write_atomic
from difflm.runtime.tensors import load_into, load_tensors, save_tensors

FORMAT = 1
SHAPES = {"hashed": HashedShape, "pieces": PiecesShape}
RARE = 3  # a chain of labels seen less often is learned as its outermost one
CELLS = 60_000  # spans that are scored at once, 64 sentences of 30 words: some 200 MB


class Parser(Protocol):
    @property
    def name(self) -> str: ...

    def parse(self, sentences: Sentences) -> list[Tree]: ...


def parse_texts(parser: Parser, texts: Sentences) -> list[Tree]:
    """A tree for each text: that of its only sentence, or TEXT over those of several (or of none)."""
    cut = [split_sentences(words) for words in texts]
    distinct = list({tuple(words): None for sentences in cut for words in sentences})
    found = dict(zip(distinct, parser.parse(distinct), strict=True))
    return [join_sentences([found[tuple(words)] for words in sentences]) for sentences in cut]


class SpanParser:
    """A span scorer and the names of its labels."""

    def __init__(self, name: str, shape: HashedShape | PiecesShape, labels: Sequence[str]) -> None:
        self.name, self.shape, self.labels = name, shape, tuple(labels)
        self.network = SpanScorer(shape.build(), len(self.labels) + 1)

    @property
    def device(self) -> torch.device:
        return self.network.out.weight.device

    def to(self, device: str | torch.device) -> "SpanParser":
        self.network.to(device)
        return self

    def scores(self, sentences: Sentences) -> tuple[Tensor, Tensor]:
        """Scores [B, n, n, labels + 1], and the numbers of words."""
        device = self.device
        inputs = {name: ids.to(device, non_blocking=True) for name, ids in self.network.encoder.read(sentences).items()}
        lengths = torch.tensor([len(words) for words in sentences], device=device)
        return self.network(inputs), lengths

    @torch.no_grad()
    def parse(self, sentences: Sentences) -> list[Tree]:
        if not all(sentences):
            raise UsageError("a sentence without words has no tree.")
        self.network.eval()
        trees: dict[int, Tree] = {}
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        for batch in _batches(order, [len(words) for words in sentences], CELLS, 1024):
            charts = best_trees(*self.scores([sentences[i] for i in batch])).cpu()
            spans = self._spans(charts, len(batch))
            trees.update((i, tree_of(sentences[i], found)) for i, found in zip(batch, spans, strict=True))
        return [trees[i] for i in range(len(sentences))]

    def _spans(self, charts: Tensor, count: int) -> list[list[Span]]:
        found: list[list[Span]] = [[] for _ in range(count)]
        places = charts.nonzero()
        for (b, first, width), label in zip(places.tolist(), charts[tuple(places.T)].tolist(), strict=True):
            found[b].append(Span(first, first + width - 1, self.labels[label - 1]))
        return found

    def save(self, directory: Path, about: dict[str, Any] | None = None) -> None:
        """Weights at half precision; `about` says what it learned from and what was measured."""
        kind = next(name for name, shape in SHAPES.items() if isinstance(self.shape, shape))
        config = {
            "format": FORMAT,
            "name": self.name,
            "labels": self.labels,
            "encoder": {"kind": kind, **asdict(self.shape)},
            "parameters": sum(p.numel() for p in self.network.parameters()),
            **(about or {}),
        }
        save_tensors(directory / "model.safetensors", {k: v.half() for k, v in self.network.state_dict().items()})
        # Not config.json: a directory with one is a run.
        write_atomic(directory / "parser.json", json.dumps(config, indent=1, ensure_ascii=False) + "\n")


def load_parser(directory: Path, device: str | torch.device = "cpu") -> SpanParser:
    config = read_json(directory / "parser.json")
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise DifflmError(f"{directory}/parser.json was not written by this version of difflm.")
    try:
        settings = dict(config["encoder"])
        shape = SHAPES[settings.pop("kind")](**{k: tuple(v) if k == "pieces" else v for k, v in settings.items()})
        parser = SpanParser(str(config["name"]), shape, [str(label) for label in config["labels"]])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
        raise DifflmError(f"{directory}/parser.json does not describe a parser ({error}).") from None
    path = directory / "model.safetensors"
    load_into(parser.network, load_tensors(path), path)
    parser.network.eval()
    return parser.to(device)


@cache
def own_parser() -> SpanParser:
    """The bundled parser of E2E texts, made from GUM's trees by `benchmarks/distil_parser.py`."""
    return load_parser(Path(str(resources.files("difflm") / "pretrained" / "parser")))


def labels_of(trees: Sequence[Tree]) -> list[str]:
    """The labels of chained trees that a parser learns: frequent chains, and every outermost label."""
    counts = Counter(node.label for tree in trees for node in _nodes(tree.chained()))
    return sorted(label for label, count in counts.items() if count >= RARE or CHAIN not in label)


@dataclass(frozen=True)
class Training:
    epochs: float = 20
    minutes: float = 2.0  # an upper bound: what is reached first ends the training, the rate falling to nought with it
    lr: float = 1e-3
    encoder_lr: float = 1e-3  # pretrained encoders want less, 3e-4
    warmup: float = 0.05
    batch: int = 32  # sentences, unless they are long
    seed: int = 0


def train_parser(
    parser: SpanParser, trees: Sequence[Tree], plan: Training, tell: Callable[[float, float], None] | None = None
) -> None:
    """Fit the parser to the trees. Repeatable where the minutes do not end it; `tell(share done, loss a word)`."""
    torch.manual_seed(plan.seed)
    draw = random.Random(plan.seed)
    sentences, cells = _examples(parser, trees)
    lengths = [len(words) for words in sentences]
    optimiser = _optimiser(parser.network, plan)
    rates = [group["lr"] for group in optimiser.param_groups]
    seen, began, done, told = 0, time.monotonic(), 0.0, 0.0
    while done < 1:
        for batch in _shuffled_batches(lengths, plan.batch, draw):
            seen += len(batch)
            done = max(seen / (plan.epochs * len(sentences)), (time.monotonic() - began) / (60 * plan.minutes))
            if done > 1:
                break
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * min(1.0, done / plan.warmup, (1 - done) / (1 - plan.warmup))
            loss = _step(parser, optimiser, [sentences[i] for i in batch], [cells[i] for i in batch])
            if tell and done >= told:
                tell(done, loss.item())
                told += 0.1
    parser.network.eval()


Cells = list[tuple[int, int, int]]  # (from, to, label) of a sentence's phrases


def _step(parser: SpanParser, optimiser: torch.optim.Optimizer, sentences: Sentences, cells: list[Cells]) -> Tensor:
    parser.network.train()
    scores, lengths = parser.scores(sentences)
    filled = [(b, *cell) for b, found in enumerate(cells) for cell in found]
    places = torch.tensor(filled, dtype=torch.long).view(-1, 4).to(scores.device).T
    targets = torch.zeros(scores.shape[:3], dtype=torch.long, device=scores.device)
    targets[places[0], places[1], places[2]] = places[3]
    loss = margin_loss(scores, targets, lengths)
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parser.network.parameters(), 1.0)
    optimiser.step()
    return loss.detach()


def _examples(parser: SpanParser, trees: Sequence[Tree]) -> tuple[list[list[str]], list[Cells]]:
    number = {label: i for i, label in enumerate(parser.labels, 1)}
    # A label that the parser does not know at all is no phrase to it.
    cells = [
        [
            (first, last + 1, found)
            for first, last, label in _chained_spans(tree)
            if (found := number.get(label) or number.get(label.split(CHAIN)[0]))
        ]
        for tree in trees
    ]
    return [tree.words() for tree in trees], cells


def _chained_spans(tree: Tree) -> Iterator[Span]:
    """One span for each node of the chained tree, its label whole."""
    joined: dict[tuple[int, int], list[str]] = {}
    for first, last, label in tree.spans():
        joined.setdefault((first, last), []).append(label)
    return (Span(*place, CHAIN.join(labels)) for place, labels in joined.items())


def _nodes(tree: Tree) -> Iterator[Tree]:
    yield tree
    for child in tree.children:
        if isinstance(child, Tree):
            yield from _nodes(child)


def _optimiser(network: SpanScorer, plan: Training) -> torch.optim.AdamW:
    encoder = {id(p) for p in network.encoder.parameters()}
    groups = [
        {"params": [p for p in network.parameters() if id(p) in encoder], "lr": plan.encoder_lr},
        {"params": [p for p in network.parameters() if id(p) not in encoder], "lr": plan.lr},
    ]
    return torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98))


def _shuffled_batches(lengths: Sequence[int], most: int, draw: random.Random) -> list[list[int]]:
    """Sentences of like length together, so that little is padding; which ones, and in what order, is chance."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i] + 4 * draw.random())
    batches = list(_batches(order, lengths, CELLS, most))
    draw.shuffle(batches)
    return batches


def _batches(order: Sequence[int], lengths: Sequence[int], cells: int, most: int) -> Iterator[list[int]]:
    """Runs of `order`: no more than `most`, and no more than `cells` spans in their squares; giants go alone."""
    batch: list[int] = []
    longest = 0
    for i in order:
        longer = max(longest, lengths[i])
        if batch and (len(batch) == most or (len(batch) + 1) * (longer + 1) ** 2 > cells):
            yield batch
            batch, longer = [], lengths[i]
        batch.append(i)
        longest = longer
    if batch:
        yield batch
