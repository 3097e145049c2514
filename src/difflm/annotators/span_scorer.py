"""A parser's network: words → a score for every label of every span, and the best tree under such scores.

A span is the difference of two fence-posts between words (Stern et al., 2017; Kitaev & Klein, 2018). Label 0 is "no
phrase"; the tree of the greatest total is found by CKY.
Encoders `read` sentences into ids on the host, and answer with a vector for what stands before the first word, for
each word, and for what stands after the last one, [B, words + 2, width].
Shapes: n = words + 1 fence-posts; scores [B, n, n, labels] at (from, to), used where from < to.
"""

import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.networks.bert import PostNormBlock
from difflm.networks.transformer import Transformer

Sentences = Sequence[Sequence[str]]
START, END = "\x02", "\x03"  # stand before the first word and after the last one
CLS, SEP, UNKNOWN = "[CLS]", "[SEP]", "[UNK]"


@dataclass(frozen=True)
class HashedShape:
    rows: int = 8192
    embedding: int = 64
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    dropout: float = 0.1
    positions: int = 64

    def build(self) -> "HashedWords":
        return HashedWords(self)


@dataclass(frozen=True)
class PiecesShape:
    pieces: tuple[str, ...]
    hidden: int
    layers: int
    heads: int
    positions: int
    dropout: float = 0.1

    def build(self) -> "Wordpieces":
        return Wordpieces(self)


FEATURES = 10
FORMS = 2  # the first features name the word itself


@lru_cache(maxsize=1 << 16)
def word_features(word: str, rows: int) -> tuple[int, ...]:
    """Rows of the table for a word: its form, its beginnings, its endings and its shape, by a stable hash.
    An unknown word shares all but the first two with words that were seen."""
    low = word.lower()
    shape = "".join("x" if c.islower() else "X" if c.isupper() else "d" if c.isdigit() else c for c in word[:8])
    parts = [word, low, *(low[:k] for k in (1, 2, 3)), *(low[-k:] for k in (1, 2, 3, 4)), shape]
    return tuple(zlib.crc32(f"{kind}:{part}".encode()) % rows for kind, part in enumerate(parts))


class HashedWords(nn.Module):
    """Our Transformer over sums of hashed features: a few MB, no vocabulary, learned from nothing."""

    def __init__(self, shape: HashedShape) -> None:
        super().__init__()
        self.rows, self.width, self.dropout = shape.rows, shape.hidden, shape.dropout
        self.table = nn.Embedding(shape.rows, shape.embedding)
        self.body = Transformer(
            shape.embedding,
            shape.hidden,
            shape.hidden,
            shape.layers,
            shape.heads,
            shape.dropout,
            time="none",
            positions=shape.positions,
        )
        nn.init.xavier_uniform_(self.body.head.weight)  # its zeros would make all fence-posts, hence all spans, one

    def read(self, sentences: Sentences) -> dict[str, Tensor]:
        number: dict[str, int] = {}  # of a word in this batch: its features are looked up once
        rows = [[number.setdefault(w, len(number)) for w in (START, *words, END)] for words in sentences]
        features = torch.tensor([word_features(word, self.rows) for word in number])
        return {"ids": features[_padded(rows)], "lengths": torch.tensor([len(row) for row in rows])}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        ids, lengths = inputs["ids"], inputs["lengths"]
        vectors = self.table(ids)
        if self.training:  # a word whose form is unknown must be read by its letters
            known = torch.rand(ids.shape[:2], device=ids.device) >= self.dropout
            vectors = torch.cat([vectors[:, :, :FORMS] * known[..., None, None], vectors[:, :, FORMS:]], dim=2)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        out: Tensor = self.body(vectors.sum(2) / FEATURES**0.5, None, mask)
        return out


class Wordpieces(nn.Module):
    """A BERT-shaped encoder, as pretrained ones come; a word is the state of its last piece."""

    def __init__(self, shape: PiecesShape) -> None:
        super().__init__()
        self.width = shape.hidden
        self.index = {piece: i for i, piece in enumerate(shape.pieces)}
        self.table = nn.Embedding(len(shape.pieces), shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden)
        self.norm, self.drop = nn.LayerNorm(shape.hidden, eps=1e-12), nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(
            PostNormBlock(shape.hidden, shape.heads, shape.dropout) for _ in range(shape.layers)
        )
        self.cut: dict[str, list[int]] = {}

    def pieces(self, word: str) -> list[int]:
        if word not in self.cut:
            self.cut[word] = wordpieces(word, self.index)
        return self.cut[word]

    def read(self, sentences: Sentences) -> dict[str, Tensor]:
        ids, lasts = [], []
        for words in sentences:
            row, last = [self.index[CLS]], [0]
            for word in words:
                row += self.pieces(word)
                last.append(len(row) - 1)
            ids.append([*row, self.index[SEP]])
            lasts.append([*last, len(row)])
        return {
            "ids": _padded(ids),
            "lasts": _padded(lasts),
            "lengths": torch.tensor([len(row) for row in ids]),
        }

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        ids, lasts = inputs["ids"], inputs["lasts"]
        place = torch.arange(ids.shape[1], device=ids.device)
        mask = place < inputs["lengths"].unsqueeze(1)
        x = self.table(ids) + self.positions(place.clamp(max=self.positions.num_embeddings - 1))
        x = self.drop(self.norm(x))
        for block in self.blocks:
            x = block(x, mask)
        return x.gather(1, lasts.unsqueeze(-1).expand(-1, -1, self.width))


def wordpieces(word: str, index: dict[str, int]) -> list[int]:
    """BERT's uncased pieces: lower case, no accents, signs apart, then the longest known beginning again and again."""
    letters = "".join(c for c in unicodedata.normalize("NFD", word.lower()) if unicodedata.category(c) != "Mn")
    apart = "".join(f" {c} " if unicodedata.category(c)[0] == "P" or c in "$+<=>^`|~" else c for c in letters)
    return [i for part in apart.split() for i in _longest_first(part, index)] or [index[UNKNOWN]]


def _longest_first(part: str, index: dict[str, int]) -> list[int]:
    found: list[int] = []
    start = 0
    while start < len(part):
        mark = "##" if start else ""
        ends = (end for end in range(len(part), start, -1) if mark + part[start:end] in index)
        if (end := next(ends, None)) is None:
            return [index[UNKNOWN]]
        found.append(index[mark + part[start:end]])
        start = end
    return found


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


class SpanScorer(nn.Module):
    def __init__(self, encoder: HashedWords | Wordpieces, labels: int, hidden: int = 256, dropout: float = 0.1) -> None:
        """`labels` counts label 0, no phrase."""
        super().__init__()
        self.encoder = encoder
        self.fence = nn.Linear(2 * encoder.width, hidden)
        self.norm, self.drop, self.out = nn.LayerNorm(hidden), nn.Dropout(dropout), nn.Linear(hidden, labels)
        with torch.no_grad():
            self.out.bias[0] = 5.0  # nine spans in ten are no phrase: known from the start, not learned

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Scores [B, n, n, labels]."""
        # Half precision for the encoder alone: trees are sums of many small differences of scores.
        with torch.autocast("cuda", torch.bfloat16, enabled=inputs["lengths"].is_cuda):
            words = self.encoder(inputs)
        # What stands left of a fence and what stands right of it: a span sees both sides of its edges.
        posts = self.fence(torch.cat([words[:, :-1], words[:, 1:]], dim=-1).float())
        spans = posts.unsqueeze(1) - posts.unsqueeze(2)
        scores: Tensor = self.out(self.drop(F.relu(self.norm(spans))))
        return scores


def margin_loss(scores: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
    """How far the best rival outscores the right tree, a point a word: rivals get one point for each wrong label
    (Stern et al., 2017). `targets` [B, n, n] holds labels at (from, to), 0 where no phrase is."""
    gains = (scores - scores[..., :1]).float()
    right = targets.unsqueeze(-1)
    rivals = (gains + 1).scatter_add(-1, right, -torch.ones_like(right, dtype=gains.dtype))
    value, label = rivals.detach().max(-1)
    best = _by_ends(_best_binary(_by_width(value), _whole(value, lengths)))
    found = (rivals.gather(-1, label.unsqueeze(-1)).squeeze(-1) * best).sum((1, 2))
    return (found - gains.gather(-1, right).sum((1, 2, 3))).clamp(min=0).sum() / lengths.sum()


@torch.no_grad()
def best_trees(scores: Tensor, lengths: Tensor) -> Tensor:
    """The labels of the best tree of each sentence at (first word, width), 0 elsewhere, [B, n, n].

    A tree's score is the sum, over its phrases, of the label's score less that of "no phrase". A phrase of many parts
    is a chain of binary ones of which the inner ones are no phrases and add nothing, so that CKY over binary trees
    finds the best of all trees. The span of the whole sentence always is a phrase. Nothing waits for the host.
    """
    value, label = (scores[..., 1:] - scores[..., :1]).float().max(-1)
    value, label = _by_width(value), _by_width(label) + 1
    whole = _whole(value, lengths)
    label = label.where(whole | (value > 0), 0)
    return label * _best_binary(value.clamp(min=0), whole)


def _whole(square: Tensor, lengths: Tensor) -> Tensor:
    """True at the span of each whole sentence, by (first, width), which also is its place by (from, to)."""
    whole = torch.zeros_like(square, dtype=torch.bool)
    whole[torch.arange(len(square), device=square.device), 0, lengths] = True
    return whole


def _best_binary(value: Tensor, whole: Tensor) -> Tensor:
    """1 at the spans of the binary trees of the greatest total value, by (first, width)."""
    return _chosen(_splits(value), whole)


def _by_width(square: Tensor) -> Tensor:
    """(from, to) → (from, to − from)."""
    n = square.shape[1]
    place = torch.arange(n, device=square.device)
    return square.gather(2, (place.unsqueeze(1) + place).clamp(max=n - 1).expand_as(square))


def _by_ends(square: Tensor) -> Tensor:
    """(from, to − from) → (from, to), 0 where to ≤ from."""
    place = torch.arange(square.shape[1], device=square.device)
    width = place - place.unsqueeze(1)
    return square.gather(2, width.clamp(min=0).expand_as(square)) * (width > 0)


def _splits(value: Tensor) -> Tensor:
    """Where the best tree over (first, width) is cut in two: the width of its left part, [B, n, n]."""
    n = value.shape[1]
    left, right = torch.zeros_like(value), torch.zeros_like(value)  # best totals by (from, width) and by (to, width)
    splits = torch.zeros_like(value, dtype=torch.long)
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
    return splits


def _chosen(splits: Tensor, whole: Tensor) -> Tensor:
    """Follow the cuts down from the whole sentences: 1 at every span of the best binary trees."""
    n = splits.shape[1]
    chosen = whole.long()
    flat = chosen.view(len(chosen), -1)
    for width in range(n - 1, 1, -1):
        starts = torch.arange(n - width, device=splits.device)
        here, cut = chosen[:, : n - width, width].clone(), splits[:, : n - width, width]
        flat.scatter_reduce_(1, starts * n + cut, here, "amax")
        flat.scatter_reduce_(1, (starts + cut) * n + width - cut, here, "amax")
    return chosen
