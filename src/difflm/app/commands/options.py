"""What commands share: their common options, options that derive from `Request`, and how an error is reported."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, get_args, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperOption

from difflm.app.console import complain, note
from difflm.errors import DifflmError, UsageError, speak_command, suggest
from difflm.evaluation.options import describe_options
from difflm.generation.requests import Request
from difflm.models.sampling import FAMILIES, Sampling
from difflm.runtime.files import Json, read_own_table
from difflm.runtime.registry import blame_package

if TYPE_CHECKING:
    from difflm.generation.pipeline import TextDiffusion

P = ParamSpec("P")
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
TABLE: Json = read_own_table("options.yaml", __file__)
PANELS, FAMILY_PANELS, METAVARS = (
    {key: name for name, keys in TABLE["requests"][table].items() for key in keys}
    for table in ("panels", "families", "metavars")
)
ENGLISH = "english"  # the model that is meant where none is named
Dtype = Literal["float32", "bfloat16", "float16", "int8"] | None


class Verb(TyperCommand):
    """A command whose --help shows its everyday options; --help-all shows all of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--help-all" in args:
            args = ["--help"]
        elif self.name in TABLE["long"] and {"--help", "-h"} & {*args}:
            ours = [p for p in self.params if isinstance(p, TyperOption | TyperArgument)]
            rare = [p for p in ours if p.name in TABLE["rare"] or p.rich_help_panel not in TABLE["everyday"]]
            for one in rare:
                one.hidden = True
            self.epilog = f"{self.epilog}. {len(rare)} more options: {ctx.command_path} --help-all"
        return super().parse_args(ctx, args)


def command(
    name: str, app: typer.Typer | None = None, **groups: type | Sequence[str]
) -> Callable[[Callable[..., int | None]], Callable[..., int]]:
    """Make a function a command, of `app` if it is given, whose arguments and options `options.yaml` describes. It gets
    each group of options as one argument: a dataclass as its object, keys of `Request` as a dictionary of those that
    are given."""
    about = TABLE["commands"][name]

    def decorate(function: Callable[..., int | None]) -> Callable[..., int]:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in groups]
        own = [make_option(p.name, p.annotation, p.default, find_entry(p.name, name)) for p in parameters]
        shared = {key: options_of(group) for key, group in groups.items()}

        @report_errors
        @functools.wraps(function)
        def made(*args: Any, **given: Any) -> int | None:
            for key, group in groups.items():
                values = {option.name: given.pop(option.name, option.default) for option in shared[key]}
                filled = {key: value for key, value in values.items() if value is not None and value != []}
                given[key] = group(**values) if isinstance(group, type) else filled
            with join_others() if "joins" in about else nullcontext():
                return function(*args, **given)

        options = sorted(chain(own, *shared.values()), key=panel_rank)
        made.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        made.__annotations__ = {p.name: p.annotation for p in options}
        return app.command(name.split()[-1], epilog=show_example(name))(made) if app else made

    return decorate


def show_example(name: str) -> str:
    return f"Example: {TABLE['commands'][name]['example']}"


def find_entry(name: str, verb: str) -> Json:
    """What help pages say of a parameter: an entry of its command, or one that several share."""
    return TABLE["commands"][verb].get(name) or TABLE["shared"].get(name, {})


def make_option(name: str, kind: Any, default: Any, about: Json) -> inspect.Parameter:
    """A parameter of a function as an argument or option of a command."""
    more: Json = {key: about[key] for key in ("metavar", "envvar", "hidden") if key in about}
    if "complete" in about:  # a place, which is imported when the tab key asks
        more["autocompletion"] = lambda: [*resolve_name(about["complete"])()]
    if "argument" in about:
        made = typer.Argument(help=about["help"], **more | {"metavar": about["argument"]})
    else:
        # Help pages are drawn by rich, which would treat a value in brackets as markup.
        help, panel = escape(about["help"]), about.get("panel") or None
        made = typer.Option(*about.get("flags", ()), help=help, rich_help_panel=panel, **more)
    return inspect.Parameter(name, KEYWORD_ONLY, default=default, annotation=Annotated[kind, made])


def panel_rank(option: inspect.Parameter) -> int:
    """The position of an option's panel on a help page."""
    order, panel = TABLE["order"], get_args(option.annotation)[1].rich_help_panel
    return order.index(panel if panel in order else "")


def options_of(group: type | Sequence[str]) -> list[inspect.Parameter]:
    """The options for keys of `Request`, or for the fields of an evaluation's that a page says something of."""
    if isinstance(group, type):
        found, hints, described = [], get_type_hints(group), describe_options()
        for one in fields(group):
            entry = find_entry(one.name, "evaluate")
            if about := described.get(one.name):
                panel = f"--task {' or '.join(about.tasks)}" if len(about.tasks) < 3 else None
                entry = {"help": about.help, "metavar": about.metavar, "panel": panel}
            if entry:
                found.append(make_option(one.name, hints[one.name], one.default, entry))
        return found
    found = []
    for key in group:
        field = Request.model_fields[key]
        kind, default, help = field.annotation, field.default, str(field.description)
        if isinstance(default, list | dict):  # of several values: the option is repeated
            kind, default, help = list[str] | None, None, f"{help.removesuffix('.')}; repeatable."
        if key == "json_schema":
            kind, help = str | None, "A JSON schema that the text must follow, as a file or written out."
        panel = FAMILY_PANELS[FAMILIES[key]] if key in FAMILIES else PANELS.get(key)
        flags = ["-n", "--number"] * (key == "n")
        entry = {"help": help, "metavar": METAVARS.get(key), "panel": panel, "flags": flags}
        found.append(make_option(key, kind, default, entry))
    return found


def check_names(device: str, *models: str | None, guides: "Sequence[Path] | None" = ()) -> None:
    """Refuse a device and models that cannot exist before torch is imported, which takes seconds."""
    from difflm.runtime.hub import is_hub_name
    from difflm.training.run import find_run

    kind = device.partition(":")[0]
    if kind not in DEVICES:
        hint = "Did you mean cuda? " if kind.lower() in ("gpu", "nvidia") else suggest(kind, DEVICES, quoted=False)
        raise UsageError(f"unknown --device {device!r}. {hint}Known: {', '.join(DEVICES)}.")
    for model in models:
        if model is not None and not is_hub_name(model):
            find_run(model)
    for folder in guides or ():
        check_file(folder)
        if not (folder / "config.json").is_file():
            raise UsageError(f"--guide: {folder} holds no classifier. Give a directory of `difflm train classifier`.")


def check_file(path: str | Path, advice: str = "") -> None:
    """Reject a file or directory that does not exist, suggesting the most similar name."""
    if os.path.exists(path):
        return
    path = Path(path)
    beside = os.listdir(path.parent) if path.parent.is_dir() else []
    raise UsageError(f"{path} does not exist. {suggest(path.name, beside)}{advice}".rstrip())


def is_text(given: str) -> bool:
    """Whether an argument is a text, not a file: nothing has this name, and it does not look like the name of one."""
    return not os.path.exists(given) and (len(given.split()) > 1 or not re.search(r"\.\w+(,|$)|/", given))


def check_reads_sources(model: str) -> None:
    """Refuse a run that was trained without sources."""
    from difflm.training.run import peek_config

    if (config := peek_config(model)) and not config["recipe"].get("source_longest"):
        raise UsageError(f"{model} was trained on texts without sources and cannot write from one.")


def read_stdin(what: str) -> Iterator[tuple[int, str]]:
    """The numbers and lines of standard input; at a terminal, say what is awaited."""
    from difflm.data.texts import decode_lines

    if sys.stdin.isatty():
        note(f"Type one {what} per line; Ctrl-D ends the input.")
    return decode_lines(sys.stdin.buffer, "standard input")


def check_values(request: Request) -> None:
    """Refuse what no model could do: values out of range, and controls that cannot be read."""
    Sampling().change(request.settings())
    for control in request.controls():
        with name_errors(f"{control.name}: ", lambda said: "--" in said or _CONTROL.match(said)):
            control.check_value()
    if edit := request.edited():
        if request.infill is not None:
            raise UsageError("--edit and --infill cannot be combined: mark gaps, or give a whole text.")
        edit.check_value()
    if request.method is not None:
        from difflm.methods.rivals import find_decoder

        find_decoder(request.method)


@contextmanager
def name_errors(name: str, is_named: Callable[[str], object] = lambda said: False) -> Iterator[None]:
    """Let a message about a request or a control begin with its name, unless it does."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error) if is_named(str(error)) else name + str(error)) from None


# Messages about a control begin with its name, or with what an option gives.
_CONTROL = re.compile(
    r"\A(infill|contains|avoid|pos|tree|span|pattern|words|length|edit|keep|control|JSON schema)(?=[:, ])"
)


DEVICES = ("auto", "cpu", "cuda", "mps")
NO_MEMORY = ("out of memory", "allocate memory", "not enough memory", "ALLOC_FAILED")  # GPU, Linux, Windows, cuBLAS
OUT_OF_MEMORY = (
    "out of memory. To train, lower batch_size or longest, or set recompute=true; "
    "to generate, ask for fewer texts or candidates; or use a smaller model."
)


def report_errors(command: Callable[P, int | None]) -> Callable[P, int]:
    """Run a command; report an error in a line, and return the exit code."""

    @functools.wraps(command)
    @speak_command()
    def reporting(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = command(*args, **kwargs) or 0
            sys.stdout.flush()
            return code
        except DifflmError as error:
            # The option that was typed is named, instead of the control that it stands for.
            complain(_CONTROL.sub(lambda found: f"--{found[1].lower().replace(' ', '-')}", str(error)))
            return error.exit_code
        except KeyboardInterrupt:
            complain("interrupted.")
        except BrokenPipeError:  # the reader has closed the pipe (`| head`)
            silence_stdout()
        except OSError as error:
            complain(f"{error.filename or 'the output'}: {error.strerror or error}.")
            silence_stdout()
        except Exception as error:
            full = isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)
            if not (said := OUT_OF_MEMORY if full else blame_package(error)):
                raise
            complain(said)
        return 1

    return reporting


TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_others() -> AbstractContextManager[object]:
    """Let the processes that torchrun started, if it did, work together."""
    if not all(name in os.environ for name in TORCHRUN) or os.environ["WORLD_SIZE"] == "1":
        return nullcontext()
    from difflm.runtime.distributed import join_processes

    return join_processes()


def silence_stdout() -> None:
    """Discard what Python flushes at exit: the output pipe is closed."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load_model(name: str, device: str, dtype: str | None = None, adapters: "Sequence[Path]" = ()) -> "TextDiffusion":
    from difflm.generation.pipeline import TextDiffusion

    return TextDiffusion.from_pretrained(name, device, dtype, adapter=adapters)
