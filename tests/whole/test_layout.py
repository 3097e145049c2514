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
TESTS = Path(__file__).parents[1]

# A package may import from the floors above it in this list, never from its own floor or a later one.
FLOORS = [
    {"errors", "version"},
    {"machine"},
    {"runtime", "diffusion"},
    {"data", "networks"},
    {"models", "annotators", "player"},
    {"fast"},
    {"controls"},
    {"methods"},
    {"training"},
    {"generation"},
    {"evaluation"},
    {"app"},
    {"api"},
    {"__init__", "__main__"},
]
FLOOR = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
DATA_FILES = {"recipes", "pretrained"}
TEST_ROOMS = {*FLOOR, "whole", "benchmarks", "browser", "support"}

PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING = {("torch", "save"), ("torch", "load")}


# Whoever asks these decides by the machine: `difflm.machine` alone does, and all others ask its switches.
OF_THE_MACHINE = {
    ("torch.cuda", "is_available"), ("torch.cuda", "device_count"), ("torch.cuda", "get_device_capability"),
    ("torch.cuda", "is_bf16_supported"), ("torch.backends.mkldnn", "is_available"),
    ("torch.backends.mkldnn", "is_acl_available"), ("torch.backends.quantized", "supported_engines"),
    ("torch.ops.mkldnn", "_is_mkldnn_bf16_supported"), ("torch.version", "hip"), ("torch.version", "cuda"),
    ("platform", "machine"), ("platform", "processor"), ("platform", "system"), ("sys", "platform"), ("os", "name"),
    ("os", "uname"), ("shutil", "which"),
}  # fmt: skip
PARTS_OF_SYSTEMS = {"signal", "socket", "mmap", "os", "fcntl", "time"}  # of which a system has more or less


def questions_to_the_machine(path: Path) -> Iterator[str]:
    """What a file asks torch, Python or the operating system about the machine."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=owner, attr=name):
                if (ast.unparse(owner), name) in OF_THE_MACHINE or ast.unparse(owner) in ("torch.cpu",):
                    yield ast.unparse(node)
            case ast.Call(func=ast.Name(id="hasattr"), args=[ast.Name(id=owner), *_]) if owner in PARTS_OF_SYSTEMS:
                yield ast.unparse(node)
            case ast.Call(func=function, args=[ast.Constant(value="triton"), *_]):
                if ast.unparse(function).endswith("find_spec"):
                    yield ast.unparse(node)
            case ast.ImportFrom(module=module) if module in {owner for owner, _ in OF_THE_MACHINE}:
                yield from (alias.name for alias in node.names if (module, alias.name) in OF_THE_MACHINE)


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import in a file, relative ones resolved; late imports count like any other."""
    package = ["difflm", *path.relative_to(PACKAGE).parts[:-1]] if path.is_relative_to(PACKAGE) else []
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
        elif parts[0] == "difflm":
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


def borrowed_tests(path: Path) -> Iterator[str]:
    """What a test module imports of another one, or of tests/support/ by a bare name."""
    shared = {path.stem for path in (TESTS / "support").glob("*.py")}
    for module, name in imported(path):
        parts = [*module.split("."), name]
        if any(part.startswith("test_") for part in parts) or parts[0] in shared:
            yield ".".join(parts)


def test_tests_lie_in_rooms_and_borrow_from_support_alone():
    for path in TESTS.rglob("*.py"):
        place = path.relative_to(TESTS)
        assert place.parts[0] in TEST_ROOMS or str(place) == "conftest.py", f"{place}: put it into a folder"
        assert not [*borrowed_tests(path)], f"{place}: what several test modules use lies in tests/support/"


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_depends_on_the_machine_is_asked_of_a_switch(path):
    asked = [*questions_to_the_machine(path)]
    assert path.name == "machine.py" or not asked, f"ask a switch of difflm.machine instead of {asked}"


@pytest.mark.long
@pytest.mark.parametrize("module", ["difflm", "difflm.app.cli", "difflm.data.text_metrics"])
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
    bad.write_text("from ..models import x\nfrom difflm import app, TextDiffusion\nimport pickle\n")
    assert set(rooms_used(bad)) == {"models", "app", "__init__"}
    assert ("pickle", "") in set(imported(bad))
    bad.write_text(
        "import torch, sys, signal\nfrom shutil import which\nfrom importlib.util import find_spec\n"
        "torch.cuda.is_available(), torch.cpu._is_amx_tile_supported(), sys.platform == 'win32', find_spec('triton')\n"
        "hasattr(signal, 'SIGHUP'), torch.cuda.synchronize(), torch.backends.mkldnn.is_acl_available()\n"
    )
    assert len([*questions_to_the_machine(bad)]) == 7
    bad.write_text("from tests.app.test_cli import run\nfrom tests.app import test_cli\nfrom tiny import tiny_run\n")
    assert len([*borrowed_tests(bad)]) == 3
