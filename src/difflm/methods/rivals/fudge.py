"""FUDGE: Controlled Text Generation With Future Discriminators (Yang & Klein, 2021)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from difflm.controls.exact import Avoid, Contains, Length
from difflm.controls.gaps import Infill
from difflm.controls.learned import Label, Span, Tags, Tree
from difflm.data.tokenizers import START
from difflm.diffusion.samplers.left_to_right import IMPOSSIBLE
from difflm.diffusion.samplers.loop import Caches, PrefixRule
from difflm.methods.rivals import base
from difflm.methods.rivals.base import ControlDecoder, ImposePossible, Part
from difflm.methods.rivals.prefix_classifier import PrefixClassifier, PrefixOutput
from difflm.models.autoregressive import Autoregressive

CANDIDATES = 200  # the likeliest words, whose futures are evaluated


class Fudge(ControlDecoder):
    """p(x_i | x_<i, a) ∝ p(x_i | x_<i) p(a | x_≤i)^λ over the likeliest words. A future that is impossible is known
    exactly; of all others a classifier of prefixes says how likely they are."""

    name, paper = "fudge", "Yang & Klein 2021"
    takes = (Label, Tags, Tree, Span, Length, Contains, Avoid, Infill)
    reason = "no classifier of prefixes knows it."

    @classmethod
    def rules(cls, parts: Sequence[Part]) -> list[PrefixRule]:
        return [ImposePossible(parts), FutureProbability(parts)]

    @property
    def asked_classifiers(self) -> list[PrefixClassifier]:
        return super().asked_classifiers + ([*self.classifiers.values()][:1] if self.phrases else [])

    def classifier_calls(self, tokens: int) -> int:
        """Two for each word: one to read it, and one to read all candidates for the next word, side by side."""
        return 2 * tokens * len({*map(id, self.asked_classifiers)}) if self.strength else 0

    def future(self, outputs: dict[int, PrefixOutput], words: Tensor, prefix: Tensor) -> Tensor:
        """log p(a | x_≤i) for each of the next words [B, k], from the outputs for them."""
        total = torch.zeros(words.shape, device=words.device) + self.label_chances(outputs, prefix.shape[1])
        for phrase in self.phrases if self.classifiers else ():
            follows = outputs[id(next(iter(self.classifiers.values())))].follows(words.new_tensor(phrase))
            ahead = follows.amin(-1)  # a phrase is at most as likely as its least likely word
            for k, word in enumerate(phrase):  # the rest of a phrase that has begun
                rest = follows[..., k + 1 :].amin(-1) if k + 1 < len(phrase) else torch.zeros_like(ahead)
                begun = base.ends_with(prefix, phrase[:k]).unsqueeze(1) & (words == word)
                ahead = torch.where(begun, rest, ahead)
            total += ahead.masked_fill(base.contains_sequence(prefix, phrase).unsqueeze(1), 0.0)
        return total


class FutureProbability:
    """A rule: the logits of the likeliest words, with λ log p(a | x_≤i) added. Classifiers keep keys and values of the
    words so far, and read all candidates side by side."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts, self.strength = parts, parts[0][0].strength
        self.model: Autoregressive = parts[0][0].model
        self.classifiers = {id(one): one for plan, _ in parts for one in plan.asked_classifiers}
        self.caches: dict[int, Caches] = {key: [] for key in self.classifiers}

    def __call__(self, prefix: Tensor, logits: Tensor, caches: Caches) -> Tensor:
        if not self.strength or not self.classifiers:
            return logits
        words = logits.topk(min(CANDIDATES, logits.shape[-1])).indices
        last = prefix[:, -1:] if prefix.shape[1] else torch.full_like(words[:, :1], START)
        outputs: dict[int, PrefixOutput] = {}
        for key, classifier in self.classifiers.items():
            _, self.caches[key] = classifier.read(self.model.view(last), self.caches[key])
            outputs[key], _ = classifier.read(self.model.view(words), self.caches[key], alternatives=True)

        def ask(plan: Fudge, part: slice) -> Tensor:
            return plan.future({key: one.rows(part) for key, one in outputs.items()}, words[part], prefix[part])

        future = base.for_each_part(self.parts, ask)
        scores = logits.gather(-1, words) + self.strength * future
        return torch.full_like(logits, IMPOSSIBLE).scatter(-1, words, scores.to(logits.dtype))
