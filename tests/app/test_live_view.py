"""The terminal view: calm in a window of any size, plain lines in a pipe."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from difflm.app import live_view as show
from difflm.app.live_view import TerminalView, hide_letters, printable
from difflm.player.frames import Draft

STEPS = 8
ESCAPE = "\x1b"


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(width: int = 80, height: int = 24, **options) -> Console:
    return Console(
        file=FakeTerminal(),
        force_terminal=True,
        color_system=options.pop("color_system", "truecolor"),
        width=width,
        height=height,
        highlight=False,
        **options,
    )


def draft(sample: int, step: int, tokens: list[str], sure: float | None = None) -> Draft:
    sure = (step + 1) / STEPS if sure is None else sure
    return Draft(sample, step, 1 - (step + 1) / STEPS, tokens, [sure] * len(tokens), [True] * len(tokens))


def play(view: TerminalView, texts: dict[int, list[str]]) -> None:
    for step in range(STEPS):
        view.frame([draft(sample, step, tokens) for sample, tokens in texts.items()])


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = [0.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}])
def test_a_pipe_gets_a_draft_a_quarter_and_the_text(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pipe = io.StringIO()
    with TerminalView(1, STEPS, console=Console(file=pipe)) as view:
        play(view, {0: ["Zizzi", "is", "cheap", "."]})
        view.put("Zizzi is cheap.")
    assert ESCAPE not in pipe.getvalue()
    *drafts, text = pipe.getvalue().splitlines()
    assert text == "Zizzi is cheap."
    assert [line[:10] for line in drafts] == [f"step {step}/8  " for step in (1, 3, 5, 7)]
    assert drafts[-1].endswith("Zizzi is cheap.")


def test_a_pipe_says_which_text_a_draft_is_of():
    pipe = io.StringIO()
    with TerminalView(2, STEPS, console=Console(file=pipe)) as view:
        play(view, {1: ["later"], 0: ["sooner"]})
    assert {line[:6] for line in pipe.getvalue().splitlines()} == {"text 1", "text 2"}


def test_every_candidate_of_a_text_has_a_line():
    view = TerminalView(2, STEPS, candidates=3, console=terminal())
    view._batch = [draft(k, 7, [f"candidate{k}"], sure=1) for k in (3, 4, 5)]
    view._drafts = {d.sample: d for d in view._batch}
    assert [row.plain for row in view._rows()] == ["·"] * 3 + ["candidate3", "candidate4", "candidate5"]
    view._finished = 1
    assert [row.plain for row in view._rows()] == ["candidate3", "candidate4", "candidate5"]


def test_a_dumb_terminal_is_like_a_pipe(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=FakeTerminal())
    with TerminalView(1, STEPS, console=console) as view:
        play(view, {0: ["Zizzi"]})
    assert ESCAPE not in output(console)
    assert output(console).count("step") == 4


def test_without_colour_unsure_words_are_faint():
    console = terminal(no_color=True)
    with TerminalView(1, STEPS, console=console) as view:
        view.frame([draft(0, 0, ["Zizzi"], sure=0.49)])
    assert "38;2" not in output(console) and "38;5" not in output(console)
    assert re.search("\x1b\\[2m[^\x1b]*z", output(console))


def test_surer_words_are_stronger(monkeypatch):
    """Away from the background: brighter on a dark one, darker on a light one."""

    def brightness(view: TerminalView) -> list[float]:
        colours = [style.color.get_truecolor() for style in view._styles]
        return [0.2126 * c.red + 0.7152 * c.green + 0.0722 * c.blue for c in colours]

    monkeypatch.delenv("COLORFGBG", raising=False)
    on_dark = brightness(TerminalView(1, STEPS, console=terminal()))
    monkeypatch.setenv("COLORFGBG", "0;15")
    on_light = brightness(TerminalView(1, STEPS, console=terminal()))
    assert on_dark == sorted(on_dark) and on_light == sorted(on_light, reverse=True)
    assert min(on_dark) > max(on_light)


def test_at_most_twenty_redraws_a_second_and_always_the_last(clock):
    console = terminal()
    steps = 100
    with TerminalView(1, steps, console=console) as view:
        for step in range(steps):
            view.frame([draft(0, step, [f"word{step}"], sure=1)])
            clock[0] += 0.01
    shown = re.findall(r"word(\d+)", output(console))
    assert len(shown) <= 20 + 1
    assert shown[0] == "0" and shown[-1] == str(steps - 1)


@given(
    tokens=st.lists(st.text(max_size=12), min_size=1, max_size=30),
    sure=st.floats(0, 1),
    width=st.integers(20, 100),
)
def test_a_line_stays_inside_the_window(tokens, sure, width):
    console = terminal(width=width)
    view = TerminalView(2, STEPS, console=console)
    view._batch = [draft(0, 0, tokens, sure), draft(1, 0, ["日本語" * 20], sure)]
    view._drafts = {d.sample: d for d in view._batch}
    for row in [view._header(), *view._rows()]:
        assert row.cell_len <= width
        assert "\n" not in row.plain and ESCAPE not in row.plain


def test_how_sure_it_is_is_shown_only_while_a_text_forms():
    view = TerminalView(2, STEPS, console=terminal())
    view._batch = [draft(0, STEPS - 2, ["here"], sure=0.9)]
    assert "90% sure" in view._header().plain
    view._batch = [draft(0, STEPS - 1, ["here"], sure=0.9)]
    assert "sure" not in view._header().plain


def test_wide_signs_are_cut_by_their_cells():
    view = TerminalView(2, STEPS, console=terminal(width=20))
    view._batch = [draft(0, 7, ["日本語" * 10], sure=1)]
    view._drafts = {0: view._batch[0]}
    line = view._rows()[0].plain
    assert line.endswith("…") and 19 <= cell_len(line) <= 20


def test_texts_that_come_later_have_their_line_from_the_start():
    view = TerminalView(3, STEPS, console=terminal())
    view._batch = [draft(1, 7, ["here"], sure=1)]
    view._drafts = {1: view._batch[0]}
    assert [row.plain for row in view._rows()] == ["·", "here", "·"]


def test_more_texts_than_lines_show_those_in_the_making():
    console = terminal(height=10)
    view = TerminalView(50, STEPS, console=console)
    view._batch = [draft(40, 7, ["here"], sure=1)]
    view._drafts = {40: view._batch[0]}
    rows = [row.plain for row in view._rows()]
    assert len(rows) + 1 < console.height
    assert "here" in rows and rows[-1] == f"… and {50 - len(rows) + 1} more"


def test_finished_texts_stand_whole_and_once_when_it_is_over(clock):
    console = terminal()
    long = "word " * 40
    with TerminalView(2, STEPS, console=console) as view:
        for sample in (0, 1):
            play(view, {sample: ["draft"]})
            clock[0] += 1
            view.put(f"{sample} {long}")
    lines = "".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output(console)).split())
    assert lines.index(f"0{'word' * 40}") < lines.index(f"1{'word' * 40}")
    assert output(console).count(f"{ESCAPE}[?25l") == output(console).count(f"{ESCAPE}[?25h")  # the cursor is back


def test_tokens_cannot_steer_the_terminal():
    console = terminal()
    with TerminalView(1, STEPS, console=console) as view:
        view.frame([draft(0, 7, ["\x1b[31mred", "\x07", "\u202eturned", "\r\n"], sure=1)])
    assert "\x1b[31m" not in output(console)
    assert not {"\x07", "\u202e"} & set(output(console))


@given(word=st.text().map(printable), sure=st.floats(0, 1), place=st.integers(0, 100))
def test_a_condensed_word_keeps_its_width_and_its_spaces(word, sure, place):
    assert hide_letters(f" {word}", sure, place)[0] == " "
    assert cell_len(hide_letters(word, sure, place)) == sum(map(cell_len, word)) or sure >= show.SETTLED


@given(word=st.text(alphabet="abcdef", max_size=20), place=st.integers(0, 100), sure=st.tuples(*[st.floats(0, 1)] * 2))
def test_letters_that_show_stay_while_confidence_grows(word, place, sure):
    less, more = sorted(sure)
    for letter, before, after in zip(
        word, hide_letters(word, less, place), hide_letters(word, more, place), strict=True
    ):
        assert {before, after} <= {letter, "·"}
        assert before == "·" or after == letter
    assert hide_letters(word, 1, place) == word
