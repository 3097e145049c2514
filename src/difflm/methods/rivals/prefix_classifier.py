"""Classifiers of left-to-right models: a small causal network reads clean words and says, at every prefix, what the
text will be (the future discriminator of Yang & Klein, 2021)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.controls.guidance import Classifier, ClassifierOutput
from difflm.data.labels import Labelling
from difflm.data.tokenizers import END, PAD, START
from difflm.diffusion.denoiser import autocast_to
from difflm.diffusion.samplers.loop import Caches
from difflm.networks import Sizes
from difflm.networks.rotary import compute_rotations

LENGTH = "length"  # the head for the number of words of a text


class PrefixClassifier(Classifier):
    """It reads START w₁ w₂ … END; its output at a position is about texts that begin this way. In addition to its
    labels it predicts which words will follow, which needs no labelling."""

    causal = True

    def __init__(
        self, labellings: Sequence[Labelling], view_dim: int, longest: int, vocabulary: int, sizes: Sizes
    ) -> None:
        super().__init__(labellings, view_dim, longest, vocabulary, sizes)
        hidden = self.trunk.head.out_features
        self.following = nn.Linear(hidden, vocabulary)
        self.farthest = longest + 1  # places from the last word of a prefix to either end of a span
        for number in (self.numbers[one.name] for one in labellings if one.kind == "spans"):
            self.heads[f"{number}-at"] = nn.Linear(hidden, hidden)
            for end in ("first", "last"):
                self.heads[f"{number}-{end}"] = nn.Embedding(2 * self.farthest + 1, hidden)

    def forward(self, view: Tensor, t: Tensor | None = None, mask: Tensor | None = None) -> "PrefixOutput":
        """`view` [B, L, view_dim] is `Autoregressive.view` of whole texts, START and END included; there is no time."""
        return self.read(view)[0]

    def read(
        self, view: Tensor, caches: Caches | None = None, alternatives: bool = False
    ) -> "tuple[PrefixOutput, Caches]":
        """Outputs for words that follow the cached ones, and the caches with them; an empty list of caches begins a
        text. `alternatives`: the words do not follow each other; each is a separate continuation of the cached ones."""
        trunk, before, turn, mask = self.trunk, caches[0][0].shape[2] if caches else 0, None, None
        if alternatives:
            words, device = view.shape[1], view.device
            turn = compute_rotations(1, trunk.head_dim, device, before)
            itself = torch.eye(words, dtype=torch.bool, device=device)
            mask = F.pad(itself, (before, 0), value=True).unsqueeze(0)
        empty = [None] * len(trunk.blocks)
        kept = caches if caches is None else caches or empty
        with autocast_to(view.device, self.precision):
            x, grown = trunk.run(trunk.input(view), None, mask, kept, before, turn)
            features = trunk.answer(x).float()
        there = torch.ones(features.shape[:2], dtype=torch.bool, device=view.device)
        return PrefixOutput(self, features, there), [cache for cache in grown if cache is not None]

    def label_spans(self, name: str, features: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """log p(label | x_≤i) of spans that may lie ahead, [..., labels], by features of prefixes [..., hidden]. The
        ends of a span are counted from the last word of its prefix: 0 is this word, 1 the next."""
        number = self.numbers[name]
        ends = (
            self.heads[f"{number}-{end}"]((place + self.farthest).clamp(0, 2 * self.farthest))
            for end, place in (("first", first), ("last", last))
        )
        pair = F.gelu(sum(ends, start=self.heads[f"{number}-at"](features)))
        return F.log_softmax(self.heads[number](pair).float(), -1)


@dataclass(frozen=True)
class PrefixOutput(ClassifierOutput):
    """The classifier's outputs at every prefix of some texts."""

    classifier: PrefixClassifier

    def rows(self, part: slice) -> "PrefixOutput":
        return PrefixOutput(self.classifier, self.features[part], self.mask[part])

    def text(self, name: str) -> Tensor:
        """log p(label | x_≤i), [B, L, labels]."""
        return self.tags(name)

    def follows(self, words: Tensor) -> Tensor:
        """log p(word occurs after x_≤i) for some words [N], [B, L, N]."""
        layer = self.classifier.following
        return F.logsigmoid(F.linear(self.features, layer.weight[words], layer.bias[words]))


def with_ends(ids: Tensor, lengths: Tensor) -> Tensor:
    """START, the words and END of texts [B, L], [B, L + 2]."""
    words = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
    canvas = F.pad(torch.where(words, ids, PAD), (1, 1), value=PAD)
    canvas[:, 0] = START
    return canvas.scatter(1, lengths.unsqueeze(1) + 1, END)
