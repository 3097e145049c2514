"""Write docs/reference/python.md: every public name of the library, from its signature and docstring.

python -m benchmarks.assets.reference
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import difflm
from difflm.controls import Control
from difflm.models.sampling import FAMILIES, SETTINGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "python.md"
WIDTH = 100
HEAD = """# Python reference

Everything that `from difflm import …` offers. `python -m benchmarks.assets.reference` generates this page from
signatures and docstrings.

```python
from difflm import Field, Length, TextDiffusion

lm = TextDiffusion.from_pretrained("e2e")
(text,) = lm.generate(controls=[Field("food", "Japanese"), Length(14)], steps=20)
print(text, text.alternatives[0])  # the probability of the first word, and likely alternatives
texts = lm.infill(["The ___ is a pub.", "A ___ near ___:2."], n=2, steps=20)  # two of each, in this order
lm.edit(str(text), strength=0.3, keep="Japanese", steps=20, progress=True)
lm.generate(2, frames=True, steps=20)  # as the last line of a notebook cell: plays how the texts form
```

Wrong arguments raise `UsageError`, whose message says what to do. [Control](../control.md) describes the controls with
examples, [`difflm train`](../verbs/train.md) the recipes, and [`difflm evaluate`](../verbs/evaluate.md) the figures of
a report.
"""
EVERYDAY = [
    *("from_pretrained", "generate", "infill", "edit", "translate", "stream", "alternatives", "score"),
    *("guided_by", "to", "device", "save_pretrained", "push_to_hub"),
]
GROUPS = {
    "A model": ["TextDiffusion"],
    "Settings": [],
    "Texts": ["Texts", "Generation", "TokenBelief", "Draft"],
    "Controls": [],  # all of them
    "Training and evaluation": ["train", "Run", "evaluate", "Report"],
    "Errors": ["DifflmError", "UsageError"],
}


def is_control(name: str) -> bool:
    one = getattr(difflm, name)
    return name == "Edit" or (isinstance(one, type) and issubclass(one, Control))


def names_of(group: str) -> list[str]:
    return [name for name in difflm.__all__ if is_control(name)] if group == "Controls" else GROUPS[group]


def show_type(annotation: Any) -> str:
    """A type as people write it."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"ForwardRef\('(.*?)'.*?\)", r"\1", text)
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)
    return re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)


def show_default(value: Any) -> str:
    return "…" if " at 0x" in repr(value) else "[]" if repr(value) == "<factory>" else repr(value)


def show_signature(name: str, function: Any) -> str:
    """A call on one line, or with one argument a line where that is too long."""
    signature = inspect.signature(function)
    said, keyword = [], False
    for one in signature.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.name in SETTINGS and {*SETTINGS} <= {*signature.parameters}:
            continue
        if one.kind is one.KEYWORD_ONLY and not keyword:
            said.append("*")
        keyword |= one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        star = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        kind = "" if one.annotation is one.empty else f": {show_type(one.annotation)}"
        default = "" if one.default is one.empty else f" = {show_default(one.default)}"
        said.append(f"{star}{one.name}{kind}{default}")
    if {*SETTINGS} <= {*signature.parameters}:
        said.append("steps=…, temperature=…, and the other settings")
    end = "" if signature.return_annotation is signature.empty else f" -> {show_type(signature.return_annotation)}"
    end = "" if isinstance(function, type) else end
    line = f"{name}({', '.join(said)}){end}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {one},\n" for one in said) + f"){end}"


def show_fields(kind: type) -> Iterator[str]:
    """The fields of a dataclass that its source explains."""
    source = "".join(inspect.getsource(base) for base in kind.__mro__ if is_dataclass(base))
    for one in fields(kind):
        if one.init and (found := re.search(rf"^    {one.name}: .*?  # (.*)$", source, re.MULTILINE)):
            yield f"- `{one.name}`: {found[1]}"


def methods_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties; those of all controls and of Python itself are left out."""
    for name in sorted(dir(kind), key=lambda name: (EVERYDAY.index(name) if name in EVERYDAY else len(EVERYDAY), name)):
        one = inspect.getattr_static(kind, name)
        own = not any(hasattr(other, name) for other in (list, Exception, Control)) and not name.startswith("_")
        method = callable(one) or isinstance(one, classmethod | property) or hasattr(one, "func")
        if own and method and inspect.getdoc(getattr(kind, name)):
            yield name, one


def describe(one: Any) -> str:
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(one) or "")


def entry(name: str) -> Iterator[str]:
    """The section of a name."""
    one = getattr(difflm, name)
    yield f"### {name}"
    if is_dataclass(one) or inspect.isfunction(one):
        yield f"```text\n{show_signature(name, one)}\n```"
    yield describe(one)
    if is_dataclass(one) and (listed := list(show_fields(one))):  # type: ignore[arg-type]
        yield "\n".join(listed)
    if not isinstance(one, type) or issubclass(one, Control | Exception):
        return
    rest = []
    for method, static in methods_of(one):
        found = getattr(static, "__func__", static)
        about = describe(getattr(static, "func", found))
        if name == "TextDiffusion" and method not in EVERYDAY:
            first = re.split(r"\.\s", about)[0].rstrip(".")
            rest.append(f"| `{method}` | {first} |")
            continue
        called = f"\n\n```text\n{show_signature(method, found)}\n```" if callable(found) else ""
        yield f"#### {name}.{method}{called}"
        yield about
    if rest:
        yield "#### For servers and benchmarks"
        yield "\n".join(["| method | |", "|---|---|", *rest])


def settings() -> str:
    """How texts are made: the settings that methods of a model share, with the models that understand them."""
    rows = [f"| `{name}` | {one.description} | {FAMILIES[name]} |" for name, one in SETTINGS.items()]
    about = "`generate`, `infill`, `edit`, `translate` and `stream` take these; None means the model's own value."
    return "\n".join([about, "", "| setting | | models |", "|---|---|---|", *rows])


def page() -> str:
    parts = [HEAD.rstrip()]
    for group in GROUPS:
        parts.append(f"## {group}")
        if group == "Settings":
            parts.append(settings())
        for name in names_of(group):
            parts += entry(name)
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
