"""Fine-tuning, the skyline: a left-to-right model that has learned to read a control before it writes (Li et al., 2022,
section 5), and the product of several such experts (Hinton, 2002; Liu et al., 2021)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from difflm.annotators.trees import phrases
from difflm.controls.base import Control, ModelInfo
from difflm.controls.exact import Avoid, Length
from difflm.controls.gaps import Infill
from difflm.controls.learned import Label, Span, Tags, Tree
from difflm.data.batches import Batch
from difflm.data.prompts import BESIDE, end_prompt, surround_gap, tell, tell_tree
from difflm.data.tokenizers import PAD
from difflm.data.words import Given
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import CausalModel, left_to_right
from difflm.diffusion.samplers.loop import Caches, Frame, Memory, Steering
from difflm.errors import UsageError
from difflm.methods.rivals.base import ControlDecoder, ImposePossible, Part
from difflm.models.base import Sampling
from difflm.models.batching import Layout, SampleBatch, pad_token_rows

NOTHING_TOLD = end_prompt([])  # the prompt of a text without controls


class FineTuning(ControlDecoder):
    """One prompt states all controls; if there are several of a kind, each of several `Experts` reads one. The guidance
    is the weight of each prompt. A gap is filled after a prompt with the text around it; its length, that of a text,
    and words to avoid are imposed."""

    name, paper = "fine-tuning", "Li et al. 2022"
    takes = (Label, Tags, Tree, Span, Length, Avoid, Infill)
    reason = "no prompt states it."
    searches = True
    appends = True

    def __init__(self, model: Any, info: ModelInfo, controls: Sequence[Control], *more: Any) -> None:
        if not info.told:
            raise UsageError("fine-tuning needs a model that has learned prompts: difflm train e2e-fine-tuning.")
        super().__init__(model, replace(info, labels={one.name: one for one in info.told}), controls, *more)
        told = [control for control in self.controls if not isinstance(control, Avoid | Infill)]
        if self.infill:
            if others := [one for one in told if not isinstance(one, Length)]:
                raise UsageError(f"fine-tuning cannot take {others[0].name} with a gap: no prompt states both.")
            self.prompts = [surround_gap(self.left, self.right)]
        else:
            texts = tell_controls(told)
            self.prompts = [end_prompt(ids) for ids in info.tokenizer.encode_batch(texts)] or [NOTHING_TOLD]
            self.unknown_words += [word for text in texts for word in info.tokenizer.unknown(text)]
        given = len(self.left) + len(self.right)  # in the prompt: only the words of the gap are written
        self.words, self.least = None if self.words is None else self.words - given, max(1, self.least - given)
        self.room -= len(self.left)
        self.around, self.left, self.right = (self.left, self.right), [], []

    def prepare(self, control: Control) -> None:
        if control.head and control.head not in self.info.labels:
            known = ", ".join(self.info.labels)
            raise UsageError(f"this model has no prompt for {control.head!r} (known: {known}).")
        super().prepare(control)

    @property
    def guidance(self) -> tuple[Any, ...]:
        """Texts share a batch if their prompts are equally long."""
        return self.name, self.strength, *map(len, self.prompts)

    def layouts(self, samples: Tensor, *_: object) -> tuple[list[Layout], list[Given]]:
        return [Layout(self.room)] * len(samples), [{}] * len(samples)

    @classmethod
    def steer(cls, batch: SampleBatch, parts: Sequence[Part]) -> Steering:
        def decode(noise: Noise, width: int, sampling: Sampling, steering: Steering) -> Iterator[Frame]:
            beams = max(1, sampling.beams)  # partial texts of each row, in order
            lead, rows = parts[0][0], [plan.prompts for plan, part in parts for _ in range(part.start, part.stop)]
            prompts, weights = [*zip(*rows, strict=True)], [lead.strength] * len(lead.prompts)
            if rest := 1 - sum(weights):
                prompts, weights = [*prompts, (NOTHING_TOLD,)], [*weights, rest]
            experts = Experts(lead.model, prompts, weights)
            rule = ImposePossible([(plan, slice(part.start * beams, part.stop * beams)) for plan, part in parts])
            for frame in left_to_right(experts, noise, width, sampling, [rule]):
                calls = (frame.tokens != PAD).sum(1) if frame.calls is None else frame.calls
                yield replace(frame, calls=calls * len(experts.prompts))

        return Steering(decode=decode)

    def finish(self, ids: list[int]) -> tuple[list[int], Given]:
        left, right = self.around
        return left + ids + right, {**self.given_at(0, 0), **self.given_at(1, len(left) + len(ids))}

    def classifier_nats(self, rows: list[list[int]]) -> list[float]:
        """−log p(prompt | text) summed over prompts, up to a constant: log p(text) − log p(text | prompt)."""
        ids, lengths = (part.to(self.model.banned.device) for part in pad_token_rows(rows))

        def nats(prompt: Sequence[int]) -> Tensor:
            told = torch.tensor(prompt, device=ids.device).expand(len(rows), -1)
            return self.model.nats(Batch(ids, lengths, told, torch.full_like(lengths, len(prompt))))

        alone = nats(NOTHING_TOLD)
        return torch.stack([nats(prompt) - alone for prompt in self.prompts]).sum(0).tolist()


def tell_controls(controls: Sequence[Control]) -> list[str]:
    """The prompts of all controls. As in training, a prompt states a label once, one length, and either tags, a tree or
    a span; other controls go into another prompt."""
    prompts: list[dict[str, str]] = []
    for control in controls:
        kind = f"label {control.label}" if isinstance(control, Label) else "length" * isinstance(control, Length)
        if not (open_ := [prompt for prompt in prompts if kind not in prompt]):
            prompts += (open_ := [{}])
        open_[0][kind] = tell_control(control)
    return [BESIDE.join(prompt.values()) for prompt in prompts]


def tell_control(control: Control) -> str:
    """The prompt that precedes complying texts in training."""
    match control:
        case Label():
            return tell(control.label, "=", control.value)
        case Tags():
            return tell(control.head, *control.tags)
        case Tree():
            return tell_tree(control.head, phrases(control.tree), len(control.tree.words()))
        case Span():
            return tell(control.head, control.first, control.last, control.label)
        case Length():
            return tell("length", control.words)
    raise TypeError(control.name)


class Experts:
    """A left-to-right model after several prompts at once: log p(x_i) = Σ_k w_k log p(x_i | x_<i, prompt k) + const.
    Weights of 1, and of 1 − K for the empty prompt, give p(x | a) p(x | b) … / p(x)^(K − 1), word by word: the product
    for K controls that are independent given the text. Caches are those of all experts, one after the other."""

    def __init__(
        self, model: CausalModel, prompts: Sequence[Sequence[Sequence[int]]], weights: Sequence[float]
    ) -> None:
        """Each expert has a prompt for every text of a batch, or one for all; prompts end with START."""
        device = model.banned.device
        self.model, self.prompts, self.weights = model, [torch.tensor(own, device=device) for own in prompts], weights
        self.longest, self.banned = model.longest, model.banned
        self.start, self.end, self.pad = model.start, model.end, model.pad

    def read(self, words: Tensor, caches: Caches | None = None, memory: Memory | None = None) -> tuple[Tensor, Caches]:
        """Like the model's own method, for the last word alone; the START of a new text stands for the prompts."""
        layers = len(caches or ()) // len(self.prompts)
        total: Tensor | float = 0.0
        grown: Caches = []
        for k, (prompt, weight) in enumerate(zip(self.prompts, self.weights, strict=True)):
            own = (caches or [])[k * layers : (k + 1) * layers]
            read = words if own else prompt.repeat_interleave(len(words) // len(prompt), 0)
            logits, own = self.model.read(read, own)
            total = total + weight * logits[:, -1:].log_softmax(-1)
            grown += own
        assert isinstance(total, Tensor)
        return total, grown
