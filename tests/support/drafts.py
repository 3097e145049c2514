"""Texts with their drafts, as players and pictures show them."""

from typing import Any

import pytest
from hypothesis import strategies as st

from difflm.data.words import join_words
from difflm.generation.jobs import Generation
from difflm.player.frames import Draft
from difflm.player.page import page

STEPS = 12
WORDS = ["Zizzi", "is", "a", "cheap", "pub", "near", "the", "river", "."]
HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<!--<script ",
    "<img src=x onerror=\"document.title='owned'\">",
]


def text_of(tokens: list[str], number: int = 0, steps: int = STEPS, **changes: Any) -> Generation:
    """Words that are "the" until their turn comes: one more is right at every step."""
    drafts = []
    before: list[str] = []
    for step in range(steps):
        right = len(tokens) * (step + 1) // steps
        now = tokens[:right] + ["the"] * (len(tokens) - right)
        changed = [not before or a != b for a, b in zip(now, before or now, strict=True)]
        sure = [1.0 if i < right else (step + 1) / steps for i in range(len(tokens))]
        drafts.append(Draft(number, step, 1 - (step + 1) / steps, now, sure, changed))
        before = now
    made = {"steps": steps, "denoiser_calls": steps, "seconds": 0.1, "seed": 3, **changes}
    return Generation(join_words(tokens), tokens, **made, drafts=drafts)


def four_texts() -> list[Generation]:
    controls = [
        {"name": "length", "target": 9, "satisfied": True, "score": 1.0, "checker": "count"},
        {"name": "food", "target": "Thai", "satisfied": False, "score": 0.1, "checker": "words"},
        {"name": "tree", "target": "(S *)", "satisfied": None, "score": None, "checker": ""},
    ]
    return [
        text_of(WORDS, 0),
        text_of([*WORDS[:-1], "and", "isn", "'", "t", "child", "-", "friendly", "."], 1, controls=controls),
        text_of([*HOSTILE, "&amp;", "\"'`", "\u2028", "x" * 200], 2),
        text_of(["مرحبا", "بكم", "في", "المطعم", "."], 3),
    ]


ABOUT = {"model": "tiny </title>", "sampler": "ancestral", "command": "difflm generate tiny -n 4 --seed 3"}


@st.composite
def drafts(draw: st.DrawFn) -> list[Draft]:
    tokens = st.sampled_from(["is", ".", "</script>", "<!--", '"', "\\", "שלום", "👩‍👩‍👧", "\n", ""]) | st.text(
        max_size=5
    )
    made = []
    for step in range(draw(st.integers(1, 5))):
        length = draw(st.integers(0, 6))
        made.append(
            Draft(
                0,
                step,
                draw(st.floats(0, 1)),
                draw(st.lists(tokens, min_size=length, max_size=length)),
                draw(st.lists(st.floats(0, 1), min_size=length, max_size=length)),
                draw(st.lists(st.booleans(), min_size=length, max_size=length)),
            )
        )
    return made


@pytest.fixture
def open_player(browser, tmp_path):
    """Opens texts in a page of its own; at the end there must have been no error and no request."""
    contexts, wrong = [], []

    def open_texts(texts: list[Generation], motion: str = "reduce", theme: str = "light", width: int = 1200) -> Any:
        path = tmp_path / "player.html"
        path.write_bytes(page(texts, ABOUT))
        context = browser.new_context(
            viewport={"width": width, "height": 800}, reduced_motion=motion, color_scheme=theme
        )
        contexts.append(context)
        context.set_default_timeout(120_000)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: request.url == path.as_uri() or wrong.append(request.url))
        tab.goto(path.as_uri())
        return tab

    open_texts.wrong = wrong  # type: ignore[attr-defined]
    yield open_texts
    for context in contexts:
        context.close()
    assert wrong == []
