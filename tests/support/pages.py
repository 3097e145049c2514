"""What the pages show: commands, blocks of Python and YAML, links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Shown:
    """A command or a block of Python, and where it stands."""

    page: str
    line: int
    text: str
    complaint: str = ""  # what it says on stderr, where it is shown to fail

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def argv(self) -> list[str]:
        """Without prompt, comment and pipe; `[…]` of a synopsis may be left out, so it is, and RUN is a run."""
        text = re.split(r" \| | > ", self.text.removeprefix("$ "))[0]
        words = shlex.split(re.sub(r" \[[A-Z][^\]]*\]", "", text), comments=True)
        return ["run" if word == "RUN" else word for word in words]


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """(first line, language, content) of every fenced block."""
    for found in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        yield text[: found.start()].count("\n") + 2, found[2], found[3]


def commands_in(page: str, text: str) -> list[Shown]:
    """Lines of fenced blocks that begin with `difflm`, `make`, `pip` or `torchrun`, those that end in a backslash
    joined."""
    found = []
    for start, language, content in blocks(text):
        if language in ("", "sh", "bash", "console"):
            lines = re.sub(r"\\\n", lambda _: "\0", content).split("\n")
            number = start
            for line, following in zip(lines, [*lines[1:], ""], strict=True):
                if re.match(r"(\$ )?(difflm|make|pip|torchrun) ", line):
                    complaint = following if following.startswith("difflm: ") else ""
                    found.append(Shown(page, number, line.replace("\0", ""), complaint))
                number += 1 + line.count("\0")
    return found


def shown(language: str = "") -> list[Shown]:
    """All commands, or all blocks of a language."""
    found = []
    for path in PAGES:
        page, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if language:
            found += [Shown(page, start, content) for start, kind, content in blocks(text) if kind == language]
        else:
            found += commands_in(page, text)
    return found


COMMANDS, PYTHON, YAML = shown(), shown("python"), shown("yaml")


def links_in(text: str) -> list[str]:
    """Targets of links and images outside code, without those that leave the repository."""
    text = re.sub(r"^( *)```.*?^\1```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)|<img [^>]*src=\"([^\"]+)\"", text)
    targets = [(a or b).partition("#")[0] for a, b in found]
    return [target for target in targets if target and not re.match(r"[a-z]+:", target)]
