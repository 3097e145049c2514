"""`difflm generate`."""

import json
import shlex
import sys
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from difflm.app.commands.kept_lines import choose_processes, hash_model, hash_texts, keep_lines
from difflm.app.commands.options import (
    ENGLISH,
    FILES,
    Device,
    Dtype,
    Guidance,
    Guide,
    Json,
    Model,
    Out,
    check_names,
    check_reads_sources,
    check_values,
    join_others,
    load_model,
    option,
    report_errors,
    with_options,
)
from difflm.app.console import Bar, complain, note, to_json
from difflm.errors import UsageError
from difflm.generation.requests import Request, generation_to_json, read_guidance, read_requests
from difflm.models.sampling import FAMILIES, SETTINGS, option_name
from difflm.runtime.files import check_place, check_regular

MOST_SCHEMA = 1 << 20  # bytes

if TYPE_CHECKING:
    from difflm.app.live_view import TerminalView
    from difflm.controls.guidance import GuidanceSettings
    from difflm.generation.jobs import Generation, GenerationJob, Watch
    from difflm.generation.pipeline import TextDiffusion
    from difflm.player.frames import Draft
    from difflm.player.page import Recording

AT_ONCE, AT_ONCE_CPU = 1024, 16  # the most texts of several requests that are generated together
# Options that serve as defaults for keys that a line of --input leaves out.
OF_WORDS = ("field", "pos", "tree", "span")  # what the classifiers of e2e know, and those of english do not
BESIDE_INPUT = ("n", "seed", "mbr", "candidates", "method", *SETTINGS)


@report_errors
@join_others
@with_options(asked=list(Request.model_fields))
def generate(
    asked: dict[str, Any],
    model: Model = ENGLISH,
    guide: Guide = None,
    guidance: Guidance = None,
    requests: Annotated[
        Path | None, option("Many requests: one JSON object per line.", "FILE.jsonl", "--input", panel=FILES)
    ] = None,
    show: Annotated[bool, option("Watch the words form.", None, "--show", panel=FILES)] = False,
    html: Annotated[Path | None, option("Write a web page that replays every step.", "FILE", panel=FILES)] = None,
    svg: Annotated[Path | None, option("Write an animated picture of the words forming.", "FILE", panel=FILES)] = None,
    out: Out = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Generate texts, with any constraints you like."""
    one = make_request(asked)
    many = [one]
    files = {name: path for name, path in (("html", html), ("svg", svg)) if path}
    if requests:
        beside = [key for key in asked if key not in BESIDE_INPUT] + ["show"] * show + [*files]
        if beside:
            hint = ": put it in that file's lines" if beside[0] in asked else ""
            raise UsageError(f"--{option_name(beside[0])} cannot be combined with --input{hint}.")
        many = [one.model_copy(update=line.model_dump(exclude_unset=True)) for line in read_requests(requests)]
    if show and as_json:
        raise UsageError("--show is for people and --json for programs: choose one.")
    if out and (show or files):
        raise UsageError(f"--{'show' if show else next(iter(files))} and --out cannot be combined: choose one.")
    for name, path in files.items():
        check_place(path, f"--{name}")
    if svg:
        from difflm.app.studio.animation import check_animation, write_animation

        check_animation(svg, one.n)
    check_names(device, model, guides=guide)
    for number, request in enumerate(many):
        check_values(request, f"request {number}: " if requests else "")
    if model == ENGLISH and not guide and (key := next((k for k in OF_WORDS for r in many if getattr(r, k)), None)):
        raise UsageError(f"--{key} needs classifiers that {model} does not have. Try: difflm generate e2e --{key} …")
    steering = check_guidance(guidance, many)
    processes = choose_processes(out)
    lm = load_writer(model, device, dtype, guide, many)
    writer = Writer(lm, steering, as_json, numbered=requests is not None)
    writer.refuse(many)
    if out:
        asked_for = hash_texts([request.model_dump_json() for request in many])
        settings = {"guide": [hash_model(str(folder)) for folder in guide or []], "guidance": guidance, "dtype": dtype}
        origin = {"model": hash_model(model), "requests": asked_for, **settings, "json": as_json}
        with keep_lines(out, origin, processes, sum(request.n for request in many)) as (put, rows):
            writer.write(many, put=put, rows=rows)
        return
    if not show and not files:
        writer.write(many)
        return
    from difflm.app.live_view import TerminalView
    from difflm.player.page import Recording, write_player

    size = one.n, lm.frames(one.controls(), **one.settings()), one.each
    recording = Recording(*size) if files else None
    texts = writer.write(many, TerminalView(*size) if show else None, recording)
    command = shlex.join(["difflm", *without_files()])
    if html and recording:
        write_player(html, recording.texts(texts), {"model": model, "command": command})
        note(f"{html}: open it in a browser.")
    if svg and recording:
        write_animation(svg, recording.texts(texts), command)
        note(f"{svg}: open it in a browser, or show it as a picture.")


def make_request(asked: dict[str, Any]) -> Request:
    """Make a request from the given options."""
    read: dict[str, Callable[[str, Any], Any]] = {
        "field": named_values,
        "label": named_values,
        "json_schema": read_json,
    }
    return Request(**asked | {key: reader(key, asked[key]) for key, reader in read.items() if key in asked})


def load_writer(
    name: str, device: str, dtype: str | None, guides: list[Path] | None, requests: list[Request], ranked: bool = False
) -> "TextDiffusion":
    """Load a model and its classifiers, and reject requests that it does not understand."""
    from difflm.generation.jobs import check_request

    for number, request in enumerate(requests):
        chosen_by = None if ranked or request.infill or request.candidates == 1 else request.controls()
        try:
            check_request(request.n, request.seed, request.mbr, request.candidates, chosen_by, bool(request.source))
        except UsageError as error:
            raise UsageError(f"request {number}: {error}" if len(requests) > 1 else str(error)) from None
        if request.source is not None:
            check_reads_sources(name)
    lm = load_model(name, device, dtype)
    for folder in guides or []:
        lm.guided_by(folder)
    for request in requests:
        refuse_foreign_options(lm, name, request)
    return lm


def check_guidance(given: str | None, requests: list[Request]) -> "GuidanceSettings | None":
    """Parse how strongly classifiers steer; reject it if no request uses a classifier."""
    guidance = read_guidance(given)
    if guidance is not None and not any(r.method or control.head for r in requests for control in r.controls()):
        raise UsageError(
            "--guidance is how strongly classifiers steer: give it with --field, --label, --pos, --tree or --span."
        )
    return guidance


def named_values(option: str, given: list[str]) -> dict[str, str]:
    """Read NAME=VALUE pairs; a repeated name is an error."""
    found: dict[str, str] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise UsageError(f"--{option} {pair!r} must have the form NAME=VALUE, such as food=Japanese.")
        if name.strip() in found:
            raise UsageError(f"--{option} {name.strip()} is given twice, but a text has only one value for it.")
        found[name.strip()] = value.strip()
    return found


def read_schema(path: Path) -> str:
    """Read a file that should hold a schema, and no more of it than a schema has."""
    check_regular(path)
    with path.open("rb") as file:
        data = file.read(MOST_SCHEMA + 1)
    if len(data) > MOST_SCHEMA:
        raise UsageError(f"{path} has more than {MOST_SCHEMA:,} bytes: that is no schema.")
    return data.decode("utf-8-sig")


def read_json(option: str, given: str) -> dict[str, Any]:
    """Read a JSON object from a file, or from the option itself."""
    inline = given.lstrip().startswith("{")
    name = "--json-schema" if inline else given
    try:
        found = json.loads(given if inline else read_schema(Path(given)))
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{name} is not JSON.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{name} holds no JSON object.")
    return found


@dataclass(frozen=True)
class Writer:
    """Generates the texts of requests and prints them in order."""

    lm: "TextDiffusion"
    guidance: "GuidanceSettings | None"
    as_json: bool
    numbered: bool  # whether output lines name their request by its number

    def refuse(self, requests: list[Request]) -> None:
        """Reject invalid requests, and print warnings, before the first text is generated."""
        warnings = []
        for number, request in enumerate(requests):
            where = f"request {number}: " if self.numbered else ""
            try:
                warnings += [where + warning for warning in self.make_job(request).warnings]
            except UsageError as error:
                raise UsageError(where + str(error)) from None
        for warning in warnings:
            complain(f"warning: {warning}")

    def make_job(self, request: Request, watch: "Watch | None" = None) -> "GenerationJob":
        return self.lm.make_job(**request.job(), guidance=self.guidance, watch=watch)

    def write(
        self,
        requests: list[Request],
        view: "TerminalView | None" = None,
        recording: "Recording | None" = None,
        put: Callable[[str], None] | None = None,
        rows: range | None = None,
    ) -> "list[Generation]":
        """Print the texts with a progress bar, or in a view that shows how they form; return them if they are recorded.
        Texts are numbered across all requests; those of `rows` are generated."""
        watchers = [watcher for watcher in (view, recording) if watcher]
        start = [0, *accumulate(request.n for request in requests)]  # the number of each request's first text
        steps = [count_steps(self.lm, request) for request in requests]
        before = [0, *accumulate(own * request.n for own, request in zip(steps, requests, strict=True))]
        count, kept = start[-1], []
        first, end = (0, count) if rows is None else (rows.start, rows.stop)

        def watch(drafts: "list[Draft]") -> None:
            for watcher in watchers:
                watcher.frame(drafts)

        with view or Bar(f"writing {count:,} text{'s'[: count != 1]}, denoising steps", before[-1]) as output:
            most = AT_ONCE_CPU if self.lm.device.type == "cpu" else AT_ONCE
            for group in split_requests([request.n * request.each for request in requests], most):
                texts, jobs = range(max(first, start[group.start]), min(end, start[group.stop])), {}
                for number in group if texts else ():
                    own = range(max(0, first - start[number]), min(requests[number].n, end - start[number]))
                    if own:
                        job = self.make_job(requests[number], watch if watchers else None)
                        sources = job.sources[own.start : own.stop]
                        job = replace(job, n=len(own), first=own.start, sources=sources, on_step=output.advance)
                        jobs[number] = job

                def report_progress(done: int, begin: int = texts.start) -> None:
                    number = bisect(start, begin + done - 1) - 1
                    output.advance(0, before[number] + (begin + done - start[number]) * steps[number])

                for number, text in in_order(self.run_requests(jobs, start), report_progress, texts.start):
                    (put or output.put)(self.line(text, number))
                    kept += [text] if recording else []
        return kept

    def run_requests(
        self, jobs: "dict[int, GenerationJob]", start: Sequence[int]
    ) -> Iterator[dict[int, tuple[int, Any]]]:
        """Yield the texts of several requests, which share batches, by their number across all requests."""
        numbers = list(jobs)
        for index, made in self.lm.run_jobs([*jobs.values()]):
            number = numbers[index]
            yield {start[number] + k: (number, text) for k, text in made.items()}

    def line(self, text: "Generation", request: int) -> str:
        about = {"request": request} if self.numbered else {}
        return to_json({**generation_to_json(text), **about}) if self.as_json else str(text)


def split_requests(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Split requests, in order, into groups of at most `most` texts, counting candidates; a larger request is alone."""
    begin = total = 0
    for number, size in enumerate(sizes):
        if number > begin and total + size > most:
            yield range(begin, number)
            begin, total = number, 0
        total += size
    yield range(begin, len(sizes))


def count_steps(lm: "TextDiffusion", request: Request) -> int:
    """The largest number of denoising steps of a text, including those of its candidates."""
    return lm.frames(request.controls(), **request.settings()) * request.each


def without_files() -> list[str]:
    """The arguments of this command without the files that show its texts."""
    named = ("--html", "--svg")
    given = pairwise(["", *sys.argv[1:]])
    return [one for before, one in given if before not in named and one.partition("=")[0] not in named]


def in_order(batches: Iterator[dict[int, Any]], on_done: Callable[[int], None], first: int = 0) -> Iterator[Any]:
    """Yield texts in the order of their numbers, each as soon as it and all earlier ones are finished."""
    waiting: dict[int, Any] = {}
    count, following = 0, first
    for batch in batches:
        waiting |= batch
        count += len(batch)
        on_done(count)
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def refuse_foreign_options(lm: "TextDiffusion", name: str, request: Request) -> None:
    """Reject options that would have no effect on this model."""
    method = lm.config["method"]
    for key in request.settings():
        needed = FAMILIES[key] if FAMILIES[key] in ("left-to-right", "tokens") else "diffusion"
        if FAMILIES[key] != "any" and needed not in lm.model.capabilities.settings:
            kind = "diffusion" if needed == "diffusion" else "autoregressive"
            raise UsageError(f"--{option_name(key)} is for {kind} models, but {name} is {method}: leave it out.")
    given = request.settings()
    beams = given.get("beams", lm.model.sampling.beams)
    if beams and "diffusion" not in lm.model.capabilities.settings:
        if ignored := next((key for key in ("temperature", "top_k", "top_p") if key in given), None):
            raise UsageError(f"a beam search draws nothing: leave --{option_name(ignored)} out, or --beams.")
        if request.mbr > 1:
            raise UsageError("a beam search gives one text: leave --mbr out, or --beams.")
    if given.get("length_penalty") and not beams:
        raise UsageError("--length-penalty is for a beam search: give --beams as well.")
