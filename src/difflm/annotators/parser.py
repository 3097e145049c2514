"""Constituency parsers map sentences of words to trees. `benchmarks/assets/train_parser.py` trains them."""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from difflm.annotators.span_scorer import HashedShape, HashedWords, Sentences, SpanScorer, best_trees
from difflm.annotators.trees import Span, Tree, join_sentences, split_sentences, tree_of
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import FORMAT, INSTALL, check_sha256, read_checked
from difflm.runtime.tensors import load_into, load_tensors

CELLS = 60_000  # spans that are scored at once, 64 sentences of 30 words: some 200 MB


class Parser(Protocol):
    @property
    def name(self) -> str: ...

    def parse(self, sentences: Sentences) -> list[Tree]: ...


def parse_texts(parser: Parser, texts: Sentences) -> list[Tree]:
    """Return a tree for each text: that of its only sentence, or TEXT over those of several (or of none)."""
    cut = [split_sentences(words) for words in texts]
    distinct = list({tuple(words): None for sentences in cut for words in sentences})
    found = dict(zip(distinct, parser.parse(distinct), strict=True))
    return [join_sentences([found[tuple(words)] for words in sentences]) for sentences in cut]


class SpanParser:
    """A span scorer and the names of its labels."""

    def __init__(self, name: str, encoder: nn.Module, labels: Sequence[str]) -> None:
        self.name, self.labels = name, tuple(labels)
        self.network = SpanScorer(encoder, len(self.labels) + 1)

    def to(self, device: str | torch.device) -> "SpanParser":
        self.network.to(device)
        return self

    def scores(self, sentences: Sentences) -> tuple[Tensor, Tensor]:
        """Return scores [B, n, n, labels + 1] and the number of words of each sentence."""
        device = self.network.out.weight.device
        inputs = {name: ids.to(device, non_blocking=True) for name, ids in self.network.encoder.read(sentences).items()}  # type: ignore[operator]
        lengths = torch.tensor([len(words) for words in sentences], device=device)
        return self.network(inputs), lengths

    @torch.no_grad()
    def parse(self, sentences: Sentences) -> list[Tree]:
        if not all(sentences):
            raise UsageError("a sentence without words has no tree.")
        self.network.eval()
        trees: dict[int, Tree] = {}
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        for batch in batch_by_cells(order, [len(words) for words in sentences], 1024):
            charts = best_trees(*self.scores([sentences[i] for i in batch])).cpu()
            spans: list[list[Span]] = [[] for _ in batch]
            found = charts.nonzero()
            for (b, first, width), label in zip(found.tolist(), charts[tuple(found.T)].tolist(), strict=True):
                spans[b].append(Span(first, first + width - 1, self.labels[label - 1]))
            trees.update((i, tree_of(sentences[i], own)) for i, own in zip(batch, spans, strict=True))
        return [trees[i] for i in range(len(sentences))]


def load_parser(directory: Path, device: str | torch.device = "cpu") -> SpanParser:
    config = read_checked(directory / "parser.json", INSTALL)
    if not isinstance(config, dict) or config.get("format") not in (1, FORMAT):
        raise DifflmError(f"{directory}/parser.json was not written by this version of difflm.")
    try:
        settings = dict(config["encoder"])
        if settings.pop("kind") != "hashed":
            raise ValueError("its encoder is not of the kind `hashed`")
        encoder = HashedWords(HashedShape(**settings))
        parser = SpanParser(str(config["name"]), encoder, [str(label) for label in config["labels"]])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
        raise DifflmError(f"{directory}/parser.json does not describe a parser ({error}).") from None
    path = directory / "model.safetensors"
    load_into(parser.network, load_tensors(path), path)
    check_sha256(path, config, INSTALL)
    parser.network.eval()
    return parser.to(device)


@cache
def own_parser() -> SpanParser:
    """Load the bundled parser of E2E texts, distilled from GUM's trees by `benchmarks/assets/distil_parser.py`."""
    return load_parser(Path(str(resources.files("difflm") / "pretrained" / "parser")))


def batch_by_cells(order: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Split `order` into batches of at most `most` sentences and CELLS spans; a longer sentence gets its own batch."""
    batch: list[int] = []
    longest = 0
    for i in order:
        longer = max(longest, lengths[i])
        if batch and (len(batch) == most or (len(batch) + 1) * (longer + 1) ** 2 > CELLS):
            yield batch
            batch, longer = [], lengths[i]
        batch.append(i)
        longest = longer
    if batch:
        yield batch
