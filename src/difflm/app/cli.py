"""The command `difflm`. Its subcommands are thin: they read options, call the library and print what it returns.

Nothing here imports torch before a subcommand needs it. Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

import sys
import warnings
from io import TextIOWrapper
from typing import Annotated

import typer

from difflm.app.commands.bench import bench
from difflm.app.commands.data import data_app
from difflm.app.commands.evaluate import compare, evaluate, score
from difflm.app.commands.generate import generate
from difflm.app.commands.info import info, methods
from difflm.app.commands.mistakes import explain_mistake
from difflm.app.commands.options import Verb, show_example
from difflm.app.commands.plot import plot_app
from difflm.app.commands.studio import studio
from difflm.app.commands.train import train
from difflm.app.commands.translate import translate
from difflm.app.console import complain
from difflm.errors import is_unicode
from difflm.version import __version__

app = typer.Typer(
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: difflm generate english -n 4. Tab completion: difflm --install-completion, then open a new shell.",
)

for verb in (generate, translate, train, evaluate, compare, score, methods, info, bench, studio):
    app.command(cls=Verb, epilog=show_example(verb.__name__))(verb)
app.add_typer(plot_app, name="plot", help="Draw schedules, word vectors, denoising and training.")
app.add_typer(data_app, name="data", help="List and download public corpora.")


def hush_torch() -> None:
    """Keep off the screen what torch says of itself; `python -W default -m difflm` shows it."""
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", r"[\s\S]*Triggered internally")
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module="torch")


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    if argv is None:
        hush_torch()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without £ shows a question mark, not a traceback
    given = sys.argv[1:] if argv is None else argv
    for number, word in enumerate(given, 1):
        if not is_unicode(word):
            complain(f"argument {number} is not UTF-8: {word!r}. Set the terminal to UTF-8, or rename the file.")
            return 2
    try:
        code = typer.main.get_command(app).main(args=argv, prog_name="difflm", standalone_mode=False)
    except SystemExit as left:
        code = left.code
    except Exception as error:
        if not hasattr(error, "ctx"):  # Typer keeps Click's UsageError to itself
            raise
        path = error.ctx.command_path if error.ctx else "difflm"
        complain(f"{explain_mistake(error, given)}\nTry: {path} --help")
        return 2
    return code if isinstance(code, int) else 0


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"difflm {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def difflm(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Diffusion language models: generate, control, train and measure text that forms all at once."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
