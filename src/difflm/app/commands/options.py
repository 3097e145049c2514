"""What commands share: their common options, options that derive from `Request`, and how an error is reported."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperOption

from difflm.app.console import complain, note
from difflm.errors import DifflmError, UsageError, speak_command, suggest
from difflm.evaluation.options import describe_options
from difflm.generation.requests import Request
from difflm.models.sampling import FAMILIES, Family, Sampling
from difflm.runtime.registry import blame_package

if TYPE_CHECKING:
    from difflm.controls import Control
    from difflm.generation.pipeline import TextDiffusion
    from difflm.generation.ranking import Rank

P = ParamSpec("P")
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


# The panels of help pages, in their order; options without one come first.
CONSTRAINTS, REWRITING, CANDIDATES = "What the text must satisfy", "Rewriting a text", "Choosing among candidates"
SAMPLING, VECTORS, DISCRETE = "Sampling", "Sampling: models of word vectors", "Sampling: masked and other token models"
LEFT_TO_RIGHT, EDITS = "Sampling: autoregressive models", "Sampling: models that edit"
FILES, HARDWARE, TRAINING = "Input and output", "Hardware", "Training what is compared"
PANELS: dict[str, Sequence[str]] = {
    CONSTRAINTS: (
        *("length", "words", "contains", "avoid", "infill", "pattern", "json_schema", "field", "label", "pos", "tree"),
        *("span", "control", "method"),
    ),
    REWRITING: ("edit", "keep", "strength"),
    CANDIDATES: ("candidates", "mbr"),
}
FAMILY_PANELS: dict[Family, str] = {
    **dict.fromkeys(("any", "diffusion"), SAMPLING),
    **dict.fromkeys(("vectors", "simplex"), VECTORS),
    **dict.fromkeys(("masks", "masked", "tokens"), DISCRETE),
    "left-to-right": LEFT_TO_RIGHT,
    "edits": EDITS,
}
ORDER = [None, *PANELS, "", SAMPLING, VECTORS, DISCRETE, LEFT_TO_RIGHT, EDITS, FILES, HARDWARE]  # "": the command's own


# The panels of everyday options, and which of their options are not: --help shows the others, --help-all all of them.
EVERYDAY = (None, CONSTRAINTS, REWRITING, CANDIDATES, SAMPLING, FILES, HARDWARE, TRAINING)
RARE = {
    *("guide", "guidance", "label", "pos", "tree", "span", "control", "method", "source", "mbr", "repairs", "rank"),
    *("sampler", "length_beam", "clamp", "draws", "dtype", "split"),
}


class Verb(TyperCommand):
    """A command whose --help shows its everyday options; --help-all shows all of them."""

    def rare_options(self) -> list[Any]:
        if self.name not in ("generate", "translate", "evaluate", "compare"):  # the others fit on a screen
            return []
        ours = [p for p in self.params if isinstance(p, TyperOption | TyperArgument)]
        return [p for p in ours if p.name in RARE or p.rich_help_panel not in EVERYDAY]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--help-all" in args:
            super().format_help(ctx, ctx.make_formatter())
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        rare, epilog = self.rare_options(), self.epilog
        more = f" {len(rare)} more options: {ctx.command_path} --help-all" if rare else ""
        try:
            for one in rare:
                one.hidden = True
            self.epilog = f"{epilog}.{more}" if more else epilog
            super().format_help(ctx, formatter)
        finally:
            self.epilog = epilog
            for one in rare:
                one.hidden = False


def option(help: str, metavar: str | None = None, *flags: str, envvar: str | None = None, panel: str = "") -> Any:
    """An option of a command; `flags` replace the name of its parameter."""
    # Help pages are drawn by rich, which would treat a value in brackets as markup.
    shown = panel or None
    return typer.Option(*flags, help=escape(help), metavar=metavar, envvar=envvar, rich_help_panel=shown)


def complete_models() -> list[str]:
    from difflm.training.run import bundled_runs

    return list(bundled_runs())


ENGLISH = "english"  # the model that is meant where none is named
A_MODEL = "A bundled model (english, e2e, judge), the directory of a run, or a model on the Hugging Face Hub."
Run = Annotated[str, typer.Argument(metavar="RUN", help=A_MODEL, autocompletion=complete_models)]
Model = Annotated[str, typer.Argument(metavar="MODEL", help=A_MODEL, autocompletion=complete_models)]
Device = Annotated[str, option("cpu, cuda, cuda:1 or mps; auto uses the GPU if there is one.", panel=HARDWARE)]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "int8"] | None,
    option("Number format of the network. [the fastest for this machine]", panel=HARDWARE),
]
Json = Annotated[bool, option("Print one JSON object per line, for programs.", None, "--json", panel=FILES)]
Seed = Annotated[int, option("The same seed gives the same result.")]
Data = Annotated[Path | None, option("The directory that holds the corpora.", "DIR", envvar="DIFFLM_DATA", panel=FILES)]
Draws = Annotated[int, option("Noise levels per text when estimating the bound.")]
Guidance = Annotated[
    str | None,
    option(
        "How strongly classifiers steer; `original`: the rule of Li et al. (2022). [10; token models 2]",
        "SIZE",
        panel=CONSTRAINTS,
    ),
]
Guide = Annotated[
    list[Path] | None,
    option("A classifier trained with `difflm train classifier`; repeatable.", "DIR", panel=CONSTRAINTS),
]
Out = Annotated[
    Path | None,
    option("Write to this file; run the same command again to continue after a stop.", "FILE", panel=FILES),
]
Records = Annotated[Path | None, option("Append the records to this file instead of the runs.", "FILE", panel=FILES)]
SHARED = {"data": Data, "device": Device, "seed": Seed, "out": Records}  # options of several commands
METAVARS = {
    **dict.fromkeys(("field", "label", "control"), "NAME=VALUE"),
    **dict.fromkeys(("source", "contains", "infill", "edit", "keep"), "TEXT"),
    **dict.fromkeys(("n", "steps", "length", "mbr", "candidates", "block"), "N"),
    **dict.fromkeys(("sampler", "method", "projection", "start"), "NAME"),
    **{"avoid": "WORD", "pattern": "REGEX", "words": "N or LOW-HIGH", "pos": "TAGS", "tree": "BRACKETS"},
    **{"json_schema": "FILE or JSON", "span": "FIRST,LAST,LABEL", "length_beam": "K", "top_k": "K", "revisions": "R"},
}


def request_option(key: str) -> inspect.Parameter:
    """Derive the option for a key of a request; if the key holds several values, the option is repeated."""
    field, flags = Request.model_fields[key], ("-n", "--number") if key == "n" else ()
    kind, default, help = field.annotation, field.default, str(field.description)
    if isinstance(default, list | dict):
        kind, default, help = list[str] | None, None, f"{help.removesuffix('.')}; repeatable."
    if key == "json_schema":
        kind, help = str | None, "A JSON schema that the text must follow, as a file or written out."
    panel = next((name for name, keys in PANELS.items() if key in keys), "")
    panel = FAMILY_PANELS[FAMILIES[key]] if key in FAMILIES else panel
    made = option(help, METAVARS.get(key), *flags, panel=panel)
    return inspect.Parameter(key, KEYWORD_ONLY, default=default, annotation=Annotated[kind, made])


def panel_rank(parameter: inspect.Parameter) -> int:
    """The position of an option's panel on a help page."""
    panel = parameter.annotation.__metadata__[0].rich_help_panel
    return ORDER.index(panel if panel in ORDER else "")


def with_options(**groups: type | Sequence[str]) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Give a command groups of options, each of which it receives as one argument: a dataclass as its object, keys of
    `Request` as a dictionary of those that are given."""

    def decorate(command: Callable[..., int | None]) -> Callable[..., int | None]:
        parameters = inspect.signature(command).parameters.values()
        own = [p for p in parameters if p.name not in groups and p.kind is not p.VAR_KEYWORD]
        shared = {name: options_of(group) for name, group in groups.items()}

        @functools.wraps(command)
        def with_groups(**given: Any) -> int | None:
            for name, group in groups.items():
                values = {option.name: given.pop(option.name, option.default) for option in shared[name]}
                filled = {key: value for key, value in values.items() if value is not None and value != []}
                given[name] = group(**values) if isinstance(group, type) else filled
            return command(**given)

        options = [p.replace(kind=KEYWORD_ONLY) for p in sorted(chain(own, *shared.values()), key=panel_rank)]
        with_groups.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        with_groups.__annotations__ = {p.name: p.annotation for p in options}
        return with_groups

    return decorate


def options_of(group: type | Sequence[str]) -> list[inspect.Parameter]:
    """The options for keys of `Request`, or for the fields of a dataclass that say what they are about."""
    if not isinstance(group, type):
        return [request_option(key) for key in group]
    found, hints, described = [], get_type_hints(group), describe_options()
    for one in fields(group):
        kind: Any = SHARED.get(one.name)
        if about := described.get(one.name):
            panel = f"--task {' or '.join(about.tasks)}" if len(about.tasks) < 3 else ""
            kind = Annotated[hints[one.name], option(about.help, about.metavar, panel=panel)]
        if kind is not None:
            found.append(inspect.Parameter(one.name, KEYWORD_ONLY, default=one.default, annotation=kind))
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
        with name_control(control):
            control.check_value()
    if edit := request.edited():
        if request.infill is not None:
            raise UsageError("--edit and --infill cannot be combined: mark gaps, or give a whole text.")
        edit.check_value()
    if request.method is not None:
        from difflm.methods.rivals import find_decoder

        find_decoder(request.method)


@contextmanager
def name_control(control: "Control") -> Iterator[None]:
    """Let a message about a control begin with its name."""
    try:
        yield
    except UsageError as error:
        said = str(error)
        raise UsageError(said if "--" in said or _CONTROL.match(said) else f"{control.name}: {said}") from None


# Messages about a control begin with its name, or with what an option gives.
_CONTROL = re.compile(
    r"(infill|contains|avoid|pos|tree|span|pattern|words|length|edit|keep|control|JSON schema)(?=[:, ])"
)


def name_option(message: str) -> str:
    """A message that names the option that was typed, instead of the control that it stands for."""
    found = _CONTROL.match(message)
    return f"--{found[1].lower().replace(' ', '-')}{message[found.end() :]}" if found else message


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
            complain(name_option(str(error)))
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


def join_others(command: Callable[P, int | None]) -> Callable[P, int | None]:
    """Let the processes that torchrun started run a command together."""

    @functools.wraps(command)
    def joined(*args: P.args, **kwargs: P.kwargs) -> int | None:
        if not all(name in os.environ for name in TORCHRUN) or os.environ["WORLD_SIZE"] == "1":
            return command(*args, **kwargs)
        from difflm.runtime.distributed import join_processes

        with join_processes():
            return command(*args, **kwargs)

    return joined


def silence_stdout() -> None:
    """Discard what Python flushes at exit: the output pipe is closed."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load_model(name: str, device: str, dtype: str | None = None) -> "TextDiffusion":
    import torch

    from difflm.generation.pipeline import TextDiffusion

    return TextDiffusion.from_pretrained(name, device, getattr(torch, dtype) if dtype else None)


def load_rank(given: str, device: str) -> "Rank":
    """Return what --rank names: "bound", for the model's own bound, or another model."""
    return "bound" if given == "bound" else load_model(given, device)
