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
    Clamp,
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
    guidance_knobs,
    load_model,
    report_errors,
)
from difflm.app.console import Bar, complain, note
from difflm.errors import UsageError

if TYPE_CHECKING:
    from difflm.controls.guidance import GuidanceSettings
    from difflm.generation.jobs import Draft, Generation, Watch
    from difflm.generation.pipeline import TextDiffusion
    from difflm.generation.requests import Request

OPEN = {"n", "seed", "steps", "temperature"}  # what a line of --input may leave to the command


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
    clamp_below: Annotated[float | None, typer.Option(help="Clamp at times up to this one, in 0 to 1.")] = None,
    contrast: Annotated[
        float | None, typer.Option(help="Models of masks: how much more known words count. [0]")
    ] = None,
    mbr: Annotated[int, typer.Option(help="Of so many candidates, the one most like the others.")] = 1,
    top_k: Annotated[int | None, typer.Option(help="Autoregressive: draw from the k likeliest words.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Autoregressive: draw from this share of probability.")] = None,
    beams: Annotated[int | None, typer.Option(help="Autoregressive: beam search.")] = None,
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
    shared = {"n": n, "seed": seed, "steps": steps, "temperature": temperature}
    asked = {"length": length, "pos": pos, "tree": tree, "infill": infill, "edit": edit, "strength": strength}
    lists = {"contains": contains, "avoid": avoid, "span": span, "keep": keep, "control": control}
    facts = {"field": named_values("field", field), "label": named_values("label", label)}
    diffusion = {
        "sampler": sampler,
        "noise_temperature": noise_temperature,
        "noise_top_p": noise_top_p,
        "clamp": clamp,
        "clamp_below": clamp_below,
        "contrast": contrast,
    }
    twin = {"top_k": top_k, "top_p": top_p, "beams": beams}
    from difflm.generation.requests import Request, read_requests

    given = {key: value or [] for key, value in lists.items()}
    one = Request.model_validate({**shared, **asked, **facts, **given})
    many = [one]
    if requests:
        refuse_beside_input({**asked, **lists, "field": field, "label": label, "show": show, "html": html})
        many = [r.model_copy(update=defaults(r, one)) for r in read_requests(requests)]
    if show and as_json:
        raise UsageError("--show is for people, --json for machines: choose one.")
    lm = load_model(model, device, dtype)
    for folder in guide or []:
        lm.guided_by(folder)
    asked_steps = next((request.steps for request in many if request.steps is not None), None)
    refuse_foreign_options(lm, model, {"steps": asked_steps, **diffusion}, twin)
    writer = Writer(lm, {**diffusion, **twin}, mbr, candidates, guidance, as_json, numbered=requests is not None)
    writer.refuse(many)
    if show or html:
        watched(writer, one, show, html, model)
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


def defaults(request: "Request", command: "Request") -> dict[str, Any]:
    """What a line of --input leaves open is as the command says."""
    return {key: getattr(command, key) for key in OPEN - request.model_fields_set}


def refuse_beside_input(options: dict[str, Any]) -> None:
    for key, value in options.items():
        if value is not None and value is not False and value != []:
            raise UsageError(f"--{key} stands in the lines of --input, not beside it.")


@dataclass(frozen=True)
class Writer:
    """Answers requests one after the other, with one bar over all of them."""

    lm: "TextDiffusion"
    settings: dict[str, Any]
    mbr: int
    candidates: int
    guidance: str | None
    as_json: bool
    numbered: bool  # the requests, in what is printed of them

    @property
    def knobs(self) -> "GuidanceSettings | None":
        return guidance_knobs(self.guidance)

    @property
    def each(self) -> int:
        """Texts that are made for one that is kept."""
        return max(self.mbr, self.candidates)

    def refuse(self, requests: "list[Request]") -> None:
        """Refuse what is wrong, and warn of what is doubtful, before the first text is made."""
        from difflm.generation.validation import check_candidates, check_request

        if self.knobs is not None and not any(control.head for r in requests for control in r.controls()):
            raise UsageError(
                "--guidance is how strongly classifiers pull: ask for a field, a label, tags or phrases as well."
            )
        warnings = []
        for number, request in enumerate(requests):
            try:
                check_request(request.n, request.seed, self.mbr)
                self.lm.sampling(**request.settings(), **self.settings)
                check_candidates(self.candidates, self.mbr, request.controls())
                brief = self.lm.brief(request.controls(), request.edited(), self.knobs)
            except UsageError as error:
                raise UsageError(self.numbered_line(number, str(error))) from None
            warnings += [self.numbered_line(number, warning) for warning in self.lm.warnings(brief)]
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

    def texts(
        self, request: "Request", on_done: Callable[[int], None], watch: "Watch | None" = None
    ) -> "Iterator[Generation]":
        batches = self.lm.batches(
            request.n,
            request.seed,
            self.mbr,
            self.candidates,
            controls=request.controls(),
            edit=request.edited(),
            knobs=self.knobs,
            watch=watch,
            **request.settings(),
            **self.settings,
        )
        return in_order(batches, on_done)

    def line(self, text: "Generation", request: int | None) -> str:
        if not self.as_json:
            return str(text)
        from difflm.generation.requests import generation_to_json

        about = {} if request is None else {"request": request}
        return json.dumps({**generation_to_json(text), **about}, ensure_ascii=False)


def watched(writer: Writer, request: "Request", show: bool, html: Path | None, model: str) -> None:
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


def refuse_foreign_options(lm: "TextDiffusion", name: str, diffusion: dict[str, Any], twin: dict[str, Any]) -> None:
    """An option without effect would be taken for one that has some."""
    method = lm.config["method"]
    foreign, kind = (diffusion, "diffusion") if method == "autoregressive" else (twin, "autoregressive")
    given = [key for key, value in foreign.items() if value is not None]
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} is for {kind} models; {name} is {method}.")
