"""Classifier guidance: a small network reads a noisy state and predicts labels of the text; its gradient steers.

For vectors, the state is moved after every step to where the classifiers find the requested labels likelier:
log p(x_s | x_t, c) = log p(x_s | x_t) + log p(c | x_s) + const; the moves climb this sum. For tokens, the belief is
reweighted before the step, by Bayes' rule at every open position: p(w | x_t, c) ∝ p(w | x_t) p(c | x_t, w).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.labels import NOTHING, Labelling
from difflm.diffusion.base import Belief, StepState, expand_levels
from difflm.diffusion.denoiser import Denoiser, autocast_to, cast_linears
from difflm.diffusion.processes.discrete import DiscreteProcess, one_hot_states
from difflm.diffusion.samplers.steps import clean_weight
from difflm.fast.accelerate import accelerate
from difflm.models.autoregressive import Autoregressive
from difflm.networks import Sizes, Transformer

CHART = 128  # width of the vectors that are summed for the two ends of a span
MOSTLY_NONE = 5.0  # nearly all pairs of positions are not spans: an initial bias, not learned


class LabelReader(nn.Module):
    """A network that finds labels in texts; its gradient steers."""

    reads_words: ClassVar[bool] = False  # whether it reads probabilities of words instead of a noisy state
    labellings: dict[str, Labelling]
    numbers: dict[str, str]  # of heads, by label
    word_counts: Mapping[str, Tensor] | nn.ParameterDict  # by the number of a head, how often each word has each label
    precision: torch.dtype | None = None  # of its arithmetic while it guides

    def guiding(self, dtype: torch.dtype | None) -> Self:
        """Prepare it for guiding: nothing is trained any more, and it computes in `dtype`."""
        self.precision = dtype
        return self.requires_grad_(False)


class Classifier(LabelReader):
    """One trunk and a head for each labelling. Its input is the denoiser's view of x_t, without earlier estimates. It
    is trained at all times of the process, so it works with any number of steps."""

    causal: ClassVar[bool] = False  # whether it reads clean prefixes, from left to right

    def __init__(
        self, labellings: Sequence[Labelling], view_dim: int, longest: int, vocabulary: int, sizes: Sizes
    ) -> None:
        super().__init__()
        self.labellings = {one.name: one for one in labellings}
        self.numbers = {name: str(number) for number, name in enumerate(self.labellings)}  # of their heads
        hidden = sizes.hidden
        if self.causal:
            self.trunk = Transformer(view_dim, hidden, sizes, time="none", causal=True)
        else:
            self.trunk = Transformer(view_dim, hidden, sizes, positions=longest)
        nn.init.normal_(self.trunk.head.weight, std=hidden**-0.5)
        self.heads = nn.ModuleDict()
        self.word_counts = nn.ParameterDict()  # how often each word has each tag, [V, labels]; not trained
        for number, one in enumerate(labellings):  # by number: a name may contain characters that module names may not
            size = hidden if self.causal or one.kind == "tags" else 2 * hidden if one.kind == "text" else CHART
            self.heads[str(number)] = nn.Linear(size, len(one.values))
            if one.kind == "tags":
                self.word_counts[str(number)] = nn.Parameter(torch.zeros(vocabulary, len(one.values)), False)
            if one.kind == "spans" and not self.causal:
                self.heads[f"{number}-first"] = nn.Linear(2 * hidden, CHART)
                self.heads[f"{number}-last"] = nn.Linear(2 * hidden, CHART)
                with torch.no_grad():
                    out = cast(nn.Linear, self.heads[str(number)])
                    out.bias[0] = MOSTLY_NONE

    def forward(self, view: Tensor, t: Tensor, mask: Tensor) -> "ClassifierOutput":
        """`view` [B, L, view_dim] is `Codec.view` of a noisy state at times t."""
        if self.precision is None:
            return ClassifierOutput(self, self.trunk(view, t, mask), mask)
        with autocast_to(view.device, self.precision):
            features = self.trunk(view, t, mask)
        return ClassifierOutput(self, features.float(), mask)

    def guiding(self, dtype: torch.dtype | None) -> Self:
        accelerate(cast_linears(super().guiding(dtype).trunk, dtype))
        return self


@dataclass(frozen=True)
class ClassifierOutput:
    """The classifier's outputs for some noisy texts; each head is computed when it is needed."""

    classifier: Classifier
    features: Tensor
    mask: Tensor

    @cached_property
    def pooled(self) -> Tensor:
        at = self.mask.unsqueeze(-1)
        mean = (self.features * at).sum(1) / at.sum(1)
        most = self.features.masked_fill(~at, float("-inf")).amax(1)
        return torch.cat([mean, most], -1)

    def text(self, name: str) -> Tensor:
        """log p(label | x_t), [B, labels]."""
        return F.log_softmax(self.classifier.heads[self.classifier.numbers[name]](self.pooled).float(), -1)

    def tags(self, name: str) -> Tensor:
        """The same at every position, [B, L, labels]."""
        return F.log_softmax(self.classifier.heads[self.classifier.numbers[name]](self.features).float(), -1)

    def spans(self, name: str) -> Tensor:
        """The same for every pair of a first and a last position, [B, L, L, labels]."""
        heads, number = self.classifier.heads, self.classifier.numbers[name]
        around = F.pad(self.features, (0, 0, 1, 1))  # an end of a span is between two words: both are used
        first = heads[f"{number}-first"](torch.cat([around[:, :-2], self.features], -1))
        last = heads[f"{number}-last"](torch.cat([self.features, around[:, 2:]], -1))
        return F.log_softmax(heads[number](torch.tanh(first.unsqueeze(2) + last.unsqueeze(1))).float(), -1)

    def nats(self, name: str, labels: Tensor, whole: bool = True) -> Tensor:
        """−log p(labels | x_t) of each text, summed over positions, [B]; NOTHING is ignored. `whole`: pairs of
        positions without a span must not be spans; otherwise a span may have several labels, any of which will do."""
        kind = self.classifier.labellings[name].kind
        if kind != "spans":
            log_p = self.text(name) if kind == "text" else self.tags(name)
            chosen = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (labels != NOTHING)
            return -(chosen if kind == "text" else chosen.sum(-1))
        if not whole:  # one of its labels for each span, 0 where there is none, [B, M]
            first, last, options = labels[..., 0].clamp(min=0), labels[..., 1].clamp(min=0), labels[..., 2:]
            rows = torch.arange(len(labels), device=labels.device).unsqueeze(1)
            chosen = self.spans(name)[rows, first, last].gather(-1, options.clamp(min=0))
            there = labels[..., 0] != NOTHING
            some = chosen.masked_fill((options == NOTHING) & there.unsqueeze(-1), float("-inf")).logsumexp(-1)
            return -torch.where(there, some, 0.0).sum(-1)
        chart = span_chart(labels, self.mask)
        chosen = self.spans(name).gather(-1, chart.unsqueeze(-1)).squeeze(-1)
        return -(chosen * word_pairs(self.mask)).sum((-1, -2))


def labels_on_canvas(labelling: Labelling, labels: Tensor, width: int, first: int) -> Tensor:
    """Labels of words as labels of canvas positions, if words do not begin at 0."""
    if labelling.kind == "tags":
        return F.pad(labels, (first, width - first - labels.shape[1]), value=NOTHING)  # what does not fit is cut
    if labelling.kind == "text" or first == 0:
        return labels
    shifted = torch.cat([labels[..., :2] + first, labels[..., 2:]], -1)
    return torch.where(labels != NOTHING, shifted, labels)


def span_chart(spans: Tensor, mask: Tensor) -> Tensor:
    """(first, last, label) triples [B, M, 3] as labels of all pairs [B, L, L]; pairs that are no span have label 0."""
    batch, length = mask.shape
    first, last, label = spans[..., :3].unbind(-1)
    there = label != NOTHING
    cell = torch.where(there, first * length + last, length * length)  # padding goes to an extra cell after the chart
    chart = torch.zeros(batch, length * length + 1, dtype=torch.int64, device=mask.device)
    return chart.scatter(1, cell, label.clamp(min=0))[:, :-1].view(batch, length, length)


def word_pairs(mask: Tensor) -> Tensor:
    """Pairs first ≤ last of positions that exist, [B, L, L]."""
    return (mask.unsqueeze(1) & mask.unsqueeze(2)).triu()


Guided = Denoiser | Autoregressive  # the model that a classifier is trained for


def model_signature(guided: Guided) -> list[float]:
    """Some numbers that are about equal for models whose states mean the same, from the word vectors and the noise
    schedule. Not a digest, since shipped weights are rounded."""
    table, noise = guided.describe_states()
    table = table.detach().float().cpu().flatten()
    return [round(v, 3) for v in (*table[:: max(1, len(table) // 60)][:60].tolist(), *noise)]


def matches_model(guided: Guided, wanted: Sequence[float]) -> bool:
    own = model_signature(guided)
    return len(own) == len(wanted) and all(abs(a - b) < 0.02 for a, b in zip(own, wanted, strict=True))


# -- how a classifier's gradient steers -------------------------------------------------------------------------------


# λ, the weight of log p(x_s | x_t) relative to a classifier's *mean* loss, for each kind of control (Li et al., 2022).
FLUENCY = {"text": 0.01, "tags": 1e-4, "tree": 5e-4, "span": 0.1}


@dataclass(frozen=True)
class GuidanceSettings:
    """`climb`: "sign" moves every component by the same amount, as the code of Li et al. (2022) does (a fresh Adagrad
    at every update is a sign step); "gradient" moves by the step's own variance times the gradient (Dhariwal & Nichol,
    2021). `size` is that amount, or the gradient's scale. With `fluency`, log p(x_s | x_t) is climbed as well, and
    classifier losses are means instead of sums. `inner` moves are made after every step, except steps that end below
    the time `tail`. With `impose`, what single words show (a field's value, tags that a word can have) is also imposed
    on the belief. Token models take "gradient", a first-order term, and "enumerate", which evaluates the `words`
    likeliest words at every position; for them `size` is the power of p(c | x_t)."""

    climb: Literal["sign", "gradient", "enumerate"] = "gradient"
    size: float = 10.0
    inner: int = 1
    fluency: bool = False
    tail: float = 0.0
    impose: bool = True
    words: int = 16


STANDARD = GuidanceSettings()
TOKENS = GuidanceSettings(size=2.0)  # 1 is Bayes' rule; 10 for vectors makes up for small steps
# Li et al. (2022), released code. Of 200 steps the last that is followed by moves ends at 0.05: half a step of room.
ORIGINAL = GuidanceSettings("sign", 0.1, 3, True, 0.0475, impose=False)


@dataclass(frozen=True)
class GuidanceTarget:
    """Labels that the texts of a batch should have under one head, which may differ between texts."""

    classifier: LabelReader
    head: str
    labels: Tensor  # on the canvas, NOTHING where nothing is asked: [B], [B, W] or [B, M, 3]
    whole: bool = False  # spans: there must be no others

    @cached_property
    def asks(self) -> Tensor:
        """Which texts have a target, [B]; with `whole`, the others may have any spans."""
        return (self.labels.reshape(len(self.labels), -1) != NOTHING).any(-1)

    @property
    def kind(self) -> Literal["text", "tags", "tree", "span"]:
        kind = self.classifier.labellings[self.head].kind
        return kind if kind != "spans" else "tree" if self.whole else "span"

    def terms(self, mask: Tensor) -> Tensor:
        """The number of terms in the original's mean, [B]: for tags all positions, for a tree all pairs, even pads."""
        if self.kind == "tags":
            return mask.sum(-1)
        if self.kind == "tree":
            return word_pairs(mask).sum((-1, -2))
        if self.kind == "span":
            return (self.labels[..., 0] != NOTHING).sum(-1).clamp(min=1)
        return torch.ones_like(mask[:, 0], dtype=torch.int64)


@dataclass(frozen=True)
class Guidance:
    targets: Sequence[GuidanceTarget]
    denoiser: Denoiser
    mask: Tensor
    settings: GuidanceSettings

    def __call__(self, now: StepState, x: Tensor) -> Tensor:
        settings, s = self.settings, now.next_level.t
        mean, std = now.process.posterior(now.x, now.belief.clean, now.level, now.next_level)
        before_tail = expand_levels(s > settings.tail, x)
        for _ in range(settings.inner):
            slope = self.slope(x, s)
            if settings.climb == "gradient":
                move = settings.size * std**2 * slope
                if now.eta < 1:  # a step with less noise moves less along the score
                    move = move * expand_levels(clean_weight(now), x)
            else:
                if settings.fluency:  # the released code divides by σ instead of σ²
                    slope = slope - expand_levels(self.fluency, x) * 2 * (x - mean) / std.clamp(min=1e-6)
                move = settings.size * slope.sign()
            x = torch.where(before_tail, x + move, x)
        return x

    @cached_property
    def fluency(self) -> Tensor:
        """λ of each text, [B]. The original never mixed kinds of controls; here the smallest λ holds for all, since a
        mean over many positions would have no effect next to a larger one. Texts without a target are not moved."""
        own = [torch.where(w.asks, FLUENCY[w.kind], torch.inf) for w in self.targets]
        return torch.nan_to_num(torch.stack(own).amin(0), posinf=0.0)

    @torch.enable_grad()
    def slope(self, x: Tensor, s: Tensor) -> Tensor:
        """∇ log p(c | x_s), 0 at positions that do not exist; with fluency, of mean losses."""
        x = x.detach().requires_grad_()
        found = self.nats_apiece(x, s)
        if self.settings.fluency:
            found = [nats / target.terms(self.mask) for nats, target in zip(found, self.targets, strict=True)]
        (slope,) = torch.autograd.grad(-torch.stack(found).sum(0).sum(), x)
        return torch.nan_to_num(slope) * self.mask.unsqueeze(-1)

    def nats(self, x: Tensor, s: Tensor) -> Tensor:
        """−log p(c | x_s) of each text, summed over targets, [B]; each classifier is called once."""
        return torch.stack(self.nats_apiece(x, s)).sum(0)

    def nats_apiece(self, x: Tensor, s: Tensor) -> list[Tensor]:
        classifiers = {id(w.classifier): w.classifier for w in self.targets}
        view = self.denoiser.view(x, s)
        opinions = {key: one(view, s, self.mask) for key, one in classifiers.items()}
        found = [opinions[id(w.classifier)].nats(w.head, w.labels, w.whole) for w in self.targets]
        return [nats * w.asks if w.whole else nats for nats, w in zip(found, self.targets, strict=True)]


@dataclass(frozen=True)
class GuidedBelief:
    """A transform for token models: the belief is reweighted before a step, where vectors would be moved after it. The
    classifiers' weight is the settings' size; "enumerate" evaluates the `words` likeliest words of each position."""

    guidance: Guidance

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        process, settings = cast(DiscreteProcess, self.guidance.denoiser.process), self.guidance.settings
        if not settings.size:  # impossible words would give −∞ · 0
            return belief
        open_ = self.guidance.mask & ((x == process.mask_id) | (not process.settles))
        if settings.climb == "enumerate":
            gain = self.enumerated(belief, x, t, open_)
        else:  # log p(c | x_t with w at a position) − log p(c | x_t) to first order in the one-hot vectors
            slope = self.guidance.slope(one_hot_states(x, process.states, torch.float32), t)
            gain = (slope - slope.gather(-1, x.unsqueeze(-1)))[..., : process.words]
        gain = torch.where(open_.unsqueeze(-1), gain, 0.0)
        return belief.with_logits(belief.logits + settings.size * gain)

    def enumerated(self, belief: Belief, x: Tensor, t: Tensor, open_: Tensor) -> Tensor:
        """log p(c | x_t with w at a position) − log p(c | x_t) of the likeliest words, 0 of others, [B, L, words]."""
        count = min(self.guidance.settings.words, belief.logits.shape[-1])
        targets = [replace(w, labels=w.labels.repeat_interleave(count, 0)) for w in self.guidance.targets]
        asked = replace(self.guidance, targets=targets, mask=self.guidance.mask.repeat_interleave(count, 0))
        before, gain = self.guidance.nats(x, t), torch.zeros_like(belief.logits)
        for place in open_.any(0).nonzero().flatten().tolist():
            words = belief.logits[:, place].topk(count).indices
            tried = x.repeat_interleave(count, 0)
            tried[:, place] = words.flatten()
            after = asked.nats(tried, t.repeat_interleave(count, 0)).view(-1, count)
            gain[:, place] = gain[:, place].scatter(-1, words, (before.unsqueeze(-1) - after).to(gain.dtype))
        return gain


def merge_targets(targets: Sequence[Sequence[GuidanceTarget]], sizes: Sequence[int]) -> list[GuidanceTarget]:
    """Merge the targets of parts with these numbers of rows: each head is called once, with NOTHING where there is no
    target, or a smaller one than elsewhere."""
    keyed = defaultdict[tuple[object, ...], list[tuple[int, GuidanceTarget]]](list)
    for own, start in zip(targets, accumulate(sizes, initial=0), strict=False):
        seen = Counter[tuple[object, ...]]()
        for target in own:  # by classifier, head and `whole`; equal ones are numbered
            key = (id(target.classifier), target.head, target.whole)
            keyed[*key, seen[key]].append((start, target))
            seen[key] += 1
    merged = []
    for placed in keyed.values():
        shape = [max(widths) for widths in zip(*(target.labels.shape[1:] for _, target in placed), strict=True)]
        labels = placed[0][1].labels.new_full((sum(sizes), *shape), NOTHING)
        for start, target in placed:
            rows, *inner = target.labels.shape
            labels[(slice(start, start + rows), *map(slice, inner))] = target.labels
        merged.append(replace(placed[0][1], labels=labels))
    return merged
