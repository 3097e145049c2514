"""A small network that reads a noisy state and says what the text will be: its gradient steers.

It is trained at all times of the process, so that it does not know how many steps anybody takes.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.labels import NOTHING, Labelling
from difflm.diffusion.denoiser import Denoiser, autocast_to, cast_linears
from difflm.networks import Transformer

CHART = 128  # width of the vectors that a span's two ends add up to
MOSTLY_NONE = 5.0  # nearly all pairs of places are no span: known from the start, not learned


class Classifier(nn.Module):
    """One trunk and a head for each labelling; it sees what the denoiser sees of x_t, but for earlier answers."""

    def __init__(
        self,
        labellings: Sequence[Labelling],
        view_dim: int,
        longest: int,
        vocabulary: int,
        hidden: int = 256,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.precision: torch.dtype | None = None
        self.labellings = {one.name: one for one in labellings}
        self.numbers = {name: number for number, name in enumerate(self.labellings)}  # of their heads
        self.trunk = Transformer(view_dim, hidden, hidden, layers, heads, dropout, positions=longest)
        nn.init.normal_(self.trunk.head.weight, std=hidden**-0.5)
        self.heads = nn.ModuleDict()
        self.word_counts = nn.ParameterDict()  # how often each word bears each tag, [V, labels]; not trained
        for number, one in enumerate(labellings):  # by number: a name may hold what module names may not
            size = 2 * hidden if one.kind == "text" else hidden if one.kind == "tags" else CHART
            self.heads[str(number)] = nn.Linear(size, len(one.values))
            if one.kind == "tags":
                self.word_counts[str(number)] = nn.Parameter(torch.zeros(vocabulary, len(one.values)), False)
            if one.kind == "spans":
                self.heads[f"{number}-first"] = nn.Linear(2 * hidden, CHART)
                self.heads[f"{number}-last"] = nn.Linear(2 * hidden, CHART)
                with torch.no_grad():
                    out = cast(nn.Linear, self.heads[str(number)])
                    out.bias[0] = MOSTLY_NONE

    def forward(self, view: Tensor, t: Tensor, mask: Tensor) -> "ClassifierOutput":
        """`view` [B, L, view_dim] is what there is to see of the texts at times t: `Codec.view` of a noisy state."""
        if self.precision is None:
            return ClassifierOutput(self, self.trunk(view, t, mask), mask)
        with autocast_to(view.device, self.precision):
            features = self.trunk(view, t, mask)
        return ClassifierOutput(self, features.float(), mask)

    def guiding(self, dtype: torch.dtype | None) -> "Classifier":
        """Itself, as it guides: nothing learns any more, and the trunk computes in `dtype`."""
        self.precision = dtype
        cast_linears(self.requires_grad_(False).trunk, dtype)
        return self

    def counted(self) -> dict[str, Tensor]:
        """How often each word bears each tag, by labelling."""
        counts = self.word_counts
        return {name: counts[str(number)] for name, number in self.numbers.items() if str(number) in counts}


class ClassifierOutput:
    """What the classifier thinks of some noisy texts; each head is asked when somebody needs it."""

    def __init__(self, classifier: Classifier, features: Tensor, mask: Tensor) -> None:
        self.classifier, self.features, self.mask = classifier, features, mask

    @cached_property
    def pooled(self) -> Tensor:
        at = self.mask.unsqueeze(-1)
        mean = (self.features * at).sum(1) / at.sum(1)
        most = self.features.masked_fill(~at, float("-inf")).amax(1)
        return torch.cat([mean, most], -1)

    def text(self, name: str) -> Tensor:
        """log p(label | x_t), [B, labels]."""
        number = self.classifier.numbers[name]
        return F.log_softmax(self.classifier.heads[str(number)](self.pooled).float(), -1)

    def tags(self, name: str) -> Tensor:
        """The same at every position, [B, L, labels]."""
        number = self.classifier.numbers[name]
        return F.log_softmax(self.classifier.heads[str(number)](self.features).float(), -1)

    def spans(self, name: str) -> Tensor:
        """The same for every pair of a first and a last position, [B, L, L, labels]."""
        number = self.classifier.numbers[name]
        # An end of a span is a place between two words: both are looked at.
        around = F.pad(self.features, (0, 0, 1, 1))
        first = self.classifier.heads[f"{number}-first"](torch.cat([around[:, :-2], self.features], -1))
        last = self.classifier.heads[f"{number}-last"](torch.cat([self.features, around[:, 2:]], -1))
        pair = torch.tanh(first.unsqueeze(2) + last.unsqueeze(1))
        return F.log_softmax(self.classifier.heads[str(number)](pair).float(), -1)

    def nats(self, name: str, labels: Tensor, whole: bool = True) -> Tensor:
        """−log p(labels | x_t) of each text, all its places together, [B]; NOTHING asks for nothing. `whole`: pairs of
        places that no span names shall be no span; else a span may have several labels, of which any will do."""
        kind = self.classifier.labellings[name].kind
        if kind == "text":
            chosen = self.text(name).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return -chosen * (labels != NOTHING)
        if kind == "tags":
            chosen = self.tags(name).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return -(chosen * (labels != NOTHING)).sum(-1)
        if not whole:
            return -self.any_of(name, labels).sum(-1)
        chart = span_chart(labels, self.mask)
        chosen = self.spans(name).gather(-1, chart.unsqueeze(-1)).squeeze(-1)
        return -(chosen * word_pairs(self.mask)).sum((-1, -2))

    def any_of(self, name: str, spans: Tensor) -> Tensor:
        """log p(one of its labels) of each span, 0 where there is none, [B, M]."""
        first, last, labels = spans[..., 0].clamp(min=0), spans[..., 1].clamp(min=0), spans[..., 2:]
        rows = torch.arange(len(spans), device=spans.device).unsqueeze(1)
        chosen = self.spans(name)[rows, first, last].gather(-1, labels.clamp(min=0))
        there = spans[..., 0] != NOTHING
        some = chosen.masked_fill((labels == NOTHING) & there.unsqueeze(-1), float("-inf")).logsumexp(-1)
        return torch.where(there, some, 0.0)


def labels_on_canvas(labelling: Labelling, labels: Tensor, width: int, first: int) -> Tensor:
    """Labels of words as labels of canvas positions, where words do not begin at 0."""
    if labelling.kind == "text" or (first == 0 and labelling.kind == "spans"):
        return labels
    if labelling.kind == "tags":
        out = torch.full((labels.shape[0], width), NOTHING, dtype=labels.dtype, device=labels.device)
        size = min(labels.shape[1], width - first)
        out[:, first : first + size] = labels[:, :size]
        return out
    shifted = torch.cat([labels[..., :2] + first, labels[..., 2:]], -1)
    return torch.where(labels != NOTHING, shifted, labels)


def span_chart(spans: Tensor, mask: Tensor) -> Tensor:
    """(first, last, label) triples [B, M, 3] as labels of all pairs [B, L, L]; pairs that are no span have label 0."""
    batch, length = mask.shape
    first, last, label = spans[..., :3].unbind(-1)
    there = label != NOTHING
    cell = torch.where(there, first * length + last, length * length)  # filling goes to a cell behind the chart
    chart = torch.zeros(batch, length * length + 1, dtype=torch.int64, device=mask.device)
    return chart.scatter(1, cell, label.clamp(min=0))[:, :-1].view(batch, length, length)


def word_pairs(mask: Tensor) -> Tensor:
    """Pairs first ≤ last of positions that exist, [B, L, L]."""
    length = mask.shape[1]
    order = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu()
    return mask.unsqueeze(1) & mask.unsqueeze(2) & order


def model_signature(denoiser: Denoiser) -> list[float]:
    """Some numbers that are about equal for models whose states mean the same: out of the word vectors, and how noise
    grows. Not a digest, since shipped weights are rounded."""
    table = denoiser.codec.table().detach().float().cpu().flatten()
    return [
        round(v, 3)
        for v in (
            *table[:: max(1, len(table) // 60)][:60].tolist(),
            *denoiser.process.describe(denoiser.codec.bias.device),
        )
    ]


def matches_model(denoiser: Denoiser, wanted: Sequence[float]) -> bool:
    own = model_signature(denoiser)
    return len(own) == len(wanted) and all(abs(a - b) < 0.02 for a, b in zip(own, wanted, strict=True))
