"""`TextDiffusion`: load a model, ask it for text."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from difflm.controls import Control, Infill, ModelInfo
from difflm.controls.batch_plan import steering_for
from difflm.controls.classifier import Classifier
from difflm.controls.guidance import STANDARD, TOKENS, GuidanceSettings
from difflm.controls.plan import ControlPlan, Edit
from difflm.data.batches import Batch
from difflm.data.labels import Labelling
from difflm.data.text_metrics import most_central
from difflm.data.tokenizers import Tokenizer, Words
from difflm.data.words import join_words, split_words
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers import Frame
from difflm.errors import UsageError
from difflm.generation.jobs import (
    BatchProgress,
    Draft,
    Generation,
    GenerationJob,
    Watch,
    allows_mixed_steps,
    batch_key,
    choose_by_classifiers,
    group_compatible,
)
from difflm.generation.unknown_words import warn_of_unknown_words
from difflm.generation.validation import (
    check_candidates,
    check_device,
    check_dtype,
    check_kinds,
    check_names,
    check_request,
    check_sampling,
)
from difflm.models.base import LanguageModel, Sampling
from difflm.models.batching import (
    Row,
    SampleBatch,
    denoise_batch,
    draw_rows,
    finished_ids,
    make_batches,
    pad_token_rows,
)
from difflm.models.diffusion import DiffusionModel
from difflm.models.inference import Inference
from difflm.runtime.threads import IsStopped, Job, run_parallel
from difflm.training.classifier import heads_of, load_guide
from difflm.training.run import find_run, load_run

T = TypeVar("T")


class TextDiffusion:
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
        self.name = "this model"
        self.guides: list[Path] = []  # directories of classifiers; loaded when a control asks for one
        self._classifiers: dict[Path, Classifier] = {}
        self._pieces: dict[int, str] = {}

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None, compile: bool = False
    ) -> "TextDiffusion":
        """A bundled model such as "e2e", or the directory of a run, on "cpu", "cuda", or the better of both ("auto").

        `dtype` is the network's arithmetic; weights and everything around the network stay in float32. None: the
        quickest for writing, and float32 for scores. `compile` fuses what a network of vectors does while it writes:
        minutes of compiling, a little at every new size, for a server that writes all day."""
        chosen = check_device(device)
        check_dtype(dtype, chosen)
        model, tokenizer, config = load_run(name_or_path, chosen)
        model.set_compute_dtype(None if dtype is torch.float32 else dtype)
        inference = Inference(model, fastest_dtype(chosen) if dtype is None else None, compile)
        made = cls(model, tokenizer, config, inference)
        made.name = find_run(name_or_path).resolve().name
        made.guides = sorted(find_run(name_or_path).glob("guide*/"))
        return made

    def guided_by(self, folder: str | Path) -> "TextDiffusion":
        """Add a classifier that `difflm train` made for this model; the same object, so that calls chain."""
        self._classifier(Path(folder))
        self.guides.append(Path(folder))
        return self

    def _classifier(self, folder: Path) -> Classifier:
        if not isinstance(self.model, DiffusionModel):
            raise UsageError(f"classifiers guide diffusion models; this one is {self.config['method']}.")
        if folder not in self._classifiers:
            made = load_guide(folder, self.model.denoiser, self.tokenizer)
            # On a processor the way back through narrow matrices is the slower one.
            self._classifiers[folder] = made.guiding(
                self.inference.denoiser.precision if self.device.type != "cpu" else None
            )
        return self._classifiers[folder]

    @property
    def labellings(self) -> dict[str, Labelling]:
        """What its classifiers tell apart, by name; of two that know a label, the later one."""
        return {name: one for folder in self.guides for name, one in self._classifier(folder).labellings.items()}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def sampling(self, **changes: Any) -> Sampling:
        """The model's own settings with some changed; `None` leaves one as it is."""
        check_names(changes)
        sampling = replace(self.model.sampling, **{k: v for k, v in changes.items() if v is not None})
        check_sampling(sampling, self.model)
        return sampling

    def generate(self, n: int = 1, seed: int = 0, **asked: Any) -> list[Generation]:
        """`n` texts in the order of their numbers; text k of a seed is the same whatever n is. See `batches`."""
        done: dict[int, Generation] = {}
        for batch in self.batches(n, seed, **asked):
            done |= batch
        return [done[k] for k in range(n)]

    def infill(self, template: str, n: int = 1, seed: int = 0, **asked: Any) -> list[Generation]:
        """Fill the gaps of a text: `___` of any length, `___:4` of four words."""
        return self.generate(n, seed, controls=[Infill(template), *asked.pop("controls", ())], **asked)

    def batches(
        self,
        n: int,
        seed: int = 0,
        mbr: int = 1,
        candidates: int = 1,
        controls: Sequence[Control] = (),
        edit: Edit | None = None,
        knobs: GuidanceSettings | None = None,
        watch: Watch | None = None,
        **settings: Any,
    ) -> Iterator[dict[int, Generation]]:
        """Finished texts by number, a tile at a time.

        `controls` are asked of every text. `edit` starts from a text instead of noise. Of `candidates` the one is kept
        that the guiding classifiers find likeliest to obey; of `mbr` candidates the one most like the others. `watch`
        sees every text at every step. `settings` are those of `Sampling`."""
        for _, made in self.together([self.work(n, seed, mbr, candidates, controls, edit, knobs, watch, **settings)]):
            yield made

    def work(
        self,
        n: int,
        seed: int = 0,
        mbr: int = 1,
        candidates: int = 1,
        controls: Sequence[Control] = (),
        edit: Edit | None = None,
        knobs: GuidanceSettings | None = None,
        watch: Watch | None = None,
        **settings: Any,
    ) -> GenerationJob:
        """A request that is refused here or can be worked on; the words are those of `batches`."""
        check_request(n, seed, mbr)
        check_candidates(candidates, mbr, controls)
        work = GenerationJob(
            n, seed, self.sampling(**settings), self.brief(controls, edit, knobs), max(mbr, candidates), watch
        )
        work.warnings = self.warnings(work.brief)
        if work.sampling.contrast and not (work.brief and (work.brief.infill or (edit and edit.keep))):
            raise UsageError("a contrast is with known words: give some with --infill, or with --edit and --keep.")
        if mbr > 1:  # minimum Bayes risk: the candidate most like the others (Kumar & Byrne, 2004)
            work.choose = lambda _, made: [most_central([g.tokens for g in group]) for group in made]
        elif candidates > 1:
            work.choose = choose_by_classifiers(work)
        return work

    def together(self, works: Sequence[GenerationJob]) -> Iterator[tuple[int, dict[int, Generation]]]:
        """The texts of several requests as they are finished: the request's number in the list, and texts by number.

        Rows of all requests share tiles, whatever is asked of each. Steps may differ; requests that differ in other
        settings, or in how strongly they are guided, stand in tiles of their own."""
        for seen in self._walked(works):
            yield from self._told(seen, works)

    def ends(self, works: Sequence[GenerationJob]) -> Iterator[tuple[SampleBatch, Frame]]:
        """The tiles of several requests and their last frames, as they are finished: texts as ids, unchecked."""
        for seen in self._walked(works):
            if seen.last:
                yield seen.tile, seen.waited().frame

    def _walked(self, works: Sequence[GenerationJob]) -> Iterator[BatchProgress]:
        for owner, work in enumerate(works):
            work.rows = self._rows(work, owner)
        self.inference.sync_weights()  # a GPU goes on with it: whoever asks that for a number before need not wait
        groups = ([row for work in group for row in work.rows] for group in group_compatible(works, self.model))
        found = (tile for rows in groups for tile in make_batches(self.model, rows, self.device))
        seen = self._on_cores(partial(self._seen, tile, works) for tile in found)
        awaited = self.device.type == "cpu" or self.model.syncs_with_device or any(work.watch for work in works)
        return seen if awaited else delay_by_one(seen)  # nobody looks but at the ends of texts

    def _on_cores(self, jobs: Iterable[Job[T]]) -> Iterator[T]:
        """Side by side on a CPU, each on one core, even where there is but one: so all texts are rounded alike."""
        if self.device.type == "cpu":
            yield from run_parallel(jobs)
        else:
            for job in jobs:
                yield from job(lambda: False)

    def shape(self, work: GenerationJob) -> Counter[tuple[Any, int]]:
        """How many rows it has of each kind and canvas width: those that agree in both share tiles."""
        return Counter((batch_key(work, self.model), row.layout.width) for row in self._rows(work))

    def frames(self, controls: Sequence[Control], **settings: Any) -> int:
        """How many frames a text has at most. No classifier is asked: a server may want to know in passing."""
        setting = ModelInfo(self.tokenizer, self.model.max_words, first=0)
        settled = [n for control in controls if (n := control.length(setting)) is not None]
        words = max([self.model.longest, *(control.min_length(setting) for control in controls)])
        return self.model.frames(self.sampling(**settings), min(settled[0] if settled else words, self.model.max_words))

    def brief(
        self, controls: Sequence[Control], edit: Edit | None = None, knobs: GuidanceSettings | None = None
    ) -> ControlPlan | None:
        """Controls bound to this model; what it cannot do is refused here."""
        if not controls and edit is None:
            return None
        if not isinstance(self.model, DiffusionModel):
            raise UsageError(f"controls are for diffusion models; this one is {self.config['method']}.")
        classifiers = [self._classifier(folder) for folder in self._knowing({c.head for c in controls if c.head})]
        knowing = {name: c for c in classifiers for name in c.labellings}  # of two that know a label, the later one
        check_kinds(controls, {name: c.labellings[name].kind for name, c in knowing.items()})
        setting = ModelInfo(
            self.tokenizer,
            self.model.max_words,
            self.model.lengths.first,
            {name: c.labellings[name].values for name, c in knowing.items()},
            {name: c.counted()[name] for name, c in knowing.items() if c.labellings[name].kind == "tags"},
        )
        return ControlPlan(
            self.model, self.inference.denoiser, setting, controls, edit, classifiers[::-1], self.knobs(knobs)
        )

    def warnings(self, brief: ControlPlan | None) -> list[str]:
        """Why texts may not be what was asked for, a sentence each."""
        return warn_of_unknown_words(self.name, self.config, self.tokenizer, brief.unknown_words if brief else ())

    def _knowing(self, heads: set[str]) -> list[Path]:
        """The classifiers that are asked; all where a head is missing, so that the refusal can name what is there."""
        known = {folder: heads_of(folder) for folder in self.guides} if heads else {}
        all_there = heads <= {head for some in known.values() for head in some or ()}
        return [folder for folder, some in known.items() if some is None or some & heads or not all_there]

    def knobs(self, asked: GuidanceSettings | None) -> GuidanceSettings:
        """Those that were asked for, or the usual ones of this kind of model."""
        tokens = isinstance(self.model, DiffusionModel) and self.model.denoiser.codec.holds_tokens
        if tokens and asked is not None and asked.climb == "sign":
            raise UsageError("the original's guidance climbs in vectors; this model diffuses tokens. Give a number.")
        return asked or (TOKENS if tokens else STANDARD)

    def _rows(self, work: GenerationJob, owner: int = 0) -> list[Row]:
        count = work.n * work.each
        if work.brief is None:
            return draw_rows(self.model, count, work.seed, owner)
        layouts, unknown = work.brief.layouts(torch.arange(count), work.seed)
        work.unknown = dict(enumerate(unknown))
        guided = work.brief.guided
        return [Row(work.seed, sample, layout, owner, guided) for sample, layout in enumerate(layouts)]

    def _frames(self, tile: SampleBatch, works: Sequence[GenerationJob]) -> Iterator[Frame]:
        parts = [(works[owner].brief, part) for owner, part in tile.owners]
        ways = [way for owner, part in tile.owners for way in [works[owner].span] * (part.stop - part.start)]
        own = [works[owner] for owner, _ in tile.owners]
        ends = None if any(work.watch for work in own) else {work.sampling.steps - 1 for work in own}
        steering = replace(steering_for(tile, parts, ways), watched_steps=ends)
        return denoise_batch(self.inference, tile, own[0].sampling, steering)

    def _seen(self, tile: SampleBatch, works: Sequence[GenerationJob], stopped: IsStopped) -> Iterator[BatchProgress]:
        """A tile's frames that somebody waits for; texts with fewer steps are done before the others."""
        start = time.perf_counter()
        ends = {owner: works[owner].sampling.steps for owner, _ in tile.owners}
        early = {steps for steps in ends.values() if steps < max(ends.values())}
        watched = any(works[owner].watch for owner in ends)
        for frame in self._frames(tile, works):
            if stopped() or not any(works[owner].wanted() for owner in ends):
                return
            done = [owner for owner, steps in ends.items() if steps in early and steps == frame.step + 1]
            if done or watched:
                yield BatchProgress(tile, frame, done, start, self._since(start))
        # A model may be done before its time is up.
        rest = [owner for owner, steps in ends.items() if steps not in early or steps > frame.step + 1]
        yield BatchProgress(tile, frame, rest, start, self._since(start), last=True)

    def _since(self, start: float) -> float | None:
        return time.perf_counter() - start if self.device.type == "cpu" else None

    def _told(self, seen: BatchProgress, works: Sequence[GenerationJob]) -> Iterator[tuple[int, dict[int, Generation]]]:
        """What a frame is for: those who watch, and texts that are done."""
        if not any(works[owner].wanted() for owner, _ in seen.tile.owners):  # given up while it was on its way
            return
        for owner, part in seen.tile.owners:
            gone = allows_mixed_steps(self.model) and seen.frame.step >= works[owner].sampling.steps
            if (watch := works[owner].watch) and not gone and not seen.last:
                watch(self._drafts(seen.tile, seen.frame, works[owner], part))
        if seen.done:
            yield from self._harvest(seen.waited(), works)

    def _harvest(
        self, seen: BatchProgress, works: Sequence[GenerationJob]
    ) -> Iterator[tuple[int, dict[int, Generation]]]:
        tile, frame = seen.tile, seen.frame
        calls = [None] * len(tile.rows) if frame.calls is None else frame.calls[: len(tile.rows)].tolist()
        rows = list(zip(tile.rows, finished_ids(self.model, tile, frame), calls, strict=True))
        # A GPU has been waited for by now.
        seconds = time.perf_counter() - seen.begun if seen.seconds is None else seen.seconds
        for owner in seen.done:
            work = works[owner]
            own = [(row.sample, ids, count) for row, ids, count in rows if row.owner == owner]
            if work.choose:
                work.ids |= {sample: ids for sample, ids, _ in own}
            made: dict[int, Generation] = {}
            for sample, ids, count in own:
                if not work.wanted():  # to check a text may take long
                    break
                made[sample] = self._generation(sample, ids, work, seconds, count)
            else:
                if ready := work.chosen(made):
                    yield owner, ready

    def _generation(
        self, sample: int, ids: list[int], work: GenerationJob, seconds: float, calls: int | None = None
    ) -> Generation:
        unknown = work.unknown.get(sample, {})
        if not isinstance(self.tokenizer, Words):
            text = self.tokenizer.decode(ids)
            words = split_words(text)
        else:
            words = self.tokenizer.tokens(ids)
            if unknown:  # words that somebody gave and the model has no id for
                words = [unknown.get(place) or self.tokenizer.words[token] for place, token in enumerate(ids)]
            text = join_words(words)
        # Of candidates the chosen one alone is checked.
        checks = work.brief.checks(text) if work.brief and not work.choose else []
        calls = self.model.calls(work.sampling, len(ids)) if calls is None else calls
        return Generation(text, words, work.sampling.steps, calls, seconds, work.seed, checks, work.warnings)

    def stream(
        self, n: int = 1, seed: int = 0, controls: Sequence[Control] = (), edit: Edit | None = None, **settings: Any
    ) -> Iterator[list[Draft]]:
        """Every text at every step: one list of drafts a step, tile after tile."""
        work = self.work(n, seed, controls=controls, edit=edit, watch=lambda drafts: None, **settings)
        self.inference.sync_weights()
        for tile in make_batches(self.model, self._rows(work), self.device):
            for seen in self._on_cores([partial(self._seen, tile, [work])]):
                if not seen.last:
                    yield self._drafts(tile, seen.frame, work, slice(None))

    def _drafts(self, tile: SampleBatch, frame: Frame, work: GenerationJob, part: slice) -> list[Draft]:
        changed = torch.ones_like(frame.mask) if frame.changed is None else frame.changed
        times = frame.t.reshape(len(frame.t), -1).mean(1)
        watched_steps = (times, tile.samples, tile.lengths, frame.tokens, frame.confidence, changed)
        there = slice(*part.indices(len(tile.rows)))
        rows = zip(*(tensor[there].tolist() for tensor in watched_steps), strict=True)
        return [
            Draft(sample, frame.step, t, self._pieces_of(sample, ids[:length], work), sure[:length], new[:length])
            for t, sample, length, ids, sure, new in rows
        ]

    def _pieces_of(self, sample: int, ids: list[int], work: GenerationJob) -> list[str]:
        """What stands at each position; words that somebody gave and the model has no id for as they were given."""
        given = work.unknown.get(sample, {})
        first = work.brief.setting.first if work.brief else 0
        return [given.get(place - first) or self._piece(token) for place, token in enumerate(ids)]

    def _piece(self, token: int) -> str:
        """How a token looks by itself; a special is nothing."""
        if token not in self._pieces:
            self._pieces[token] = "".join(self.tokenizer.tokens([token]))
        return self._pieces[token]

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
    def score(self, texts: Sequence[str], seed: int = 0, draws: int = 16, batch_size: int = 64) -> list[float]:
        """−log p of each text, or its bound, in nats."""
        return [float(v) for v in self.score_ids(self.encode(texts), seed, draws, batch_size)]

    def score_ids(
        self,
        rows: list[list[int]],
        seed: int = 0,
        draws: int = 16,
        batch_size: int = 64,
        first: int = 0,
        share_noise: int = 1,
    ) -> torch.Tensor:
        """The same for ids."""
        return self.score_ids_with_errors(rows, seed, draws, batch_size, first, share_noise)[0]

    @torch.no_grad()
    def score_ids_with_errors(
        self,
        rows: list[list[int]],
        seed: int = 0,
        draws: int = 16,
        batch_size: int = 64,
        first: int = 0,
        share_noise: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nats, and the standard errors that a bound's draws leave, in batches of like length; the answer does not
        depend on the batch size.

        `first` is the number of the first text, where a long list is scored in pieces. `share_noise` texts in a row share
        their noise: candidates for one place differ by what they say, not by their luck."""
        found = torch.zeros(2, len(rows))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            ids, lengths = pad_token_rows([rows[i] for i in chosen])
            noise = Noise(seed, (first + torch.tensor(chosen, device=self.device)) // share_noise)
            batch = Batch(ids.to(self.device), lengths.to(self.device))
            told = self.model.nats_and_error(batch, noise, draws)
            found[:, chosen] = torch.stack([part.float().cpu() for part in told])
        return found[0], found[1]


def delay_by_one(seen: Iterable[BatchProgress]) -> Iterator[BatchProgress]:
    """The end of a tile when the next one is under way: a GPU makes that one while these words are put together. What
    is there is told even where the next one fails; texts that are done before their tile is come at once."""
    waiting: list[BatchProgress] = []
    try:
        for one in seen:
            if one.last:
                one = one.sent()
                yield from waiting
                waiting = [one]
            else:
                yield one
    except Exception:
        yield from waiting
        raise
    yield from waiting


def fastest_dtype(device: torch.device) -> torch.dtype | None:
    """What networks write in: bfloat16 on GPUs, and on processors that have matrix units for it; texts are as good
    (docs/performance.md). None: float32."""
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else None
