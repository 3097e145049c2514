"""A list of controls bound to a model: checked in advance, then turned into layouts, steering and checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from difflm.controls.base import Canvas, Check, Control, ModelInfo
from difflm.controls.exact import Avoid, Infill, Length, Letters, Pieces
from difflm.controls.gap_sizes import GAPS, GapSizes, draw_gap_layouts, share_gap_sizes
from difflm.controls.guidance import (
    STANDARD,
    Classifier,
    Guidance,
    GuidanceSettings,
    GuidanceTarget,
    GuidedBelief,
    labels_on_canvas,
)
from difflm.controls.patterns.pattern import Pattern, impose_automaton, join_patterns
from difflm.controls.patterns.token_automata import ANY, TokenAutomaton
from difflm.controls.phrases import choose_phrases, join_given, speaks_of_every_word
from difflm.controls.pieces import PieceInfill, avoid_words, can_pass, find_kept, keep_whole, let_end, say_of_pieces
from difflm.controls.rules import ForbidSpecials
from difflm.controls.sentence_classifier import SentenceClassifier, SentenceGuidance
from difflm.controls.shared_batches import merge_last, merge_rules, merge_targets
from difflm.data.tokenizers import END, SPECIALS, START, UNK
from difflm.data.words import Given, join_words, space_words, split_words
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes.discrete import certain_logits
from difflm.diffusion.samplers.loop import Steering, Transform
from difflm.diffusion.timesteps import StepSpan
from difflm.errors import UsageError
from difflm.models.base import LanguageModel
from difflm.models.batching import Layout, SampleBatch, pad_token_rows
from difflm.models.leave_one_out import NEARLY_WRITTEN, leave_one_out_nats

if TYPE_CHECKING:
    from difflm.controls.patterns.pattern import Chains

NEARLY_CLEAN = 1e-3  # the time at which a classifier reads a finished text


@dataclass(frozen=True)
class Edit:
    """A text to rewrite lightly. `strength` is how much noise is added first; `keep` names words of it to keep."""

    text: str
    strength: float = 0.5
    keep: Sequence[str] = ()  # phrases, or a single one; stored as a tuple

    def __post_init__(self) -> None:
        kept = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)
        if not all(isinstance(one, str) for one in (self.text, *kept)):
            raise UsageError('an edit takes a text and words of it to keep, such as keep=["The Mill"].')
        if not isinstance(self.strength, Real):
            raise UsageError(f"strength must be a number above 0 and up to 1, not {self.strength!r}.")
        object.__setattr__(self, "keep", kept)

    def check_value(self) -> None:
        if not self.text.strip():
            raise UsageError("edit: the text is empty.")
        if not 0 < self.strength <= 1:
            raise UsageError(f"--strength must be greater than 0 and at most 1, not {self.strength}.")


class ControlPlan:
    """The controls of a request, bound to a model."""

    def __init__(
        self,
        model: LanguageModel,
        denoiser: Denoiser,
        info: ModelInfo,
        controls: Sequence[Control],
        edit: Edit | None = None,
        classifiers: Sequence[Classifier | SentenceClassifier] = (),
        guidance: GuidanceSettings = STANDARD,
    ) -> None:
        if info.tokenizer.length_unit == "characters":
            controls = [Letters(control.words) if type(control) is Length else control for control in controls]
        if info.tokenizer.length_unit == "tokens":
            own = info.tokenizer
            controls = [Pieces(control.words, own) if type(control) is Length else control for control in controls]
        if info.tokenizer.spells:
            controls = say_of_pieces(controls, info.tokenizer)
        self.model, self.denoiser, self.info = model, denoiser, info
        self.controls, self.edit = list(controls), edit
        self.classifiers, self.guidance = classifiers, guidance
        for control in self.controls:
            control.prepare(info)
        infills = [c for c in self.controls if isinstance(c, Infill)]
        if len(infills) > 1:
            raise UsageError("infill can be given only once; put all gaps in one text.")
        self.infill = infills[0] if infills else None
        # Whether the model continues a text as far as it likes: a template that ends in its only gap.
        self.continues = model.lengths.continues and any(c.gaps == [None] and not c.parts[-1] for c in infills)
        if edit is not None:
            self.check_edit(edit)
        self.guided = any(control.head for control in self.controls)  # whether a classifier guides
        # Of two classifiers with the same head, the first; each is called once, however many heads it has.
        able = {control.head: [c for c in classifiers if control.head in c.labellings] for control in self.controls}
        self.asked_classifiers = list({id(some[0]): some[0] for some in able.values() if some}.values())
        self.words, self.least = agree_on_length(self.controls, info, edit)
        self.pattern, self.spelling = None, None
        self.chains: Chains = {}
        if any(isinstance(c, Pattern) or (isinstance(c, PieceInfill) and any(c.gaps)) for c in self.controls):
            bias, kept = model.denoiser.codec.bias, None if edit is None else self.kept_items(edit)
            self.pattern = join_patterns(self.controls, info, self.words, self.least, bias, kept)
        # Whether nothing determines the length, and the model writes its own end.
        own_end = END not in model.lengths.forbidden
        self.open_ended = own_end and self.words is None and not self.pattern
        self.open_ended &= self.continues or (self.least <= 1 and self.infill is None)
        if not self.pattern and info.tokenizer.spells:
            self.spelling = self.avoid_spellings()
        given = self.infill.texts(info) if self.infill else (edit.text,) if edit else ()
        # Given words that the model does not know, each once.
        self.unknown_words = list(
            dict.fromkeys(word for text in given for word in info.tokenizer.unknown(text.strip()))
        )
        known = self.infill.parts if self.infill else edit.keep if edit else ()
        if any(isinstance(c, Avoid) for c in self.controls):
            check_avoided(self.controls, info, known)
        self.imposed = [c for c in self.controls if guidance.impose or not c.head]
        if self.pattern or self.spelling:  # its rule takes care of it
            self.imposed = [c for c in self.imposed if not isinstance(c, Avoid)]
        # Reweighting single words hardly ever makes a phrase appear: docs/log.md has the figures.
        placed = [] if self.pattern else self.imposed  # a pattern contains the phrases already
        self.phrases = choose_phrases(placed, info, known, self.words, model.denoiser.codec.holds_tokens)
        self.extra = self.phrases.more(self.infill, self.words) if self.infill and not self.continues else 0
        if edit is not None:
            self.edited, self.kept = self.edit_layout(edit)
        elif (self.infill is None or self.continues) and self.phrases.needed > (room := self.words or info.max_words):
            what = "this model holds" if self.words is None else "the length is"
            raise UsageError(f"contains: {self.phrases.needed} words must appear; {what} {room}.")

    def check_edit(self, edit: Edit) -> None:
        if self.infill:
            raise UsageError("edit and infill cannot be combined: mark gaps, or give a whole text.")
        edit.check_value()

    def kept_places(self, edit: Edit) -> list[range]:
        """Positions of the tokens of each kept phrase, wherever it occurs."""
        return [place for phrase in edit.keep for place in find_kept(phrase, edit.text.strip(), self.info.tokenizer)]

    def kept_items(self, edit: Edit) -> list[int]:
        """The text in the form of a `Template`."""
        kept = {k for place in self.kept_places(edit) for k in place}
        ids = self.info.tokenizer.encode(edit.text.strip())
        return [token if k in kept else ANY for k, token in enumerate(ids)]

    def edit_layout(self, edit: Edit) -> tuple[Layout, Given]:
        """The text on its canvas, with the kept words as known ones; and what is given with them."""
        text, tokenizer, places = edit.text.strip(), self.info.tokenizer, self.kept_places(edit)
        ids, (words, _) = tokenizer.encode(text), space_words(text)
        if not self.info.whole_words:
            words = [("", text[begin:end]) for begin, end in tokenizer.spans(text)]
        kept = {k: ids[k] for place in places for k in place}
        self.phrases.check_kept([k in kept for k in range(len(ids))])
        inside = {k for place in places for k in place[1:]}
        given = {k: (words[k][0] if k in inside else None, words[k][1]) for k in kept}
        if not self.info.whole_words:  # their spaces are in their tokens
            given = {k: one for k, one in given.items() if ids[k] == UNK}
        return self.layout(len(ids), kept, ids), given

    def avoid_spellings(self) -> TokenAutomaton | None:
        """The automaton of texts that spell no avoided word, if there are any."""
        avoided = tuple(c.word for c in self.controls if isinstance(c, Avoid))
        if not avoided:
            return None
        automaton, given = (
            avoid_words(avoided, self.info.tokenizer),
            self.infill.known(self.info) if self.infill else [],
        )
        if self.edit is not None:
            ids = self.info.tokenizer.encode(self.edit.text.strip())
            given = [[ids[k] for k in place] for place in self.kept_places(self.edit)]
        if not can_pass(automaton, given):
            raise UsageError(f"avoid {' or '.join(map(repr, avoided))}: the words that are kept contain it.")
        return let_end(automaton, self.model.lengths.ends) if self.open_ended else automaton

    # -- before sampling ----------------------------------------------------------------------------------------

    def layouts(
        self, samples: Tensor, seed: int, condition: Condition = UNCONDITIONAL, ranks: Tensor | None = None
    ) -> tuple[list[Layout], list[Given]]:
        """Layouts of these samples, and for each what is given. With `ranks` [B], lengths that nothing determines are
        the likeliest ones, by rank."""
        noise = Noise(seed, samples)
        if self.edit is not None:
            return [self.edited] * len(samples), [self.kept] * len(samples)
        if self.open_ended:
            lay = self.open_layout if self.model.capabilities.always_planned else Layout
            given = self.infill.given_at(0, 0, self.info) if self.infill else {}
            return [lay(n) for n in self.model.draw_lengths(noise, condition).tolist()], [given] * len(samples)
        if self.gap_sizes is not None:
            return draw_gap_layouts(self, self.gap_sizes, noise)
        infill, totals = self.infill, [self.words or 0] * len(samples)  # tokens of each text
        if self.words is None:
            needed = infill.min_length(self.info) + self.extra if infill else self.phrases.needed
            least, room = max(needed, self.least), infill.max_words(self.info) if infill else self.info.max_words
            lengths, most = self.model.lengths, max(least, room)
            if condition is not UNCONDITIONAL:
                condition = lengths.predict(self.denoiser, condition)
            if self.pattern:
                own = self.pattern.lengths
                own = {n: ways for n, ways in own.items() if n <= max(most, min(own))}
                drawn = lengths.draw_among(noise.uniform(0, stream=1), [*own], [*own.values()], condition)
            elif ranks is None or infill:
                drawn = lengths.draw_between(noise.uniform(0, stream=1), least, most, condition)
            else:
                drawn = lengths.rank_between(ranks, least, most, condition)
            totals = [int(n) for n in drawn.tolist()]
        if infill is None:
            return [self.layout(n, {}) for n in totals], [{}] * len(samples)
        if self.pattern:
            shares = noise.uniform(0, 2 * max(totals), stream=GAPS).tolist()
            cuts = [self.pattern.template.draw_gaps(n, iter(u)) for n, u in zip(totals, shares, strict=True)]
        else:
            shares = noise.uniform(0, len(infill.gaps), stream=GAPS).tolist()
            cuts = [infill.cut_gaps(self.info, n, u, self.extra) for n, u in zip(totals, shares, strict=True)]
        placed = [infill.place_known(self.info, cut) for cut in cuts]
        layouts = [self.layout(n, known) for n, (known, _) in zip(totals, placed, strict=True)]
        return layouts, [given for _, given in placed]

    @cached_property
    def gap_sizes(self) -> GapSizes | None:
        return share_gap_sizes(self)

    def layout(self, words: int, known: dict[int, int], begin: Sequence[int] = ()) -> Layout:
        positions, settled = self.model.lengths.settled(words)
        first, behind = self.info.first, self.info.first - self.model.lengths.first
        if behind:  # a prompt precedes the text, instead of START
            positions, settled = positions + behind, {k + behind: token for k, token in settled.items() if k}
        known = settled | {k + first: token for k, token in known.items()}
        if begin:
            canvas = {**settled, **{k + first: token for k, token in enumerate(begin)}}
            begin = [canvas[k] for k in range(positions)]
        return Layout(positions, known, begin)

    def open_layout(self, positions: int) -> Layout:
        """A canvas whose text the model ends itself, after the known words before a gap at the end."""
        known = [START] * self.info.first
        if self.continues and self.infill is not None:
            known += self.infill.known(self.info)[0]
            positions = self.infill.most or positions
        room = self.info.first + self.info.max_words + 1
        return Layout(min(len(known) + positions, room), dict(enumerate(known)))

    # -- while sampling -----------------------------------------------------------------------------------------

    def rules(self, canvas: Canvas) -> list[Transform]:
        """The rules of all controls, as transforms of the belief. Required words come last: no other rule may change
        their positions."""
        return self.token_rules(canvas) + self.phrase_rules(canvas)

    def token_rules(self, canvas: Canvas) -> list[Transform]:
        """The rules for single positions."""
        codec, rules = self.denoiser.codec, list[Transform]()
        if not self.open_ended:
            # A vocabulary of words may contain a newline; a text does not begin or end with it.
            words = self.info.tokenizer.known_words
            newline = words.index("\n") + len(SPECIALS) if "\n" in words else None
            rules.append(ForbidSpecials(codec, canvas, newline, self.model.lengths.ends))
        rules += [rule for c in self.imposed if (rule := c.rule(codec, self.info, canvas)) is not None]
        if self.edit is not None and self.edit.keep and not self.info.whole_words:
            rules.append(keep_whole(self.edit.text.strip(), self.kept_places(self.edit), codec, self.info, canvas))
        return rules

    def phrase_rules(self, canvas: Canvas) -> list[Transform]:
        """The rule that required words appear, if there are any."""
        ends = self.model.lengths.ends if self.open_ended else ()
        return self.phrases.rule(self.denoiser.codec, canvas, ends)

    def targets(self, canvas: Canvas) -> list[GuidanceTarget]:
        """For every control with a classifier: the classifier, and the labels it should find."""
        found = []
        for control in self.controls:
            classifier = next((c for c in self.classifiers if control.head in c.labellings), None)
            if control.head and classifier is not None:
                rows = torch.tensor([control.wanted(self.info)] * len(canvas.mask), device=canvas.mask.device)
                labelling = classifier.labellings[control.head]
                if labelling.kind != "text":
                    rows = labels_on_canvas(labelling, rows, canvas.mask.shape[1], canvas.first)
                found.append(GuidanceTarget(classifier, control.head, rows, control.whole))
        return found

    @property
    def automaton(self) -> TokenAutomaton | None:
        """The automaton that the whole text follows, if there is one."""
        return self.pattern.template.automaton if self.pattern else self.spelling

    @property
    def transitions(self) -> int:
        """How many transitions each step goes through for each token of a text."""
        return 0 if self.automaton is None else len(self.automaton.edges)

    def last_rules(self, canvas: Canvas) -> list[Transform]:
        """The rule that the whole text is accepted, if there is an automaton."""
        own = self.automaton
        return [] if own is None else [impose_automaton(own, self.chains, self.denoiser.codec, canvas)]

    # -- after sampling -----------------------------------------------------------------------------------------

    def print_words(self, words: Sequence[str], given: Given) -> str:
        """Join words to a text that has what was given as it was given; a pattern was matched with natural spacing."""
        if self.pattern:
            return join_words(words)
        return join_given(self.controls, self.info, words, given)

    @torch.no_grad()
    def classifier_nats(self, rows: list[list[int]]) -> list[float]:
        """−log p(requested labels | finished text) under the guiding classifiers, for word ids."""
        device = self.model.denoiser.codec.bias.device
        canvas, mask = self.canvas_of(rows)
        found = self.targets(Canvas(mask, self.info.first, torch.zeros_like(mask)))
        readers = [target for target in found if isinstance(target.classifier, SentenceClassifier)]
        targets = [target for target in found if not isinstance(target.classifier, SentenceClassifier)]
        certain = certain_logits(canvas, self.model.vocabulary)
        nats = SentenceGuidance(readers, mask, self.guidance.size).nats(certain, mask)
        if targets:
            guide = Guidance(targets, self.model.denoiser, mask, self.guidance)
            t = torch.full((len(rows),), NEARLY_CLEAN, device=device)
            nats = nats + guide.nats(self.model.denoiser.codec.encode(canvas), t)
        return nats.tolist()

    @property
    def reads_words(self) -> bool:
        """Whether finished texts are also compared by how likely the model finds their words: if controls determine
        every word, and one call of the model is enough."""
        speaks = speaks_of_every_word(self.controls, self.info)
        return speaks and self.model.denoiser.codec.adds_evidence and not self.model.capabilities.source_limit

    @torch.no_grad()
    def word_nats(self, rows: list[list[int]]) -> list[float]:
        """−Σ log p(word | all others) of finished texts under the model, for word ids."""
        canvas, mask = self.canvas_of(rows)
        t = self.model.times.time_of(torch.full((len(rows),), NEARLY_WRITTEN, device=canvas.device))
        nats = leave_one_out_nats(self.model.denoiser, t, canvas, mask)[:, self.info.first :]
        return [float(own[: len(row)].sum()) for own, row in zip(nats.cpu(), rows, strict=True)]

    def canvas_of(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The canvas of finished texts on the model's device, and which of its positions exist."""
        ids, lengths = (
            part.to(self.model.denoiser.codec.bias.device) for part in pad_token_rows(rows, self.info.max_words)
        )
        return self.model.lengths.canvas(ids, lengths)


def check_text(controls: Sequence[Control], text: str, unknown_words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the checkers' results for a finished text, one per control, as JSON values. If a template contains words
    that the model does not know, infilling is not judged, because their presence says nothing."""
    words, found = split_words(text), []
    for control in controls:
        check = control.check(text if control.reads_text else words)
        if unknown_words and check.satisfied and isinstance(control, Infill):
            check = Check(None, None, "none: the model does not know all words")
        score = None if check.score is None else round(check.score, 4)
        about = {"name": control.name, "target": control.target}
        found.append({**about, "satisfied": check.satisfied, "score": score, "checker": check.checker})
    return found


def agree_on_length(controls: Sequence[Control], info: ModelInfo, edit: Edit | None = None) -> tuple[int | None, int]:
    """The number of tokens on which the controls must agree, if any, and the fewest that satisfy all of them."""
    asked = [(c.name, n) for c in controls if (n := c.length(info)) is not None]
    if edit is not None:
        asked.append(("edit", len(info.tokenizer.encode(edit.text.strip()))))
    for (one, n), (other, m) in pairwise(asked):
        if n != m:
            raise UsageError(f"{one} asks for {n} {info.unit}, {other} for {m}: no text has both.")
    needed = [(c, c.min_length(info)) for c in controls]
    least = max([1, *(n for _, n in needed)])
    if not asked:
        return None, least
    words = asked[0][1]
    shortest = max([0, *(n for c, n in needed if isinstance(c, Infill))])
    if words < shortest:
        raise UsageError(f"the infilled text has at least {shortest} {info.unit}; a length of {words} is too short.")
    if words > info.max_words:
        raise UsageError(f"{words} {info.unit} are requested; this model takes at most {info.max_words}.")
    for control, n in needed:
        if words < n:
            raise UsageError(f"{control} needs {n} {info.unit}; a length of {words} is too short.")
    return words, least


def check_avoided(controls: Sequence[Control], info: ModelInfo, known: Sequence[str]) -> None:
    """Reject words that are both required and excluded."""
    avoided = [c for c in controls if isinstance(c, Avoid)]
    wanted = [("the words that stay", text) for text in known]
    wanted += [(str(c), text) for c in controls if (text := c.verbatim(info)) is not None]
    for where, text in wanted:
        for control in avoided:
            if not control.check(text).satisfied:
                word = control.word.strip()
                raise UsageError(f"avoid {word!r} contradicts {where}: a word cannot be both required and excluded.")


Part = tuple[ControlPlan | None, slice]  # the plan of some rows of a batch; None: no controls


def steering_for(batch: SampleBatch, parts: Sequence[Part], spans: Sequence[StepSpan]) -> Steering:
    """The steering of a batch whose rows belong to one plan, or to several with the same guidance settings."""
    lead = next((plan for plan, _ in parts if plan is not None), None)
    if lead is None:
        told = batch.condition
        return Steering(batch.known, batch.begin, spans, source=told.source, source_mask=told.source_mask)
    mask = torch.arange(batch.width, device=batch.lengths.device) < batch.lengths.unsqueeze(1)
    settled = batch.known >= 0 if batch.known is not None else torch.zeros_like(mask)
    canvas = Canvas(mask, lead.info.first, settled, batch.known)
    if len(parts) == 1:
        rules, targets, last = lead.rules(canvas), lead.targets(canvas), []
        if lead.pattern or lead.spelling:
            last = lead.last_rules(canvas)
    else:
        rows = [(plan, part, canvas.rows(part)) for plan, part in parts]
        rules = merge_rules([(part, plan.rules(own) if plan else []) for plan, part, own in rows], canvas)
        last = merge_last([(part, plan.last_rules(own) if plan else []) for plan, part, own in rows])
        sizes = [len(own.mask) for *_, own in rows]
        targets = merge_targets([plan.targets(own) if plan else [] for plan, _, own in rows], sizes)
    readers = [target for target in targets if isinstance(target.classifier, SentenceClassifier)]
    targets = [target for target in targets if not isinstance(target.classifier, SentenceClassifier)]
    guidance = Guidance(targets, lead.denoiser, mask, lead.guidance) if targets else None
    if guidance and lead.denoiser.codec.holds_tokens:  # tokens have no gradient: the belief is reweighted
        rules, guidance = [GuidedBelief(guidance), *rules], None
    if readers:  # after the rules: it cannot make forbidden words possible, and reads what the rules leave
        rules = [*rules, SentenceGuidance(readers, mask, lead.guidance.size)]
    rules = [*rules, *last]
    told = batch.condition
    return Steering(
        *(batch.known, batch.begin, spans, rules, guidance),
        source=told.source,
        source_mask=told.source_mask,
    )
