"""The shape of the package: imports point one way, torch loads late, nothing is pickled."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import difflm

PACKAGE = Path(difflm.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# A package may import from the floors above it in this list, never from its own floor or a later one.
FLOORS = [
    {"errors"},
    {"runtime", "diffusion"},
    {"data", "networks"},
    {"models", "annotators"},
    {"methods", "controls"},
    {"training"},
    {"generation"},
    {"evaluation"},
    {"app"},
    {"api"},
    {"__init__", "__main__"},
]
FLOOR = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
DATA_FILES = {"recipes", "pretrained"}

PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING = {("torch", "save"), ("torch", "load")}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import in a file, relative ones resolved; late imports count like any other."""
    package = ["difflm", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def rooms_used(path: Path) -> Iterator[str]:
    for module, name in imported(path):
        parts = module.split(".")
        if parts[0] == "difflm" and len(parts) > 1:
            yield parts[1]
        elif parts[0] == "difflm" and name != "__version__":
            yield name if name in FLOOR else "__init__"


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    room = room_of(path)
    assert room in FLOOR, f"give {room} a floor in {Path(__file__).name}"
    for used in set(rooms_used(path)):
        assert used in FLOOR, f"give {used} a floor in {Path(__file__).name}"
        assert used == room or FLOOR[used] < FLOOR[room] or room == "__main__", f"{room} may not import {used}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_pickled(path):
    """A pickle runs code when it is read; weights are safetensors, everything else JSON."""
    assert not PICKLERS & {module.split(".")[0] for module, _ in imported(path)}
    assert not PICKLING & set(imported(path))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in PICKLING, f"line {node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant) and node.value.value is False, f"line {node.lineno}"


@pytest.mark.long
@pytest.mark.parametrize(
    "module", ["difflm", "difflm.app.cli", "difflm.data.text_metrics", "difflm.data.seq2seq_metrics"]
)
def test_importing_leaves_torch_out(module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} does not exist yet")
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_checks_see_what_they_forbid(tmp_path, monkeypatch):
    """The two readers of imports on a file that does everything wrong."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "networks").mkdir()
    bad = tmp_path / "networks" / "bad.py"
    bad.write_text("from ..models import x\nfrom difflm import app, TextDiffusion, __version__\nimport pickle\n")
    assert set(rooms_used(bad)) == {"models", "app", "__init__"}
    assert ("pickle", "") in set(imported(bad))
