"""`difflm generate`."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflm.app.commands.options import ENGLISH, Dtype, check_names, check_values, command, name_errors
from difflm.app.commands.writing import Writer, check_guidance, count_processes, load_writer, make_request
from difflm.app.console import Bar, complain, note, to_json
from difflm.app.live_view import TerminalView
from difflm.app.studio.animation import check_animation, draw_animation
from difflm.errors import UsageError
from difflm.generation.requests import Request, generation_to_json, read_requests
from difflm.models.sampling import SETTINGS, option_name
from difflm.player.page import Recording, write_player
from difflm.runtime.files import check_place, write_atomic

if TYPE_CHECKING:
    from difflm.generation.jobs import Generation

AT_ONCE, AT_ONCE_CPU = 1024, 16  # the most texts of several requests that are generated together
FILES = ("--html", "--svg")
# Options that serve as defaults for keys that a line of --input leaves out.
OF_WORDS = ("field", "pos", "tree", "span")  # what the classifiers of e2e know, and those of english do not
BESIDE_INPUT = ("n", "seed", "mbr", "candidates", "method", *SETTINGS)


@command("generate", asked=list(Request.model_fields))
def generate(
    asked: dict[str, Any],
    model: str = ENGLISH,
    adapter: list[Path] | None = None,
    guide: list[Path] | None = None,
    guidance: str | None = None,
    requests: Path | None = None,
    show: bool = False,
    html: Path | None = None,
    svg: Path | None = None,
    out: Path | None = None,
    device: str = "auto",
    dtype: Dtype = None,
    as_json: bool = False,
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
        check_animation(svg, one.n)
    check_names(device, model, guides=guide)
    names = [f"request {number}: " for number in range(len(many))] if requests else [""]
    for name, request in zip(names, many, strict=True):
        with name_errors(name):
            check_values(request)
    if model == ENGLISH and not guide and (key := next((k for k in OF_WORDS for r in many if getattr(r, k)), None)):
        raise UsageError(f"--{key} needs classifiers that {model} does not have. Try: difflm generate e2e --{key} …")
    steering = check_guidance(guidance, many)
    count_processes(out)
    lm = load_writer(model, device, dtype, guide, many, adapters=adapter or ())
    many = [lm.settle(request) for request in many]
    one = one if requests else many[0]
    shown = one.n, lm.frames(one.controls(), **one.settings()), one.each
    view, recording = TerminalView(*shown) if show else None, Recording(*shown) if files else None
    watchers = [watcher for watcher in (view, recording) if watcher]
    writer = Writer(lm, many, {"guidance": steering}, watchers)
    warnings = []
    for number, name in enumerate(names):
        with name_errors(name):
            warnings += [name + warning for warning in writer.job(number).warnings]
    for warning in warnings:
        complain(f"warning: {warning}")
    kept: list[Generation] = []

    def put(number: int, text: "Generation", put_line: Callable[[str], None]) -> None:
        about = {"request": writer.request_of(number)} if requests else {}
        put_line(to_json({**generation_to_json(text), **about}) if as_json else str(text))
        for warning in text.warnings[len(writer.job(about.get("request", 0)).warnings) :]:
            complain(f"warning: {warning}")
        if text.changed and not as_json:
            note("changed: " + ", ".join(f"{old or '–'} → {new or '–'}" for old, new in text.changed))
        kept.extend([text] if files else [])

    count, most = writer.starts[-1], AT_ONCE_CPU if lm.device.type == "cpu" else AT_ONCE
    output = view or Bar(f"writing {count:,} text{'s'[: count != 1]}, denoising steps", writer.before[-1])
    groups = split_requests([request.n * request.each for request in many], most)
    pieces = (range(writer.starts[group.start], writer.starts[group.stop]) for group in groups)
    made_from = {"requests": [request.model_dump_json() for request in many], "guide": guide, "guidance": guidance}
    made_from |= {"adapter": adapter} if adapter else {}
    origin = {"model": model, **made_from, "dtype": dtype, "json": as_json}
    writer.write(out, origin, pieces, put, output)
    given = [(before, one) for before, one in pairwise(["", *sys.argv[1:]]) if one.partition("=")[0] not in FILES]
    line = shlex.join(["difflm", *(one for before, one in given if before not in FILES)])  # without these files
    if html and recording:
        write_player(html, recording.texts(kept), {"model": model, "command": line})
        note(f"{html}: open it in a browser.")
    if svg and recording:
        write_atomic(svg, draw_animation(recording.texts(kept), line))
        note(f"{svg}: open it in a browser, or show it as a picture.")


def split_requests(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Split requests, in order, into groups of at most `most` texts, counting candidates; a larger request is alone."""
    begin = total = 0
    for number, size in enumerate(sizes):
        if number > begin and total + size > most:
            yield range(begin, number)
            begin, total = number, 0
        total += size
    yield range(begin, len(sizes))
