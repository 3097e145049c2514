"""Plug and Play Language Models: a Simple Approach to Controlled Text Generation (PPLM; Dathathri et al., 2020)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from difflm.controls.exact import Avoid, Contains, Length
from difflm.controls.learned import Label, Span, Tags, Tree
from difflm.data.tokenizers import PAD, START
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import CausalModel, left_to_right
from difflm.diffusion.samplers.loop import Caches, Frame, PrefixRule, Steering
from difflm.methods.rivals.base import ControlDecoder, Part, contains_sequence
from difflm.methods.rivals.prefix_classifier import PrefixOutput
from difflm.models.base import Sampling
from difflm.models.batching import SampleBatch

# Words so far [B, i] → (probabilities of the next [B, V] → −log p(a | both) of each text, [B])
Attributes = Callable[[Tensor], Callable[[Tensor], Tensor]]
FLOOR = 1e-3  # the least norm that a gradient is divided by: an attribute that is nearly certain moves nothing much


class Pplm(ControlDecoder):
    """`PplmRule`, with classifiers of prefixes and bags of words; the strength is its step size."""

    name, paper = "pplm", "Dathathri et al. 2020"
    takes = (Label, Tags, Tree, Span, Length, Contains, Avoid)
    reason = "its attributes are of whole texts, not of words around a gap."
    usual_strength = 0.3

    @classmethod
    def rules(cls, parts: Sequence[Part]) -> list[PrefixRule]:
        lead = parts[0][0]
        return [PplmRule(lead.model, AskedAttributes(parts), lead.strength), *super().rules(parts)]

    @classmethod
    def steer(cls, batch: SampleBatch, parts: Sequence[Part]) -> Steering:
        def decode(noise: Noise, width: int, sampling: Sampling, steering: Steering) -> Iterator[Frame]:
            rules = cls.rules(parts)
            for frame in left_to_right(parts[0][0].model, noise, width, sampling, rules):
                yield replace(frame, calls=1 + ((frame.tokens != PAD).sum(1) - 1) * (PplmRule.iterations + 3))

        return Steering(decode=decode)

    def classifier_calls(self, tokens: int) -> int:
        """For each word but the first: one call for the words so far, and one per iteration for the expected one."""
        return (tokens - 1) * (PplmRule.iterations + 1) * len({*map(id, self.asked_classifiers)})

    def nats(self, outputs: Mapping[int, PrefixOutput], p: Tensor, missing: Sequence[Tensor], position: int) -> Tensor:
        """−log p(a | x), [B]: from classifiers, whose outputs are for the expected word at a position, and from bags,
        the words of missing phrases."""
        total = torch.zeros_like(p[:, :1]) - self.label_chances(outputs, position)
        for phrase, lacks in zip(self.phrases, missing, strict=True):
            total = total + (bag_nats(p, phrase) * lacks).unsqueeze(1)
        return total.squeeze(1)


def bag_nats(p: Tensor, words: Sequence[int]) -> Tensor:
    """−log Σ p(w) over the words of a bag, [B]."""
    return -sum(p[:, word] for word in set(words)).clamp(min=torch.finfo(p.dtype).tiny).log()  # type: ignore[union-attr]


@dataclass(frozen=True)
class AskedAttributes:
    """The attributes of the texts of a batch."""

    parts: Sequence[Part]

    def __call__(self, prefix: Tensor) -> Callable[[Tensor], Tensor]:
        model, start = self.parts[0][0].model, torch.full_like(prefix[:, :1], START)
        classifiers = {id(one): one for plan, _ in self.parts for one in plan.asked_classifiers}
        seen = model.view(torch.cat([start, prefix], dim=1)) if classifiers else None
        caches = {key: one.read(seen, [])[1] for key, one in classifiers.items()}
        missing = [[~contains_sequence(prefix[part], phrase) for phrase in plan.phrases] for plan, part in self.parts]

        def nats(p: Tensor) -> Tensor:
            outputs = {key: one.read(model.view(p.unsqueeze(1)), caches[key])[0] for key, one in classifiers.items()}
            found = []
            for (plan, part), own in zip(self.parts, missing, strict=True):
                rows = {key: one.rows(part) for key, one in outputs.items()}
                found.append(plan.nats(rows, p[part], own, prefix.shape[1]))
            return torch.cat(found)

        return nats


@dataclass
class PplmRule:
    """A rule of left-to-right decoding: before each word, the keys and values H of the words before are moved to where
    the attributes of the next one are likelier. Later words read the moved ones.

    The paper's classifier is a linear head on the model's hidden states. Here attributes read the words so far and the
    expected next one, computed with the moved history, so that all rivals can share a classifier. Norms are per layer
    and text: a text does not depend on others in its batch. Rules that forbid words come after this one."""

    model: CausalModel
    attributes: Attributes
    step_size: float = 0.03  # α
    iterations: int = 3
    kl_scale: float = 0.01
    fusion: float = 0.9  # γ_gm
    window: int = 5  # words whose keys and values are moved; 0: all
    unmoved: Caches = field(default_factory=list, init=False)

    def __call__(self, prefix: Tensor, logits: Tensor, caches: Caches) -> Tensor:
        """log of p̃^γ_gm · p^(1 − γ_gm), not normalised; the caches are moved in place."""
        if not prefix.shape[1]:  # nothing precedes START
            self.unmoved = list(caches)
            return logits
        last, history = prefix[:, -1:], [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in caches]
        answer, self.unmoved = self.model.read(last, self.unmoved)
        log_p = answer[:, -1].log_softmax(-1)
        moved, caches[:] = self.model.read(last, self.move(prefix, last, history, log_p))
        return self.fusion * moved[:, -1].log_softmax(-1) + (1 - self.fusion) * log_p

    @torch.enable_grad()
    def move(self, prefix: Tensor, last: Tensor, history: Caches, log_p: Tensor) -> Caches:
        """H + ΔH, where ΔH ← ΔH − α ∇/‖∇‖ of the loss, as often as there are iterations."""
        first = max(0, history[0][0].shape[2] - self.window) if self.window else 0
        delta = [torch.zeros_like(torch.stack(layer)[..., first:, :]) for layer in history]
        with torch.no_grad():
            nats = self.attributes(prefix)
        for _ in range(self.iterations):
            delta = [d.detach().requires_grad_() for d in delta]
            loss = self.loss(nats, last, add_delta(history, delta), log_p)
            for k, g in enumerate(torch.autograd.grad(loss.sum(), delta)):
                norm = g.transpose(0, 1).flatten(1).norm(dim=1).clamp(min=FLOOR).view(1, -1, 1, 1, 1)
                delta[k] = delta[k] - self.step_size * g / norm
        return add_delta(history, [d.detach() for d in delta])

    def loss(self, nats: Callable[[Tensor], Tensor], last: Tensor, history: Caches, log_p: Tensor) -> Tensor:
        """−log p(a | x) + λ KL(p̃ ‖ p) of each text, [B]."""
        moved = self.model.read(last, history)[0][:, -1].log_softmax(-1)
        p = moved.exp()
        return nats(p) + self.kl_scale * (p * (moved - log_p)).sum(-1)


def add_delta(history: Caches, delta: Sequence[Tensor]) -> Caches:
    """H + ΔH; ΔH [2, B, heads, window, head_dim] is of the last keys and values of each layer."""

    def add(kept: Tensor, more: Tensor) -> Tensor:
        first = kept.shape[2] - more.shape[2]
        return torch.cat([kept[:, :, :first], kept[:, :, first:] + more], dim=2)

    return [(add(keys, dk), add(values, dv)) for (keys, values), (dk, dv) in zip(history, delta, strict=True)]
