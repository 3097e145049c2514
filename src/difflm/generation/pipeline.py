"""`TextDiffusion`: load a model and generate texts with it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex, TypeVar, Unpack

from difflm.controls import CONTROLS, Control, Infill, ModelInfo
from difflm.controls.base import prepare_together
from difflm.controls.gaps import Edit
from difflm.controls.guidance import STANDARD, TOKENS, GuidanceSettings, LabelReader
from difflm.controls.phrases import find_template
from difflm.controls.plan import ControlPlan, check_text
from difflm.data.chat import encode_messages
from difflm.data.labels import Labelling
from difflm.data.meaning import list_changes
from difflm.data.text_metrics import most_central
from difflm.data.tokenizers import UNK, Tokenizer
from difflm.data.words import split_words
from difflm.errors import UsageError
from difflm.fast.inference import Inference
from difflm.generation import checks
from difflm.generation.jobs import (
    ARGUMENTS,
    Asked,
    Choice,
    Chosen,
    FinishedRow,
    GenerationJob,
    Settings,
    Written,
    WrittenFrom,
    choose_by_classifiers,
    list_arguments,
)
from difflm.generation.ranking import GapFit, check_repairs, make_ranking, read_in_order, restate
from difflm.generation.reading import Reader, list_texts
from difflm.generation.requests import Request
from difflm.generation.scheduler import run_list
from difflm.generation.texts import Generation, Texts
from difflm.generation.watching import Progress, Watcher
from difflm.methods.rivals import DECODERS, ControlDecoder, choose_decoder
from difflm.models.base import NO_WORDS, LanguageModel, Sampling
from difflm.models.batching import Row
from difflm.models.in_order import IN_ORDER
from difflm.models.sampling import SETTINGS, explain_setting
from difflm.player.frames import Draft
from difflm.runtime.files import Json
from difflm.runtime.threads import check_process
from difflm.training.classifier import heads_of, load_guide

R = TypeVar("R", bound=Request)
JUDGED_TOGETHER = 128  # requests of a list whose candidates a GPU reads at once
WHOLE, LAID_OUT = 12, 8  # candidates of a text that is written in order, or of so many words around required ones
WHOLE_SAMPLING: Settings = {"sampler": IN_ORDER, "temperature": 0.8, "top_p": 0.95}
SAID = ("candidates", "mbr", "rank", "repairs", "method", "messages", "watch")  # who says these chooses for himself
NOISED = "the text is noised and denoised, as was asked for: it may come to mean something else."


class TextDiffusion(Reader):
    """A model that writes text by denoising all positions at once, or word by word if it is autoregressive.

    Load one with `TextDiffusion.from_pretrained`. `generate`, `infill`, `edit` and `translate` return lists of texts.
    Given several templates, texts or sources, they return `n` texts for each, in order. `alternatives` and `score` read
    texts of any origin."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        config: Json,
        inference: Inference | None = None,
    ) -> None:
        super().__init__(model, tokenizer, config, inference)
        self._tokens = model.capabilities.state == "tokens"
        self.usual_guidance = TOKENS if self._tokens else STANDARD
        if "guidance" in config:
            self.usual_guidance = checks.parse_guidance(config["guidance"], self.usual_guidance)
        self.fixed_dtype, self.guides = inference is not None, []
        self._classifiers: dict[Path, LabelReader] = {}
        self._heads: dict[Path, set[str] | None] = {}

    def guided_by(self, folder: str | Path) -> "TextDiffusion":
        """Add a classifier trained for this model, or a sentence classifier, and return this model."""
        self._load_classifier(Path(folder))
        self.guides.append(Path(folder))
        return self

    def _load_classifier(self, folder: Path) -> LabelReader:
        if folder not in self._classifiers:
            guided: Any = self.model
            if whole := self.model.capabilities.whole_text:
                raise UsageError(NO_WORDS.format("this model", whole))
            dtype = self.inference.dtype
            if self.model.capabilities.denoises:
                guided, dtype = self.model.denoiser, self.inference.denoiser.precision
            made = load_guide(folder, guided, self.tokenizer)
            # On a CPU, gradients through linear layers of half width are the slower ones.
            self._classifiers[folder] = made.guiding(dtype if self.device.type != "cpu" else None)
        return self._classifiers[folder]

    def _find_classifiers(self, heads: set[str] | None) -> list[LabelReader]:
        """The classifiers that know these heads, of two the later; all if one is missing, since the error names them,
        or if no heads are given."""
        for folder in self.guides:
            if folder not in self._heads:
                self._heads[folder] = heads_of(folder)
        known = {folder: self._heads[folder] for folder in self.guides}
        asked = {head: folder for folder, some in known.items() for head in (heads or set()) & (some or set())}
        all_asked = heads is None or heads > asked.keys()
        chosen = [f for f, some in known.items() if all_asked or some is None or f in asked.values()]
        return [self._classifiers.get(folder) or self._load_classifier(folder) for folder in chosen]

    @property
    def labellings(self) -> dict[str, Labelling]:
        """Return the labels that its classifiers know, by name; if two know the same label, the later one counts."""
        return {name: one for c in self._find_classifiers(None) for name, one in c.labellings.items()}

    def to(self, device: str) -> "TextDiffusion":
        """Move the model to "cpu", "cuda", "mps" or the best of them ("auto"), and return it. Unless a dtype was given,
        the fastest one on that device is used."""
        chosen = checks.check_device(device)
        checks.check_dtype(self.inference.dtype if self.fixed_dtype else None, chosen)
        self.inference.clear_recorded()  # graphs that a model keeps would hold the memory of the other device
        self.model.to(chosen)
        dtype = self.inference.dtype if self.fixed_dtype else checks.fastest_dtype(chosen)
        self.inference = Inference(self.model, dtype, self.inference.compiled)
        self._classifiers = {}
        return self

    def __repr__(self) -> str:
        size = sum(weight.numel() for weight in self.model.parameters()) / 1e6
        kind = self.config.get("method", type(self.model).__name__)
        return f"TextDiffusion({self.name!r}: {kind}, {size:.1f}M parameters, {self.device})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            "a model is neither pickled nor copied: save it with lm.save_pretrained(folder), and load it where it is "
            "needed with TextDiffusion.from_pretrained(folder)."
        )

    def sampling(self, **changes: Any) -> Sampling:
        """Return the model's sampling settings with some changed; `None` keeps the model's own value."""
        if unknown := [name for name in changes if name not in SETTINGS]:
            if (name := unknown[0]) in CONTROLS:
                raise UsageError(f"{name} is a control: give controls=[{CONTROLS[name].__name__}(…)].")
            raise explain_setting(name, ["n", "seed", "progress", "frames", *(ARGUMENTS - {"usual"})])
        sampling = self.model.sampling.change(changes)
        checks.check_sampling(sampling, self.model)
        return sampling

    @list_arguments
    def generate(
        self,
        n: int = 1,
        seed: int = 0,
        *,
        controls: Control | Sequence[Control] | Sequence[Sequence[Control]] | None = (),
        edit: Edit | Sequence[Edit] | None = None,
        source: str | Sequence[str] | None = None,
        progress: bool | Progress = False,
        frames: bool = False,
        **asked: Unpack[Asked],
    ) -> Texts:
        """Generate `n` texts. Text k of a seed is the same whatever `n` is; only one text alone, with gaps, is the best
        of several if the model says so (`english`).

        `controls` apply to every text. `edit` is a text to start from, and `source` is what texts are written from.
        Given several lists of controls, several edits or several sources, there are `n` texts for each. For a chat
        model `source` is the user's message, and `messages` is a whole conversation.

        With `candidates=N`, N candidates are generated for each text, and the one that the classifiers score highest is
        kept; if gaps are filled or messages answered and no classifier is asked, the one that fits best. With `rank` it
        is the likeliest one, by this model's own likelihood ("bound") or by another model. If that is a left-to-right
        model, it can also repair each candidate, at most `repairs` times: the first word that it finds far less likely
        than another one is replaced by that, and if there is none, another word is tried. With `mbr=N` the candidate
        most like the others is kept. `guidance` is how strongly classifiers steer; `method` is the decoding method by
        which a left-to-right model takes controls.

        `progress=True` draws a progress bar; a function is called after every step with the number of finished steps
        and the total. `watch` is called after every step with the drafts of the texts. With `frames=True` each text
        keeps its drafts as `drafts`, which a notebook plays."""
        lists = isinstance(controls, Sequence) and len(controls) > 0 and isinstance(controls[0], list | tuple)
        wanted: Any = controls if lists else [controls]
        edits: Any = edit if isinstance(edit, list | tuple) else [edit]
        both = [(own, one) for own in wanted for one in edits]
        given = {"usual": all(asked.get(key) is None for key in SAID), "source": source, **asked}
        jobs = [self.make_job(n, seed, controls=own, edit=one, **given) for own, one in both]
        watcher = Watcher(self.model, jobs, progress, frames) if progress or frames else None
        done: dict[tuple[int, int], Generation] = {}
        for owner, made in self.run_jobs(jobs):
            done |= {(owner, k): text for k, text in made.items()}
        done = watcher.finish(done) if watcher else done
        return Texts(done[key] for key in sorted(done))

    def settle(self, request: R) -> R:
        """A request with the candidates that this model usually has, where it says nothing of any: one text alone, and
        texts that are said in other words."""
        if "candidates" in request.model_fields_set or request.each > 1 or request.source or request.method:
            return request
        edit, controls = request.edited(), request.controls()
        usual = WHOLE if self._restates(edit, controls) else 1 if edit else self._count_candidates(request.n, controls)
        return request.model_copy(update={"candidates": usual}) if usual > 1 else request

    def _restates(self, edit: Edit | None, others: Sequence[object]) -> bool:
        """Whether a text is said in other words, by a model that learned a phrase before those; strength, controls and
        the like ask for noise instead."""
        able = "restates" in self.gaps and self.model.capabilities.reads_in_order
        return able and edit is not None and edit.strength is None and not any(others)

    def _count_candidates(self, n: int, controls: Sequence[Control]) -> int:
        """How many candidates a text alone has, which the model itself can compare."""
        ordered = self.model.capabilities.reads_in_order
        if n > 1 or not (self.gaps or ordered):
            return 1
        info = ModelInfo(self.tokenizer, self.model.lengths.max_words, first=0)
        bound = [control.bind(info) for control in controls]
        template = find_template(controls, None)
        if any(control.head for control in bound):
            return 1
        if template is not None and template.parts[-1]:
            return int(self.gaps.get("candidates", 1))
        if not ordered:
            return 1
        if template is None and any(one.counts is not None for one in bound):
            return LAID_OUT
        return 1 if any(one.verbatim(info) for one in bound) else WHOLE

    @list_arguments
    def infill(self, template: str | Sequence[str], n: int = 1, seed: int = 0, **asked: Unpack[WrittenFrom]) -> Texts:
        """Fill the gaps of one or several texts: `___` has any length, `___:4` four words. The rest is kept."""
        own = asked.pop("controls", ()) or ()
        own = [own] if isinstance(own, Control) else own
        wanted: Any = {**asked, "controls": [[Infill(one), *own] for one in list_texts(template, "template")]}
        return self.generate(n, seed, **wanted)

    @list_arguments
    def edit(
        self,
        text: str | Sequence[str],
        n: int = 1,
        seed: int = 0,
        *,
        strength: float | None = None,
        keep: str | Sequence[str] = (),
        **asked: Unpack[WrittenFrom],
    ) -> Texts:
        """Say texts in other words, if the model was trained to: negations, numbers and names stay, and `changed` lists
        what does not. Other models, and all with controls or a `strength` (above 0, at most 1), noise and denoise them:
        their meaning may change. `keep` names words or phrases to keep."""
        edits = [Edit(one, strength, keep) for one in list_texts(text, "text")]
        return self.generate(n, seed, edit=edits, **asked)

    @list_arguments
    def translate(self, source: str | Sequence[str], n: int = 1, seed: int = 0, **asked: Unpack[Written]) -> Texts:
        """Write texts from one or several sources: translations, summaries, or whatever the model was trained on."""
        return self.generate(n, seed, source=source, **asked)

    def batches(self, n: int, seed: int = 0, **asked: Any) -> Iterator[dict[int, Generation]]:
        """Yield finished texts by number, one batch at a time. `asked` are the arguments of `make_job`."""
        yield from (made for _, made in self.run_jobs([self.make_job(n, seed, **asked)]))

    def make_job(self, n: int, seed: int = 0, **asked: Any) -> GenerationJob:
        """Check a request and bind it to this model; raises an error if it is wrong. Arguments as for `generate`."""
        job = self._parse(n, seed, asked)
        self._bind(job)
        job.each = max(job.mbr, job.candidates)
        if job.choose is None and (job.each > 1 or job.rank is not None):
            job.choose = self._choose_ranking(job)
        if job.controls or job.edited or job.told:
            job.warnings = self._warn(job)
        return job

    def _parse(self, n: int, seed: int, asked: dict[str, Any]) -> GenerationJob:
        """What is asked for, with its sources as ids; wrong numbers and contradictions are rejected."""
        known = {key: asked.pop(key) for key in [*asked] if key in ARGUMENTS}
        job, able = GenerationJob(n, seed, self.model.sampling, **known, settings=asked), self.model.capabilities
        if not isinstance(job.guidance, GuidanceSettings | None):
            job.guidance = checks.parse_guidance(job.guidance, self.usual_guidance)
        job.controls = [job.controls] if isinstance(job.controls, Control | str) else job.controls or ()
        if job.watch is not None and not callable(job.watch):
            raise UsageError(f"watch must be a function that takes a list of drafts, not {job.watch!r}.")
        if self.chat is not None and isinstance(job.source, str):
            job.messages, job.source = [{"role": "user", "content": job.source}], None
        if job.messages is not None:
            job.sources = [encode_messages(self.chat, job.messages)] * n
        if job.source is not None or able.source_limit:
            job.told = self.encode_sources(job.source)
            job.sources = [row for row in job.told for _ in range(n)]
            job.n = len(job.sources)
        if job.repairs:
            check_repairs(job.repairs, job.rank, [*job.controls, *([] if job.edit is None else [job.edit])])
        if job.edit is not None:
            job.edited = job.edit.text
            others = (job.controls, job.method, job.sources, job.mbr > 1, job.rank, job.messages)
            if self._restates(job.edit, others):
                job.choose = rewriting = restate(job.edit, self.gaps["restates"], self)
                job.template, job.hides, job.edit = rewriting.template, rewriting.before, None
        if not job.hides and job.method is None and not job.sources:
            job.template = next((control for control in job.controls if isinstance(control, Infill)), None)
        judges = job.template is not None or job.messages is not None or (able.reads_in_order and job.edit is None)
        job.by_fit = judges and not any(isinstance(one, Control) and one.head for one in job.controls)
        if job.usual and job.by_fit:
            job.candidates = WHOLE if job.hides else self._count_candidates(n, job.controls)
        chosen_by = None if job.rank or (job.candidates > 1 and job.by_fit) else job.controls
        checks.check_request(job.n, seed, job.mbr, job.candidates, chosen_by, bool(job.told))
        return job

    def _bind(self, job: GenerationJob) -> None:
        """Bind the controls to this model, and settle how texts are sampled, where the request says nothing else: in
        order if the model can and nothing is given behind a gap; a model may have settings of its own for gaps."""
        able, edit, plan = self.model.capabilities, job.edit, None
        if edit and "edits" in able.settings:
            if edit.keep or edit.strength is not None:
                raise UsageError("this model edits the text directly: leave --keep and --strength out.")
            (job.begin,), edit = self.encode([edit.text]), None
        controls = [job.template] if job.hides and job.template else job.controls
        if controls or edit or job.method or able.always_planned or able.reads_in_order:
            prompt = len(job.sources[0]) if job.sources else 0
            job.plan = plan = self.plan_controls(controls, edit, job.guidance, job.method, prompt)
        sampler, usual = job.settings.get("sampler"), dict[str, object]()
        if ((job.template and job.template.parts[-1]) or (plan and plan.laid_out)) and sampler != IN_ORDER:
            usual = {key: value for key, value in self.gaps.items() if key in SETTINGS}
        elif able.reads_in_order and sampler in (None, IN_ORDER) and plan and plan.ordered is not None:
            usual, plan.sampler = {**WHOLE_SAMPLING}, IN_ORDER
        elif able.reads_in_order and sampler == IN_ORDER:
            raise UsageError("the sampler in-order is for texts in which nothing is given behind a gap: leave it out.")
        if told := usual | {key: value for key, value in job.settings.items() if not usual or value is not None}:
            job.sampling = self.sampling(**told)
        if plan and job.sampling.beams and not plan.searches:
            raise UsageError(f"{job.method} chooses words one by one: leave --beams out.")
        if plan and plan.sampler:
            job.sampling = replace(job.sampling, sampler=plan.sampler)
        if job.sampling.contrast and not job.sources and not (plan and (plan.infill or (edit and edit.keep))):
            raise UsageError("--contrast needs known words: give some with --infill, or with --edit and --keep.")

    def _warn(self, job: GenerationJob) -> list[str]:
        """One sentence for each reason why texts may not be as requested, such as unknown words."""
        unknown = job.plan.unknown_words if job.plan else []
        if job.plan is None and UNK in job.begin:
            unknown = [word for word in split_words(job.edited) if UNK in self.tokenizer.encode(word)]
        data = self.config.get("recipe", {}).get("data")  # a model composed by hand has no recipe
        warnings = checks.explain_unknown(unknown, self.name, self.tokenizer, data) if unknown else []
        if given := " ".join(filter(None, (*(control.given() for control in job.controls), job.edited))):
            warnings += self.warn_of_language(given)
        if job.edit and "restates" in self.gaps:
            warnings += [NOISED]
        if len(job.told) == 1 and job.source is not None:
            (source,) = list_texts(job.source, "source")
            warnings += [*checks.warn_of_sources(job.told), *self.warn_of_language(source, source=True)]
        return warnings

    def _choose_ranking(self, job: GenerationJob) -> Choice:
        """How the best candidate of a text is chosen."""
        if job.rank is not None:
            return make_ranking(self, job.rank, job.candidates, job.told, job.n, job.seed, job.repairs)
        if job.mbr > 1:  # minimum Bayes risk: the candidate most like the others (Kumar & Byrne, 2004)
            return lambda _, __, made: [Chosen(most_central([one().tokens for one in group])) for group in made]
        assert job.plan is not None, "what does not rank has controls, gaps or messages"
        if not job.by_fit:
            return choose_by_classifiers(job.plan)
        self.check_reads_tokens()
        left, *_, right = job.template.known(job.plan.info).parts if job.template else ([], [])
        given = " ".join(control.given() or "" for control in job.controls)
        return GapFit(self, len(left), len(right), () if job.messages is None else job.sources[0], given)

    def run_jobs(self, jobs: Sequence[GenerationJob]) -> Iterator[tuple[int, dict[int, Generation]]]:
        """Yield the texts of several jobs as they are finished: the job's index in the list, and its texts by number.

        Rows of all jobs share batches, whatever is asked of each. Steps may differ; jobs that differ in other settings,
        or in how strongly they are guided, have batches of their own."""
        most = JUDGED_TOGETHER if self.inference.device.type != "cpu" and self.model.capabilities.reads_in_order else 1
        finished = self.finished_rows(jobs)
        while some := [*islice(finished, most)]:
            chosen = [row.ids for owner, rows, _ in some if jobs[owner].choose is not None for row in rows]
            self.costs = {}
            if most > 1:
                self.costs = dict(zip(map(tuple, chosen), read_in_order(self, chosen), strict=True))
            for owner, rows, seconds in some:
                if texts := self.finish_rows(jobs[owner], rows, seconds):
                    yield owner, texts

    def run_unchecked(self, jobs: Sequence[GenerationJob]) -> Iterator[list[FinishedRow]]:
        """Yield the finished texts of several jobs as ids, a batch at a time; nothing is chosen or checked."""
        yield from (rows for _, rows, _ in self.finished_rows(jobs))

    def finished_rows(
        self, jobs: Sequence[GenerationJob], is_own: Callable[[GenerationJob, Row], bool] | None = None
    ) -> Iterator[tuple[int, list[FinishedRow], float]]:
        """Yield finished rows of a job, with its index and their seconds. With `is_own`, other rows are not made."""
        numbers = {id(job): number for number, job in enumerate(jobs)}
        for progress in run_list(self, jobs, is_own):
            for job, drafts in progress.drafts:
                if job.watch is not None and job.wanted():  # not cancelled meanwhile
                    job.watch(drafts)
            for job, part in progress.parts:
                if job.wanted():
                    yield numbers[id(job)], *progress.read(job, part)

    def frames(self, controls: Sequence[Control], **settings: object) -> int:
        """Return the largest number of frames of a text. No classifier is loaded, so a server can call this often."""
        info = ModelInfo(self.tokenizer, self.model.lengths.max_words, first=0)
        settled = [n for control in controls if (n := control.length(info)) is not None]
        words = max([self.model.longest, *(control.min_length(info) for control in controls)])
        return self.model.frames(self.sampling(**settings), min(settled[0] if settled else words, self.model.max_words))

    def plan_controls(
        self,
        controls: Sequence[Control],
        edit: Edit | None = None,
        guidance: GuidanceSettings | None = None,
        method: str | None = None,
        prompt: int = 0,
    ) -> ControlPlan | ControlDecoder:
        """Bind controls to this model, after a `prompt` of this many tokens; rejects what the model cannot do."""
        check_process()
        model, able, kind = self.model, self.model.capabilities, self.config["method"]
        if able.whole_text:
            raise UsageError(NO_WORDS.format(kind, able.whole_text))
        decoder = None if method is None else choose_decoder(method, model, kind, controls, edit, guidance)
        if not able.denoises and decoder is None:
            known = " or ".join(name for name in DECODERS if isinstance(model, DECODERS[name].decodes))
            how = f": give --method {known}" if known else ", which takes none"
            raise UsageError(f"controls are for diffusion models; this one is {kind}{how}.")
        most, first = model.lengths.max_words, model.lengths.first
        if prompt and able.always_planned:
            most, first = most + first - prompt, 0
        heads = {control.head for control in controls if control.head}
        classifiers = self._find_classifiers(None if decoder else heads) if heads or decoder else []
        labels = {name: one for c in classifiers for name, one in c.labellings.items()}  # the later of two
        counts = {name: c.word_counts[k] for c in classifiers for name, k in c.numbers.items() if k in c.word_counts}
        told = [Labelling(**one) for one in self.config.get("labels", ())]
        info = ModelInfo(self.tokenizer, most, first, labels, counts, told)
        with prepare_together(controls, info, edit):
            if decoder is not None:
                return decoder(model, info, controls, classifiers, guidance.size if guidance else None)
            settings = self.guidance_settings(guidance) if guidance else self.usual_guidance
            return ControlPlan(model, self.inference.denoiser, info, controls, edit, classifiers[::-1], settings)

    def guidance_settings(self, asked: GuidanceSettings | None) -> GuidanceSettings:
        """Return the given guidance settings, or the default ones for this kind of model."""
        if self._tokens and asked is not None and asked.climb == "sign":
            raise UsageError("guidance `original` needs word vectors; this model diffuses tokens. Give a number.")
        return asked or self.usual_guidance

    def finish_rows(self, job: GenerationJob, rows: Sequence[FinishedRow], seconds: float) -> dict[int, Generation]:
        """The texts of finished rows of one job by number; none if the job is cancelled."""
        texts = dict[int, Generation]()
        if job.choose is not None and job.wanted():
            texts = job.choose_texts([(row, partial(self._generation, row, job, seconds)) for row in rows], seconds)
        for row in rows if job.choose is None else ():
            if job.wanted():  # checking a text may take long
                texts[row.sample] = self._generation(row, job, seconds)
        return texts if job.wanted() else {}

    def _generation(
        self, row: FinishedRow, job: GenerationJob, seconds: float, ids: list[int] | None = None
    ) -> Generation:
        ids = row.ids if ids is None else ids
        if self.tokenizer.whole_words and job.plan is not None:
            words, given = self.tokenizer.fill_words(ids, job.given.get(row.sample, {}))
            text = job.plan.print_words(words, given)
        else:
            text = self.tokenizer.decode(ids)
            words = split_words(text)
        # Of several candidates only the chosen one is checked.
        checked = check_text(job.plan.controls, text, job.plan.unknown_words) if job.plan and not job.choose else []
        about = seconds, job.seed, checked, job.warnings
        source = job.sources[row.sample // job.each - job.first] if job.sources else ()
        read = partial(self.read_tokens, ids, source)
        changed = list_changes(job.edited, text) if job.edited else []
        return Generation(text, words, job.sampling.steps, row.calls, *about, changed, row.classifier_calls, read=read)

    @list_arguments
    def stream(
        self,
        n: int = 1,
        seed: int = 0,
        *,
        controls: Control | Sequence[Control] | None = (),
        edit: Edit | None = None,
        source: str | Sequence[str] | None = None,
        **asked: Unpack[Asked],
    ) -> Iterator[list[Draft]]:
        """Yield every text at every step: one list of drafts per step, batch after batch."""
        asked = {"watch": lambda drafts: None, **asked}
        job = self.make_job(n, seed, controls=controls, edit=edit, source=source, **asked)
        for progress in run_list(self, [job], in_order=True):
            yield from (drafts for _, drafts in progress.drafts)
