"""What a stranger gets: a package, a site and a notebook, and the guide followed from an empty environment."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from dataclasses import replace
from email import message_from_bytes
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import difflm
from difflm.data.words import split_words
from difflm.generation.pipeline import TextDiffusion
from difflm.training.run import bundled_runs
from tests.support.pages import COMMANDS, PAGES, PYTHON, ROOT, links_in

GUIDE = ROOT / "docs" / "guide"
NOTEBOOK = GUIDE / "text-diffusion-in-15-minutes.ipynb"
PRETRAINED = bundled_runs()["e2e"].parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}")


def home_links() -> Any:
    spec = importlib.util.spec_from_file_location("home_links", ROOT / "home_links.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*argv: object, **settings: Any) -> str:
    done = subprocess.run([str(one) for one in argv], capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- what the files say ------------------------------------------------------------------------------------------------


def test_the_licence_of_all_weights_is_that_of_the_package() -> None:
    cards = sorted(PRETRAINED.glob("*/README.md"))
    assert {card.parent for card in cards} == {path for path in PRETRAINED.iterdir() if any(path.glob("*.safetensors"))}
    licences = {re.search(r"^license: (\S+)$", c.read_text(encoding="utf-8"), re.MULTILINE)[1].upper() for c in cards}  # type: ignore[index]
    assert {"MIT", *licences} == set(PROJECT["license"].split(" AND "))
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])


def test_the_citation_and_the_changes_are_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == difflm.__version__ and " AND ".join(cited["license"]) == PROJECT["license"]
    assert f"\n## {difflm.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_guide_lists_every_extra() -> None:
    rows = re.findall(r"^\| (`.+?`) \|", (GUIDE / "install.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*PROJECT["optional-dependencies"]}


def test_links_of_other_files_lead_somewhere() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    notes = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    for folder, text in [(GUIDE, notes), (ROOT, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))]:
        assert (links := links_in(text)) and [one for one in links if not (folder / one).exists()] == []


def test_every_page_has_one_place_on_the_site() -> None:
    settings, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    unlisted = settings.split("\nnot_in_nav: |\n")[1].split()  # the log's pages, to which its first page leads
    pages = ["/" + page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]]
    assert sorted(listed) == sorted(p[1:] for p in pages if not any(fnmatch(p, pattern) for pattern in unlisted))
    assert all(pattern.startswith("/log/") for pattern in unlisted)


def test_links_are_made_for_where_the_text_is_shown() -> None:
    text = "[a](b.md#c) [![d](e.png)](f.md) [g](https://h) [i](#j) `[k](l)`\n```\n[m](n)\n```\n[`o`](p q)"
    links = home_links()
    assert links.replace_links(text, lambda target, picture: links.at_home("https://x", target, picture)) == (
        "[a](https://x/blob/main/b.md#c) [![d](https://x/raw/main/e.png)](https://x/blob/main/f.md) "
        "[g](https://h) [i](#j) `[k](l)`\n```\n[m](n)\n```\n[`o`](p q)"
    )
    assert links.replace_links(text, lambda target, _: None).startswith("a d [g](https://h) [i](#j) `[k](l)`\n")


def test_a_package_with_a_home_has_no_relative_link_on_its_page() -> None:
    need("hatchling")
    metadata: dict[str, Any] = {}
    home_links().PackagePage(str(ROOT), {"home": "https://x"}).update(metadata)
    assert links_in(metadata["readme"]["text"]) == [] and "](https://x/blob/main/docs/" in metadata["readme"]["text"]
    assert metadata["urls"]["Repository"] == "https://x"


# -- what is built -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.mark.long
def test_wheel_and_source_hold_what_they_should(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.stat().st_size < 95e6
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        (about,) = (name for name in names if name.endswith("/METADATA"))
        metadata = message_from_bytes(packed.read(about))
    package = Path(difflm.__file__).parent
    ours = {path.relative_to(package.parent) for path in package.rglob("*") if path.is_file()}
    assert {path.as_posix() for path in ours if "__pycache__" not in path.parts} <= names
    assert metadata["License-Expression"] == PROJECT["license"] and metadata["Version"] == difflm.__version__
    assert metadata.get_all("License-File") == PROJECT["license-files"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    with tarfile.open(source) as packed_source:
        inside = {name.partition("/")[2] for name in packed_source.getnames()}
    wanted = {"pyproject.toml", "home_links.py", "mkdocs.yml", "CITATION.cff", "CONTRIBUTING.md", "tests/conftest.py"}
    assert wanted | {"docs/guide/install.md", "Makefile", *PROJECT["license-files"]} <= inside


@pytest.mark.long
def test_twine_finds_no_fault(built: Path) -> None:
    need("twine")
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())


@pytest.mark.long
def test_the_site_has_no_dead_link(tmp_path: Path) -> None:
    """`strict` in mkdocs.yml: a warning is a failure. It warns of dead links and anchors, and of lost pages."""
    need("material")
    run(sys.executable, "-m", "mkdocs", "build", "-d", tmp_path, cwd=ROOT)
    assert 'href="guide/first-texts/"' in (tmp_path / "index.html").read_text(encoding="utf-8")


# -- what the guide says -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, with fewer steps than written; what must hold of the texts holds in a few steps too."""
    sampling = TextDiffusion.sampling
    load = TextDiffusion.from_pretrained

    def loaded(*args: Any, **kwargs: Any) -> TextDiffusion:
        made = load(*args, **kwargs)
        made.model.sampling = replace(made.model.sampling, steps=4)
        return made

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TextDiffusion, "from_pretrained", loaded)
    monkeypatch.setattr(TextDiffusion, "sampling", lambda self, **changes: replace(sampling(self, **changes), steps=4))
    names: dict[str, Any] = {"__name__": "__main__"}
    written = NOTEBOOK.read_text(encoding="utf-8")
    assert written.index("english") < written.index("difflm.train(") < written.index("e2e")
    for k, cell in enumerate(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            code = "".join(cell["source"]).replace("steps=150", "steps=10")
            exec(compile(code, f"{NOTEBOOK.name}, cell {k}", "exec"), names)
    assert all(len(text.tokens) == 14 and "riverside" in text.tokens for text in names["asked"])
    assert all(re.fullmatch("The old man .+ and smiled.", text.text) for text in names["filled"])
    assert names["run"].step == 10 and names["mine"].name == "ten-run"
    assert all(re.fullmatch(names["form"], text.text) for text in names["matching"])
    assert all(text.text.startswith("The Mill") for text in names["edited"])


@pytest.mark.slow
def test_a_stranger_follows_the_guide(built: Path, tmp_path: Path) -> None:
    """Both wheels in an empty environment, beside what they require: every command of the first page, in its order."""
    need("fastapi")
    venv.create(tmp_path / "venv", with_pip=True)
    places = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    (site,) = {path for path in (tmp_path / "venv").rglob("site-packages") if path.is_dir()}
    (site / "requirements.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    settings: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT / "models" / "english")
    wheels = [*built.glob("*.whl"), *tmp_path.glob("*.whl")]
    run(places / "python", "-m", "pip", "install", "--no-index", "--no-deps", *wheels, **settings)
    assert str(site) in run(places / "python", "-c", "import difflm; print(difflm.__file__)", **settings)
    script = next(block.text for block in PYTHON if block.page == "docs/own-text.md")
    exec(script.replace("my.txt", f"{tmp_path}/my.txt"), {})

    done = set()
    for command in (c for c in COMMANDS if c.page == "docs/guide/first-texts.md"):
        verb, *words = command.argv[1:]
        done |= {verb, *(word for word in words if word.startswith("--"))}
        if verb == "studio":
            open_the_page([places / "difflm", verb, *words, "--port", "0", "--no-browser"], settings)
            continue
        said = run(places / "difflm", verb, *words, **settings)
        if verb == "generate" and not {"--show", "--svg"} & set(words):
            meets_request(words, said.splitlines())
    assert {"generate", "train", "studio", "--infill", "--length", "--contains"} <= done


def meets_request(words: list[str], lines: list[str]) -> None:
    """The command printed as many texts as it asked for, each with the words and of the length that it asked for."""
    given = [*pairwise(words)]
    asked = {
        name: [value for key, value in given if key == name] for name in ("-n", "--infill", "--length", "--contains")
    }
    assert [str(len(lines))] == (asked["-n"] or ["1"]), lines
    for line in lines:
        for template in asked["--infill"]:
            parts = re.split(r"___(?::\d+)?", template)
            assert words[0] == "english" and re.fullmatch(".+".join(map(re.escape, parts)), line), line
        assert all(len(line.split()) == int(length) for length in asked["--length"]), line
        assert set(asked["--contains"]) <= set(split_words(line)), line
    assert not asked["--length"] or len(asked["--contains"]) == 2  # the guide asks for a length and two words


def open_the_page(argv: list[Any], settings: dict[str, Any]) -> None:
    server = subprocess.Popen([str(one) for one in argv], stderr=subprocess.PIPE, text=True, **settings)
    try:
        assert server.stderr
        address = re.search(r"http://\S+", server.stderr.readline())
        assert address
        with urllib.request.urlopen(address[0], timeout=60) as answer:
            assert answer.status == 200 and b"<html" in answer.read()
    finally:
        server.terminate()
        server.wait(60)
