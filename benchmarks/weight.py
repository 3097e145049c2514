"""How much there is to read: sizes, circles, kinds and walks of the code, and what they shall be.

    make weight                                (python -m benchmarks.weight)
    python -m benchmarks.weight --list 'one field'   (the functions that one walk enters)

tests/whole/test_weight.py holds today's figures, which may only fall.
"""

import argparse
import ast
import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import requests

import difflm
from difflm.controls import Field
from difflm.generation.pipeline import TextDiffusion
from difflm.machine import SWITCHES, turn

ROOT = Path(difflm.__file__).parent
REPOSITORY = ROOT.parents[1]
CORE = ("diffusion", "networks", "models", "methods")
# Denoising begins with the first call of the denoiser that is part of making a text: in a loop of steps, or in a draft
# that only tells how large a gap should be. Before 2026-11-19 the loops alone counted, so such drafts were "before".
DENOISER = "Denoiser.forward"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Request = Callable[[], object]
Walk = list[tuple[str, str]]  # file and name of the functions that are entered, in the order of first calls

# What the plan to make the code lighter had counted, what this script counted when the work began, and the goal.
PLAN: dict[str, tuple[int, int, int]] = {
    "lines of src/difflm": (43_161, 45_839, 33_000),
    "lines of diffusion, networks, models, methods": (15_000, 15_036, 13_500),
    "circles of files": (7, 7, 0),
    "isinstance of own classes": (280, 293, 80),
    "constant getattr and hasattr": (65, 66, 15),
    "Any": (549, 592, 250),
    "class attributes of LanguageModel": (20, 20, 6),
    "parameters of one function": (14, 15, 8),
    "lines of one function": (66, 70, 50),
    "late imports of methods": (196, 199, 0),
    "words of docs": (91_000, 95_136, 60_000),
    "plain text: files": (25, 29, 18),
    "plain text: functions": (113, 129, 90),
    "one field: files": (29, 39, 24),
    "one field: functions": (156, 195, 130),
    "gap with english: files": (37, 44, 26),
    "gap with english: functions": (178, 208, 140),
    "gap with english: functions before denoising": (125, 151, 60),
    "HTTP, one field: files": (44, 53, 30),
    "HTTP, one field: functions": (239, 285, 170),
}


@cache
def parse_all() -> dict[str, ast.Module]:
    """The code of the package by the names of its files."""
    paths = sorted(ROOT.rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def count_lines(rooms: tuple[str, ...] = ()) -> int:
    files = [path for path in parse_all() if not rooms or Path(path).parts[0] in rooms]
    return sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in files)


# -- circles -----------------------------------------------------------------------------------------------------------


def file_of(module: str) -> str | None:
    """The file of a module of the package."""
    parts = module.split(".")
    if parts[0] != "difflm":
        return None
    path = "/".join(parts[1:])
    return next((one for one in (f"{path}.py", f"{path}/__init__.py") if one in parse_all()), None)


def imports_of(path: str, tree: ast.AST) -> Iterator[str]:
    """The files that a file imports: at the top, late, for types alone, or by `import_module`."""
    package = ["difflm", *Path(path).parts[:-1]]
    for node in ast.walk(tree):
        named: list[str] = []
        match node:
            case ast.Import(names=names):
                named = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                named = [inner if file_of(inner := f"{base}.{alias.name}") else base for alias in names]
            case ast.Call(func=function, args=[ast.Constant(value=str(module)), *_]):
                if ast.unparse(function).endswith("import_module"):
                    named = [module]
        yield from (file for name in named if (file := file_of(name)) and file != path)


def find_circles() -> list[list[str]]:
    """Groups of files each of which imports all others, directly or not (Tarjan, 1972)."""
    graph = {path: sorted(set(imports_of(path, tree))) for path, tree in parse_all().items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(path: str) -> None:
        index[path] = low[path] = len(index)
        stack.append(path)
        for other in graph[path]:
            if other not in index:
                visit(other)
            if other in stack:
                low[path] = min(low[path], low[other])
        if low[path] == index[path]:
            group = stack[stack.index(path) :]
            del stack[stack.index(path) :]
            if len(group) > 1:
                circles.append(sorted(group))

    for path in graph:
        if path not in index:
            visit(path)
    return circles


# -- kinds -------------------------------------------------------------------------------------------------------------


def all_nodes() -> Iterator[ast.AST]:
    for tree in parse_all().values():
        yield from ast.walk(tree)


def count_own_kinds() -> int:
    """Tests of `isinstance`, `type(x) is` and `case` for classes of the package."""
    own = {node.name for node in all_nodes() if isinstance(node, ast.ClassDef)}

    def names_own(node: ast.AST) -> bool:
        return any(
            (isinstance(part, ast.Name) and part.id in own) or (isinstance(part, ast.Attribute) and part.attr in own)
            for part in ast.walk(node)
        )

    count = 0
    for node in all_nodes():
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                count += names_own(kinds)
            case ast.Compare(left=ast.Call(func=ast.Name(id="type")), ops=[ast.Is() | ast.IsNot()], comparators=[kind]):
                count += names_own(kind)
            case ast.MatchClass(cls=kind):
                count += names_own(kind)
    return count


def count_constant_attributes() -> int:
    """Calls of `getattr` and `hasattr` with a name that is written there."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and isinstance(node.args[1], ast.Constant)
        for node in all_nodes()
    )


def count_any() -> int:
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in all_nodes())


def count_class_attributes(name: str) -> int:
    classes = [node for node in all_nodes() if isinstance(node, ast.ClassDef) and node.name == name]
    return sum(isinstance(part, ast.AnnAssign | ast.Assign) for node in classes for part in node.body)


def functions_by_file() -> Iterator[tuple[str, Function]]:
    for path, tree in parse_all().items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, Function))


def is_counted(path: str, node: Function) -> bool:
    """Not so: commands, whose parameters are options, and kernels, which get pointers and strides one by one."""
    return not path.startswith("app/commands") and not any("triton.jit" in ast.unparse(d) for d in node.decorator_list)


def count_parameters(node: Function) -> int:
    args = node.args
    named = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return sum(arg is not None and arg.arg not in ("self", "cls") for arg in named)


def count_function_lines(node: Function) -> int:
    """Lines of a function, without those of functions and classes inside."""
    inner = [part for part in node.body if isinstance(part, Function | ast.ClassDef)]
    return span_lines(node) - sum(map(span_lines, inner))


def span_lines(node: Function | ast.ClassDef) -> int:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.end_lineno or first) - first + 1


def largest_function(measure: Callable[[Function], int]) -> int:
    return max(measure(node) for path, node in functions_by_file() if is_counted(path, node))


def count_late_imports(room: str) -> int:
    inside = (node for path, node in functions_by_file() if path.startswith(f"{room}/"))
    late = {id(part) for node in inside for part in ast.walk(node) if isinstance(part, ast.Import | ast.ImportFrom)}
    return len(late)


def count_words() -> int:
    """Words of the pages, without the log."""
    pages = [path for path in (REPOSITORY / "docs").rglob("*.md") if path.parent.name != "log"]
    return sum(len(path.read_text(encoding="utf-8").split()) for path in pages)


# -- walks -------------------------------------------------------------------------------------------------------------


def record_walk(name: str) -> Walk:
    """The named functions of the package that a request enters which has been made once before, in all threads.
    Comprehensions, lambdas and what dataclasses generate are not counted. What processors differ in is turned off, so
    that the walk is the same on all of them."""
    entered: dict[tuple[str, str], None] = {}
    recording = False

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        named = event == "call" and not code.co_name.startswith("<")
        if recording and named and code.co_filename.startswith(f"{ROOT}/"):
            entered.setdefault((str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname))

    threading.setprofile(note)  # of threads that begin from now on
    try:
        with turn(**{switch: switch == "posix" for switch in SWITCHES}), WALKS[name]() as ask:
            ask()
            recording = True
            sys.setprofile(note)
            ask()
            sys.setprofile(None)
            recording = False
    finally:
        threading.setprofile(None)
    return list(entered)


@contextmanager
def ask_plain() -> Iterator[Request]:
    lm = TextDiffusion.from_pretrained("e2e", dtype=None)
    yield lambda: lm.generate(1, steps=4)


@contextmanager
def ask_field() -> Iterator[Request]:
    lm, control = TextDiffusion.from_pretrained("e2e", dtype=None), Field("food", "Japanese")
    yield lambda: lm.generate(1, controls=[control], steps=4)


@contextmanager
def ask_gap() -> Iterator[Request]:
    lm = TextDiffusion.from_pretrained("english-small", dtype=None)  # the model that the first figures are of
    yield lambda: lm.infill("We ___ because it was raining.", steps=4)


@contextmanager
def ask_http() -> Iterator[Request]:
    """One field by HTTP, with a server in a thread."""
    from difflm.app.studio.limits import Limits
    from difflm.app.studio.served import Served
    from difflm.app.studio.server import listen, make_server

    listening = listen("127.0.0.1", 0)
    server = make_server([Served(TextDiffusion.from_pretrained("e2e", dtype=None), "e2e")], Limits(), None)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/api/generate"
    body: Any = {"n": 1, "field": {"food": "Japanese"}, "steps": 4}
    try:
        yield lambda: requests.post(address, json=body, timeout=600).raise_for_status()
    finally:
        server.engine.stop()
        server.should_exit = True
        thread.join(60)


WALKS: dict[str, Callable[[], AbstractContextManager[Request]]] = {
    "plain text": ask_plain,
    "one field": ask_field,
    "gap with english": ask_gap,
    "HTTP, one field": ask_http,
}


def count_walks(names: Iterable[str] = WALKS) -> dict[str, int]:
    counts = {}
    for name in names:
        walk = record_walk(name)
        counts[f"{name}: files"] = len({path for path, _ in walk})
        counts[f"{name}: functions"] = len(walk)
        if name == "gap with english":
            counts[f"{name}: functions before denoising"] = [function for _, function in walk].index(DENOISER)
    return counts


# -- the table ---------------------------------------------------------------------------------------------------------


def count_code() -> dict[str, int]:
    return {
        "lines of src/difflm": count_lines(),
        f"lines of {', '.join(CORE)}": count_lines(CORE),
        "circles of files": len(find_circles()),
        "isinstance of own classes": count_own_kinds(),
        "constant getattr and hasattr": count_constant_attributes(),
        "Any": count_any(),
        "class attributes of LanguageModel": count_class_attributes("LanguageModel"),
        "parameters of one function": largest_function(count_parameters),
        "lines of one function": largest_function(count_function_lines),
        "late imports of methods": count_late_imports("methods"),
        "words of docs": count_words(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--list", choices=WALKS, help="print the functions that a walk enters")
    parser.add_argument("--json", action="store_true", help="print what is now alone")
    asked = parser.parse_args()
    if asked.list:
        print(*(f"{path}: {name}" for path, name in record_walk(asked.list)), sep="\n")
        return
    now = {**count_code(), **count_walks()}
    if asked.json:
        print(json.dumps(now, indent=1))
        return
    print(f"{'':<44}{'before':>9}{'begin':>9}{'now':>9}{'goal':>9}")
    for what, count in now.items():
        print(f"{what:<44}" + "".join(f"{number:>9,}" for number in (*PLAN[what][:2], count, PLAN[what][2])))


if __name__ == "__main__":
    main()
