"""The base of decoders that make a left-to-right model comply with controls.

To add a decoder, subclass `ControlDecoder` in its own file, list the controls it takes, and override either `rules`
(changes the logits of the next word) or `steer` (decodes by itself: `Steering.decode`); add it to `DECODERS`."""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from difflm.controls.base import Control, ModelInfo
from difflm.controls.exact import Avoid, Contains, Length, spell_variants
from difflm.controls.gaps import Infill
from difflm.controls.phrases import agree_on_length, check_avoided, join_given
from difflm.data.tokenizers import END
from difflm.data.words import Given
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.samplers.left_to_right import IMPOSSIBLE
from difflm.diffusion.samplers.loop import Caches, PrefixRule, Steering
from difflm.errors import UsageError
from difflm.methods.rivals.prefix_classifier import LENGTH, PrefixClassifier, PrefixOutput, with_ends
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import LanguageModel
from difflm.models.batching import Layout, SampleBatch, pad_token_rows
from difflm.models.sampling import Sampling

Part = tuple[Any, slice]  # a decoder bound to the controls of some rows of a batch, and these rows


class ControlDecoder(ABC):
    """A decoder bound to a model and to the controls of one request. Requests with the same decoder and strength share
    batches: class methods are given all of them, each with its rows."""

    name: ClassVar[str] = ""
    paper: ClassVar[str]
    takes: ClassVar[tuple[type[Control], ...]]
    reason: ClassVar[str]  # why it takes no other control, after "cannot take NAME: "
    decodes: ClassVar[type[LanguageModel]] = Autoregressive
    family: ClassVar[str] = "left-to-right models"  # the name of such models
    searches: ClassVar[bool] = False  # whether a beam search makes sense with it
    sampler: str | None = None  # the model's step rule; None: its own
    usual_strength: ClassVar[float] = 1.0
    appends: ClassVar[bool] = False  # whether words after a gap are supported

    edit = gap_sizes = ordered = None  # as in `ControlPlan`: no decoder edits, or sizes gaps
    guided = laid_out = False
    joins = False
    transitions = 0

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        controls: Sequence[Control],
        classifiers: Sequence[Any] = (),
        strength: float | None = None,
    ) -> None:
        if info.tokenizer.unit == "characters":
            controls = [c.bind(info) if type(c) is Length else c for c in controls]
        self.model, self.info, self.controls = model, info, list(controls)
        # By the labels that they know; if two know the same label, the later one.
        self.classifiers: dict[str, PrefixClassifier] = {name: one for one in classifiers for name in one.labellings}
        self.strength = self.usual_strength if strength is None else strength
        for control in self.controls:
            if not isinstance(control, self.takes):
                raise UsageError(f"{self.name} cannot take {control.name}: {self.reason}")
            self.prepare(control)
        infills = [control for control in self.controls if isinstance(control, Infill)]
        if len(infills) > 1:
            raise UsageError("infill can be given only once; put all gaps in one text.")
        self.infill = infills[0] if infills else None
        self.words, self.least = agree_on_length(self.controls, info)
        parts = self.infill.parts if self.infill else [""]
        if self.infill and len(parts) > 2:
            raise UsageError(f"{self.name} fills one gap; this text has {len(parts) - 1}.")
        if self.infill and parts[1].strip() and not self.appends:
            raise UsageError(f"{self.name} cannot take words after a gap: it writes from left to right.")
        self.known = self.infill.known(info) if self.infill else None
        self.left, self.right = ([*part] for part in self.known.parts) if self.known else ([], [])
        unknown = (word for text in parts for word in info.tokenizer.unknown(text.strip()))
        self.unknown_words = list(dict.fromkeys(unknown))
        self.phrases = [tuple(info.tokenizer.encode_inside(c.phrase)) for c in self.controls if isinstance(c, Contains)]
        avoided = [c.word for c in self.controls if isinstance(c, Avoid)]
        self.avoided = [tuple(way) for word in avoided for way in spell_variants(word, info.tokenizer)]
        check_avoided(self.controls, info, parts)
        most = self.known.most if self.known else info.max_words
        self.room = (self.words or most) - len(self.right)  # words that it writes, including those before the gap
        if (needed := len(self.left) + sum(map(len, self.phrases))) > self.room and self.phrases:
            raise UsageError(f"contains: {needed} words must appear; there is room for {self.room}.")

    def prepare(self, control: Control) -> None:
        """Reject what this model, or its classifier, cannot do."""
        control.prepare(self.info)

    @property
    def guidance(self) -> tuple[str, float]:
        """What all texts of a batch must have in common."""
        return self.name, self.strength

    @property
    def asked_classifiers(self) -> list[PrefixClassifier]:
        """The classifiers of the requested labels; one may occur several times."""
        return [classifier for classifier, *_ in self.targets()]

    def classifier_calls(self, tokens: int) -> int:
        """The number of classifier calls for a text of this many tokens, END included."""
        return 0

    # -- before decoding ------------------------------------------------------------------------------------------

    def layouts(
        self, samples: Tensor, seed: int, condition: Condition = UNCONDITIONAL, ranks: Tensor | None = None
    ) -> tuple[list[Layout], list[Given]]:
        """The positions of these samples, with the words that they begin with; and what is given of them."""
        layout = Layout(self.room, dict(enumerate(self.left)))
        return [layout] * len(samples), [self.given_at(0, 0)] * len(samples)

    def given_at(self, part: int, first: int) -> Given:
        """What a part of the text gives, by position; its first word is at `first`."""
        return {first + k: word for k, word in self.known.given[part].items()} if self.known else {}

    # -- while decoding -------------------------------------------------------------------------------------------

    @classmethod
    def steer(cls, batch: SampleBatch, parts: Sequence[Part]) -> Steering:
        told, rules = batch.condition, cls.rules(parts)
        return Steering(batch.known, source=told.source, source_mask=told.source_mask, prefix_rules=rules)

    @classmethod
    def rules(cls, parts: Sequence[Part]) -> list[PrefixRule]:
        """Rules for the next word: by default, words that make a control impossible are excluded."""
        return [ImposePossible(parts)]

    def possible(self, prefix: Tensor) -> Tensor:
        """Which next words can still lead to a text that complies, [B, V], after the words so far [B, i]; the others
        certainly cannot."""
        position, rows = prefix.shape[1], len(prefix)
        allowed = (~self.model.banned).repeat(rows, 1)
        if position >= self.room:
            allowed &= torch.arange(allowed.shape[1], device=allowed.device) == END
        else:
            allowed[:, END] &= self.words is None and position >= self.least - len(self.right)
        if self.infill and position == len(self.left):
            allowed[:, self.glued] = False
        for sequence in self.avoided:
            allowed[:, sequence[-1]] &= ~ends_with(prefix, sequence[:-1])
        if self.phrases:
            # The words needed after the next one to finish the phrase that is furthest, and then all others.
            missing = [~contains_sequence(prefix, phrase) for phrase in self.phrases]
            needed = sum(there * len(phrase) for there, phrase in zip(missing, self.phrases, strict=True))
            progress = torch.zeros_like(allowed, dtype=torch.int64)
            for phrase, there in zip(self.phrases, missing, strict=True):
                for k, word in enumerate(phrase):
                    begun = (there & ends_with(prefix, phrase[:k])) * (k + 1)
                    progress[:, word] = torch.maximum(progress[:, word], begun)
            open_ = needed.unsqueeze(1) - progress  # type: ignore[union-attr]
            ends = allowed[:, END] & (needed == 0)  # END needs no room for a word
            allowed &= open_ <= self.room - position - 1
            allowed[:, END] = ends
        return allowed

    @cached_property
    def glued(self) -> list[int]:
        """Tokens that do not begin the gap."""
        return [k for begin, _ in (self.infill.misfits(self.info.tokenizer)[:1] if self.infill else ()) for k in begin]

    # -- after decoding -------------------------------------------------------------------------------------------

    def finish(self, ids: list[int]) -> tuple[list[int], Given]:
        """The text of a finished row, and what is given of it."""
        return ids + self.right, {**self.given_at(0, 0), **self.given_at(1, len(ids))}

    def finish_row(self, ids: list[int], given: Given, sampling: Sampling) -> tuple[list[int], Given, int]:
        """The text of a row as its model wrote it, what is given of it, and the classifier calls for it."""
        asked = self.classifier_calls(min(len(ids) + 1, self.model.longest))
        return *self.finish(ids), asked

    def print_words(self, words: Sequence[str], given: Given) -> str:
        return join_given(self.controls, self.info, words, given)

    def targets(self) -> list[tuple[PrefixClassifier, str, Any]]:
        """For every control with a classifier: the classifier, its head, and the labels that it should find."""
        found = [
            (self.classifiers[control.head], control.head, control.wanted(self.info))
            for control in self.controls
            if control.head in self.classifiers
        ]
        if self.words is not None and LENGTH in self.classifiers:
            labels = self.classifiers[LENGTH].labellings[LENGTH].values
            found += [(self.classifiers[LENGTH], LENGTH, labels.index(str(self.words)))]
        return found

    def label_chances(self, outputs: Mapping[int, PrefixOutput], position: int) -> Tensor | float:
        """log p(requested labels | x_≤i), [B, k], from the classifiers' outputs (by their ids) for k words at a
        position. Nothing is copied to the device, so a loop that calls this does not wait for it."""
        total: Tensor | float = 0.0
        for classifier, head, wanted in self.targets():
            output, kind = outputs[id(classifier)], classifier.labellings[head].kind
            if kind == "text":
                total = total + output.text(head)[..., wanted]
            elif kind == "spans":
                # Of many spans, those that this word may begin, continue or close, or that the next word may begin.
                near = [one for one in wanted if one[0] - 1 <= position <= one[1] + 1]
                for first, last, *labels in near if len(wanted) > 1 else wanted:
                    device = output.features.device
                    ends = (torch.full((), place - position, device=device) for place in (first, last))
                    chances = classifier.label_spans(head, output.features, *ends)
                    total = total + torch.stack([chances[..., label] for label in labels]).logsumexp(0)
            elif position < len(wanted):  # the tag of this word: earlier ones are the same for all
                total = total + output.tags(head)[..., wanted[position]]
        return total

    @torch.no_grad()
    def classifier_nats(self, rows: list[list[int]]) -> list[float]:
        """−log p(requested labels | finished text) under the classifiers, for word ids."""
        ids, lengths = (part.to(self.model.banned.device) for part in pad_token_rows(rows))
        canvas, number = with_ends(ids, lengths), torch.arange(len(rows), device=ids.device)
        nats = torch.zeros(len(rows), device=ids.device)
        for classifier, head, wanted in self.targets():
            output, kind = classifier(self.model.view(canvas)), classifier.labellings[head].kind
            ended = output.features[number, lengths + 1]
            if kind == "spans":
                for first, last, *labels in wanted:
                    found = classifier.label_spans(head, ended, first - lengths, last - lengths)
                    nats -= found[:, labels].logsumexp(-1)
            elif kind == "tags":
                asked = torch.tensor(wanted[: ids.shape[1]], device=ids.device)
                tags = output.tags(head)[:, 1 : len(asked) + 1]
                nats -= tags.gather(-1, asked.expand(len(rows), -1).unsqueeze(-1)).sum((-1, -2))
            else:
                nats -= output.text(head)[number, lengths + 1, wanted]
        return nats.tolist()


@dataclass(frozen=True)
class ImposePossible:
    """A rule: words after which the request becomes impossible are not drawn."""

    parts: Sequence[Part]

    def __call__(self, prefix: Tensor, logits: Tensor, caches: Caches) -> Tensor:
        allowed = for_each_part(self.parts, lambda plan, part: plan.possible(prefix[part]))
        allowed |= ~allowed.any(-1, keepdim=True)  # texts that have ended
        return logits.masked_fill(~allowed, IMPOSSIBLE)


def for_each_part(parts: Sequence[Part], compute: Callable[[Any, slice], Tensor]) -> Tensor:
    """Compute something for the rows of each part of a batch, and join the results."""
    return torch.cat([compute(plan, part) for plan, part in parts])


def ends_with(prefix: Tensor, sequence: Sequence[int]) -> Tensor:
    """Whether the last words of [B, i] are these, [B]."""
    size = len(sequence)
    if size > prefix.shape[1]:
        return torch.zeros(len(prefix), dtype=torch.bool, device=prefix.device)
    return (prefix[:, prefix.shape[1] - size :] == prefix.new_tensor(sequence)).all(-1)


def contains_sequence(prefix: Tensor, sequence: Sequence[int]) -> Tensor:
    """Whether words [B, i] contain a sequence, [B]."""
    if len(sequence) > prefix.shape[1]:
        return torch.zeros(len(prefix), dtype=torch.bool, device=prefix.device)
    return (prefix.unfold(1, len(sequence), 1) == prefix.new_tensor(sequence)).all(-1).any(-1)
