"""The HTML player: what is embedded comes back, nothing is loaded, and a browser plays it."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from difflm.data.words import join_words
from difflm.errors import UsageError, speak_command
from difflm.generation.jobs import Generation
from difflm.player.frames import SIGNS, Draft, spaces
from difflm.player.page import MOST_FRAMES, MOST_TEXTS, Recording, page, write_player
from tests.support.drafts import ABOUT, STEPS, WORDS, drafts, four_texts, text_of


class Reader(HTMLParser):
    """Tags with their attributes, and what the scripts hold."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        self._inside = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def embedded(source: str) -> dict[str, Any]:
    reader = Reader(source)
    assert len(reader.scripts) == 3
    return json.loads(reader.scripts[0])


def unpacked(frames: list[dict[str, Any]], tokens: list[str]) -> list[dict[str, Any]]:
    cells: list[int] = []
    drafts = []
    for frame in frames:
        cells = cells[: frame["n"]] + [-1] * (frame["n"] - len(cells))
        for place, cell in zip(frame["w"][::2], frame["w"][1::2], strict=True):
            cells[place] = cell
        drafts.append(
            {
                "tokens": [tokens[cell >> 1] for cell in cells],
                "written": "".join(" " * (cell & 1) + tokens[cell >> 1] for cell in cells),
                "confidence": [SIGNS.index(sign) / 63 for sign in frame["c"]],
                "changed": [i in frame["x"] for i in range(frame["n"])],
            }
        )
    return drafts


@given(made=drafts())
def test_what_is_embedded_comes_back(made):
    """Any token at any place, drafts of any lengths; confidences to within half a level."""
    text = "this is not what the last draft says"
    source = page([Generation(text, [], 1, 1, 0.0, 0, drafts=made)], {}).decode()
    assert not set("<>&") & set(Reader(source).scripts[0])
    data = embedded(source)
    assert data["texts"][0]["text"] == text
    for draft, back in zip(made, unpacked(data["texts"][0]["frames"], data["tokens"]), strict=True):
        assert back["tokens"] == draft.tokens
        assert back["changed"] == draft.changed
        assert all(abs(a - b) <= 0.5 / 63 + 1e-9 for a, b in zip(back["confidence"], draft.confidence, strict=True))


@given(tokens=st.lists(st.sampled_from([*WORDS, "£", "30", "-", "friendly", "'", "t", "isn", '"', "日", ""])))
def test_words_are_spaced_as_in_a_text(tokens):
    apart = spaces(tokens, pieces=False)
    assert "".join(" " * space + token for space, token in zip(apart, tokens, strict=True)) == join_words(
        [token for token in tokens if token]
    )


def test_byte_pairs_bring_their_own_spaces():
    draft = Draft(0, 0, 0.0, ["Ziz", "zi", " is", " che", "ap"], [1.0] * 5, [True] * 5)
    data = embedded(page([Generation("Zizzi is cheap", [], 1, 1, 0.0, 0, drafts=[draft])], {}).decode())
    assert unpacked(data["texts"][0]["frames"], data["tokens"])[0]["written"] == "Zizzi is cheap"


def test_words_behind_the_end_are_not_part_of_the_last_draft():
    tokens = ["Zizzi", "is", "cheap", "", "river", "the"]
    last = Draft(0, 0, 0.0, tokens, [1.0] * 6, [True] * 6)
    data = embedded(page([Generation("Zizzi is cheap", [], 1, 1, 0.0, 0, drafts=[last])], {}).decode())
    assert unpacked(data["texts"][0]["frames"], data["tokens"])[0]["written"] == "Zizzi is cheap"


def test_the_page_refers_to_nothing_outside():
    source = page([text_of(WORDS)], ABOUT).decode()
    assert not re.search(r"https?://|@import|url\(", source)
    tags = Reader(source).tags
    assert not {"link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in tags}
    assert not any({"src", "href", "style"} & set(attributes) for _, attributes in tags)
    policy = next(a["content"] for tag, a in tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';") and "unsafe" not in policy


def test_the_page_is_written_to_a_file(tmp_path):
    write_player(tmp_path / "player.html", [text_of(WORDS)], ABOUT)
    assert (tmp_path / "player.html").read_bytes() == page([text_of(WORDS)], ABOUT)


def test_the_same_texts_give_the_same_page():
    assert page(four_texts(), ABOUT) == page(four_texts(), ABOUT)


def test_eight_texts_of_thirty_words_and_fifty_steps_are_small():
    """The worst case: every word is another one at every step."""
    words = [f"word{i}" for i in range(1000)]
    texts = []
    for number in range(8):
        made = [
            Draft(number, s, 0.5, [words[(s * 30 + i * 7 + number) % 1000] for i in range(30)], [0.5] * 30, [True] * 30)
            for s in range(50)
        ]
        texts.append(Generation("text", ["text"], 50, 50, 0.0, 0, drafts=made))
    assert len(page(texts, {})) < 400_000


def test_a_recording_keeps_every_step_of_every_text_in_order():
    recording = Recording(2, STEPS)
    one, two = text_of(WORDS, 0), text_of(WORDS[:4], 1)
    for tile in (two, one):
        for draft in tile.drafts:
            recording.frame([draft])
    bare = [replace(text, drafts=[]) for text in (one, two)]
    assert [text.drafts for text in recording.texts(bare)] == [one.drafts, two.drafts]


def test_a_long_recording_is_thinned_and_loses_no_change():
    steps = 3 * MOST_FRAMES + 1
    recording = Recording(1, steps)
    for step in range(steps):
        recording.frame([Draft(0, step, 0.5, ["a", "b"], [0.5, 0.5], [step == 5, step == steps - 1])])
    (played,) = recording.texts([Generation("a b", ["a", "b"], steps, steps, 0.0, 0)])
    assert len(played.drafts) <= MOST_FRAMES + 1
    assert (played.drafts[0].step, played.drafts[-1].step) == (0, steps - 1)
    assert [sum(d.changed[i] for d in played.drafts) for i in (0, 1)] == [1, 1]


def test_of_several_candidates_the_chosen_one_is_played():
    recording = Recording(1, STEPS, candidates=3)
    made = [text_of([*WORDS[:3], word, "."], number) for number, word in enumerate(("cheap", "pricey", "quiet"))]
    for played in made:
        for draft in played.drafts:
            recording.frame([draft])
    (chosen,) = recording.texts([replace(made[1], drafts=[])])
    assert chosen.drafts == made[1].drafts


def test_a_score_that_is_no_number_is_none():
    control = {"name": "length", "target": 9, "satisfied": None, "score": float("nan"), "checker": "count"}
    data = embedded(page([text_of(WORDS, controls=[control])], {}).decode())
    assert data["texts"][0]["controls"] == [{**control, "score": None}]


@speak_command()
def test_too_many_texts_are_refused_before_they_are_made():
    with pytest.raises(UsageError, match="-n"):
        Recording(MOST_TEXTS + 1, STEPS)


def test_a_frame_is_the_object_that_every_reader_knows():
    frame = vars(text_of(["one"]).drafts[0])
    assert list(frame) == ["sample", "step", "t", "tokens", "confidence", "changed", "edits", "picture"]
    assert json.loads(json.dumps(frame)) == frame


def contrast(one: str, other: str) -> float:
    """Of two colours, after WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_level_of_confidence_can_be_read_and_told_apart(theme):
    block = re.findall(r":root[^{]*\{([^}]*)\}", page([], {}).decode())[theme]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
    levels = [contrast(colours[f"c{i}"], colours["card"]) for i in range(8)]
    assert levels == sorted(levels) and len(set(levels)) == 8
    assert all(contrast(colours[f"c{i}"], colours[f"f{i}"]) >= 4.5 for i in range(4))
    for ink, ground in [("ink", "card"), ("muted", "page"), ("muted", "card"), ("met", "card"), ("missed", "card")]:
        assert contrast(colours[ink], colours[ground]) >= 4.5
    assert contrast(colours["accent"], colours["page"]) >= 3


# ---- in a browser ----


def shown(tab: Any, number: int = 0) -> str:
    return tab.evaluate("n => document.querySelectorAll('.text')[n].textContent", number)


def reached(tab: Any, step: str) -> None:
    from playwright.sync_api import expect

    expect(tab.locator("#step")).to_have_text(re.compile(step), timeout=120_000)


@pytest.mark.long
def test_the_slider_leads_from_the_first_draft_to_the_text(open_player):
    texts = four_texts()
    tab = open_player(texts)
    slider = tab.get_by_label("Step", exact=True)
    slider.fill("0")
    assert shown(tab).startswith("the the")
    assert tab.inner_text("#step") == f"1/{STEPS}"
    slider.fill(str(STEPS - 1))
    assert [shown(tab, i) for i in range(4)] == [played.text for played in texts]
    assert tab.inner_text("#step") == f"{STEPS}/{STEPS}" and tab.inner_text("#t") == "0.000"
    assert slider.get_attribute("aria-valuetext") == f"step {STEPS} of {STEPS}, t 0.000"


def test_a_text_that_its_tokens_do_not_spell_is_shown_at_the_end(open_player):
    played = text_of(WORDS)
    odd = Generation("Zizzi", ["Zizzi"], STEPS, STEPS, 0.0, 3, drafts=[*played.drafts[:-1], played.drafts[0]])
    tab = open_player([odd])
    assert shown(tab) == "Zizzi"
    tab.keyboard.press("ArrowLeft")
    assert shown(tab) == join_words(played.drafts[-2].tokens)


@pytest.mark.long
def test_how_sure_it_is_is_shown_only_while_a_text_forms(open_player):
    tab = open_player([text_of(WORDS)])
    slider, share = tab.get_by_label("Step", exact=True), tab.locator(".sureness")
    slider.fill("3")
    assert re.fullmatch(r"\d+ % sure", share.inner_text()) and tab.locator(".word[title*='sure']").count() > 0
    slider.fill(str(STEPS - 1))
    assert share.inner_text() == "" and tab.locator(".word[title*='sure']").count() == 0


@pytest.mark.long
def test_a_warning_of_the_texts_stands_above_them_once(open_player):
    assert open_player([text_of(WORDS)]).locator("#warning").is_hidden()
    tab = open_player([text_of(WORDS, k, warnings=["tiny does not know 'dog'."]) for k in range(2)])
    assert tab.inner_text("#warning").removeprefix("! ") == "tiny does not know 'dog'."


@pytest.mark.long
def test_keys_move_by_a_step_and_to_both_ends(open_player):
    tab = open_player([text_of(WORDS)])
    for key, step in [("Home", 1), ("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", STEPS)]:
        tab.keyboard.press(key)
        assert tab.inner_text("#step") == f"{step}/{STEPS}"
    tab.focus("#time")  # the slider knows these keys itself: a step must not be counted twice
    tab.keyboard.press("ArrowLeft")
    assert tab.inner_text("#step") == f"{STEPS - 1}/{STEPS}"


@pytest.mark.long
def test_it_plays_to_the_end_by_itself(open_player):
    tab = open_player([text_of(WORDS)], motion="no-preference")
    assert tab.get_by_role("button", name="Pause").count() == 1
    tab.select_option("#speed", "4")
    reached(tab, f"^{STEPS}/")
    assert shown(tab) == join_words(WORDS)
    assert tab.get_by_role("button", name="Play").count() == 1


@pytest.mark.long
def test_reduced_motion_waits_at_the_text_until_it_is_asked_to_play(open_player):
    tab = open_player([text_of(WORDS)], motion="reduce")
    assert shown(tab) == join_words(WORDS)
    assert tab.get_by_role("button", name="Play").count() == 1
    tab.evaluate("document.getElementById('speed').value = '0.5'")  # a busy machine sees it play, too
    tab.keyboard.press(" ")
    reached(tab, "^([2-9]|1[01])/")
    tab.keyboard.press(" ")
    stopped = tab.inner_text("#step")
    assert tab.get_by_role("button", name="Play").count() == 1
    tab.wait_for_timeout(300)
    assert tab.inner_text("#step") == stopped


@pytest.mark.long
def test_changed_words_are_underlined(open_player):
    played = text_of(WORDS)
    tab = open_player([played])
    for step in (0, 5):
        tab.get_by_label("Step", exact=True).fill(str(step))
        marked = tab.evaluate(
            "[...document.querySelectorAll('.text .word')].map(w => getComputedStyle(w).textDecorationLine)"
        )
        assert [line == "underline" for line in marked] == [step > 0 and new for new in played.drafts[step].changed]


@pytest.mark.long
def test_the_theme_follows_the_system_and_the_button(open_player):
    tab = open_player([text_of(WORDS)], theme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(ground)
    tab.get_by_role("button", name="Switch to the light theme").click()
    light = tab.evaluate(ground)
    assert dark != light
    tab.get_by_role("button", name="Switch to the dark theme").click()
    assert tab.evaluate(ground) == dark


def test_a_focused_button_keeps_the_space_bar(open_player):
    tab = open_player([text_of(WORDS)])
    tab.focus("#theme")
    tab.keyboard.press(" ")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert tab.inner_text("#step") == f"{STEPS}/{STEPS}" and tab.get_by_role("button", name="Play").count() == 1


@pytest.mark.parametrize("width", [360, 1600])
def test_it_fits_narrow_and_wide_windows(open_player, width):
    tab = open_player(four_texts(), width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    left = tab.evaluate("[...document.querySelectorAll('.card')].map(card => card.getBoundingClientRect().left)")
    assert len(set(left)) == (1 if width == 360 else 2)


@pytest.mark.long
def test_the_page_keeps_its_height_while_it_plays(open_player):
    tab = open_player(four_texts())
    heights = set()
    for step in range(STEPS):
        tab.get_by_label("Step", exact=True).fill(str(step))
        heights.add(tab.evaluate("document.documentElement.scrollHeight"))
    assert len(heights) == 1


def test_hostile_texts_stay_texts(open_player):
    tab = open_player(four_texts())
    assert tab.title() == f"{ABOUT['model']}: texts out of noise"
    assert tab.inner_text("h1") == "difflm" and ABOUT["model"] in tab.inner_text("#about")
    assert "all words form at once out of noise" in tab.inner_text("#intro")
    assert tab.evaluate("document.scripts.length") == 3
    assert tab.evaluate("document.images.length") == 0


@pytest.mark.long
def test_controls_have_names_and_marks(open_player):
    tab = open_player(four_texts())
    items = tab.evaluate("[...document.querySelectorAll('.controls li')].map(li => li.textContent)")
    assert items == ["✓length9", "✗foodThai", "–tree(S *)"]
    assert tab.get_by_role("img", name="missed", exact=True).count() == 1


def test_a_text_is_read_in_its_direction(open_player):
    tab = open_player(four_texts())
    assert tab.evaluate("[...document.querySelectorAll('.text')].map(p => p.dir)") == ["ltr", "ltr", "ltr", "rtl"]


def test_copy_gives_the_finished_text(open_player):
    tab = open_player([text_of(WORDS)])
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.keyboard.press("Home")
    tab.get_by_role("button", name="Copy text 1").click()
    assert tab.evaluate("navigator.clipboard.readText()") == join_words(WORDS)


def test_the_browser_unpacks_the_drafts(open_player):
    """The same frames as in Python, from the code that studio pages share."""
    texts = four_texts()
    tab = open_player(texts)
    frames = tab.evaluate(
        "() => { const d = JSON.parse(document.getElementById('data').textContent);"
        " return d.texts.map(t => Player.unpack(t.frames, d.tokens)) }"
    )
    for played, back in zip(texts, frames, strict=True):
        for draft, frame in zip(played.drafts, back, strict=True):
            assert frame["tokens"] == draft.tokens and frame["changed"] == draft.changed
            assert all(
                abs(a - b) <= 0.5 / 63 + 1e-9 for a, b in zip(frame["confidence"], draft.confidence, strict=True)
            )


def test_the_page_may_not_load_anything(open_player):
    """Even a script of its own could not: the policy holds."""
    tab = open_player([text_of(WORDS)])
    assert tab.evaluate("fetch('data:text/plain,x').then(() => 'loaded', () => 'refused')") == "refused"
    assert any("Content Security Policy" in told for told in open_player.wrong)
    open_player.wrong.clear()


def test_where_it_comes_from_is_at_the_foot(open_player):
    tab = open_player([text_of(WORDS)])
    foot = tab.inner_text("footer dl")
    assert ABOUT["command"] in foot and re.search(r"seed\s+3", foot) and "ancestral" in foot
