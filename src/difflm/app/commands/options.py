"""What commands share: their common options, options that derive from `Request`, and how an error is reported."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

import typer
from rich.markup import escape

from difflm.app.console import complain
from difflm.errors import DifflmError, UsageError
from difflm.generation.requests import Request

if TYPE_CHECKING:
    from difflm.controls.guidance import GuidanceSettings
    from difflm.generation.pipeline import TextDiffusion
    from difflm.generation.ranking import Rank

P = ParamSpec("P")


def option(help: str, metavar: str | None = None, *flags: str, envvar: str | None = None) -> Any:
    """An option of a command; `flags` replace the name of its parameter."""
    # Help pages are drawn by rich, which would take a value in brackets for its own markup.
    return typer.Option(*flags, help=escape(help), metavar=metavar, envvar=envvar)


Run = Annotated[str, typer.Argument(metavar="RUN", help="A bundled model or the directory of a run.")]
Model = Annotated[str, typer.Argument(metavar="[MODEL]", help="A bundled model or the directory of a run.")]
Device = Annotated[str, option("cpu, cuda, cuda:1, mps …; auto is the GPU where there is one.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "int8"] | None, option("The network's arithmetic. [float32]")
]
Json = Annotated[bool, option("For machines: one JSON object a line.", None, "--json")]
Seed = Annotated[int, option("The same seed gives the same answer.")]
Data = Annotated[Path | None, option("Where the corpora are.", "DIR", envvar="DIFFLM_DATA")]
Draws = Annotated[int, option("Noise levels a text, for a bound.")]
Guidance = Annotated[
    str | None, option("How strongly classifiers pull; `original`: as Li et al. did. [10; tokens 2]", "SIZE")
]
Guide = Annotated[list[Path] | None, option("A classifier that difflm train made; repeatable.", "DIR")]
METAVARS = {"field": "NAME=VALUE", "label": "NAME=VALUE", "control": "NAME=VALUE", "span": "FIRST,LAST,LABEL"}
METAVARS |= {"json_schema": "FILE"}


def request_option(key: str) -> inspect.Parameter:
    """Derive the option that gives a key of a request; one with several values is given once for each."""
    field, flags = Request.model_fields[key], ("-n", "--number") if key == "n" else ()
    kind, default, help = field.annotation, field.default, str(field.description)
    if isinstance(default, list | dict):
        kind, default, help = list[str] | None, None, f"{help.removesuffix('.')}; repeatable."
    if METAVARS.get(key) == "FILE":
        kind = Path | None
    option = typer.Option(*flags, metavar=METAVARS.get(key), help=help)
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


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

        options = [p.replace(kind=p.KEYWORD_ONLY) for p in chain(own, *shared.values())]
        with_groups.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        with_groups.__annotations__ = {p.name: p.annotation for p in options}
        return with_groups

    return decorate


def options_of(group: type | Sequence[str]) -> list[inspect.Parameter]:
    if isinstance(group, type):
        return list(inspect.signature(group).parameters.values())
    return [request_option(key) for key in group]


def parse_guidance(given: str | None) -> "GuidanceSettings | None":
    """A size of our own rule, or the rule and the sizes of Li et al. (2022); None: the model's own."""
    from difflm.controls.guidance import ORIGINAL, STANDARD

    if given is None:
        return None
    if given == "original":
        return ORIGINAL
    try:
        size = float(given)
    except ValueError:
        raise UsageError(f"--guidance must be a number or `original`, not {given!r}.") from None
    if not 0 <= size <= 1000:
        raise UsageError(f"--guidance must lie between 0 and 1,000, not {given}.")
    return replace(STANDARD, size=size)


def parse_methods(given: "Sequence[str] | None") -> "dict[str, GuidanceSettings | None]":
    """Decoders by name, each with its strength; `all` are those of the registry. None: the decoder's usual strength."""
    from difflm.controls.rivals import DECODERS, find_decoder

    found: dict[str, GuidanceSettings | None] = {}
    for one in given or ():
        name, equals, strength = one.partition("=")
        if (equals and name == "all") or strength == "original":
            raise UsageError(f"--method {one}: give the strength of one decoder as a number, such as fudge=2.")
        names = [*DECODERS] if name == "all" else [find_decoder(name).name]
        found |= dict.fromkeys(names, parse_guidance(strength) if equals else None)
    return found


NO_MEMORY = (
    "out of memory",
    "allocate memory",
    "not enough memory",
    "ALLOC_FAILED",
)  # GPU, Linux, Windows, cuBLAS


def report_errors(command: Callable[P, int | None]) -> Callable[P, int]:
    """Run a command; report an error in a line, and return the exit code."""

    @functools.wraps(command)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = command(*args, **kwargs) or 0
            sys.stdout.flush()
            return code
        except DifflmError as error:
            complain(str(error))
            return error.exit_code
        except KeyboardInterrupt:
            complain("interrupted.")
        except BrokenPipeError:  # the reader has seen enough (`| head`)
            silence_stdout()
        except OSError as error:
            complain(f"{error.filename or 'the output'}: {error.strerror or error}.")
            silence_stdout()
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not any(words in str(error) for words in NO_MEMORY):
                raise
            complain(
                "out of memory. To train, lower batch_size or longest, or set recompute=true; "
                "to generate, ask for fewer texts or candidates; or take a smaller model."
            )
        return 1

    return reporting


TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_others(command: Callable[P, int | None]) -> Callable[P, int | None]:
    """Let the processes that torchrun started run a command as one."""

    @functools.wraps(command)
    def joined(*args: P.args, **kwargs: P.kwargs) -> int | None:
        if not all(name in os.environ for name in TORCHRUN) or os.environ["WORLD_SIZE"] == "1":
            return command(*args, **kwargs)
        from difflm.runtime.distributed import join_processes

        with join_processes():
            return command(*args, **kwargs)

    return joined


def silence_stdout() -> None:
    """Let Python's last flush go nowhere: what is left in the buffer has no reader."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load_model(name: str, device: str, dtype: str | None = None, divided: bool = False) -> "TextDiffusion":
    """A model for a command; what measures models is not imported with it. `divided`: several processes make its texts
    together."""
    import torch

    from difflm.generation.divided import DividedTextDiffusion
    from difflm.generation.pipeline import TextDiffusion
    from difflm.runtime.distributed import current

    kind = DividedTextDiffusion if divided and current().count > 1 else TextDiffusion
    return kind.from_pretrained(name, device, getattr(torch, dtype) if dtype else None)


def load_rank(given: str, device: str) -> "Rank":
    """What --rank names: the writer's own bound, or a run."""
    return "bound" if given == "bound" else load_model(given, device)
