"""The terminal view: texts while they are denoised."""

import os
import sys
import time
import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.text import Text

from difflm.app.console import strip_controls
from difflm.player.frames import Draft, made_of_pieces, spaces

PAUSE = 0.05  # seconds between two redraws; steps that come faster are not drawn
SETTLED = 0.5  # the confidence above which a word shows all its letters
BAR = 20  # cells
# From low confidence (warm, faint) to high (cool, strong); the ramps of the player's two themes.
ON_DARK = ("#a08d45", "#a99a61", "#b2a77b", "#bbb495", "#c4c2af", "#ced0c9", "#d8dde4", "#e2ebff")
ON_LIGHT = ("#84640a", "#735b26", "#615234", "#50493e", "#3f4044", "#2d3647", "#1d2b49", "#0b1f4a")
MARKS = {"replace": "~{}", "delete": "-{}", "insert": "{}+"}  # what the next step does with a word
FAINT = Style(dim=True)
UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # these characters would move the cursor or reverse the line


class TerminalView:
    """Pass its `frame` as `watch`, and each finished text to `put`, in order.

    In a terminal there is a line for every text that is not finished, cut to the window (a lone text has all the lines
    it needs); a finished one moves above them, whole. Elsewhere a few drafts are plain lines before the text.
    Where a text is chosen from several candidates, each of them has a line."""

    def __init__(self, n: int, steps: int, candidates: int = 1, console: Console | None = None) -> None:
        self.n, self.steps, self.candidates = n, steps, candidates
        self.console = console or Console(file=sys.stdout, highlight=False)
        self._drafts: dict[int, Draft] = {}  # the latest of every text that is not finished
        self._batch: list[Draft] = []
        self._finished = 0
        self._drawn = float("-inf")
        self._styles = word_styles(self.console)
        # FORCE_COLOR makes rich treat a pipe as a terminal; the file itself knows.
        alive = self.console.file.isatty() and self.console.is_terminal and not self.console.is_dumb_terminal
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if alive else None

    def __enter__(self) -> "TerminalView":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.update(Text(""))
            self._live.stop()

    def frame(self, drafts: Sequence[Draft]) -> None:
        """Show one step of the texts of a batch."""
        if not drafts:
            return
        self._batch = list(drafts)
        self._drafts |= {draft.sample: draft for draft in drafts}
        if self._live and (drafts[0].step + 1 == self.steps or time.monotonic() - self._drawn >= PAUSE):
            self._draw(self._live)
        # Without a terminal, print the drafts of the first step and of every quarter.
        told = () if self._live else (0, self.steps // 4, self.steps // 2, 3 * self.steps // 4)
        for draft in drafts if drafts[0].step in told else ():
            text, candidate = divmod(draft.sample, self.candidates)
            name = f"text {text + 1}  " * (self.n > 1) + f"candidate {candidate + 1}  " * (self.candidates > 1)
            line = f"{name}{self._time(draft)}  {draw_words(draft, self._styles).plain}"
            print(line, file=self.console.file, flush=True)

    def advance(self, steps: int, least: int = 0) -> None:
        """Do nothing: this view counts the texts that it prints. It has the interface of a `Bar`."""

    def put(self, text: str) -> None:
        """Print the next finished text."""
        for candidate in range(self.candidates):
            self._drafts.pop(self._finished * self.candidates + candidate, None)
        self._finished += 1
        text = strip_controls(text)
        if self._live is None:
            print(text, file=self.console.file, flush=True)
            return
        self.console.print(Text(text if self.n == 1 else f"{text}\n"))  # a blank line separates long texts
        self._draw(self._live)

    def _draw(self, live: Live) -> None:
        rows = self._rows() if self._finished < self.n else []
        live.update(Group(*([self._header()] if rows and self._batch else []), *rows), refresh=True)
        self._drawn = time.monotonic()

    def _rows(self) -> list[Text]:
        """One line for each text, including waiting ones, as many as fit into the window."""
        unfinished = range(self._finished * self.candidates, self.n * self.candidates)
        if self.n * self.candidates == 1:
            return [draw_words(self._drafts[0], self._styles)] if 0 in self._drafts else []
        room = max(1, self.console.height - 3)
        shown = list(unfinished)
        if len(shown) > room:
            now = {draft.sample for draft in self._batch}
            shown = sorted(sorted(shown, key=lambda sample: sample not in now)[: max(1, room - 1)])
        rows = [draw_words(self._drafts[k], self._styles) if k in self._drafts else Text("·", FAINT) for k in shown]
        for row in rows:
            row.truncate(self.console.width, overflow="ellipsis")
        more = len(unfinished) - len(shown)
        return rows + ([Text(f"… and {more:,} more", FAINT)] if more else [])

    def _header(self) -> Text:
        draft = self._batch[0]
        sure = [c for d in self._batch for c, token in zip(d.confidence, d.tokens, strict=True) if token]
        mean = sum(sure) / max(1, len(sure))
        full = min(BAR, round(BAR * (draft.step + 1) / max(self.steps, draft.step + 1)))
        parts = [self._time(draft), "━" * full + "╌" * (BAR - full)]
        if draft.step + 1 < self.steps:  # showing confidence for a finished text would look like a promise
            parts.append(f"{mean:4.0%} sure")
        if self.n > 1:
            parts.append(f"{self._finished}/{self.n} done")
        header = Text("  ".join(parts), FAINT)
        header.truncate(self.console.width, overflow="ellipsis")
        return header

    def _time(self, draft: Draft) -> str:
        total = f"/{self.steps}" if self.steps > draft.step else ""
        return f"step {draft.step + 1:>{len(str(self.steps))}}{total}  t {draft.t:.3f}"


def draw_words(draft: Draft, styles: Sequence[Style | str]) -> Text:
    """The words of a draft, each in the style of its confidence; `styles` run from low to high."""
    tokens = [printable(token) for token in draft.tokens]
    apart = spaces(tokens, made_of_pieces(tokens))
    line = Text()
    for position, (token, space, sure) in enumerate(zip(tokens, apart, draft.confidence, strict=True)):
        style = styles[max(0, min(len(styles) - 1, int(sure * len(styles))))]
        line.append(" " * space)
        edit = draft.edits[position] if draft.edits and token else "keep"
        line.append(mark_word(hide_letters(token, sure, position), edit), style)
    return line


def word_styles(console: Console) -> list[Style]:
    """Styles from low to high confidence; without colours, faint and plain."""
    if console.no_color or console.color_system is None:
        return [FAINT, Style()]
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]  # some terminals set its colour number
    light = background in map(str, (7, *range(9, 16)))
    return [Style(color=color) for color in (ON_LIGHT if light else ON_DARK)]


def printable(token: str) -> str:
    return "".join(character for character in token if unicodedata.category(character) not in UNPRINTABLE)


def mark_word(word: str, edit: str) -> str:
    """Byte pairs put their space before the mark."""
    letters = word.lstrip(" ")
    return " " * (len(word) - len(letters)) + MARKS.get(edit, "{}").format(letters)


def hide_letters(word: str, sure: float, position: int) -> str:
    """Show some letters as dots of the same width while the confidence is below SETTLED.

    Which ones depends on the position alone, so that a word does not flicker while its confidence grows."""
    if not sure < SETTLED:
        return word
    shown, hidden = "", False
    for k, sign in enumerate(word):
        width = cell_len(sign)
        if width:  # a combining mark has no width: it is hidden with its letter
            hidden = sign != " " and (0.61803 * (k + 1) + 0.32472 * position) % 1 > sure / SETTLED
        shown += "·" * width if hidden else sign
    return shown
