"""A list of controls bound to a model: checked in advance, then turned into layouts, steering and checks."""

from collections.abc import Sequence
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from difflm.controls.agreement import agree_on_length, check_avoided, find_template
from difflm.controls.base import Canvas, Check, Control, KnownText, KnownTokens, ModelInfo
from difflm.controls.edits import Edit, EditedText
from difflm.controls.exact import avoid_all
from difflm.controls.gap_sizes import GAPS, TRIES, GapFiller, GapSizes, list_options
from difflm.controls.gaps import cut_gaps
from difflm.controls.guidance import (
    STANDARD,
    Guidance,
    GuidanceSettings,
    GuidanceTarget,
    LabelReader,
    labels_on_canvas,
)
from difflm.controls.patterns.chains import chain_of
from difflm.controls.patterns.pattern import join_patterns
from difflm.controls.patterns.token_automata import Template, TokenAutomaton
from difflm.controls.phrases import choose_phrases, join_given, speaks_of_every_word
from difflm.controls.pieces import let_end, spaced_pieces
from difflm.controls.rules import ForbidSpecials, ImposePattern, KeepApart, PlacePhrases, control_rules
from difflm.controls.sentence_classifier import read_labels
from difflm.data.tokenizers import END, SPECIALS, START, UNK
from difflm.data.words import Given, join_words, split_words
from difflm.diffusion.condition import FREE, UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes.discrete import certain_logits
from difflm.diffusion.samplers.loop import Transform
from difflm.errors import UsageError
from difflm.models.base import LanguageModel
from difflm.models.batching import Layout, pad_token_rows
from difflm.models.sampling import Sampling
from difflm.models.word_nats import NEARLY_WRITTEN, leave_one_out_nats
from difflm.runtime.files import Json

NEARLY_CLEAN = 1e-3  # the time at which a classifier reads a finished text


class ControlPlan:
    """The controls of a request, bound to a model."""

    joins = True  # whether its texts can join a batch that runs
    searches = True  # whether a beam search makes sense with it
    sampler: str | None = None  # the model's step rule; None: its own

    def __init__(
        self,
        model: LanguageModel,
        denoiser: Denoiser,
        info: ModelInfo,
        controls: Sequence[Control],
        edit: Edit | None = None,
        classifiers: Sequence[LabelReader] = (),
        guidance: GuidanceSettings = STANDARD,
    ) -> None:
        self.model, self.denoiser, self.info, self.edit, self.guidance = model, denoiser, info, edit, guidance
        self.controls = [control.bind(info) for control in controls]
        for control in self.controls:
            control.prepare(info)
        self.infill = find_template(self.controls, edit)
        self.edited = None if edit is None else EditedText(edit.text.strip(), edit.keep)
        keeps: KnownText | None = self.infill or self.edited
        self.known = keeps.known(info) if keeps else None
        # Whether the model continues a text as far as it likes: a template that ends in its only gap.
        alone = self.infill is not None and self.infill.ends_open and len(self.infill.gaps) == 1
        self.continues = alone and model.lengths.continues
        asked = [*self.controls, self.edited] if self.edited else self.controls
        self.words, self.least = agree_on_length(asked, info)
        given = keeps.texts(info.tokenizer) if keeps else ()
        unknown = (word for text in given for word in info.tokenizer.unknown(text.strip()))
        self.unknown_words = list(dict.fromkeys(unknown))  # given words that the model does not know, each once
        # For each head the first classifier that has it; each is called once, however many heads it has.
        heads = {c.head: [one for one in classifiers if c.head in one.labellings] for c in self.controls if c.head}
        self.guided, self.classifiers = bool(heads), {head: some[0] for head, some in heads.items() if some}
        self.asked_classifiers = list({id(one): one for one in self.classifiers.values()}.values())
        self.pattern: Template | None = None
        if any(control.needs_automaton for control in asked):
            self.pattern = join_patterns(asked, info, self.words, self.least, model.denoiser.codec.bias, self.known)
        # Whether nothing determines the length, and the model writes its own end.
        free = self.words is None and not self.pattern and END not in model.lengths.forbidden
        self.open_ended = free and (self.continues or (self.least <= 1 and self.infill is None))
        parts = keeps.parts if keeps else ()
        self.automaton = self.pattern.automaton if self.pattern else None
        if avoided := [c for c in self.controls if c.forbids]:
            self.automaton = self.automaton or self.avoid_spellings(avoided)
            check_avoided(self.controls, info, parts)
        self.imposed = [c for c in asked if guidance.impose or not c.head]
        if self.automaton is not None:  # it takes care of avoided words, and a pattern of phrases
            self.imposed = [c for c in self.imposed if not c.forbids]
            self.chain_on = cache(partial(chain_of, self.automaton))  # all batches on a device share one
        # Reweighting single words hardly ever makes a phrase appear: docs/log has the figures.
        placed = [] if self.pattern else self.imposed
        self.phrases = choose_phrases(placed, info, parts, self.words, model.denoiser.codec.holds_tokens)
        self.extra = self.phrases.widen(None if self.continues else self.known, self.words) if self.phrases.asked else 0

    def avoid_spellings(self, avoided: Sequence[Control]) -> TokenAutomaton | None:
        """The automaton of texts that spell no avoided word; None if each is a token, or unknown."""
        words = [c.forbids for c in avoided]
        if all(c.bans(self.info) is not None for c in avoided):
            return None
        automaton = avoid_all(words, self.info)
        kept = self.known.parts if self.known and self.info.tokenizer.spells else []
        if not all(map(automaton.can_contain, kept)):
            raise UsageError(f"avoid {' or '.join(map(repr, words))}: the words that are kept contain it.")
        return let_end(automaton, self.model.lengths.ends) if self.open_ended else automaton

    # -- before sampling ----------------------------------------------------------------------------------------

    def layouts(
        self, samples: Tensor, seed: int, condition: Condition = UNCONDITIONAL, ranks: Tensor | None = None
    ) -> tuple[list[Layout], list[Given]]:
        """Layouts of these samples, and for each what is given. With `ranks` [B], lengths that nothing determines are
        the likeliest ones, by rank."""
        noise = Noise(seed, samples)
        if self.open_ended:
            lay = self.open_layout if self.model.capabilities.always_planned else Layout
            given = self.known.given[0] if self.known else {}
            return [lay(n) for n in self.model.draw_lengths(noise, condition).tolist()], [given] * len(samples)
        if self.known is None:
            return [self.layout(n, {}) for n in self.draw_totals(noise, condition, ranks)], [{}] * len(samples)
        if self.gap_sizes is not None:
            shares = noise.uniform(0, TRIES * len(self.gap_sizes.options), stream=GAPS).tolist()
            return self.lay_out(self.known, [self.gap_sizes.draw(own) for own in shares])
        totals = self.draw_totals(noise, condition, ranks)
        if self.pattern:
            shares = noise.uniform(0, 2 * max(totals), stream=GAPS).tolist()
            widths = [self.pattern.draw_gaps(n, iter(u)) for n, u in zip(totals, shares, strict=True)]
        else:
            shares = noise.uniform(0, len(self.known.free), stream=GAPS).tolist()
            widths = [cut_gaps(self.known, n, u, self.extra) for n, u in zip(totals, shares, strict=True)]
        return self.lay_out(self.known, widths)

    def draw_totals(self, noise: Noise, condition: Condition, ranks: Tensor | None) -> list[int]:
        """The number of tokens of each text."""
        if self.words is not None:
            return [self.words] * len(noise.samples)
        lengths, u = self.model.lengths, noise.uniform(0, stream=1)
        least = max(self.known.least + self.extra if self.known else self.phrases.needed, self.least)
        most = max(least, self.known.most if self.known else self.info.max_words)
        if condition is not UNCONDITIONAL:
            condition = lengths.predict(self.denoiser, condition)
        if self.pattern:
            own = self.pattern.lengths
            own = {n: ways for n, ways in own.items() if n <= max(most, min(own))}
            drawn = lengths.draw_among(u, [*own], [*own.values()], condition)
        elif ranks is None or self.infill:
            drawn = lengths.draw_between(u, least, most, condition)
        else:
            drawn = lengths.rank_between(ranks, least, most, condition)
        return [int(n) for n in drawn.tolist()]

    @cached_property
    def gap_sizes(self) -> GapSizes | None:
        """The sizes for the gaps, if the model can tell: a masked model trained on gaps, whose lengths of whole texts
        say nothing about them. None: drawn from these lengths."""
        infill, known, info = self.infill, self.known, self.info
        learned = self.model.capabilities.learned_gaps and not info.tokenizer.whole_words
        if infill is None or known is None or not learned or infill.ends_open:
            return None
        if self.words is not None or self.least > known.least:
            return None
        if self.pattern and not info.tokenizer.byte_level:
            return None
        sizes = list_options(infill, known, self.phrases.sizes, self.pattern)
        rows, _ = self.lay_out(known, [own for _, own in sizes.tried()])
        rules = self.token_rules, self.word_rules, self.last_rules
        filler = GapFiller(self.denoiser, info.first, self.model.lengths.forbidden, *rules)
        return filler.share_sizes(sizes, known.parts, rows)

    def lay_out(self, known: KnownTokens, widths: Sequence[Sequence[int]]) -> tuple[list[Layout], list[Given]]:
        """Layouts of texts whose free gaps have these widths, and for each what is given."""
        begin = self.info.tokenizer.encode(self.edited.text) if self.edited else ()
        placed = [known.place(own) for own in widths]
        return [self.layout(total, known, begin) for total, known, _ in placed], [given for *_, given in placed]

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
        known = [*[START] * self.info.first, *(self.known.parts[0] if self.known else ())]
        if self.infill is not None:
            positions = self.infill.most or positions
        room = self.info.first + self.info.max_words + 1
        return Layout(min(len(known) + positions, room), dict(enumerate(known)))

    # -- while sampling -----------------------------------------------------------------------------------------

    def rules(self, canvas: Canvas) -> list[Transform]:
        """The rules of all controls, as transforms of the belief. Required words come last: no other rule may change
        their positions."""
        return self.token_rules(canvas) + self.word_rules(canvas)

    def token_rules(self, canvas: Canvas) -> list[Transform]:
        """The rules for single positions."""
        codec, rules = self.denoiser.codec, list[Transform]()
        if not self.open_ended:
            # A vocabulary of words may contain a newline; a text does not begin or end with it.
            newline = self.info.tokenizer.encode("\n")[0] if self.info.tokenizer.whole_words else UNK
            rules.append(ForbidSpecials(codec, canvas, newline, self.model.lengths.ends))
        return rules + [rule for c in self.imposed for rule in control_rules(c, codec, self.info, canvas)]

    def word_rules(self, canvas: Canvas) -> list[Transform]:
        """The rule that required words appear, if there are any; for subwords, with nothing that lengthens them."""
        codec, phrases, tokenizer = self.denoiser.codec, self.phrases, self.info.tokenizer
        if not phrases.asked:
            return []
        free = canvas.mask & ~canvas.settled
        free[:, : canvas.first] = False
        free[:, canvas.first + self.info.max_words :] = False
        apart = None
        if tokenizer.spells:
            apart = KeepApart(codec, phrases.followers, spaced_pieces(tokenizer), canvas, phrases.openings)
        ends = self.model.lengths.ends if self.open_ended else ()
        return [PlacePhrases(codec, phrases.ids, free, apart, ends)]

    def last_rules(self, canvas: Canvas) -> list[Transform]:
        """The rule that the whole text is accepted, if there is an automaton. Known special tokens are not part of a
        text."""
        if self.automaton is None:
            return []
        chain, known = self.chain_on(canvas.mask.device), canvas.known
        if known is None:
            return [ImposePattern(self.denoiser.codec, chain, canvas.mask)]
        words = known >= len(SPECIALS)
        inside = canvas.mask & (words | ~canvas.settled)
        inside[:, : self.info.first] = False  # a model may write the START before its text itself
        return [ImposePattern(self.denoiser.codec, chain, inside, known.masked_fill(~words, FREE))]

    @property
    def transitions(self) -> int:
        """How many transitions each step goes through for each token of a text."""
        return 0 if self.automaton is None else len(self.automaton.edges)

    def targets(self, canvas: Canvas) -> list[GuidanceTarget]:
        """For every control with a classifier: the classifier, and the labels it should find."""
        found, width = [], canvas.mask.shape[1]
        for control in self.controls:
            if control.head in self.classifiers:
                classifier = self.classifiers[control.head]
                labels = torch.tensor([control.wanted(self.info)] * len(canvas.mask), device=canvas.mask.device)
                if (labelling := classifier.labellings[control.head]).kind != "text":
                    labels = labels_on_canvas(labelling, labels, width, canvas.first)
                found.append(GuidanceTarget(classifier, control.head, labels, control.whole))
        return found

    # -- after sampling -----------------------------------------------------------------------------------------

    def finish_row(self, ids: list[int], given: Given, sampling: Sampling) -> tuple[list[int], Given, int]:
        """The text of a row as its model wrote it, what is given of it, and the classifier calls for it."""
        steps = sampling.steps - ("vectors" in self.model.capabilities.settings)  # not moved after the last
        return ids, given, len(self.asked_classifiers) * self.guidance.inner * steps

    def print_words(self, words: Sequence[str], given: Given) -> str:
        """Join words to a text that has what was given as it was given; a pattern was matched with natural spacing."""
        return join_words(words) if self.pattern else join_given(self.controls, self.info, words, given)

    @torch.no_grad()
    def classifier_nats(self, rows: list[list[int]]) -> list[float]:
        """−log p(requested labels | finished text) under the guiding classifiers, for word ids."""
        canvas, mask = self.canvas_of(rows)
        found = self.targets(Canvas(mask, self.info.first, torch.zeros_like(mask)))
        readers = [target for target in found if target.classifier.reads_words]
        targets = [target for target in found if not target.classifier.reads_words]
        nats = -read_labels(readers, certain_logits(canvas, self.model.vocabulary), mask)
        if targets:
            guide = Guidance(targets, self.model.denoiser, mask, self.guidance)
            t = torch.full((len(rows),), NEARLY_CLEAN, device=canvas.device)
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
        device = self.model.denoiser.codec.bias.device
        return self.model.lengths.canvas(*(part.to(device) for part in pad_token_rows(rows, self.info.max_words)))


def check_text(controls: Sequence[Control], text: str, unknown_words: Sequence[str] = ()) -> list[Json]:
    """Return the checkers' results for a finished text, one per control, as JSON values. If a template contains words
    that the model does not know, infilling is not judged, because their presence says nothing."""
    words, found = split_words(text), []
    for control in controls:
        check = control.check(text if control.reads_text else words)
        if unknown_words and check.satisfied and control.keeps_text:
            check = Check(None, None, "none: the model does not know all words")
        score = None if check.score is None else round(check.score, 4)
        about = {"name": control.name, "target": control.target, "satisfied": check.satisfied, "score": score}
        found.append({**about, "checker": check.checker, "guarantee": control.guarantee})
    return found
