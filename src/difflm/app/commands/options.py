"""What commands share: their common options, and how an error is reported."""

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

import typer

from difflm.app.console import complain
from difflm.errors import DifflmError, UsageError
from difflm.models.sampling import SETTINGS

if TYPE_CHECKING:
    from difflm.controls.guidance import GuidanceSettings
    from difflm.generation.pipeline import TextDiffusion

P = ParamSpec("P")

Run = Annotated[str, typer.Argument(metavar="RUN", help="A bundled model or the directory of a run.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto is the GPU where there is one.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="The network's arithmetic. [float32]")
]
Json = Annotated[bool, typer.Option("--json", help="For machines: one JSON object a line.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same answer.")]
Data = Annotated[Path | None, typer.Option(metavar="DIR", envvar="DIFFLM_DATA", help="Where the corpora are.")]
Draws = Annotated[int, typer.Option(help="Noise levels a text, for a bound.")]
Split = Annotated[Literal["train", "valid"], typer.Option(help="Which texts to measure on.")]
ScoreTexts = Annotated[int, typer.Option(help="Held-out texts whose likelihood is measured.")]
Judge = Annotated[str | None, typer.Option(metavar="RUN", help="Left-to-right model that reads the samples. [judge]")]
Twin = Annotated[str | None, typer.Option(metavar="RUN", help="Autoregressive run whose samples stand beside.")]


def setting(name: str, *flags: str) -> Any:
    """A setting of `Sampling` as an option."""
    return typer.Option(*flags, help=SETTINGS[name].description)


Steps = Annotated[int | None, setting("steps")]
Sampler = Annotated[str | None, setting("sampler")]
Temperature = Annotated[float | None, setting("temperature")]
NoiseTemperature = Annotated[float | None, setting("noise_temperature")]
NoiseTopP = Annotated[float | None, setting("noise_top_p")]
Clamp = Annotated[bool | None, setting("clamp", "--clamp/--no-clamp")]
ClampBelow = Annotated[float | None, setting("clamp_below")]
Contrast = Annotated[float | None, setting("contrast")]
TopK = Annotated[int | None, setting("top_k")]
TopP = Annotated[float | None, setting("top_p")]
Beams = Annotated[int | None, setting("beams")]
Guidance = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="How strongly classifiers pull; `original`: as Li et al. did. [10; tokens 2]"),
]


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
            if not isinstance(error, MemoryError) and "out of memory" not in str(error):
                raise
            complain("out of memory. Try a smaller batch_size, fewer candidates or a smaller model.")
        return 1

    return reporting


def silence_stdout() -> None:
    """Let Python's last flush go nowhere: what is left in the buffer has no reader."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load_model(name: str, device: str, dtype: str | None = None) -> "TextDiffusion":
    """A model for a command; what measures models is not imported with it."""
    import torch

    from difflm.generation.pipeline import TextDiffusion

    return TextDiffusion.from_pretrained(name, device, getattr(torch, dtype) if dtype else None)
