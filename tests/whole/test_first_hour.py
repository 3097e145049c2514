"""A newcomer's first hour: a fresh clone, `make demo`, and the lines of the README and of the guide, typed in a shell.

The clone uses the environment that runs the tests, unless DIFFLM_MAKE_DEMO is set: then `make demo` installs everything
into a .venv of its own first, from the internet.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from difflm.training.run import peek_config
from tests.support.pages import COMMANDS, PYTHON, ROOT, Shown

pytestmark = pytest.mark.slow

PAGES = ("README.md", "docs/guide/first-texts.md", "docs/guide/install.md")
SOON = 300.0  # seconds within which a line prints its first words, also on a busy machine
# Lines that a newcomer does not type, or waits for: servers, downloads, clusters, and trainings of many minutes.
LONGER = ("difflm studio", "difflm data", "difflm train e2e", "difflm train my.txt --out", "difflm compare", "torchrun")
Typed = Callable[[str], tuple[str, float]]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (shutil.which("git") and shutil.which("make") and (ROOT / ".git").exists()):
        pytest.skip("needs git, make and a repository")
    clone = tmp_path_factory.mktemp("home") / "difflm"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    return clone


@pytest.fixture(scope="module")
def typed(clone: Path) -> Typed:
    """Type a line in a shell of the clone; give what it printed, and the seconds until its first line."""
    own = os.environ.get("DIFFLM_MAKE_DEMO")
    enter = "source .venv/bin/activate; " if own else ""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "DIFFLM_DATA")}
    if not own:
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        environment["PYTHONPATH"] = str(clone / "src")

    def run(line: str) -> tuple[str, float]:
        begun = time.monotonic()
        shell = subprocess.Popen(
            ["bash", "-c", enter + line],
            cwd=clone,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert shell.stdout is not None
        first = shell.stdout.readline()
        seconds = time.monotonic() - begun
        said = first + shell.stdout.read()
        assert shell.wait() == 0, f"{line}\n{said}"
        faults = [told for told in said.splitlines() if told.startswith("difflm: ") and "WARNING" not in told]
        assert "Traceback" not in said and not faults, said
        return said, seconds

    return run


def test_the_demo_fills_a_gap_and_says_how_to_go_on(clone: Path, typed: Typed) -> None:
    if os.environ.get("DIFFLM_MAKE_DEMO"):
        said = subprocess.run(["make", "demo"], cwd=clone, check=True, capture_output=True, text=True).stdout
    else:
        said, _ = typed(f"make -s -o .venv/.ready demo BIN={Path(sys.executable).parent}")
    *_, a, b, c, d, last = said.strip().splitlines()
    whole = re.compile(r"My neighbour .+ every morning before work\.")
    assert all(whole.fullmatch(text) for text in (a, b, c, d))
    assert last == "To use difflm in this shell: source .venv/bin/activate"


def lines() -> list[Shown]:
    shown = [c for c in COMMANDS if c.page in PAGES and c.argv[0] == "difflm" and not c.complaint]
    return [c for c in shown if not " ".join(c.argv).startswith(LONGER)]


def test_the_lines_of_the_readme_and_the_guide_answer_within_seconds(clone: Path, typed: Typed) -> None:
    script = next(block.text for block in PYTHON if block.page == "docs/own-text.md")
    (clone / "write.py").write_text(script, encoding="utf-8")
    typed("python write.py; test -s my.txt && echo written")
    made_run, answered = False, 0
    for command in sorted(lines(), key=lambda c: "my-run" in c.argv and "train" not in c.argv):
        line = command.text.removeprefix("$ ")
        if "plot" in command.argv:
            pytest.importorskip("matplotlib")
        made_run |= "train" in command.argv
        if "my-run" in command.argv and not made_run:
            continue
        said, seconds = typed(line)
        assert seconds < SOON, line
        answered += 1
        if command.argv[1] == "generate" and not {"--show", "--svg", "--html"} & {*command.argv}:
            wanted = int(command.argv[command.argv.index("-n") + 1]) if "-n" in command.argv else 1
            texts = [text for text in said.splitlines() if text.strip() and not text.startswith("changed: ")]
            assert len(texts) == wanted, f"{line}\n{said}"
        if "--svg" in command.argv:
            assert (clone / command.argv[command.argv.index("--svg") + 1]).read_text().startswith("<svg")
    assert answered > 15 and made_run


def test_the_python_of_the_readme_prints_texts(clone: Path, typed: Typed) -> None:
    for number, block in enumerate(block for block in PYTHON if block.page == "README.md"):
        (clone / f"block-{number}.py").write_text(block.text, encoding="utf-8")
        said, seconds = typed(f"python block-{number}.py")
        assert said.strip() and seconds < SOON


def test_what_a_newcomer_tries_next_is_answered(clone: Path, typed: Typed) -> None:
    """No model named, a text in place of a file, help, and a description."""
    said, _ = typed('difflm generate --infill "My dog ___ in the garden." --json')
    made = json.loads(said)
    assert made["text"].startswith("My dog ") and "warnings" not in made
    assert "nats/token" in typed('difflm score english-small "Some text."')[0]
    said, _ = typed("difflm info")
    assert "English" not in said and f"{peek_config('english')['parameters']:,} parameters" in said
    assert "--infill" in typed("difflm generate --help")[0]
