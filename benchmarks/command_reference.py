"""Write the reference page of the command, with every verb and option, from the command itself.

python -m benchmarks.command_reference
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer

from difflm.app.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "command.md"
INTRODUCTION = """# Every command and option

This page is written by `python -m benchmarks.command_reference` from the command itself, and says what `--help` says.
[Documentation](../README.md) has a page with examples for each command. `difflm --install-completion` sets up tab
completion for your shell. Exit codes: 0 done, 1 failed, 2 wrong usage.
"""
OWN = ("help", "install_completion", "show_completion")  # options that typer describes
KINDS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}


def write_reference() -> str:
    return "\n".join([INTRODUCTION, *describe(typer.main.get_command(app), "difflm")]).rstrip() + "\n"


def describe(command: Any, path: str) -> Iterator[str]:
    """The lines of a command and of those below it."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join([path, *(one.metavar if one.required else f"[{one.metavar}]" for one in arguments)])
    yield from (f"## `{usage}`", "", (command.help or "").strip(), "")
    if arguments:
        rows = [f"| `{escape(str(one.metavar))}` | {plain(one.help)}{shown_default(one)} |" for one in arguments]
        yield from ("| argument | |", "|---|---|", *rows, "")
    panels: dict[str, list[str]] = {}
    for one in command.params:
        if one.param_type_name == "option" and not one.hidden and one.name not in OWN:
            rows = panels.setdefault(getattr(one, "rich_help_panel", None) or "Options", [])
            rows.append(f"| {describe_flags(one, command)} | {plain(one.help)}{shown_default(one)} |")
    for panel, rows in sorted(panels.items(), key=lambda item: item[0] != "Options"):
        yield from (f"| {panel} | |", "|---|---|", *rows, "")
    for name, inner in getattr(command, "commands", {}).items():
        yield from describe(inner, f"{path} {name}")


def describe_flags(option: Any, command: Any) -> str:
    flags = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = option.metavar or value_kind(option.name, command)
    return f"{flags} {escape(value)}".rstrip()


def value_kind(name: str, command: Any) -> str:
    """What kind of value an option without a name for it takes: that of the annotation; "" for a switch."""
    parameter = inspect.signature(command.callback).parameters.get(name)
    kind = get_args(parameter.annotation)[0] if parameter else bool
    if get_origin(kind) in (Union, UnionType):
        kind = get_args(kind)[0]
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else KINDS.get(kind, "")


def shown_default(option: Any) -> str:
    default = option.default
    told = default is None or isinstance(default, bool | list | tuple) or option.required
    return "" if told else f" [{default}]"


def plain(help: str | None) -> str:
    return escape((help or "").replace("\\[", "[").replace("*", "\\*").replace("___", "\\_\\_\\_"))


def escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(write_reference(), encoding="utf-8")
