"""`TextDiffusion`: load a model, ask it for text."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from difflm.controls import Control, Infill, ModelInfo
from difflm.controls.guidance import STANDARD, TOKENS, Classifier, GuidanceSettings
from difflm.controls.plan import ControlPlan, Edit, check_text
from difflm.controls.rivals import DECODERS, ControlDecoder, choose_decoder
from difflm.controls.sentence_classifier import SentenceClassifier
from difflm.data.batches import Batch
from difflm.data.chat import Chat, Message, encode_messages
from difflm.data.labels import Labelling
from difflm.data.text_metrics import most_central
from difflm.data.tokenizers import UNK, Tokenizer, Words
from difflm.data.words import join_words, split_words
from difflm.diffusion.denoiser import NO_SOURCE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Frame
from difflm.errors import UsageError
from difflm.generation.drafts import read_drafts
from difflm.generation.jobs import (
    BatchProgress,
    Chosen,
    Draft,
    FinishedRow,
    Generation,
    GenerationJob,
    Watch,
    batch_key,
    check_request,
    check_sampling,
    choose_by_classifiers,
    explain_unknown,
    finished_rows,
    plain_edit,
    run_jobs,
)
from difflm.generation.ranking import Rank, make_ranking
from difflm.generation.sharing import Pretrained
from difflm.models.base import NO_WORDS, LanguageModel, Sampling
from difflm.models.batching import SampleBatch, pad_token_rows
from difflm.models.diffusion import DiffusionModel
from difflm.models.inference import Inference
from difflm.training.classifier import heads_of, load_guide


class TextDiffusion(Pretrained):
    """A model that writes text by denoising all positions at once (or, for the twin, word by word)."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        config: dict[str, Any],
        inference: Inference | None = None,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.inference = inference or Inference(model)
        tokens = isinstance(model, DiffusionModel) and model.denoiser.codec.holds_tokens
        self.usual_guidance = TOKENS if tokens else STANDARD
        self.name = "this model"
        self.chat: Chat | None = None  # of a model that answers messages
        self.guides: list[Path] = []  # directories of classifiers; loaded when a control asks for one
        self._classifiers: dict[Path, Classifier | SentenceClassifier] = {}
        self._heads: dict[Path, set[str] | None] = {}

    def guided_by(self, folder: str | Path) -> "TextDiffusion":
        """Add a classifier that `difflm train` made for this model, or one of sentences; it returns itself to chain."""
        self._load_classifier(Path(folder))
        self.guides.append(Path(folder))
        return self

    def _load_classifier(self, folder: Path) -> Classifier | SentenceClassifier:
        if folder not in self._classifiers:
            guided: Any = self.model
            dtype = self.inference.dtype
            if isinstance(self.model, DiffusionModel):
                guided, dtype = self.model.denoiser, self.inference.denoiser.precision
            made = load_guide(folder, guided, self.tokenizer)
            # On a CPU, gradients through linear layers of half width are the slower ones.
            self._classifiers[folder] = made.guiding(dtype if self.device.type != "cpu" else None)
        return self._classifiers[folder]

    def _find_classifiers(self, heads: set[str]) -> list[Classifier | SentenceClassifier]:
        """The classifiers that know these heads; all where a head is missing, so that the error can name the others."""
        for folder in self.guides if heads else ():
            if folder not in self._heads:
                self._heads[folder] = heads_of(folder)
        known = {folder: self._heads[folder] for folder in self.guides} if heads else {}
        all_known = heads <= {head for some in known.values() for head in some or ()}
        chosen = [folder for folder, some in known.items() if some is None or some & heads or not all_known]
        return [self._classifiers.get(folder) or self._load_classifier(folder) for folder in chosen]

    @property
    def labellings(self) -> dict[str, Labelling]:
        """What its classifiers tell apart, by name; of two that know a label, the later one."""
        return {name: one for folder in self.guides for name, one in self._load_classifier(folder).labellings.items()}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def sampling(self, **changes: Any) -> Sampling:
        """The model's own settings with some changed; `None` leaves one as it is."""
        sampling = self.model.sampling.change(changes)
        check_sampling(sampling, self.model)
        return sampling

    def generate(self, n: int = 1, seed: int = 0, **asked: Any) -> list[Generation]:
        """`n` texts in the order of their numbers; text k of a seed is the same whatever n is. See `make_job`."""
        done: dict[int, Generation] = {}
        for _, made in self.run_jobs([self.make_job(n, seed, **asked)]):
            done |= made
        return [done[k] for k in sorted(done)]

    def infill(self, template: str, n: int = 1, seed: int = 0, **asked: Any) -> list[Generation]:
        """Fill the gaps of a text: `___` of any length, `___:4` of four words."""
        return self.generate(n, seed, controls=[Infill(template), *asked.pop("controls", ())], **asked)

    def batches(self, n: int, seed: int = 0, **asked: Any) -> Iterator[dict[int, Generation]]:
        """Finished texts by number, a batch at a time; `asked` as in `make_job`."""
        yield from (made for _, made in self.run_jobs([self.make_job(n, seed, **asked)]))

    def make_job(
        self,
        n: int,
        seed: int = 0,
        mbr: int = 1,
        candidates: int = 1,
        controls: Sequence[Control] = (),
        edit: Edit | None = None,
        guidance: GuidanceSettings | None = None,
        watch: Watch | None = None,
        source: str | Sequence[str] | None = None,
        rank: Rank | None = None,
        method: str | None = None,
        messages: Sequence[Message] | None = None,
        **settings: Any,
    ) -> GenerationJob:
        """A request, checked and bound to this model; what is wrong with it is raised.

        `controls` are asked of every text; `method` is the decoder by which a left-to-right model takes them. `edit`
        starts from a text. Of `candidates` the one is kept that the guiding classifiers find likeliest to obey, or that
        `rank` finds likeliest: "bound" is this model's own likelihood, else another's. Of `mbr` candidates the one
        most like the others is kept. `watch` is given every text at every step. Texts are written from `source`; of
        several sources each has `n` texts, one source after the other; of a model that chats it is what the user says,
        as are `messages`. `settings` are those of `Sampling`."""
        guidance = settings.pop("knobs", guidance)  # its name in earlier versions
        if self.chat is not None and isinstance(source, str):
            messages, source = [{"role": "user", "content": source}], None
        sources = [] if messages is None else [encode_messages(self.chat, messages)] * n
        if source is not None or self.model.source_longest:
            sources = [row for row in self.encode_sources(source) for _ in range(n)]
            n = len(sources)
        check_request(n, seed, mbr, candidates, None if rank else controls)
        sampling = self.sampling(**settings) if settings else self.model.sampling
        begin = self.encode([plain_edit(edit)])[0] if edit and "edits" in self.model.families else []
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
        if sampling.contrast and not sources and not (plan and (plan.infill or (edit and edit.keep))):
            raise UsageError("a contrast is with known words: give some with --infill, or with --edit and --keep.")
        if rank is not None:
            job.choose = make_ranking(self, rank, candidates, source, n, seed)
        elif mbr > 1:  # minimum Bayes risk: the candidate most like the others (Kumar & Byrne, 2004)
            job.choose = lambda _, __, made: [Chosen(most_central([one().tokens for one in group])) for group in made]
        elif candidates > 1 and plan is not None:
            job.choose = choose_by_classifiers(plan)
            job.together = candidates if isinstance(plan, ControlPlan) and plan.guidance.resample else 1
        return job

    def run_jobs(self, jobs: Sequence[GenerationJob]) -> Iterator[tuple[int, dict[int, Generation]]]:
        """The texts of several jobs as they are finished: the job's index in the list, and its texts by number.

        Rows of all jobs share batches, whatever is asked of each. Steps may differ; jobs that differ in other settings,
        or in how strongly they are guided, have batches of their own."""
        for progress in run_jobs(self.inference, jobs):
            batch, frame = progress.batch, progress.frame
            if not any(jobs[owner].wanted() for owner, _ in batch.owners):  # given up while it was on its way
                continue
            for owner, part in batch.owners if not progress.last else ():
                over = self.model.allows_mixed_steps and frame.step >= jobs[owner].sampling.steps
                if (watch := jobs[owner].watch) and not over:
                    watch(self.drafts(batch, frame, jobs[owner], part))
            if progress.finished:
                yield from self.finish(progress, jobs)

    def run_unchecked(self, jobs: Sequence[GenerationJob]) -> Iterator[list[FinishedRow]]:
        """The finished texts of several jobs as ids, a batch at a time; nothing is decoded, chosen or checked."""
        for progress in run_jobs(self.inference, jobs):
            if progress.last:
                yield finished_rows(self.model, progress, jobs)

    def count_rows(self, job: GenerationJob) -> Counter[tuple[Any, int]]:
        """How many rows it has of each batch key and canvas width: rows that agree in both share batches."""
        key = batch_key(job, self.model)
        return Counter((key, row.layout.width) for row in job.make_rows(self.model))

    def frames(self, controls: Sequence[Control], **settings: Any) -> int:
        """How many frames a text has at most. No classifier is loaded for this, so that a server can ask often."""
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
        """Controls bound to this model, behind a `prompt` of so many tokens; what it cannot do is refused here."""
        if not controls and edit is None and method is None and not self.model.always_planned:
            return None
        kind, decoder = self.config["method"], None
        if self.model.whole_text:
            raise UsageError(NO_WORDS.format(kind, self.model.whole_text))
        if method is not None:
            decoder = choose_decoder(method, self.model, kind, controls, edit, guidance)
        model, most, first = self.model, self.model.longest, 0
        if isinstance(model, DiffusionModel):
            most, first = model.lengths.max_words, model.lengths.first
            if prompt and model.always_planned:
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
        if decoder is not None:
            return decoder(model, info, controls, classifiers, guidance.size if guidance else None)
        assert isinstance(model, DiffusionModel)
        settings = self.guidance_settings(guidance) if guidance else self.usual_guidance
        return ControlPlan(model, self.inference.denoiser, info, controls, edit, classifiers[::-1], settings)

    def guidance_settings(self, asked: GuidanceSettings | None) -> GuidanceSettings:
        """Those that were asked for, or the usual ones of this kind of model."""
        if self.usual_guidance is TOKENS and asked is not None and asked.climb == "sign":
            raise UsageError("the original's guidance climbs in vectors; this model diffuses tokens. Give a number.")
        return asked or self.usual_guidance

    def warnings(self, plan: ControlPlan | ControlDecoder | None, edited: str = "") -> list[str]:
        """Why texts may not be what was asked for, a sentence each: given words that the model does not know."""
        unknown = plan.unknown_words if plan else [w for w in split_words(edited) if UNK in self.tokenizer.encode(w)]
        data = self.config.get("recipe", {}).get("data")  # a model that was put together by hand has no recipe
        return explain_unknown(unknown, self.name, self.tokenizer, data)

    def finish(
        self, progress: BatchProgress, jobs: Sequence[GenerationJob]
    ) -> Iterator[tuple[int, dict[int, Generation]]]:
        """The texts of the jobs that are finished, chosen and checked."""
        rows = finished_rows(self.model, progress, jobs)
        # The words of a GPU are on the host by now.
        seconds = (time.perf_counter() if progress.ended is None else progress.ended) - progress.begun
        for owner in progress.finished:
            job, texts = jobs[owner], dict[int, Generation]()
            own = [(row, partial(self._generation, row, job, seconds)) for row in rows if row.owner == owner]
            if job.choose is not None and job.wanted():
                texts = job.choose_texts(own, seconds)
            for row, decode in own if job.choose is None else ():
                if job.wanted():  # to check a text may take long
                    texts[row.sample] = decode()
            if texts and job.wanted():
                yield owner, texts

    def _generation(self, row: FinishedRow, job: GenerationJob, seconds: float) -> Generation:
        unknown = job.unknown.get(row.sample, {})
        if not isinstance(self.tokenizer, Words):
            text = self.tokenizer.decode(row.ids)
            words = split_words(text)
        else:
            words = self.tokenizer.tokens(row.ids)
            if unknown:  # words that somebody gave and the model has no id for
                words = [unknown.get(k) or self.tokenizer.words[token] for k, token in enumerate(row.ids)]
            text = join_words(words)
        # Of candidates the chosen one alone is checked.
        checks = check_text(job.plan.controls, text, job.plan.unknown_words) if job.plan and not job.choose else []
        about = seconds, job.seed, checks, job.warnings, row.classifier_calls
        return Generation(text, words, job.sampling.steps, row.calls, *about)

    def stream(self, n: int = 1, seed: int = 0, **asked: Any) -> Iterator[list[Draft]]:
        """Every text at every step: one list of drafts a step, batch after batch."""
        job = self.make_job(n, seed, watch=lambda drafts: None, **asked)
        for progress in run_jobs(self.inference, [job], in_order=True):
            if not progress.last:
                yield self.drafts(progress.batch, progress.frame, job, slice(None))

    def drafts(self, batch: SampleBatch, frame: Frame, job: GenerationJob, part: slice) -> list[Draft]:
        return read_drafts(self.model, batch, frame, part, lambda sample, ids: self._pieces_of(sample, ids, job))

    def _pieces_of(self, sample: int, ids: list[int], job: GenerationJob) -> list[str]:
        """The token at each position as text; words that were given and have no id as they were given."""
        given = job.unknown.get(sample, {})
        first = job.plan.info.first if job.plan else 0
        return [given.get(k - first) or self._pieces[token] for k, token in enumerate(ids)]

    @cached_property
    def _pieces(self) -> list[str]:
        """What a position may show as text, token by token; a special is empty."""
        return [*self.model.pieces] or ["".join(self.tokenizer.tokens([k])) for k in range(self.tokenizer.size)]

    def source_room(self) -> int:
        """Tokens of the longest source that the model reads; a model that reads none is refused."""
        if not self.model.source_longest:
            raise UsageError(f"{self.name} has learned texts without sources, and cannot write from one.")
        return self.model.source_longest

    def encode_sources(
        self, source: str | Sequence[str] | None, name: Callable[[int], str] = "source {}".format
    ) -> list[list[int]]:
        """Token ids of sources; what the model cannot read is refused by its number, or by the `name` of that."""
        if source is None:
            raise UsageError(f"{self.name} writes each text from a source: give one (--source, difflm translate).")
        room = self.source_room()
        rows = self.tokenizer.for_sources.encode_batch([source] if isinstance(source, str) else list(source))
        if not rows:
            raise UsageError("there is no source.")
        for number, row in enumerate(rows, start=1):
            if not row:
                raise UsageError(f"{name(number)} is empty.")
            if len(row) > room:
                raise UsageError(f"{name(number)} has {len(row)} tokens; this model reads {room}. Shorten it.")
        return rows

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Word ids of texts; one that the model cannot hold is refused by its number."""
        rows = self.tokenizer.encode_batch(list(texts))
        room = self.model.max_words
        for number, row in enumerate(rows, start=1):
            if not row:
                raise UsageError(f"text {number} is empty.")
            if len(row) > room:
                raise UsageError(f"text {number} has {len(row)} tokens; this model holds {room}. Shorten or split it.")
        return rows

    @torch.no_grad()
    def score(
        self,
        texts: Sequence[str],
        seed: int = 0,
        draws: int = 16,
        batch_size: int = 64,
        source: str | Sequence[str] | None = None,
    ) -> list[float]:
        """−log p of each text, or its bound, in nats. Models that learned pairs need the source of each text, or one of
        all."""
        rows, sources = self.encode(texts), []
        if source is not None or self.model.source_longest:
            sources = self.encode_sources(source) * (len(rows) if isinstance(source, str) else 1)
        return [float(v) for v in self.score_ids(rows, seed, draws, batch_size, sources=sources)]

    def score_ids(self, rows: list[list[int]], *settings: Any, **more: Any) -> torch.Tensor:
        """The same for ids; further arguments as of `score_ids_with_errors`."""
        return self.score_ids_with_errors(rows, *settings, **more)[0]

    @torch.no_grad()
    def score_ids_with_errors(
        self,
        rows: list[list[int]],
        seed: int = 0,
        draws: int = 16,
        batch_size: int = 64,
        numbers: Sequence[int] | None = None,
        sources: Sequence[Sequence[int]] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nats, and the standard errors that a bound's draws leave, in batches of like length; the answer does not
        depend on the batch size.

        `numbers` are those of the texts, 0, 1 … where none are given: texts of one number share their noise, so that
        candidates for one gap or source differ by what they say alone. `sources` are what each is written from."""
        if sources:
            self.source_room()
            if len(sources) != len(rows):
                raise UsageError(f"{len(rows):,} texts have {len(sources):,} sources: give each its own.")
        elif self.model.source_longest:
            raise UsageError(NO_SOURCE)
        samples = torch.arange(len(rows)) if numbers is None else torch.tensor(numbers)
        found = torch.zeros(2, len(rows))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            padded = pad_token_rows([rows[i] for i in chosen])
            told = pad_token_rows([sources[i] for i in chosen]) if sources else ()
            batch = Batch(*(part.to(self.device) for part in (*padded, *told)))
            noise = Noise(seed, samples[chosen].to(self.device))
            estimates = self.inference.nats_and_error(batch, noise, draws)
            found[:, chosen] = torch.stack([part.float().cpu() for part in estimates])
        return found[0], found[1]
