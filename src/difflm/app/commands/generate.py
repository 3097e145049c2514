"""`difflm generate`."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from difflm.app.commands.options import (
    Beams,
    Clamp,
    ClampBelow,
    Contrast,
    Device,
    Dtype,
    Guidance,
    Json,
    NoiseTemperature,
    NoiseTopP,
    Sampler,
    Seed,
    Steps,
    Temperature,
    TopK,
    TopP,
    load_model,
    parse_guidance,
    report_errors,
)
from difflm.app.console import Bar, complain, note
from difflm.errors import UsageError
from difflm.models.sampling import FAMILIES, SETTINGS, option_name

if TYPE_CHECKING:
    from difflm.controls.guidance import GuidanceSettings
    from difflm.generation.jobs import Draft, Generation, GenerationJob, Watch
    from difflm.generation.pipeline import TextDiffusion
    from difflm.generation.requests import Request


@report_errors
def generate(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="A bundled model or the directory of a run.")] = "e2e",
    n: Annotated[int, typer.Option("-n", "--number", help="How many texts.")] = 1,
    steps: Steps = None,
    seed: Seed = 0,
    sampler: Sampler = None,
    temperature: Temperature = None,
    noise_temperature: NoiseTemperature = None,
    noise_top_p: NoiseTopP = None,
    clamp: Clamp = None,
    clamp_below: ClampBelow = None,
    contrast: Contrast = None,
    mbr: Annotated[int, typer.Option(help="Of so many candidates, the one most like the others.")] = 1,
    top_k: TopK = None,
    top_p: TopP = None,
    beams: Beams = None,
    length: Annotated[
        int | None, typer.Option(help="So many words, punctuation included; of a model of characters, these.")
    ] = None,
    field: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A fact, such as food=Japanese; repeatable.")
    ] = None,
    pos: Annotated[str | None, typer.Option(help='A part of speech for every word, such as "PROPN AUX ADJ".')] = None,
    tree: Annotated[
        str | None, typer.Option(help='The tree of the text, such as "(S (NP * *) (VP * (ADJP *)))".')
    ] = None,
    span: Annotated[
        list[str] | None, typer.Option(metavar="FIRST,LAST,LABEL", help="A phrase, such as 7,10,VP; repeatable.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A label of your own --guide; repeatable.")
    ] = None,
    guide: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="A classifier that difflm train made; repeatable.")
    ] = None,
    guidance: Guidance = None,
    candidates: Annotated[int, typer.Option(help="Of so many, the one that the classifiers like best.")] = 1,
    contains: Annotated[list[str] | None, typer.Option(help="A word or phrase that must appear; repeatable.")] = None,
    avoid: Annotated[list[str] | None, typer.Option(help="A word that must not appear; repeatable.")] = None,
    control: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A control of another package; repeatable.")
    ] = None,
    infill: Annotated[
        str | None, typer.Option(help="A text with gaps: ___ of any length, ___:4 of four words.")
    ] = None,
    edit: Annotated[str | None, typer.Option(help="A text to write anew, lightly.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="With --edit: words that stay; repeatable.")] = None,
    strength: Annotated[float | None, typer.Option(help="With --edit: how much noise, above 0 to 1. [0.5]")] = None,
    requests: Annotated[
        Path | None, typer.Option("--input", metavar="FILE.jsonl", help="Many requests: one JSON object a line.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Watch the words condense.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a player that shows every step.")] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Write texts; ask of them what you like."""
    from difflm.generation.requests import Request, read_requests

    given = dict(locals())
    settings = {name: given[name] for name in SETTINGS if name in given}
    asked = {"length": length, "pos": pos, "tree": tree, "infill": infill, "edit": edit, "strength": strength}
    lists = {"contains": contains, "avoid": avoid, "span": span, "keep": keep, "control": control}
    facts = {"field": named_values("field", field), "label": named_values("label", label)}
    filled = {key: value or [] for key, value in lists.items()}
    one = Request.model_validate({"n": n, "seed": seed, **settings, **asked, **facts, **filled})
    many = [one]
    if requests:
        refuse_beside_input({**asked, **lists, "field": field, "label": label, "show": show, "html": html})
        many = [r.model_copy(update=fill_from_command(r, one)) for r in read_requests(requests)]
    if show and as_json:
        raise UsageError("--show is for people, --json for machines: choose one.")
    lm = load_model(model, device, dtype)
    for folder in guide or []:
        lm.guided_by(folder)
    for request in many:
        refuse_foreign_options(lm, model, request)
    writer = Writer(lm, mbr, candidates, parse_guidance(guidance), as_json, numbered=requests is not None)
    writer.refuse(many)
    if show or html:
        write_watched(writer, one, show, html, model)
    else:
        writer.write(many)


def named_values(option: str, given: list[str] | None) -> dict[str, str]:
    """NAME=VALUE pairs; a name that is there twice contradicts itself."""
    found: dict[str, str] = {}
    for pair in given or []:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise UsageError(f"--{option} {pair!r} is not of the form NAME=VALUE, such as food=Japanese.")
        if name.strip() in found:
            raise UsageError(f"--{option} {name.strip()} is given twice; a text can have one of them.")
        found[name.strip()] = value.strip()
    return found


def fill_from_command(request: "Request", command: "Request") -> dict[str, Any]:
    """The command's values for what a line of --input leaves open."""
    return {
        key: getattr(command, key) for key in ("n", "seed", *command.settings()) if key not in request.model_fields_set
    }


def refuse_beside_input(options: dict[str, Any]) -> None:
    for key, value in options.items():
        if value is not None and value is not False and value != []:
            raise UsageError(f"--{key} stands in the lines of --input, not beside it.")


@dataclass(frozen=True)
class Writer:
    """Answers requests one after the other, with one bar over all of them."""

    lm: "TextDiffusion"
    mbr: int
    candidates: int
    guidance: "GuidanceSettings | None"
    as_json: bool
    numbered: bool  # the requests, in what is printed of them

    @property
    def each(self) -> int:
        """Texts that are made for one that is kept."""
        return max(self.mbr, self.candidates)

    def refuse(self, requests: "list[Request]") -> None:
        """Refuse what is wrong, and warn of what is doubtful, before the first text is made."""
        if self.guidance is not None and not any(control.head for r in requests for control in r.controls()):
            raise UsageError(
                "--guidance is how strongly classifiers pull: ask for a field, a label, tags or phrases as well."
            )
        warnings = []
        for number, request in enumerate(requests):
            try:
                job = self.make_job(request)
            except UsageError as error:
                raise UsageError(self.numbered_line(number, str(error))) from None
            warnings += [self.numbered_line(number, warning) for warning in job.warnings]
        for warning in warnings:
            complain(f"warning: {warning}")

    def numbered_line(self, number: int, line: str) -> str:
        return f"request {number}: {line}" if self.numbered else line

    def write(self, requests: "list[Request]") -> None:
        total = sum(request.n for request in requests)
        done = 0
        with Bar("writing", total) as bar:

            def more(count: int) -> None:
                bar.update("writing", done + count, total)

            for number, request in enumerate(requests):
                for text in self.texts(request, more):
                    bar.put(self.line(text, number if self.numbered else None))
                done += request.n

    def make_job(self, request: "Request", watch: "Watch | None" = None) -> "GenerationJob":
        return self.lm.make_job(
            request.n,
            request.seed,
            self.mbr,
            self.candidates,
            controls=request.controls(),
            edit=request.edited(),
            guidance=self.guidance,
            watch=watch,
            **request.settings(),
        )

    def texts(
        self, request: "Request", on_done: Callable[[int], None], watch: "Watch | None" = None
    ) -> "Iterator[Generation]":
        return in_order((made for _, made in self.lm.run_jobs([self.make_job(request, watch)])), on_done)

    def line(self, text: "Generation", request: int | None) -> str:
        if not self.as_json:
            return str(text)
        from difflm.generation.requests import generation_to_json

        about = {} if request is None else {"request": request}
        return json.dumps({**generation_to_json(text), **about}, ensure_ascii=False)


def write_watched(writer: Writer, request: "Request", show: bool, html: Path | None, model: str) -> None:
    """Make the texts of one request before somebody's eyes, or for a player, or both."""
    from difflm.app.live_view import TerminalView
    from difflm.app.studio import Recording, write_player

    steps = writer.lm.frames(request.controls(), **request.settings())
    recording = Recording(request.n, steps, writer.each) if html else None
    finished = []
    with ExitStack() as stack:
        view = stack.enter_context(TerminalView(request.n, steps, writer.each)) if show else None
        bar = None if view else stack.enter_context(Bar("writing", request.n))

        def watch(drafts: "list[Draft]") -> None:
            for watcher in (view, recording):
                if watcher:
                    watcher.frame(drafts)

        def more(count: int) -> None:
            if bar:
                bar.update("writing", count, request.n)

        for text in writer.texts(request, more, watch):
            finished.append(text)
            if view:
                view.put(str(text))
            elif bar:
                bar.put(writer.line(text, None))
    if html and recording:
        write_player(
            html, recording.texts(finished), {"model": model, "command": shlex.join(["difflm", *without_html()])}
        )
        note(f"{html}: open it in a browser.")


def without_html() -> list[str]:
    """The arguments of this command but for the player's own file."""
    kept, skip = [], False
    for argument in sys.argv[1:]:
        if not skip and argument != "--html" and not argument.startswith("--html="):
            kept.append(argument)
        skip = argument == "--html"
    return kept


def in_order(batches: Iterator[dict[int, Any]], on_done: Callable[[int], None]) -> Iterator[Any]:
    """Texts by their number, each as soon as it and all before it are there."""
    waiting: dict[int, Any] = {}
    count = following = 0
    for batch in batches:
        waiting |= batch
        count += len(batch)
        on_done(count)
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def refuse_foreign_options(lm: "TextDiffusion", name: str, request: "Request") -> None:
    """An option without effect would be taken for one that has some."""
    method = lm.config["method"]
    twin = method == "autoregressive"
    for key in request.settings():
        if FAMILIES[key] != "any" and (FAMILIES[key] == "left-to-right") != twin:
            kind = "diffusion" if twin else "autoregressive"
            raise UsageError(f"--{option_name(key)} is for {kind} models; {name} is {method}.")
