"""How the studio's page explains itself and looks, in a real browser."""

import json

import pytest

from difflm.generation.pipeline import TextDiffusion
from tests.support.browsing import Opener, asked, axe_faults, finished, hush, load_axe, texts
from tests.support.serving import running

pytestmark = pytest.mark.long  # a browser, and the bundled model behind it


def test_it_says_what_it_is_and_what_the_model_knows(opened):
    tab = opened("#n=1&steps=3&length=12")
    (text,) = finished(tab)
    said = tab.inner_text("#intro")
    assert "all words at once" in said and "40,766 restaurant descriptions" in said and "817 words" in said
    assert tab.locator("#chooser").is_hidden() and tab.locator("#race").is_hidden()  # there is one model
    first = text.split()[0]
    assert first in tab.get_attribute("#start", "placeholder") and "___" in tab.get_attribute("#start", "placeholder")


def test_marks_are_those_of_the_finished_text(opened):
    tab = opened("#n=1&steps=6&length=12")
    finished(tab)
    mark = tab.locator(".controls .mark")
    assert mark.is_visible()
    tab.get_by_label("Step", exact=True).fill("2")
    assert not mark.is_visible() and tab.locator(".controls .target").is_visible()
    assert tab.locator(".word:not([data-level='7'])").count() > 0
    tab.keyboard.press("End")
    assert mark.is_visible() and tab.locator(".word.changed, .word:not([data-level='7'])").count() == 0


def test_grammar_is_folded_until_it_is_asked(opened):
    tab = opened("#n=1&steps=3")
    finished(tab)
    assert tab.locator("#grammar").is_visible() and not tab.locator("#pos").is_visible()
    hush(tab)
    tab.get_by_role("button", name="tags").click()
    finished(tab)
    assert tab.locator("#pos").is_visible() and tab.inner_text("#grammar-count") == "1 active"


def test_likely_words_are_shown_on_hover_and_put_in_the_place_of_a_word(opened):
    tab = opened("#n=1&steps=6&edit=The+Mill+is+a+cheap+pub+near+the+river.&strength=0.05")
    finished(tab)
    tab.locator(".word").nth(2).hover()
    tab.wait_for_selector("#likely:visible")
    shown = tab.locator("#likely p:not(.hint)").all_inner_texts()
    shares = [0 if "<" in row else int(row.split()[-2]) for row in shown]
    assert 5 <= len(shown) <= 6 and shares[:5] == sorted(shares[:5], reverse=True) and sum(shares) <= 101
    assert tab.locator("#likely .own").count() == 1
    tab.locator(".word").nth(2).click()
    assert tab.locator("#likely").is_hidden()
    other = tab.locator(".likely-words button").first
    word = other.inner_text().split()[0]
    other.click()
    assert tab.get_by_label("Replacement").input_value() == word
    tab.keyboard.press("Escape")
    tab.get_by_label("Step", exact=True).fill("0")
    tab.locator(".word").nth(1).hover()
    tab.wait_for_timeout(500)
    assert tab.locator("#likely").is_hidden()  # of a draft there is nothing to weigh


def test_another_model_is_chosen_and_both_race(browser):
    others = [(TextDiffusion.from_pretrained("judge"), "judge")]
    with running(TextDiffusion.from_pretrained("e2e"), name="e2e", others=others) as found:
        opener = Opener(browser, f"{found.url}/")
        tab = opener("#n=1&steps=3")
        finished(tab)
        assert tab.locator("#model-choice option").all_inner_texts() == ["e2e", "judge"]
        tab.click("#race")
        for card in tab.locator("#racers .card").all():
            card.get_by_text("finished").wait_for()
            assert card.locator(".text").inner_text()
        steps = [int(said.split()[0]) for said in tab.locator("#racers .sureness").all_inner_texts()]
        assert steps[0] == 3 and steps[1] > 3  # one for each word
        assert "17.2M parameters" in tab.inner_text("#race-about") and "4.4M" in tab.inner_text("#race-about")
        tab.click("#race-close")
        assert tab.locator("#races").is_hidden()
        tab.select_option("#model-choice", "judge")
        tab.wait_for_selector("#intro:has-text('one word at a time')")
        finished(tab)
        assert tab.locator("#start").is_hidden() and tab.locator(".edit").first.is_hidden()
        hush(tab)
        tab.click("#next")
        finished(tab)
        assert asked(tab)["model"] == ["judge"] and asked(tab)["seed"] == ["1"]
        tab.context.close()
        assert opener.wrong == []


def test_the_texts_are_saved_as_a_video(opened, tmp_path):
    tab = opened("#n=2&steps=3&length=12")
    finished(tab)
    tab.get_by_role("button", name="Export").click()
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Save video").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert path.suffix == ".webm" and path.read_bytes()[:4] == bytes.fromhex("1a45dfa3")  # EBML
    seen = tab.context.new_page()
    data = json.dumps(list(path.read_bytes()))
    width, dark = seen.evaluate(
        "async (data) => { const video = document.createElement('video'); video.muted = true;"
        " video.src = URL.createObjectURL(new Blob([new Uint8Array(JSON.parse(data))], {type: 'video/webm'}));"
        " await new Promise((resolve) => { video.oncanplay = resolve; });"
        " const canvas = document.createElement('canvas'); canvas.width = video.videoWidth; canvas.height = 200;"
        " const context = canvas.getContext('2d'); context.drawImage(video, 0, 0);"
        " const pixels = context.getImageData(0, 0, canvas.width, 200).data;"
        " return [video.videoWidth, pixels.filter((value, i) => i % 4 === 0 && value < 100).length]; }",
        data,
    )
    assert width == 1280 and dark > 500  # letters on a light page


def test_targets_have_forty_pixels_on_narrow_screens(opened):
    tab = opened("#n=1&steps=3&length=12", width=360)
    finished(tab)
    tab.click("#panel > summary")
    tab.click("#grammar > summary")
    tab.locator(".word").nth(2).click()
    small = tab.evaluate(
        "[...document.querySelectorAll('button, select, summary, textarea, input:not([type=checkbox])')]"
        ".filter(e => e.checkVisibility()).map(e => [e.outerHTML, e.getBoundingClientRect()])"
        ".filter(([, box]) => box.width < 39.5 || box.height < 39.5).map(([html]) => html)"
    )
    assert small == []


@pytest.mark.parametrize("width", [360, 1600])
def test_axe_finds_no_fault(opened, width):
    tab = opened("#n=2&steps=3&length=12&field.food=Japanese", width=width)
    finished(tab)
    load_axe(tab)
    assert axe_faults(tab) == []
    tab.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    for i in range(2):
        tab.locator(".keep-it").nth(i).click()
    tab.check("#compare")
    tab.locator(".word").nth(2).click()
    assert axe_faults(tab) == []
    tab.get_by_label("Step", exact=True).fill("1")
    tab.click("#theme")
    assert texts(tab) and axe_faults(tab) == []
    tab.get_by_role("button", name="Export").click()
    assert axe_faults(tab) == []
