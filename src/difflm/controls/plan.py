"""A list of controls bound to a model: checked in advance, then turned into layouts, steering and checks. The rows of a
batch may belong to several requests: each text has its own controls, and every network is called once for all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, groupby, pairwise, repeat, takewhile

import torch
from torch import Tensor

from difflm.controls import rules
from difflm.controls.base import Canvas, Check, Control, KnownText, KnownTokens, ModelInfo
from difflm.controls.exact import avoid_words, let_end, spaced_pieces
from difflm.controls.gaps import Edit, cut_gaps, fits_between
from difflm.controls.guidance import (
    STANDARD,
    Guidance,
    GuidanceSettings,
    GuidanceTarget,
    GuidedBelief,
    LabelReader,
    labels_on_canvas,
    merge_targets,
)
from difflm.controls.ordered import (
    LONG,
    SENTENCE,
    SPARE,
    FollowAutomaton,
    Ordered,
    end_sentences,
    is_final,
    join_prefix_rules,
    lay_out_words,
)
from difflm.controls.patterns.pattern import join_patterns
from difflm.controls.patterns.token_automata import ANY, Template, TokenAutomaton, chain_of, intersect
from difflm.controls.phrases import (
    agree_on_length,
    check_avoided,
    choose_phrases,
    find_required,
    find_template,
    join_given,
)
from difflm.controls.sentence_classifier import read_labels
from difflm.data.tokenizers import END, PAD, SPECIALS, START, UNK
from difflm.data.words import Given, join_words, split_words
from difflm.diffusion.base import Belief
from difflm.diffusion.condition import FREE, UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes.discrete import certain_logits
from difflm.diffusion.samplers.loop import BanTokens, Steering, Transform, Unsaid
from difflm.errors import UsageError
from difflm.models.base import LanguageModel
from difflm.models.batching import Layout, SampleBatch, max_batch_rows, pad_token_rows
from difflm.models.in_order import IN_ORDER
from difflm.models.sampling import Sampling
from difflm.models.word_nats import A_TOKEN, NEARLY_WRITTEN, leave_one_out_log_probs, nats_in_order
from difflm.runtime.files import Json

NEARLY_CLEAN = 1e-3  # the time at which a classifier reads a finished text
GAPS = 4  # the random stream that sizes free gaps
MOST_SIZES = 8  # the most sizes that are tried in a gap, from the smallest possible one on
FIRST_SIZES = 5  # of them, for a model that judges whole texts; the others if the largest of these is the best
DRAFT_STEPS = 3  # of a size, for a model that judges whole texts
AT_A_TIME = 320  # positions that a CPU reads, of drafts
TOGETHER = 128  # requests whose sizes are tried in common
OTHERS = 3  # tokens in the other gaps meanwhile
TRIES = 32  # how often sizes are drawn that do not fit together
SHARPNESS = 4.0  # turns scores into shares: sizes that are filled almost as well are drawn almost as often
BREADTH = 0.5  # of the nats of whole texts: candidates differ in their sizes


@dataclass
class GapSizes:
    """The sizes that each gap of a template may have, in tokens, and how large the share of each is.

    Each gap is filled with up to MOST_SIZES numbers of tokens that can hold what is asked of it, always writing the
    surest half of the remaining ones. The score of a size is the mean of their log-probabilities (compare CAL, arXiv
    2602.00476, which takes it from the first step); of a gap of so many words, the mean by word, since a word is no
    likelier for having sure pieces at its end. A model that also reads from left to right scores whole texts."""

    plan: "ControlPlan"
    known: KnownTokens
    words: Sequence[int | None]  # of counted gaps
    options: Sequence[Sequence[int]]
    usual: Sequence[int]  # sizes that fit together
    fits: Callable[[Sequence[int]], bool]
    shares: Sequence[Tensor] = ()  # of each gap, when they are known

    @cached_property
    def drafts(self) -> list[tuple[Layout, int, int, float]]:
        """A text for each size of each gap, beside the usual ones of the others; where that gap begins and ends, and by
        how many words, or tokens, the score is divided."""
        found = []
        for gap, size in ((gap, size) for gap, own in enumerate(self.options) for size in own):
            (layout,), _ = self.plan.lay_out(self.known, [[*self.usual[:gap], size, *self.usual[gap + 1 :]]])
            first = self.plan.info.first + sum(map(len, self.known.parts[: gap + 1])) + sum(self.usual[:gap])
            found.append((layout, first, first + size, float(self.words[gap] or size)))
        return found

    def next_rows(self, scores: Tensor) -> list[int]:
        """The rows to score next, given −∞ for those without a score: first FIRST_SIZES of each gap, then all of a gap
        whose best size was the largest one."""
        found, end = list[int](), 0
        most = FIRST_SIZES if self.plan.model.capabilities.reads_in_order else MOST_SIZES
        for own in scores.split([*map(len, self.options)]):
            end, done = end + len(own), int(own.isfinite().sum())
            if not done or (done < len(own) and int(own.argmax()) == done - 1):
                begin = end - len(own) + done
                found += range(begin, min(end, begin + most))
        return found

    def draw(self, u: Sequence[float]) -> Sequence[int]:
        """Draw sizes by uniform numbers, again as long as they do not fit together and numbers are left."""
        gaps, self.shares = len(self.options), self.shares or share_sizes([self])[0]
        for k in range(0, len(u) - gaps + 1, gaps):
            drawn = [
                sizes[int(torch.searchsorted(own.cumsum(0), one * float(own.sum())))]
                for sizes, own, one in zip(self.options, self.shares, u[k : k + gaps], strict=True)
            ]
            if self.fits(drawn):
                return drawn
        return self.usual


class ControlPlan:
    """The controls of a request, bound to a model."""

    joins = True  # whether its texts can join a batch that runs
    searches = True  # whether a beam search makes sense with it
    sampler: str | None = None  # the model's step rule; None: its own
    counted = False  # whether whole texts of so many words are asked for

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
        keeps: KnownText | None = self.infill or edit
        self.known = keeps.known(info) if keeps else None
        # Whether the model continues a text as far as it likes: a template that ends in its only gap.
        alone = self.infill is not None and self.infill.ends_open and len(self.infill.gaps) == 1
        self.continues = alone and model.lengths.continues
        asked = [*self.controls, edit] if edit else self.controls
        self.words, self.least = agree_on_length(asked, info)
        given, parts = (keeps.texts(info.tokenizer), keeps.parts) if keeps else ((), ())
        unknown = (word for text in given for word in info.tokenizer.unknown(text.strip()))
        self.unknown_words = list(dict.fromkeys(unknown))  # given words that the model does not know, each once
        # For each head the first classifier that has it; each is called once, however many heads it has.
        heads = {c.head: [one for one in classifiers if c.head in one.labellings] for c in self.controls if c.head}
        self.guided, self.classifiers = bool(heads), {head: some[0] for head, some in heads.items() if some}
        self.asked_classifiers = list({id(one): one for one in self.classifiers.values()}.values())
        self.pattern: Template | None = None
        if any(control.needs_automaton for control in asked):
            self.pattern = join_patterns(asked, info, self.words, self.least, model.denoiser.codec.bias, self.known)
            self.counted = self.end_counted(self.pattern)
        # Whether nothing determines the length, and the model writes its own end.
        free = self.words is None and not self.pattern and END not in model.lengths.forbidden
        self.open_ended = free and (self.continues or (self.least <= 1 and self.infill is None))
        self.automaton = self.pattern.automaton if self.pattern else None
        if avoided := [c for c in self.controls if c.forbids]:
            self.automaton = self.automaton or self.avoid_spellings(avoided)
            check_avoided(self.controls, info, parts)
        # The automaton takes care of avoided words, and a pattern of phrases.
        self.imposed = [c for c in asked if (guidance.impose or not c.head) and not (self.automaton and c.forbids)]
        if self.automaton is not None:
            self.chain_on = cache(partial(chain_of, self.automaton))  # all batches on a device share one
        self.every_word = any(c.head and c.length(info) is not None for c in self.controls)  # tags or a tree is asked
        worded = self.every_word or model.denoiser.codec.holds_tokens
        self.phrases = choose_phrases([] if self.pattern else self.imposed, info, parts, self.words, worded)
        self.extra = self.phrases.widen(None if self.continues else self.known, self.words) if self.phrases.asked else 0

    def avoid_spellings(self, avoided: Sequence[Control]) -> TokenAutomaton | None:
        """The automaton of texts that spell no avoided word; None if each is a token, or unknown."""
        words = [c.forbids for c in avoided]
        if all(c.bans(self.info) is not None for c in avoided):
            return None
        automaton = avoid_words(words, self.info.tokenizer)
        kept = self.known.parts if self.known and self.info.tokenizer.spells else []
        if not all(map(automaton.can_contain, kept)):
            raise UsageError(f"avoid {' or '.join(map(repr, words))}: the words that are kept contain it.")
        return let_end(automaton, self.model.lengths.ends) if self.open_ended else automaton

    @property
    def laid_out(self) -> bool:
        """Whether required words have their places before the others are written."""
        return self.counted and self.infill is None

    def end_counted(self, pattern: Template) -> bool:
        """Whether texts of so many words are asked of a model that judges them: these end where a sentence does."""
        tokenizer, infill = self.info.tokenizer, self.infill
        known = all(c.counts is not None or c.forbids or c.keeps_text or c.verbatim(self.info) for c in self.controls)
        whole = not self.edit and (infill is None or infill.ends_open)
        if all(c.counts is None for c in self.controls) or not (known and whole and tokenizer.spells):
            return False
        if not self.model.capabilities.reads_in_order:
            return False
        ended = replace(pattern, automaton=intersect(pattern.automaton, end_sentences(tokenizer)))
        self.pattern = ended if ended.lengths else pattern
        return bool(ended.lengths)

    @cached_property
    def ordered(self) -> Ordered | None:
        """How texts are written from left to right; None: they cannot be, by this model or as it is asked."""
        tokenizer, infill, known = self.info.tokenizer, self.infill, self.known
        begins = infill is None or (infill.ends_open and len(infill.gaps) == 1)
        told = self.edit or self.guided or self.phrases.asked or self.laid_out or self.info.first
        others = any(c.energy or c.prior(self.info) for c in self.imposed)
        if not self.model.capabilities.reads_in_order or not tokenizer.spells or not begins or told or others:
            return None
        given, most = (known.parts[0], known.most) if known else ((), self.info.max_words)
        if self.pattern:
            ends, most = self.counted or is_final(self.pattern.automaton), min(most, max(self.pattern.lengths))
            room = min(most, min(self.pattern.lengths) + SPARE) if self.counted else most
            return Ordered(self.pattern.automaton, given, 0.0 if ends else 1.0, room if ends else None)
        automaton = end_sentences(tokenizer, begins=known is None)
        if avoided := [c.forbids for c in self.controls if c.forbids]:
            automaton = intersect(automaton, avoid_words(avoided, tokenizer))
        if infill:
            (glued, _), *_ = infill.misfits(tokenizer)
            return Ordered(automaton, given, 0.0, min(most, len(given) + SENTENCE), glued)
        long = self.model.lengths.draw_words(torch.tensor([LONG]), range(1, most + 1))
        return Ordered(automaton, given, 0.5, int(long))

    # -- before sampling ----------------------------------------------------------------------------------------

    def layouts(
        self, samples: Tensor, seed: int, condition: Condition = UNCONDITIONAL, ranks: Tensor | None = None
    ) -> tuple[list[Layout], list[Given]]:
        """Layouts of samples, and for each what is given; with `ranks` [B], free lengths are the likeliest ones."""
        noise = Noise(seed, samples)
        if self.sampler == IN_ORDER and self.ordered:
            room, known = self.ordered.room, dict(enumerate(self.ordered.given))
            rooms = [room] * len(samples) if room else self.draw_totals(noise, condition, ranks)
            return [self.layout(n, known) for n in rooms], [{}] * len(samples)
        if self.pattern and self.laid_out:
            required = find_required(self.controls, self.info, ())
            phrases = [self.info.tokenizer.encode_inside(phrase) for phrase in required]
            shares = noise.uniform(0, TRIES * (2 + 2 * len(phrases)), stream=GAPS).tolist()
            last = self.info.tokenizer.encode(".")[-1]
            spread = min(c.counts for c in self.controls if c.counts is not None)
            own = phrases, last, spread, self.pattern, self.info.max_words
            return [self.layout(*lay_out_words(*own, u)) for u in shares], [{}] * len(samples)
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
            drawn = lengths.draw_words(u, [*own], condition, [*own.values()])
        elif ranks is None or self.infill:
            drawn = lengths.draw_words(u, range(least, most + 1), condition)
        else:
            drawn = lengths.rank_words(ranks, range(least, most + 1), condition)
        return [int(n) for n in drawn.tolist()]

    @cached_property
    def gap_sizes(self) -> GapSizes | None:
        """The sizes of a template's gaps that can hold the phrases, or that the pattern accepts, if the model can tell
        which are good: a masked model trained on gaps, whose lengths of whole texts say nothing about them. None: they
        are drawn from these lengths."""
        infill, text, tokenizer = self.infill, self.known, self.info.tokenizer
        learned = self.model.capabilities.learned_gaps and not tokenizer.whole_words
        if infill is None or text is None or not learned or infill.ends_open:
            return None
        if self.words is not None or self.least > text.least or (self.pattern and not tokenizer.byte_level):
            return None
        pattern, phrases = self.pattern, self.phrases.sizes
        written, gaps = sum(map(len, text.parts)), len(text.sizes)
        most = max(1, min(MOST_SIZES, (text.most - written) // gaps))

        def fits(sizes: Sequence[int]) -> bool:
            small = any(n < least for n, least in zip(sizes, text.sizes, strict=True))
            if small or written + sum(sizes) > text.most:
                return False
            if pattern:
                return pattern.automaton.accepts(text.join([ANY] * size for size in sizes))
            # A phrase may be lengthened by a part behind it that does not begin with a space.
            room_for = [size - (not part[:1].isspace()) for size, part in zip(sizes, infill.parts[1:], strict=True)]
            return not phrases or fits_between(phrases, room_for)

        usual = [max(least, min(OTHERS, most)) for least in text.sizes]
        if not fits(usual) and pattern:
            usual = pattern.draw_gaps(min(pattern.lengths), repeat(0.5))
            usual = larger if fits(larger := [max(OTHERS, size) for size in usual]) else usual
        elif not fits(usual):
            usual = [sum(phrases) + 1] * gaps
        options = []
        for gap in range(gaps):
            possible = (n for n in range(1, text.most) if fits([*usual[:gap], n, *usual[gap + 1 :]]))
            first = next(possible, usual[gap])
            options.append([first, *takewhile(lambda n: n < first + most, possible)])  # noqa: B023 (used at once)
        return GapSizes(self, text, infill.gaps, options, usual, fits)

    def lay_out(self, known: KnownTokens, widths: Sequence[Sequence[int]]) -> tuple[list[Layout], list[Given]]:
        """Layouts of texts whose free gaps have these widths, and for each what is given."""
        begin = self.info.tokenizer.encode(self.edit.text.strip()) if self.edit else ()
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

    def steer(self, batch: SampleBatch, parts: "Sequence[Part]") -> Steering:
        """The steering of a batch whose rows belong to this plan, or to several with the same guidance settings."""
        if self.sampler == IN_ORDER:
            rooms = [row.layout.positions for row in batch.rows]
            rooms += rooms[-1:] * (len(batch.lengths) - len(rooms))
            asked = [(plan.ordered, part) for plan, part in parts if plan and plan.ordered]  # all are
            own = [(part, FollowAutomaton(ordered, rooms[part], batch.lengths.device)) for ordered, part in asked]
            return Steering(batch.known, prefix_rules=[join_prefix_rules(own)])
        mask = torch.arange(batch.width, device=batch.lengths.device) < batch.lengths.unsqueeze(1)
        canvas = Canvas(mask, self.info.first, batch.known)
        imposed = join_own(parts, canvas, lambda plan, own: plan.token_rules(own) + plan.word_rules(own))
        if len(parts) == 1:
            targets = self.targets(canvas)
        else:
            wanted = [plan.targets(canvas.rows(part)) if plan else [] for plan, part in parts]
            targets = merge_targets(wanted, [part.stop - part.start for _, part in parts])
        readers = [target for target in targets if target.classifier.reads_words]
        targets = [target for target in targets if not target.classifier.reads_words]
        guidance = Guidance(targets, self.denoiser, mask, self.guidance) if targets else None
        if guidance and self.denoiser.codec.holds_tokens:  # tokens have no gradient: the belief is reweighted
            imposed, guidance = [GuidedBelief(guidance), *imposed], None
        if readers:  # after the rules: it cannot make forbidden words possible, and reads what the rules leave
            imposed = [*imposed, rules.ClimbEnergy(partial(read_labels, readers), mask, self.guidance.size)]
        # Required words come last: no other rule may change their positions.
        imposed = [*imposed, *join_own(parts, canvas, lambda plan, own: plan.last_rules(own) if plan.automaton else [])]
        return Steering(batch.known, batch.begin, rules=imposed, guide=guidance)

    def token_rules(self, canvas: Canvas) -> list[Transform]:
        """The rules for single positions."""
        codec, found = self.denoiser.codec, list[Transform]()
        if not self.open_ended:
            # A vocabulary of words may contain a newline; a text does not begin or end with it.
            newline = self.info.tokenizer.encode("\n")[0] if self.info.tokenizer.whole_words else UNK
            found.append(rules.ForbidSpecials(codec, canvas, newline, self.model.lengths.ends))
        if self.model.capabilities.unsaid:
            found.append(Unsaid(self.model.capabilities.unsaid, canvas.settled))
        for control in self.imposed:
            if (rule := control.rule(codec, self.info, canvas)) is not None:
                found.append(rule)
            if (prior := control.prior(self.info)) is not None:
                found.append(rules.WordPrior.count(*prior, canvas))
            if (energy := control.energy) is not None:
                read = lambda logits, there, log_p=energy: log_p(logits.softmax(-1), there, self.info)  # noqa: E731
                found.append(rules.ClimbEnergy(read, canvas.mask, name=control.name))
        return found

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
            apart = rules.KeepApart(codec, phrases.followers, spaced_pieces(tokenizer), canvas, phrases.openings)
        ends = self.model.lengths.ends if self.open_ended else ()
        return [rules.PlacePhrases(codec, phrases.ids, free, apart, ends)]

    def last_rules(self, canvas: Canvas) -> list[Transform]:
        """The rule that the whole text, without special tokens, is accepted, if there is an automaton."""
        if self.automaton is None:
            return []
        chain, known = self.chain_on(canvas.mask.device), canvas.known
        if known is None:
            return [rules.ImposePattern(self.denoiser.codec, chain, canvas.mask)]
        words = known >= len(SPECIALS)
        inside = canvas.mask & (words | ~canvas.settled)
        inside[:, : self.info.first] = False  # a model may write the START before its text itself
        return [rules.ImposePattern(self.denoiser.codec, chain, inside, known.masked_fill(~words, FREE))]

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
        found = self.targets(Canvas(mask, self.info.first))
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
        return self.every_word and self.model.denoiser.codec.adds_evidence and not self.model.capabilities.source_limit

    @torch.no_grad()
    def word_nats(self, rows: list[list[int]]) -> list[float]:
        """−Σ log p(word | all others) of finished texts under the model, for word ids."""
        canvas, mask = self.canvas_of(rows)
        t = self.model.times.time_of(torch.full((len(rows),), NEARLY_WRITTEN, device=canvas.device))
        log_p = leave_one_out_log_probs(self.model.denoiser, t, canvas, mask)
        nats = -log_p.gather(-1, canvas.unsqueeze(-1)).squeeze(-1)[:, self.info.first :]
        return [float(own[: len(row)].sum()) for own, row in zip(nats.cpu(), rows, strict=True)]

    def canvas_of(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The canvas of finished texts on the model's device, and which of its positions exist."""
        device = self.model.denoiser.codec.bias.device
        return self.model.lengths.canvas(*(part.to(device) for part in pad_token_rows(rows, self.info.max_words)))


Part = tuple[ControlPlan | None, slice]  # the plan of some rows of a batch; None: no controls


def join_own(
    parts: Sequence[Part], canvas: Canvas, make: Callable[[ControlPlan, Canvas], list[Transform]]
) -> list[Transform]:
    """The rules that the plans of a batch make for their rows of a canvas."""
    if len(parts) == 1 and (plan := parts[0][0]):
        return make(plan, canvas)
    return rules.join_rules([(part, make(plan, canvas.rows(part)) if plan else []) for plan, part in parts], canvas)


def size_gaps(asked: Sequence[GapSizes]) -> None:
    """Settle the sizes of gaps of many requests, in batches of rows of about the same length."""
    ordered = sorted(asked, key=lambda sizes: max(layout.positions for layout, *_ in sizes.drafts))
    for k in range(0, len(ordered), TOGETHER):
        for sizes, shares in zip(ordered[k:], share_sizes(ordered[k : k + TOGETHER]), strict=False):
            sizes.shares = shares


def share_sizes(asked: Sequence[GapSizes]) -> list[list[Tensor]]:
    """The shares of sizes of each request, for each gap, by their scores."""
    scores = [torch.full((len(sizes.drafts),), float("-inf"), dtype=torch.float64) for sizes in asked]
    for _ in range(2):
        wanted = [(sizes, sizes.next_rows(own), own) for sizes, own in zip(asked, scores, strict=True)]
        if wanted := [one for one in wanted if one[1]]:
            found = score_rows([(sizes, rows) for sizes, rows, _ in wanted])
            for (_, rows, own), new in zip(wanted, found, strict=True):
                own[rows] = new
    by_gap = [own.split([*map(len, sizes.options)]) for sizes, own in zip(asked, scores, strict=True)]
    return [[one.softmax(0) for one in own] for own in by_gap]


@torch.no_grad()
def score_rows(asked: Sequence[tuple[GapSizes, Sequence[int]]]) -> Sequence[Tensor]:
    """The scores of sizes of gaps: of each request, of some of its rows. Few rows are written at a time, since their
    logits take memory."""
    lead = asked[0][0].plan
    rows, *spans, sizes = zip(*(sizes.drafts[k] for sizes, own in asked for k in own), strict=True)
    model, mask_id, device = lead.model, lead.denoiser.process.mask_id, lead.denoiser.codec.bias.device
    count, width = len(rows), max(row.positions for row in rows)
    lines = [[row.known.get(k, mask_id) if k < row.positions else PAD for k in range(width)] for row in rows]
    x, place = torch.tensor(lines, device=device), torch.arange(width, device=device)
    lengths, first, end = torch.tensor([[row.positions for row in rows], *spans], device=device).unsqueeze(-1)
    mask, inside, total = place < lengths, (place >= first) & (place < end), torch.zeros(count, device=device)
    canvas = Canvas(mask, lead.info.first, torch.where(mask & (x != mask_id), x, FREE))
    counts, plans = [len(own) for _, own in asked], [sizes.plan for sizes, own in asked for _ in own]
    judged = model.capabilities.reads_in_order  # as whole texts: drafts in few calls are enough
    steps = DRAFT_STEPS if judged else max(line.count(mask_id) for line in lines).bit_length()
    room = max(1, AT_A_TIME // width) if x.device.type == "cpu" else max_batch_rows(model.vocabulary, width, "cuda")
    size = -(-count // -(-count // room))  # about equally many at a time
    for k in range(0, count, size):
        part, ends = slice(k, k + size), accumulate(len([*run]) for _, run in groupby(plans[k : k + size], id))
        runs = [(plans[k + begin], slice(begin, end)) for begin, end in pairwise([0, *ends])]
        x[part], total[part] = write_drafts(lead, x[part], canvas.rows(part), inside[part], runs, steps)
    if judged:
        nats = nats_in_order(lead.denoiser, x, mask)
        return (BREADTH * (A_TOKEN * mask - nats).sum(-1)).double().cpu().split(counts)
    return (SHARPNESS * total.double().cpu() / torch.tensor(sizes, dtype=torch.float64)).split(counts)


def write_drafts(
    lead: ControlPlan, x: Tensor, canvas: Canvas, inside: Tensor, parts: Sequence[Part], steps: int
) -> tuple[Tensor, Tensor]:
    """Write all masks of texts x, the surer half in each step, and return the log-probabilities of what is written
    `inside`, [B]. Required words and patterns decide what is written, not how likely it is."""
    denoiser, mask_id, total = lead.denoiser, lead.denoiser.process.mask_id, torch.zeros(len(x), device=x.device)
    first, placed = list[Transform](), list[Transform]()
    for step in range(steps):
        left, there = x == mask_id, canvas.mask & (x != mask_id)
        open_ = (canvas.mask & left).any(-1)
        t = (1 - there.sum(-1) / canvas.mask.sum(-1)).clamp(min=1e-3)
        asked = open_ if x.device.type == "cpu" else slice(None)  # on a CPU nothing is asked about texts without masks
        belief: Belief = denoiser(x[asked], t[asked], canvas.mask[asked])
        if len(belief.logits) < len(x):
            logits = belief.logits.new_zeros(len(x), *belief.logits.shape[1:])
            belief = replace(belief, logits=logits.masked_scatter(open_[:, None, None], belief.logits))
        if step == 0:  # a GPU computes its first answer meanwhile
            bans = BanTokens(denoiser.codec.token_mask(lead.model.lengths.forbidden))
            first = [bans, *join_own(parts, canvas, lambda plan, own: plan.token_rules(own))]
            placed = join_own(parts, canvas, lambda plan, own: plan.word_rules(own))
        for rule in first:
            belief = rule(belief, x, t)
        plain, written = belief.logits, Canvas(canvas.mask, canvas.first, torch.where(there, x, FREE))
        for rule in placed + join_own(parts, written, lambda plan, own: plan.last_rules(own)):
            belief = rule(belief, x, t)
        words = belief.tokens.unsqueeze(-1)
        sure, own = (
            (one.gather(-1, words) - one.logsumexp(-1, keepdim=True))[..., 0] for one in (belief.logits, plain)
        )
        order = sure.masked_fill(~left, float("-inf")).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        here = left & ((order < (left.sum(-1, keepdim=True) + 1) // 2) | (step + 1 == steps))
        # A phrase may be impossible for another rule.
        total = total + torch.where(here & inside, own.clamp(min=-100), 0.0).sum(-1)
        x = torch.where(here, belief.tokens, x)
    return x, total


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
