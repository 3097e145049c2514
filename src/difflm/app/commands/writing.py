"""What `difflm generate` and `difflm translate` share: requests are read and checked, and their texts written in order,
to the screen or to a file that a killed command continues, alone or as several processes."""

import hashlib
import json
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflm.app.commands.options import check_reads_sources, load_model, name_errors
from difflm.app.console import Bar, note
from difflm.app.live_view import TerminalView
from difflm.controls.base import ModelInfo
from difflm.controls.phrases import check_agreement
from difflm.data.labels import Labelling
from difflm.data.tokenizers import Tokenizer
from difflm.errors import UsageError, suggest
from difflm.generation.requests import Request, read_guidance
from difflm.methods.base import LISTED
from difflm.models.sampling import KNOWN, STEP_RULES, option_name, refuse_foreign
from difflm.player.page import Recording
from difflm.runtime.files import Json, check_place, check_regular, read_checked, sha256_of
from difflm.runtime.resumable import ResumableLines, check_free
from difflm.training.run import bundled_runs, find_run, peek_config

if TYPE_CHECKING:
    from difflm.controls.guidance import GuidanceSettings
    from difflm.generation.jobs import Generation
    from difflm.generation.pipeline import TextDiffusion
    from difflm.player.frames import Draft

MOST_SCHEMA = 1 << 20  # bytes
Put = Callable[[int, "Generation", Callable[[str], None]], None]
# Families whose models say themselves why no classifier reaches single words.
WHOLE_TEXTS = ("latent", "pixels", "edits")


# -- requests from options --------------------------------------------------------------------------------------------


def make_request(asked: dict[str, Any]) -> Request:
    """Make a request from the given options."""
    read: dict[str, Callable[..., Any]] = {"field": named_values, "label": named_values, "json_schema": read_json}
    return Request(**asked | {key: reader(key, asked[key]) for key, reader in read.items() if key in asked})


def named_values(option: str, given: list[str]) -> dict[str, str]:
    """Read NAME=VALUE pairs; a repeated name is an error."""
    found: dict[str, str] = {}
    for pair in given:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name or not value:
            raise UsageError(f"--{option} {pair!r} must have the form NAME=VALUE, such as food=Japanese.")
        if name in found:
            raise UsageError(f"--{option} {name} is given twice, but a text has only one value for it.")
        found[name] = value
    return found


def read_json(option: str, given: str) -> Json:
    """Read a JSON object from a file, of which no more is read than a schema has, or from the option itself."""
    inline = given.lstrip().startswith("{")
    name, data = "--json-schema" if inline else given, given.encode()
    try:
        if not inline:
            check_regular(Path(given))
            with open(given, "rb") as file:
                data = file.read(MOST_SCHEMA + 1)
        if len(data) > MOST_SCHEMA and not inline:
            raise UsageError(f"{given} has more than {MOST_SCHEMA:,} bytes: that is no schema.")
        found = json.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{name} is not JSON.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{name} holds no JSON object.")
    return found


def check_guidance(given: str | None, requests: Sequence[Request]) -> "GuidanceSettings | None":
    """Parse how strongly classifiers steer; reject it if no request uses a classifier."""
    guidance = read_guidance(given)
    if guidance is not None and not any(r.method or control.head for r in requests for control in r.controls()):
        raise UsageError(
            "--guidance is how strongly classifiers steer: give it with --field, --label, --pos, --tree or --span."
        )
    return guidance


def load_writer(
    name: str,
    device: str,
    dtype: str | None,
    guides: Sequence[Path] | None,
    requests: Sequence[Request],
    ranked: bool = False,
    adapters: Sequence[Path] = (),
) -> "TextDiffusion":
    """Load a model with its adapters and classifiers, and reject requests that it does not understand."""
    from difflm.generation.checks import check_request

    for number, request in enumerate(requests):
        chosen_by = None if ranked or request.infill or request.edit or request.candidates == 1 else request.controls()
        with name_errors(f"request {number}: " if len(requests) > 1 else ""):
            check_request(request.n, request.seed, request.mbr, request.candidates, chosen_by, bool(request.source))
            refuse_by_config(name, guides or (), request)
        if request.source is not None:
            check_reads_sources(name)
    lm = load_model(name, device, dtype, adapters)
    for folder in guides or ():
        lm.guided_by(folder)
    known, usual = lm.model.capabilities.settings, lm.model.sampling.beams
    for request in requests:  # options that would have no effect on this model
        given = request.settings()
        refuse_foreign(given, known, f"{name} is {lm.config['method']}")
        beams = given.get("beams", usual)
        if beams and "diffusion" not in known:
            if ignored := next((key for key in ("temperature", "top_k", "top_p") if key in given), None):
                raise UsageError(f"a beam search draws nothing: leave --{option_name(ignored)} out, or --beams.")
            if request.mbr > 1:
                raise UsageError("a beam search gives one text: leave --mbr out, or --beams.")
        if given.get("length_penalty") and not beams:
            raise UsageError("--length-penalty is for a beam search: give --beams as well.")
    return lm


def refuse_by_config(name: str, guides: Sequence[Path], request: Request) -> None:
    """Reject, before a model is loaded, settings and labels of which its config says that it does not know them."""
    config = peek_config(name)
    method = config.get("method", "")
    family = LISTED[method]["family"] if method in LISTED else ""
    if family in KNOWN:
        refuse_foreign(request.settings(), KNOWN[family], f"{name} is {method}")
    rules = STEP_RULES.get(family) or sorted({rule for some in STEP_RULES.values() for rule in some})
    if request.sampler is not None and request.sampler not in rules and (family or not config):
        what = f"for {family} models" if family else "for any model"
        hint = suggest(request.sampler, rules)
        raise UsageError(f"unknown --sampler {request.sampler!r} {what}. {hint}Known: {', '.join(rules)}.")
    by_words = bool(STEP_RULES.get(family)) and family not in WHOLE_TEXTS
    if by_words and request.method is None:
        controls, edit = request.controls(), request.edited()
        folders = *sorted(find_run(name).glob("guide*/")), *guides
        found = [read_checked(one / "config.json").get("labels") for one in folders]
        labels = {one["name"]: Labelling(**one) for own in found for one in own or ()}
        # A classifier that does not list its own labels may know any.
        for control in controls if None not in found and not {"base", "labels"} & config.keys() else ():
            control.check_labels(labels)
        if controls or edit:
            tokenizer = Tokenizer.load(find_run(name) / "tokenizer.json")
            most = max(config["longest"], LISTED[method].get("most_words", 0))
            check_agreement(controls, edit, ModelInfo(tokenizer, most, first=0))


# -- texts in order ---------------------------------------------------------------------------------------------------


class Writer:
    """Writes the texts of requests, which are numbered across all of them. `more` are further arguments of `make_job`;
    sources among them are those of the only request."""

    def __init__(
        self,
        lm: "TextDiffusion",
        requests: Sequence[Request],
        more: dict[str, Any],
        watchers: "Sequence[TerminalView | Recording]" = (),
    ) -> None:
        sizes = [len(more.get("source", ())) or request.n for request in requests]
        # The largest number of denoising steps of a text of each, including those of its candidates.
        self.steps = [lm.frames(one.controls(), **one.settings()) * one.each for one in requests]
        self.lm, self.watchers = lm, watchers
        self.starts = [0, *accumulate(sizes)]  # the number of each request's first text
        self.before = [0, *accumulate(own * size for own, size in zip(self.steps, sizes, strict=True))]
        self.job = lru_cache(1)(lambda number: lm.make_job(**requests[number].job() | more))

    def request_of(self, text: int) -> int:
        return bisect(self.starts, text) - 1

    def write(
        self, out: Path | None, origin: Json, pieces: Iterable[range], put: "Put", output: Bar | TerminalView
    ) -> None:
        """Write the texts that this process has yet to write, in order: to the screen or, where `out` is given, to a
        file that says what its texts are made from, `origin`. `put` gets the number of a text, the text, and what
        writes a line. The texts of a piece share batches; a text does not depend on its piece."""
        with open_output(out, origin, self.starts[-1], output.put) as (put_line, rows), output:
            for piece in pieces:
                first, end = max(piece.start, rows.start), min(piece.stop, rows.stop)
                for number, text in enumerate(in_order(self._make(first, end, output), first), first):
                    put(number, text, put_line)

    def _make(self, first: int, end: int, output: Bar | TerminalView) -> "Iterator[dict[int, Generation]]":
        numbers = range(self.request_of(first), self.request_of(end - 1) + 1) if first < end else range(0)
        jobs, done = [], first
        for number in numbers:
            start, following = self.starts[number : number + 2]
            own, job = slice(max(0, first - start), min(end, following) - start), self.job(number)
            part = replace(job, n=own.stop - own.start, first=own.start, sources=job.sources[own])
            jobs.append(replace(part, on_step=output.advance, watch=self._show if self.watchers else None))
        for index, made in self.lm.run_jobs(jobs) if jobs else ():
            done += len(made)
            last = self.request_of(done - 1)
            output.advance(0, self.before[last] + (done - self.starts[last]) * self.steps[last])
            yield {self.starts[numbers[index]] + k: text for k, text in made.items()}

    def _show(self, drafts: "list[Draft]") -> None:
        for watcher in self.watchers:
            watcher.frame(drafts)


def in_order(batches: "Iterable[dict[int, Generation]]", first: int = 0) -> "Iterator[Generation]":
    """Yield texts in the order of their numbers, each as soon as it and all earlier ones are finished."""
    waiting: dict[int, Generation] = {}
    for batch in batches:
        waiting |= batch
        while first in waiting:
            yield waiting.pop(first)
            first += 1


# -- to the screen, or to a file --------------------------------------------------------------------------------------


def count_processes(out: Path | None) -> int:
    """How many processes write the texts together: to a file, which must be new, if there are several."""
    from difflm.runtime.distributed import current

    if out is None and current().count > 1:
        raise UsageError("several processes need a common output file: give --out FILE.")
    if out is not None:
        check_place(out, new_folder=True)
        check_free(out)
    return current().count


@contextmanager
def open_output(
    out: Path | None, origin: Json, total: int, put: Callable[[str], None]
) -> Iterator[tuple[Callable[[str], None], range]]:
    """Yield a function that writes a line, `put` where there is no file, and the numbers of the lines that this process
    has yet to write; say how many a file had already and, if the work is interrupted, how many it has now."""
    from difflm.runtime.distributed import current

    if out is None:
        yield put, range(total)
        return
    rows = range(total)[current().rows(total)]
    hashed = {key: HASHED[key](value) if key in HASHED else value for key, value in origin.items()}
    with ResumableLines(out, hashed, current()) as kept:
        if kept.count:
            note(f"{kept.partial}: {kept.count:,} of {len(rows):,} texts are already written.")
        try:
            yield kept.put, rows[kept.count :]
            kept.finish()
        except BaseException:
            if kept.count:
                left = "Run the same command again to write the rest."
                note(f"{kept.partial}: {kept.count:,} of {len(rows):,} texts. {left}")
            raise


def hash_model(run: str) -> str:
    """A fingerprint of the weights, so that texts of different models are never mixed; for a model that is not a run,
    its name."""
    folder = find_run(run) if run in bundled_runs() else Path(run)
    found = [folder / name for name in ("adapter_model.safetensors", "model.safetensors") if (folder / name).is_file()]
    return sha256_of(found[0]) if found else run


# What a file says of its origin in place of long values.
HASHED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("model", "rank"), hash_model),
    **dict.fromkeys(("requests", "sources"), lambda texts: hashlib.sha256("\n".join(texts).encode()).hexdigest()),
    **dict.fromkeys(("guide", "adapter"), lambda folders: [hash_model(str(folder)) for folder in folders or ()]),
}
