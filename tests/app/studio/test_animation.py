"""The animated picture: it is XML without scripts, its words are those of the drafts, and it ends with the text."""

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from difflm.app.cli import main
from difflm.app.live_view import draw_words
from difflm.app.studio.animation import FRAMES, HELD, PLAYED, draw_animation
from difflm.errors import UsageError
from difflm.generation.jobs import Generation
from difflm.player.frames import Draft
from tests.support.drafts import HOSTILE, WORDS, drafts, four_texts, text_of

SVG = "{http://www.w3.org/2000/svg}"


def frames_in(picture: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(picture).findall(f"{SVG}g")


def words_of(frame: ElementTree.Element) -> str:
    return " ".join("".join(line.itertext()).strip() for line in frame)


@pytest.mark.parametrize("tokens", [WORDS, [*WORDS, *WORDS, *WORDS], [*HOSTILE, "&amp;", "\"'`", "日本", "."]])
def test_every_frame_shows_its_draft_and_the_last_one_the_text(tokens: list[str]) -> None:
    played = text_of(tokens)
    frames = frames_in(draw_animation([played], "difflm generate"))
    assert [words_of(frame) for frame in frames[:-1]] == [draw_words(d, [""]).plain for d in played.drafts[:-1]]
    assert words_of(frames[-1]) == played.text


def test_words_have_the_class_of_their_confidence() -> None:
    draft = Draft(0, 0, 0.5, ["Ziz", "zi", " is", " cheap"], [1.0, 0.99, 0.6, 0.0], [True] * 4)
    frame, last = frames_in(draw_animation([Generation("Zizzi is cheap", [], 2, 2, 0, 0, drafts=[draft] * 2)], ""))
    assert [(run.get("class"), run.text) for run in frame[0]] == [("c7", "Zizzi"), ("c4", " is"), ("c0", " ·····")]
    assert {run.get("class") for run in last.iter(f"{SVG}tspan")} == {"c7"}


@settings(max_examples=10)
@given(made=drafts())
def test_any_token_gives_a_picture_that_holds_nothing_but_shapes_and_words(made: list[Draft]) -> None:
    text = "\x00\x1b\ufffe\ud800 ]]> & <script>" + "".join(made[-1].tokens)
    played = Generation(text, [], 1, 1, 0.0, 0, drafts=made)
    root = ElementTree.fromstring(draw_animation([played], "difflm --infill '<&\"\x00'").encode())
    assert {one.tag.removeprefix(SVG) for one in root.iter()} <= {"svg", "style", "rect", "text", "tspan", "g"}
    names = {name for one in root.iter() for name in one.attrib}
    assert not [name for name in names if name.startswith("on") or "href" in name or "src" in name]


def test_one_frame_is_visible_at_any_time() -> None:
    """Each begins where the one before ends, and the last one stays: without its style, it is the only one."""
    frames = frames_in(draw_animation([text_of(WORDS, steps=100)], ""))
    begins = [float(frame.attrib["style"].removeprefix("animation-delay:")[:-1]) for frame in frames]
    assert len(frames) == FRAMES and begins[0] == -(PLAYED + HELD)
    assert begins == pytest.approx([begins[0] + k * PLAYED / FRAMES for k in range(FRAMES)], abs=1e-3)
    assert [frame.get("visibility") for frame in frames] == ["hidden"] * (FRAMES - 1) + [None]


@pytest.mark.long
def test_a_browser_shows_one_frame_after_the_other(browser: Any, tmp_path: Any) -> None:
    path = tmp_path / "text.svg"
    path.write_text(draw_animation(four_texts(), "difflm generate"), encoding="utf-8")
    context = browser.new_context(color_scheme="dark")
    tab = context.new_page()
    tab.goto(path.as_uri())
    visible = """at => { document.getAnimations().forEach(one => { one.pause(); one.currentTime = at });
        return [...document.querySelectorAll("g")].map(g => getComputedStyle(g).visibility == "visible") }"""
    count = len(frames_in(path.read_text(encoding="utf-8")))
    for k in range(count):
        offset = 1000 * PLAYED * (k + 0.5) / count
        assert tab.evaluate(visible, offset) == [number == k for number in range(count)]
    assert tab.evaluate("getComputedStyle(document.querySelector('.page')).fill") == "rgb(23, 27, 36)"
    context.close()


def test_too_much_is_refused_in_one_line(tmp_path: Any, capsys: Any) -> None:
    for argv, said in [
        (["--svg", "text.png"], "--svg writes an .svg file, not text.png."),
        (["--svg", "text.svg", "-n", "9"], "--svg holds at most 8 texts, not 9. Ask for fewer with -n."),
        (["--svg", "text.svg", "--out", "texts"], "--svg and --out cannot be combined: choose one."),
        (
            ["--svg", "text.svg", "--input", "x.jsonl"],
            "--svg cannot be combined with --input.",
        ),
    ]:
        assert main(["generate", *argv]) == 2
        assert capsys.readouterr().err == f"difflm: {said}\n"
    with pytest.raises(UsageError, match="lines of text are too many for one picture"):
        draw_animation([text_of(WORDS * 100)], "")


def test_a_picture_of_two_texts_is_small() -> None:
    """The worst case: the confidence of every word differs from that of its neighbours, at every step."""
    words = [f"word{k}" for k in range(33)]
    made = [Draft(0, s, 0.5, words, [k % 8 / 8 for k in range(33)], [True] * 33) for s in range(50)]
    texts = [Generation(" ".join(words), words, 50, 50, 0.0, 0, drafts=made)] * 2
    assert len(draw_animation(texts, "").encode()) < 150_000


def test_the_command_writes_it(tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "text.svg"
    assert main(["generate", "e2e", "-n", "2", "--steps", "3", "--svg", str(path), "--html", str(path) + ".html"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert words_of(frames_in(path.read_text(encoding="utf-8"))[-1]) == " ".join(printed)
