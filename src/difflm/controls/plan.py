"""A list of controls bound to a model: checked for sense beforehand, then layouts and steering, then checks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from difflm.controls.base import Canvas, Control, ModelInfo
from difflm.controls.classifier import Classifier, labels_on_canvas
from difflm.controls.exact import Avoid, Infill, Length, Letters
from difflm.controls.guidance import STANDARD, Guidance, GuidanceSettings, GuidanceTarget
from difflm.controls.phrases import Phrases
from difflm.controls.rules import ForbidSpecials
from difflm.data.tokenizers import END, SPECIALS, UNK, Characters, Words
from difflm.data.words import split_words
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers import Transform
from difflm.errors import UsageError
from difflm.models.batching import Layout, pad_token_rows
from difflm.models.diffusion import DiffusionModel

NEARLY_CLEAN = 1e-3  # the time at which a classifier reads a finished text
GAPS = 4  # the stream of random numbers that cuts the words of free gaps


@dataclass(frozen=True)
class Edit:
    """A text to be written anew from a share of the noise; `keep` are words of it that stay."""

    text: str
    strength: float = 0.5
    keep: tuple[str, ...] = ()


class ControlPlan:
    """What is asked of every text of a request."""

    def __init__(
        self,
        model: DiffusionModel,
        denoiser: Denoiser,
        setting: ModelInfo,
        controls: Sequence[Control],
        edit: Edit | None = None,
        classifiers: Sequence[Classifier] = (),
        knobs: GuidanceSettings = STANDARD,
    ) -> None:
        if isinstance(setting.tokenizer, Characters):
            controls = [Letters(control.words) if type(control) is Length else control for control in controls]
        self.model, self.denoiser, self.setting = model, denoiser, setting
        self.controls, self.edit = list(controls), edit
        self.classifiers, self.knobs = classifiers, knobs
        for control in self.controls:
            control.prepare(setting)
        self.infill = at_most_one([c for c in self.controls if isinstance(c, Infill)], "infill")
        if edit is not None:
            self.check_edit(edit)
        self.words = self.agreed_length()
        known = [split_words(part) for part in (self.infill.parts if self.infill else edit.keep if edit else ())]
        check_words(self.controls, setting, known)
        self.ruling = [c for c in self.controls if knobs.impose or not c.head]
        # A tilt of single words hardly says a phrase: docs/log.md has the figures.
        self.phrases = Phrases.of(self.ruling, setting, known, self.words, model.denoiser.codec.holds_tokens)
        self.more = self.phrases.more(self.infill, self.words) if self.infill else 0
        if edit is not None:
            self.edited, self.unknown = self.edit_layout(edit)
        elif self.infill is None:
            self.phrases.check_length(self.words)

    @property
    def guided(self) -> bool:
        """Whether a classifier is climbed."""
        return any(control.head for control in self.controls)

    def agreed_length(self) -> int | None:
        """The number of tokens that the controls settle, all the same."""
        unit = self.setting.unit
        asked = [(c.name, n) for c in self.controls if (n := c.length(self.setting)) is not None]
        if self.edit is not None:
            asked.append(("edit", len(self.setting.tokenizer.encode(self.edit.text.strip()))))
        for (one, n), (other, m) in pairwise(asked):
            if n != m:
                raise UsageError(f"{one} asks for {n} {unit}, {other} for {m}: no text has both.")
        words = asked[0][1] if asked else None
        least = self.infill.min_length(self.setting) if self.infill else 0
        if words is not None and words < least:
            raise UsageError(f"the infilled text has at least {least} {unit}; a length of {words} is too short.")
        if words is not None and words > self.setting.max_words:
            raise UsageError(f"{words} {unit} are asked for; this model holds {self.setting.max_words}.")
        for control in self.controls:
            if words is not None and words < (needed := control.min_length(self.setting)):
                raise UsageError(f"{control} needs {needed} {unit}; a length of {words} is too short.")
        return words

    def check_edit(self, edit: Edit) -> None:
        if self.infill:
            raise UsageError("edit and infill exclude each other: mark gaps, or give a whole text.")
        if not edit.text.strip():
            raise UsageError("edit: the text is empty.")
        if not 0 < edit.strength <= 1:
            raise UsageError(f"--strength must lie above 0 and up to 1, not {edit.strength}.")
        if not self.setting.whole_words:
            raise UsageError("edit: this model writes pieces of words; edit a text with a model of whole words.")

    def edit_layout(self, edit: Edit) -> tuple[Layout, dict[int, str]]:
        """The text on its canvas, with the words that stay as known ones; of these, those without an id."""
        words, ids = split_words(edit.text.strip()), self.setting.tokenizer.encode(edit.text.strip())
        kept = {place: ids[place] for phrase in edit.keep for place in find_kept(phrase, words)}
        self.phrases.check_kept([place in kept for place in range(len(words))])
        return self.layout(len(ids), kept, ids), {place: words[place] for place, token in kept.items() if token == UNK}

    # -- before -------------------------------------------------------------------------------------------------

    def layouts(self, samples: Tensor, seed: int) -> tuple[list[Layout], list[dict[int, str]]]:
        """Layouts of these samples, and for each the words that the model has no id for."""
        noise = Noise(seed, samples)
        if self.edit is not None:
            return [self.edited] * len(samples), [self.unknown] * len(samples)
        if self.infill is not None:
            return self.gap_layouts(self.infill, noise)
        if self.open_ended:
            layouts = [Layout(n) for n in self.model.draw_lengths(noise).tolist()]
        else:
            layouts = [self.layout(n, {}) for n in self.totals(noise, self.phrases.needed)]
        return layouts, [{}] * len(samples)

    @property
    def open_ended(self) -> bool:
        """Whether nothing settles the length, and the model writes its own end."""
        settled = self.words is not None or any(control.min_length(self.setting) > 1 for control in self.controls)
        return END not in self.model.lengths.forbidden and not settled and self.infill is None

    def totals(self, noise: Noise, least: int) -> list[int]:
        """The number of tokens of each text."""
        if self.words is not None:
            return [self.words] * len(noise.samples)
        least = max([least, *(control.min_length(self.setting) for control in self.controls)])
        room = self.infill.max_words(self.setting) if self.infill else self.setting.max_words
        lengths: list[int] = self.model.lengths.draw_between(
            noise.uniform(0, stream=1), least, max(least, room)
        ).tolist()
        return lengths

    def gap_layouts(self, infill: Infill, noise: Noise) -> tuple[list[Layout], list[dict[int, str]]]:
        totals = self.totals(noise, infill.min_length(self.setting) + self.more)
        shares = noise.uniform(0, len(infill.gaps), stream=GAPS).tolist()
        laid = [infill.laid(self.setting, n, cut, self.more) for n, cut in zip(totals, shares, strict=True)]
        layouts = [self.layout(n, known) for n, (known, _) in zip(totals, laid, strict=True)]
        return layouts, [unknown for _, unknown in laid]

    def layout(self, words: int, known: dict[int, int], begin: Sequence[int] = ()) -> Layout:
        positions, settled = self.model.lengths.settled(words)
        first = self.setting.first
        known = settled | {place + first: token for place, token in known.items()}
        if begin:
            canvas = {**settled, **{i + first: token for i, token in enumerate(begin)}}
            begin = [canvas[i] for i in range(positions)]
        return Layout(positions, known, begin)

    # -- while it forms -----------------------------------------------------------------------------------------

    def rules(self, place: Canvas) -> list[Transform]:
        codec = self.denoiser.codec
        rules: list[Transform] = [] if self.open_ended else [ForbidSpecials(codec, place, self.newline)]
        rules += [rule for c in self.ruling if (rule := c.rule(codec, self.setting, place)) is not None]
        # Words that must appear come last: what else is asked of their places must not unsettle them.
        return rules + self.phrases.rule(codec, place, self.open_ended)

    @property
    def newline(self) -> int | None:
        """Its id: a vocabulary of words may hold one, a text does not begin or end with it."""
        words = self.setting.tokenizer.words if isinstance(self.setting.tokenizer, Words) else []
        return words.index("\n", len(SPECIALS)) if "\n" in words[len(SPECIALS) :] else None

    def wishes(self, place: Canvas) -> list[GuidanceTarget]:
        """Of every control that a classifier knows: which one, and what is asked of it."""
        return [wish for control in self.controls if control.head for wish in self._wish(control, place)]

    def _wish(self, control: Control, place: Canvas) -> Iterator[GuidanceTarget]:
        for classifier in self.classifiers:
            if control.head in classifier.labellings:
                labelling = classifier.labellings[control.head]
                rows = torch.tensor([control.wanted(self.setting)] * len(place.mask), device=place.mask.device)
                labels = labels_on_canvas(labelling, rows, place.mask.shape[1], place.first)
                yield GuidanceTarget(classifier, control.head, labels, control.whole)
                return

    # -- after --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def own_nats(self, rows: list[list[int]]) -> list[float]:
        """−log p(what is asked | finished text) under the guiding classifiers, for word ids."""
        device = self.model.denoiser.codec.bias.device
        ids, lengths = pad_token_rows(rows)
        canvas, mask = self.model.lengths.canvas(ids.to(device), lengths.to(device))
        wishes = self.wishes(Canvas(mask, self.setting.first, torch.zeros_like(mask)))
        guide = Guidance(wishes, self.model.denoiser, mask, self.knobs)
        t = torch.full((len(rows),), NEARLY_CLEAN, device=device)
        return guide.nats(self.model.denoiser.codec.encode(canvas), t).tolist()

    @cached_property
    def unknown_words(self) -> list[str]:
        """The words that were given and that the model does not know, each once."""
        given = [*(self.infill.parts if self.infill else ()), *([self.edit.text] if self.edit else ())]
        return list(dict.fromkeys(word for text in given for word in self.setting.tokenizer.unknown(text.strip())))

    def checks(self, text: str) -> list[dict[str, Any]]:
        """What the checkers say. A gap between words that the model cannot read may be filled with anything, so that
        unknown words leave the infilling unjudged: that they stand where they were put says nothing."""
        found = check_text(self.controls, text)
        if self.infill and self.unknown_words:
            place = self.controls.index(self.infill)
            if found[place]["satisfied"]:
                found[place] |= {"satisfied": None, "score": None, "checker": "none: the model does not know all words"}
        return found


def check_text(controls: Sequence[Control], text: str) -> list[dict[str, Any]]:
    """What the checkers say of a finished text, a control each, as every reader outside Python gets it."""
    words = split_words(text)
    found = [(control, control.check(text if isinstance(control, Letters) else words)) for control in controls]
    return [
        {
            "name": control.name,
            "target": control.target,
            "satisfied": check.satisfied,
            "score": None if check.score is None else round(check.score, 4),
            "checker": check.checker,
        }
        for control, check in found
    ]


def at_most_one(found: Sequence[Any], name: str) -> Any:
    if len(found) > 1:
        raise UsageError(f"{name} can be asked once; put all gaps into one text.")
    return found[0] if found else None


def find_kept(phrase: str, words: Sequence[str]) -> list[int]:
    """Where the words of a phrase stand in a text, however often."""
    asked = split_words(phrase.strip())
    starts = [i for i in range(len(words) - len(asked) + 1) if list(words[i : i + len(asked)]) == asked]
    if not asked or not starts:
        raise UsageError(f"keep: {phrase!r} does not stand in the text that is edited.")
    return [start + k for start in starts for k in range(len(asked))]


def check_words(controls: Sequence[Control], setting: ModelInfo, known: Sequence[Sequence[str]]) -> None:
    """Words that must and must not be there at once."""
    avoided = {c.word.strip().lower() for c in controls if isinstance(c, Avoid)}
    wanted = [("the words that stay", words) for words in known]
    wanted += [(str(c), split_words(text)) for c in controls if (text := c.verbatim(setting)) is not None]
    for where, words in wanted:
        for word in words:
            if word.lower() in avoided:
                raise UsageError(f"avoid {word!r} contradicts {where}: the word cannot be there and not there.")
