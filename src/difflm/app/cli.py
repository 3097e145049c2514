"""The command `difflm`. Its subcommands are thin: they read options, call the library and print what it returns.

Nothing here imports torch before a subcommand needs it. Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

import re
import sys
import warnings
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from difflm.app.commands.bench import bench
from difflm.app.commands.data import data_app
from difflm.app.commands.evaluate import compare, evaluate, score
from difflm.app.commands.generate import generate
from difflm.app.commands.info import info, methods
from difflm.app.commands.options import TABLE, Verb, show_example
from difflm.app.commands.plot import plot_app
from difflm.app.commands.studio import studio
from difflm.app.commands.train import train
from difflm.app.commands.translate import translate
from difflm.app.console import complain
from difflm.errors import is_unicode, suggest
from difflm.version import __version__

ELSEWHERE = TABLE["elsewhere"]
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


# -- what is wrong with a command line, in one sentence that says what to do instead ----------------------------------


def explain_mistake(error: Any, given: Sequence[str]) -> str:
    """A sentence about the `UsageError` that Click's parser found in the given arguments."""
    message, context = str(error.format_message()), error.ctx
    match type(error).__name__:
        case "BadOptionUsage":
            return f"{error.option_name} needs a value."
        case "NoSuchOption" if context:
            return explain_unknown_option(error.option_name, context, given)
        case "MissingParameter" if context and (param := error.param):
            what = re.sub(r"\\(\[)", r"\1", str(param.help or "")).strip().removesuffix(".")
            return f"{context.command_path} needs {param.metavar or param.name.upper()}: {what[:1].lower()}{what[1:]}."
        case "BadParameter" if context and (param := error.param):
            return explain_value(param.opts[-1], str(error.message), value_of(param.opts, given))
    extra = re.search(r"unexpected extra argument\S* \((.*)\)", message, re.DOTALL) if context else None
    if extra is None:
        return message
    # A setting without its dashes, a text to continue, or another argument too many.
    path, (key, equals, value) = context.command_path, extra[1].partition("=")
    if equals and (option := f"--{key.replace('_', '-')}") in names_of(context.command):
        return f"{path} takes options, not key=value: write {option} {value}."
    if context.info_name == "generate":
        return f"{path} takes one MODEL. To continue a text, give it with a gap: --infill {extra[1] + ' ___'!r}"
    return f"{path} does not take {extra[1]!r} after its other arguments."


def explain_unknown_option(name: str, context: Any, given: Sequence[str]) -> str:
    path, key = context.command_path, name.lstrip("-").replace("-", "_").removeprefix("model.")
    if context.info_name == "train":  # it may be a setting
        from difflm.training.recipe import Recipe

        key = ELSEWHERE["keys"].get(key, key)
        key = f"model.{key}" if key in ELSEWHERE["sizes"] else key
        if key in Recipe.model_fields or key.startswith("model."):
            change = f"{key}={value_of([name], given) or 'VALUE'}"
            return f"{path} takes settings as key=value: write {change} instead of {name}."
    if name in ELSEWHERE["options"]:
        return f"{path} has no option {name}: {ELSEWHERE['options'][name]}."
    verbs = context.find_root().command.commands
    if others := [f"difflm {verb}" for verb, command in verbs.items() if name in names_of(command)]:
        return f"{path} has no option {name}; {' and '.join(others[:2])} {'have' if others[1:] else 'has'} it."
    return f"{path} has no option {name}. {suggest(name, names_of(context.command), quoted=False)}".strip()


def explain_value(option: str, message: str, value: str | None) -> str:
    """Say which values an option takes, if it was given another one."""
    shown = "" if value is None else f", not {value!r}"
    if choices := [one for one in re.findall(r"'([^']*)'", message) if one != value]:
        hint = suggest(value or "", choices, quoted=False)
        return f"{option} must be one of {', '.join(choices)}{shown}. {hint}".strip()
    if "integer" in message:
        return f"{option} must be a whole number{shown}."
    if "number" in message or "float" in message:
        return f"{option} must be a number{shown}."
    return f"{option}: {message[:1].lower()}{message[1:].removesuffix('.')}{shown}."


def names_of(command: Any) -> list[str]:
    return [name for param in command.params for name in param.opts if name.startswith("-")]


def value_of(options: Sequence[str], given: Sequence[str]) -> str | None:
    """The last value that was given to an option."""
    pairs = ((*word.partition("="), following) for word, following in zip(given, [*given[1:], None], strict=True))
    found = [value if equals else following for name, equals, value, following in pairs if name in options]
    return found[-1] if found else None
