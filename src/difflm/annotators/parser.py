"""Constituency parsers map sentences of words to trees: a network scores every label of every span of words, and CKY
finds the best tree under these scores. `benchmarks/assets/train_parser.py` trains them.

A span is represented by the difference of its two boundary vectors (Stern et al., 2017; Kitaev & Klein, 2018). Label 0
means "no phrase". Boundaries lie before the first word, between words and after the last one: n = words + 1.
Shapes: scores are [B, n, n, labels] at (from, to), used where from < to.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.annotators.trees import Span, Tree, join_sentences, split_sentences, tree_of
from difflm.data.words import MOST_CACHED
from difflm.errors import DifflmError, UsageError
from difflm.networks.transformer import Sizes, Transformer
from difflm.runtime.files import FORMAT, INSTALL, check_sha256, read_checked
from difflm.runtime.tensors import load_into, load_tensors

Sentences = Sequence[Sequence[str]]
CELLS = 60_000  # spans that are scored at once, 64 sentences of 30 words: some 200 MB
START, END = "\x02", "\x03"  # pseudo-words before the first word and after the last one
FEATURES = 10


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


def parse_texts(parser: SpanParser, texts: Sentences) -> list[Tree]:
    """Return a tree for each text: that of its only sentence, or TEXT over those of several (or of none)."""
    cut = [split_sentences(words) for words in texts]
    distinct = list({tuple(words): None for sentences in cut for words in sentences})
    found = dict(zip(distinct, parser.parse(distinct), strict=True))
    return [join_sentences([found[tuple(words)] for words in sentences]) for sentences in cut]


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
    batch, longest = list[int](), 0
    for i in order:
        longest = max(longest, lengths[i])
        if batch and (len(batch) == most or (len(batch) + 1) * (longest + 1) ** 2 > CELLS):
            yield batch
            batch, longest = [], lengths[i]
        batch.append(i)
    if batch:
        yield batch


@dataclass(frozen=True)
class HashedShape:
    rows: int = 8192
    embedding: int = 64
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    dropout: float = 0.1
    positions: int = 64


@lru_cache(maxsize=1 << 16)
def word_features(word: str, rows: int) -> tuple[int, ...]:
    """Return the table rows of a word's form, prefixes, suffixes and shape, by a stable hash.

    An unknown word shares all but the first two features with words of the training texts."""
    low = word.lower()
    shape = "".join("x" if c.islower() else "X" if c.isupper() else "d" if c.isdigit() else c for c in word[:8])
    parts = [word, low, *(low[:k] for k in (1, 2, 3)), *(low[-k:] for k in (1, 2, 3, 4)), shape]
    return tuple(zlib.crc32(f"{kind}:{part}".encode()) % rows for kind, part in enumerate(parts))


class HashedWords(nn.Module):
    """A Transformer encodes sums of hashed word features; it needs no vocabulary and a few MB."""

    def __init__(self, shape: HashedShape) -> None:
        super().__init__()
        self.shape, self.width = shape, shape.hidden
        self.table = nn.Embedding(shape.rows, shape.embedding)
        sizes = Sizes(shape.hidden, shape.layers, shape.heads, shape.dropout)
        self.body = Transformer(shape.embedding, shape.hidden, sizes, time="none", positions=shape.positions)

    def read(self, sentences: Sentences) -> dict[str, Tensor]:
        """Look up feature ids on the host, once per distinct word of the batch."""
        number: dict[str, int] = {}
        rows = [[number.setdefault(w, len(number)) for w in (START, *words, END)] for words in sentences]
        plain = word_features.__wrapped__
        found = [(word_features if len(word) <= MOST_CACHED else plain)(word, self.shape.rows) for word in number]
        features = torch.tensor(found)
        return {"ids": features[pad_rows(rows)], "lengths": torch.tensor([len(row) for row in rows])}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return vectors of START, of each word and of END, [B, words + 2, width]."""
        ids, lengths = inputs["ids"], inputs["lengths"]
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        out: Tensor = self.body(self.table(ids).sum(2) / FEATURES**0.5, None, mask)
        return out


def pad_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


class SpanScorer(nn.Module):
    """An encoder of words and a two-layer classifier of spans; `labels` includes label 0, no phrase."""

    def __init__(self, encoder: nn.Module, labels: int, hidden: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder = encoder
        self.fence = nn.Linear(2 * int(encoder.width), hidden)  # type: ignore[arg-type]
        self.norm, self.drop, self.out = nn.LayerNorm(hidden), nn.Dropout(dropout), nn.Linear(hidden, labels)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return scores [B, n, n, labels]."""
        # Half precision for the encoder alone: trees are sums of many small differences of scores.
        with torch.autocast("cuda", torch.bfloat16, enabled=inputs["lengths"].is_cuda):
            words = self.encoder(inputs)
        # A boundary combines the vectors on its left and on its right.
        boundaries = self.fence(torch.cat([words[:, :-1], words[:, 1:]], dim=-1).float())
        spans = boundaries.unsqueeze(1) - boundaries.unsqueeze(2)
        scores: Tensor = self.out(self.drop(F.relu(self.norm(spans))))
        return scores


@torch.no_grad()
def best_trees(scores: Tensor, lengths: Tensor) -> Tensor:
    """Return the labels of each sentence's best tree at (first word, width), 0 elsewhere, [B, n, n].

    The score of a tree is the sum, over its phrases, of the label's score minus that of "no phrase". A phrase of many
    parts is a chain of binary ones whose inner ones are no phrases and add nothing, so that CKY over binary trees
    finds the best of all trees. The whole sentence always is a phrase. Nothing synchronises with the device."""
    value, label = (scores[..., 1:] - scores[..., :1]).float().max(-1)
    value, label = index_by_width(value), index_by_width(label) + 1
    whole = mark_sentences(value, lengths)
    label = label.where(whole | (value > 0), 0)
    return label * best_binary_trees(value.clamp(min=0), whole)


def mark_sentences(square: Tensor, lengths: Tensor) -> Tensor:
    """Mark the span of each whole sentence; (first, width) and (from, to) are the same there."""
    whole = torch.zeros_like(square, dtype=torch.bool)
    whole[torch.arange(len(square), device=square.device), 0, lengths] = True
    return whole


def index_by_width(square: Tensor) -> Tensor:
    """Reindex (from, to) as (from, to − from)."""
    n = square.shape[1]
    place = torch.arange(n, device=square.device)
    return square.gather(2, (place.unsqueeze(1) + place).clamp(max=n - 1).expand_as(square))


def best_binary_trees(value: Tensor, whole: Tensor) -> Tensor:
    """Return 1 at the spans of the binary trees with the greatest total value, by (first, width)."""
    n = value.shape[1]
    left, right = torch.zeros_like(value), torch.zeros_like(value)  # best totals by (from, width) and by (to, width)
    splits = torch.zeros_like(
        value, dtype=torch.long
    )  # the width of the left part of the best tree over (first, width)
    for width in range(1, n):
        starts = n - width
        total = value[:, :starts, width]
        if width > 1:
            both = left[:, :starts, 1:width] + right[:, width:, 1:width].flip(-1)
            best, where = both.max(-1)
            total = total + best
            splits[:, :starts, width] = where + 1
        left[:, :starts, width] = total
        right[:, width:, width] = total
    chosen = whole.long()
    flat = chosen.view(len(chosen), -1)
    for width in range(n - 1, 1, -1):  # from the whole sentences downwards
        first = torch.arange(n - width, device=splits.device)
        here, cut = chosen[:, : n - width, width].clone(), splits[:, : n - width, width]
        flat.scatter_reduce_(1, first * n + cut, here, "amax")
        flat.scatter_reduce_(1, (first + cut) * n + width - cut, here, "amax")
    return chosen
