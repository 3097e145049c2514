"""`TextDiffusion`: load a model and generate texts with it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from difflm.controls import Control, Infill, ModelInfo
from difflm.controls.guidance import STANDARD, TOKENS, Classifier, GuidanceSettings
from difflm.controls.patterns.pattern import prepare_together
from difflm.controls.plan import ControlPlan, Edit, check_text
from difflm.controls.sentence_classifier import SentenceClassifier
from difflm.data.chat import Chat, Message, encode_messages
from difflm.data.labels import Labelling
from difflm.data.text_metrics import most_central
from difflm.data.tokenizers import UNK, Tokenizer
from difflm.data.words import split_words
from difflm.diffusion.samplers.loop import Frame
from difflm.errors import UsageError
from difflm.fast.inference import Inference
from difflm.generation.drafts import read_drafts
from difflm.generation.jobs import (
    BatchProgress,
    Chosen,
    Draft,
    FinishedRow,
    Generation,
    GenerationJob,
    Watch,
    check_device,
    check_dtype,
    check_request,
    check_sampling,
    choose_by_classifiers,
    explain_unknown,
    fastest_dtype,
    finished_rows,
    parse_guidance,
    plain_edit,
    run_jobs,
    warn_of_sources,
)
from difflm.generation.ranking import GapFit, Rank, check_repairs, make_ranking
from difflm.generation.reading import Reader, list_texts
from difflm.generation.settings import Asked, Written, WrittenFrom, check_names, list_arguments
from difflm.generation.sharing import Pretrained
from difflm.generation.texts import Texts
from difflm.generation.watching import Progress, Watcher
from difflm.methods.rivals import DECODERS, ControlDecoder, choose_decoder
from difflm.models.base import NO_WORDS, LanguageModel, Sampling
from difflm.models.batching import SampleBatch
from difflm.runtime.threads import check_process
from difflm.training.classifier import heads_of, load_guide


class TextDiffusion(Pretrained, Reader):
    """A model that writes text by denoising all positions at once, or word by word if it is autoregressive.

    Load one with `TextDiffusion.from_pretrained`. `generate`, `infill`, `edit` and `translate` return lists of texts.
    Given several templates, texts or sources, they return `n` texts for each, in order. `alternatives` and `score` read
    texts of any origin."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        config: dict[str, Any],
        inference: Inference | None = None,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.inference = inference or Inference(model)
        self._tokens = model.capabilities.state == "tokens"
        self.usual_guidance = TOKENS if self._tokens else STANDARD
        if "guidance" in config:
            self.usual_guidance = parse_guidance(config["guidance"], self.usual_guidance)
        self.name = "this model"
        self.chat: Chat | None = None  # for chat models
        self.fixed_dtype = inference is not None
        self.guides: list[Path] = []  # directories of classifiers; loaded when a control asks for one
        self._classifiers: dict[Path, Classifier | SentenceClassifier] = {}
        self._heads: dict[Path, set[str] | None] = {}

    def guided_by(self, folder: str | Path) -> "TextDiffusion":
        """Add a classifier trained for this model, or a sentence classifier, and return this model."""
        self._load_classifier(Path(folder))
        self.guides.append(Path(folder))
        return self

    def _load_classifier(self, folder: Path) -> Classifier | SentenceClassifier:
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

    def _find_classifiers(self, heads: set[str]) -> list[Classifier | SentenceClassifier]:
        """The classifiers that know these heads, of two that know one the later; all if a head is missing, so that the
        error can name the others."""
        for folder in self.guides if heads else ():
            if folder not in self._heads:
                self._heads[folder] = heads_of(folder)
        known = {folder: self._heads[folder] for folder in self.guides} if heads else {}
        asked = {head: folder for folder, some in known.items() for head in heads & (some or set())}
        some_missing = heads > asked.keys()
        chosen = [f for f, some in known.items() if some is None or f in asked.values() or some_missing]
        return [self._classifiers.get(folder) or self._load_classifier(folder) for folder in chosen]

    @property
    def labellings(self) -> dict[str, Labelling]:
        """Return the labels that its classifiers know, by name; if two know the same label, the later one counts."""
        return {name: one for folder in self.guides for name, one in self._load_classifier(folder).labellings.items()}

    def to(self, device: str) -> "TextDiffusion":
        """Move the model to "cpu", "cuda", "mps" or the best of them ("auto"), and return it. Unless a dtype was given,
        the fastest one on that device is used."""
        chosen = check_device(device)
        check_dtype(self.inference.dtype if self.fixed_dtype else None, chosen)
        self.inference.clear_recorded()  # graphs that a model keeps would hold the memory of the other device
        self.model.to(chosen)
        dtype = self.inference.dtype if self.fixed_dtype else fastest_dtype(chosen)
        self.inference = Inference(self.model, dtype, self.inference.compiled)
        self._classifiers = {}
        return self

    def __repr__(self) -> str:
        size = sum(weight.numel() for weight in self.model.parameters()) / 1e6
        kind = self.config.get("method", type(self.model).__name__)
        return f"TextDiffusion({self.name!r}: {kind}, {size:.1f}M parameters, {self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a model is neither pickled nor copied: save it with lm.save_pretrained(folder), and load it where it is "
            "needed with TextDiffusion.from_pretrained(folder)."
        )

    def sampling(self, **changes: Any) -> Sampling:
        """Return the model's sampling settings with some changed; `None` keeps the model's own value."""
        check_names(changes)
        sampling = self.model.sampling.change(changes)
        check_sampling(sampling, self.model)
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
        """Generate `n` texts. Text k of a seed is the same whatever `n` is.

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
        jobs = [self.make_job(n, seed, controls=own, edit=one, source=source, **asked) for own, one in both]
        watcher = Watcher(self, jobs, progress, frames) if progress or frames else None
        done: dict[tuple[int, int], Generation] = {}
        for owner, made in self.run_jobs(jobs):
            done |= {(owner, k): text for k, text in made.items()}
        done = watcher.finish(done) if watcher else done
        return Texts(done[key] for key in sorted(done))

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
        strength: float = Edit.strength,
        keep: str | Sequence[str] = (),
        **asked: Unpack[WrittenFrom],
    ) -> Texts:
        """Rewrite one or several texts lightly. `strength`, above 0 and at most 1, is how much noise is added first;
        `keep` names words or phrases to keep."""
        edits = [Edit(one, strength, keep) for one in list_texts(text, "text")]
        return self.generate(n, seed, edit=edits, **asked)

    @list_arguments
    def translate(self, source: str | Sequence[str], n: int = 1, seed: int = 0, **asked: Unpack[Written]) -> Texts:
        """Write texts from one or several sources: translations, summaries, or whatever the model was trained on."""
        return self.generate(n, seed, source=source, **asked)

    def batches(self, n: int, seed: int = 0, **asked: Any) -> Iterator[dict[int, Generation]]:
        """Yield finished texts by number, one batch at a time. `asked` are the arguments of `make_job`."""
        yield from (made for _, made in self.run_jobs([self.make_job(n, seed, **asked)]))

    def make_job(
        self,
        n: int,
        seed: int = 0,
        mbr: int = 1,
        candidates: int = 1,
        controls: Control | Sequence[Control] | None = (),
        edit: Edit | None = None,
        guidance: GuidanceSettings | float | None = None,
        watch: Watch | None = None,
        source: str | Sequence[str] | None = None,
        rank: Rank | None = None,
        repairs: int = 0,
        method: str | None = None,
        messages: Sequence[Message] | None = None,
        **settings: Any,
    ) -> GenerationJob:
        """Check a request and bind it to this model; raises an error if it is wrong. Arguments as for `generate`."""
        guidance = settings.pop("knobs", guidance)  # its name in earlier versions
        if not isinstance(guidance, GuidanceSettings | None):
            guidance = parse_guidance(guidance, self.usual_guidance)
        controls = [controls] if isinstance(controls, Control | str) else controls or ()
        if watch is not None and not callable(watch):
            raise UsageError(f"watch must be a function that takes a list of drafts, not {watch!r}.")
        if self.chat is not None and isinstance(source, str):
            messages, source = [{"role": "user", "content": source}], None
        sources = [] if messages is None else [encode_messages(self.chat, messages)] * n
        told = self.encode_sources(source) if source is not None or self.model.capabilities.source_limit else []
        if told:
            sources = [row for row in told for _ in range(n)]
            n = len(sources)
        template = next((one for one in controls if isinstance(one, Infill) and not (method or sources)), None)
        heads = any(one.head for one in controls if isinstance(one, Control))
        gap = None if heads else template
        fits = gap is not None or (messages is not None and not heads)  # the model chooses
        if repairs:
            check_repairs(repairs, rank, [*controls, *([] if edit is None else [edit])])
        check_request(n, seed, mbr, candidates, None if rank or fits else controls, bool(told))
        if template is not None and template.parts[-1]:  # a model may have other settings for gaps than for whole texts
            settings = self.config.get("gaps", {}) | {key: v for key, v in settings.items() if v is not None}
        sampling = self.sampling(**settings) if settings else self.model.sampling
        begin = self.encode([plain_edit(edit)])[0] if edit and "edits" in self.model.capabilities.settings else []
        plan = self.plan_controls(
            controls, None if begin else edit, guidance, method, len(sources[0]) if sources else 0
        )
        if isinstance(plan, ControlDecoder):
            if sampling.beams and not plan.searches:
                raise UsageError(f"{method} chooses words one by one: leave --beams out.")
            sampling = replace(sampling, sampler=plan.sampler or sampling.sampler)
        job = GenerationJob(n, seed, sampling, plan, max(mbr, candidates), watch, sources=sources, begin=begin)
        if (plan is not None and plan.unknown_words) or UNK in begin:
            job.warnings = self.warnings(plan, edit.text if edit else "")
        if given := " ".join(filter(None, (*(one.given() for one in controls), edit.text if edit else ""))):
            job.warnings = [*job.warnings, *self.warn_of_language(given)]
        if len(told) == 1:
            own = list_texts(source, "source")[0]
            job.warnings = [*job.warnings, *warn_of_sources(told), *self.warn_of_language(own, source=True)]
        if sampling.contrast and not sources and not (plan and (plan.infill or (edit and edit.keep))):
            raise UsageError("--contrast needs known words: give some with --infill, or with --edit and --keep.")
        if rank is not None:
            job.choose = make_ranking(self, rank, candidates, told, n, seed, repairs)
        elif mbr > 1:  # minimum Bayes risk: the candidate most like the others (Kumar & Byrne, 2004)
            job.choose = lambda _, __, made: [Chosen(most_central([one().tokens for one in group])) for group in made]
        elif candidates > 1 and fits and plan is not None:
            self.check_reads_tokens()
            left, *_, right = gap.known(plan.info) if gap else ([], [])
            job.choose = GapFit(self, len(left), len(right), () if messages is None else sources[0])
        elif candidates > 1 and plan is not None:
            job.choose = choose_by_classifiers(plan)
        return job

    def run_jobs(self, jobs: Sequence[GenerationJob]) -> Iterator[tuple[int, dict[int, Generation]]]:
        """Yield the texts of several jobs as they are finished: the job's index in the list, and its texts by number.

        Rows of all jobs share batches, whatever is asked of each. Steps may differ; jobs that differ in other settings,
        or in how strongly they are guided, have batches of their own."""
        for progress in run_jobs(self.inference, jobs):
            batch, frame = progress.batch, progress.frame
            if not any(jobs[owner].wanted() for owner, _ in batch.owners):  # cancelled meanwhile
                continue
            for owner, part in batch.owners if not progress.last else ():
                over = self.model.capabilities.mixed_steps and frame.step >= jobs[owner].sampling.steps
                if (watch := jobs[owner].watch) and not over:
                    watch(self.drafts(batch, frame, jobs[owner], part))
            if progress.finished:
                yield from self.finish(progress, jobs)

    def run_unchecked(self, jobs: Sequence[GenerationJob]) -> Iterator[list[FinishedRow]]:
        """Yield the finished texts of several jobs as ids, one batch at a time; nothing is decoded, chosen or
        checked."""
        for progress in run_jobs(self.inference, jobs):
            if progress.last:
                yield finished_rows(self.model, progress, jobs)

    def frames(self, controls: Sequence[Control], **settings: Any) -> int:
        """Return the largest number of frames of a text. No classifier is loaded, so a server can call this often."""
        info = ModelInfo(self.tokenizer, self.model.max_words, first=0)
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
    ) -> ControlPlan | ControlDecoder | None:
        """Bind controls to this model, after a `prompt` of this many tokens; rejects what the model cannot do."""
        if not controls and edit is None and method is None and not self.model.capabilities.always_planned:
            return None
        check_process()
        kind, decoder = self.config["method"], None
        if self.model.capabilities.whole_text:
            raise UsageError(NO_WORDS.format(kind, self.model.capabilities.whole_text))
        if method is not None:
            decoder = choose_decoder(method, self.model, kind, controls, edit, guidance)
        model, most, first = self.model, self.model.longest, 0
        if model.capabilities.denoises:
            most, first = model.max_words, model.lengths.first
            if prompt and model.capabilities.always_planned:
                most, first = most + first - prompt, 0
        elif decoder is None:
            known = " or ".join(name for name in DECODERS if isinstance(model, DECODERS[name].decodes))
            how = f": give --method {known}" if known else ", which takes none"
            raise UsageError(f"controls are for diffusion models; this one is {kind}{how}.")
        heads = {control.head for control in controls if control.head}
        classifiers = self._find_classifiers(heads) if decoder is None else [*map(self._load_classifier, self.guides)]
        labellings = {name: one for c in classifiers for name, one in c.labellings.items()}  # the later of two
        info = ModelInfo(
            self.tokenizer,
            most,
            first,
            {name: one.values for name, one in labellings.items()},
            {name: c.word_counts[k] for c in classifiers for name, k in c.numbers.items() if k in c.word_counts},
            {name: one.kind for name, one in labellings.items()},
            [Labelling(**one) for one in self.config.get("labels", ())],
        )
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

    def warnings(self, plan: ControlPlan | ControlDecoder | None, edited: str = "") -> list[str]:
        """Return one sentence for each reason why texts may not be as requested, such as unknown words."""
        unknown = plan.unknown_words if plan else [w for w in split_words(edited) if UNK in self.tokenizer.encode(w)]
        data = self.config.get("recipe", {}).get("data")  # a model composed by hand has no recipe
        return explain_unknown(unknown, self.name, self.tokenizer, data)

    def finish(
        self, progress: BatchProgress, jobs: Sequence[GenerationJob]
    ) -> Iterator[tuple[int, dict[int, Generation]]]:
        """Choose, decode and check the texts of the jobs that are finished."""
        own = defaultdict[int, list[FinishedRow]](list)
        for row in finished_rows(self.model, progress, jobs):
            own[row.owner].append(row)
        seconds = progress.seconds_since(progress.begun)
        for owner in progress.finished:
            if texts := self.finish_job(jobs[owner], own[owner], seconds):
                yield owner, texts

    def finish_job(self, job: GenerationJob, rows: Sequence[FinishedRow], seconds: float) -> dict[int, Generation]:
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
        checks = check_text(job.plan.controls, text, job.plan.unknown_words) if job.plan and not job.choose else []
        about = seconds, job.seed, checks, job.warnings, row.classifier_calls
        source = job.sources[row.sample // job.each - job.first] if job.sources else ()
        read = partial(self.read_tokens, ids, source)
        return Generation(text, words, job.sampling.steps, row.calls, *about, read=read)

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
        for progress in run_jobs(self.inference, [job], in_order=True):
            if not progress.last:
                yield self.drafts(progress.batch, progress.frame, job, slice(None))

    def drafts(self, batch: SampleBatch, frame: Frame, job: GenerationJob, part: slice) -> list[Draft]:
        """Return the drafts of a job, whose texts are `part` of a batch, at one step."""
        return read_drafts(self.model, batch, frame, part, lambda sample, ids: self._pieces_of(sample, ids, job))

    def _pieces_of(self, sample: int, ids: list[int], job: GenerationJob) -> list[str]:
        """The token at each position as text; given words without an id are shown as they were given."""
        given, first = job.given.get(sample, {}), job.plan.info.first if job.plan else 0
        return [given.get(k - first, ("", None))[1] or self._pieces[token] for k, token in enumerate(ids)]
