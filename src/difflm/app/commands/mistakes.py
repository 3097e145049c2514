"""Explain what is wrong with a command line, in one sentence that says what to do instead."""

import re
from collections.abc import Sequence
from typing import Any

from difflm.app.commands.options import TABLE
from difflm.errors import suggest

ELSEWHERE = TABLE["elsewhere"]


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
    if context is None:
        return message
    if extra := re.search(r"unexpected extra argument\S* \((.*)\)", message, re.DOTALL):
        return explain_extra(extra[1], context)
    return message


def explain_unknown_option(name: str, context: Any, given: Sequence[str]) -> str:
    path = context.command_path
    if context.info_name == "train" and (change := recipe_change(name, value_of([name], given))):
        return f"{path} takes settings as key=value: write {change} instead of {name}."
    if name in ELSEWHERE["options"]:
        return f"{path} has no option {name}: {ELSEWHERE['options'][name]}."
    verbs = context.find_root().command.commands
    if others := [f"difflm {verb}" for verb, command in verbs.items() if name in options_of(command)]:
        return f"{path} has no option {name}; {' and '.join(others[:2])} {'have' if others[1:] else 'has'} it."
    return f"{path} has no option {name}. {suggest(name, options_of(context.command), quoted=False)}".strip()


def recipe_change(name: str, value: str | None) -> str | None:
    """Suggest the `key=value` to use in place of an unknown option of `train`."""
    from difflm.training.recipe import Recipe

    key = name.lstrip("-").replace("-", "_").removeprefix("model.")
    key = ELSEWHERE["keys"].get(key, key)
    if key in ELSEWHERE["sizes"]:
        key = f"model.{key}"
    known = key in Recipe.model_fields or key.startswith("model.")
    return f"{key}={'VALUE' if value is None else value}" if known else None


def explain_value(option: str, message: str, value: str | None) -> str:
    """Say which values an option takes, if it was given another one."""
    choices = [one for one in re.findall(r"'([^']*)'", message) if one != value]
    shown = "" if value is None else f", not {value!r}"
    if choices:
        hint = suggest(value or "", choices, quoted=False)
        return f"{option} must be one of {', '.join(choices)}{shown}. {hint}".strip()
    if "integer" in message:
        return f"{option} must be a whole number{shown}."
    if "number" in message or "float" in message:
        return f"{option} must be a number{shown}."
    return f"{option}: {message[:1].lower()}{message[1:].removesuffix('.')}{shown}."


def explain_extra(extra: str, context: Any) -> str:
    """Advice for a surplus argument: a setting without its dashes, or a text to continue."""
    path, (key, equals, value) = context.command_path, extra.partition("=")
    if equals and (option := f"--{key.replace('_', '-')}") in options_of(context.command):
        return f"{path} takes options, not key=value: write {option} {value}."
    if context.info_name == "generate":
        return f"{path} takes one MODEL. To continue a text, give it with a gap: --infill {extra + ' ___'!r}"
    return f"{path} does not take {extra!r} after its other arguments."


def options_of(command: Any) -> list[str]:
    return [name for param in command.params for name in param.opts if name.startswith("-")]


def value_of(options: Sequence[str], given: Sequence[str]) -> str | None:
    """The last value that was given to an option."""
    found = None
    for word, following in zip(given, [*given[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name in options:
            found = value if equals else following
    return found
