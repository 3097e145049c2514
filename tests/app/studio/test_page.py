"""The studio's page in a real browser, with the bundled model behind it."""

import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import difflm.app.studio
from difflm.app.cli import app
from difflm.generation.pipeline import TextDiffusion
from tests.support.browsing import REFUSED, Opener, asked, finished, hush, says, sentence, texts, write
from tests.support.serving import need, running
from tests.support.tiny import tiny_run

httpx = need("httpx2")
pytestmark = pytest.mark.long  # a browser, and the bundled model behind it


# ---- asking ----


def test_two_controls_are_asked_and_both_marks_turn_good(opened):
    tab = opened("#n=2&steps=3")
    finished(tab)
    assert tab.locator(".controls li").count() == 0
    tab.fill("#length", "12")
    tab.get_by_label("food").select_option("Japanese")
    for text in write(tab):
        assert "Japanese" in text
    marks = [tab.locator(".card").nth(i).locator(".controls li.met").all_inner_texts() for i in range(2)]
    assert [[" ".join(mark.split()) for mark in card] for card in marks] == [
        ["✓ length 12 met", "✓ field food=Japanese met"]
    ] * 2
    assert tab.inner_text("[data-tally='length']") == tab.inner_text("[data-tally='field.food']") == "✓ 2/2"
    assert asked(tab) == {"n": ["2"], "steps": ["3"], "length": ["12"], "field.food": ["Japanese"]}


def test_a_json_schema_has_a_field_where_the_model_can_write_json(opened, browser, tmp_path):
    """Models of restaurants cannot; one of byte pairs can: its texts are valid, and an error stands at the field."""
    tab = opened("#n=1&steps=2")
    finished(tab)
    assert tab.locator("#json_schema").is_hidden()
    (tmp_path / "signs.txt").write_text("".join(f'{chr(k)}{{}}[]": {chr(159 - k)}\n' for k in range(33, 127)) * 4)
    changes = {"steps": 1, "validate_every": 1, "save_every": 1, "tokenizer": "bpe", "vocabulary": 300, "longest": 80}
    run = tiny_run(tmp_path, "mdlm", data=str(tmp_path / "signs.txt"), **changes)
    with running(TextDiffusion.from_pretrained(run)) as server:
        opener = Opener(browser, f"{server.url}/")
        tab = opener("#n=2&steps=2")
        finished(tab)
        schema = '{"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}'
        tab.fill("#json_schema", schema)
        assert all(json.loads(text) in ({"on": True}, {"on": False}) for text in write(tab))
        assert tab.inner_text("[data-tally='json']") == "✓ 2/2" and asked(tab)["json_schema"] == [schema]
        tab.fill("#json_schema", '{"type": "strnig"}')
        tab.get_by_role("button", name="Write", exact=True).first.click()
        tab.wait_for_selector("#field-wrong")
        assert "'strnig' is not known" in tab.inner_text("#field-wrong")
        for context in opener.contexts:
            context.close()


def test_a_control_that_is_missed_says_so_in_a_word(opened):
    tab = opened("#n=1&steps=2&field.price=high&pos=PROPN+AUX+DET+NOUN+PUNCT")
    finished(tab)
    missed = tab.locator(".controls li.missed")
    assert missed.count() >= 1
    assert re.match(r"✗\s.*\smissed$", " ".join(missed.first.inner_text().split()))
    assert "✗ 0/1" in tab.locator(".tally").all_inner_texts()


def test_a_pattern_is_judged_while_it_is_typed_and_then_obeyed(opened):
    from playwright.sync_api import expect

    tab = opened("#n=2&steps=3")
    finished(tab)
    says_of_it = tab.locator("#pattern-says")

    def told(text: Any) -> None:
        expect(says_of_it).to_have_text(text, timeout=60_000)

    tab.fill("#pattern", r"The [A-Z]\w+ (is|has")
    told(re.compile("closing bracket is missing"))
    tab.fill("#pattern", "zebra")
    told(re.compile("^No text of this model's words"))
    assert "wrong" in says_of_it.get_attribute("class")
    pattern = r"The [A-Z]\w+ is( \w+){2,4}\."
    tab.fill("#pattern", pattern)
    told("Texts of 6–13 words match.")
    tab.fill("#length", "15")
    told("Texts that match have 6–13 words, not 15.")
    tab.fill("#length", "7")
    told("Texts of 6–13 words match.")
    for text in write(tab):
        assert re.fullmatch(pattern, text)
    assert tab.inner_text("[data-tally='pattern']") == "✓ 2/2" and asked(tab)["pattern"] == [pattern]
    again = opened(tab.url[tab.url.index("#") :])
    finished(again)
    assert again.input_value("#pattern") == pattern
    assert again.inner_text("#asked-count") == "2 active"


def test_the_first_texts_form_without_being_asked(opened):
    def fewer_steps(route: Any) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "steps": 3}))

    tab = opened("", prepare=lambda tab: tab.route("**/api/stream", fewer_steps))
    assert len(finished(tab)) == 4
    assert tab.locator(".controls li.met").count() == 8  # a length and a fact
    hush(tab)
    tab.get_by_role("button", name="tags").click()
    finished(tab)
    assert asked(tab)["pos"] and tab.locator(".controls li").count() == 4


def test_drafts_are_shown_while_they_form_and_by_the_slider_again(opened):
    tab = opened("#n=1&steps=20&length=12", motion="no-preference")
    tab.wait_for_selector(".forming .word[data-level='0']")
    assert tab.get_by_role("button", name="Pause").count() == 1
    (text,) = finished(tab)
    slider = tab.get_by_label("Step", exact=True)
    slider.fill("0")
    assert texts(tab) != [text] and tab.inner_text("#step") == "1/20"
    slider.fill("19")
    assert texts(tab) == [text] and tab.inner_text("#t") == "0.000"
    for key, step in [("Home", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 20)]:
        tab.keyboard.press(key)
        assert tab.inner_text("#step") == f"{step}/20"
    assert texts(tab) == [text]


def test_the_time_can_be_held_while_texts_still_form(opened):
    tab = opened("#n=1&steps=40&length=12", motion="no-preference")
    tab.wait_for_selector(".word")
    tab.get_by_role("button", name="Pause").click()
    held = tab.inner_text("#step")
    (draft,) = finished(tab)
    assert tab.inner_text("#step") == held != "40/40"
    tab.keyboard.press("End")
    assert texts(tab) != [draft] and tab.locator(".card.done").count() == 1


def test_reduced_motion_shows_the_text_and_no_draft(opened):
    tab = opened("#n=1&steps=20&length=12")
    tab.evaluate(
        "() => { window.drafts = 0; new MutationObserver(() => { window.drafts += 1; })"
        ".observe(document.getElementById('texts'), {subtree: true, childList: true, characterData: true}); }"
    )
    finished(tab)
    assert tab.evaluate("window.drafts") < 10


def test_a_gap_typed_into_a_sentence_is_filled(opened):
    tab = opened("#n=2&steps=3")
    finished(tab)
    tab.fill("#start", "The  is a ___:2 pub.")
    tab.evaluate("document.getElementById('start').setSelectionRange(4, 4)")
    tab.get_by_role("button", name="Gap ___").first.click()
    assert tab.input_value("#start") == "The ___ is a ___:2 pub."
    assert tab.inner_text("#meaning") == "2 gaps are filled; all other words are kept."
    for text in write(tab):
        assert re.fullmatch(r"The .+ is a .+ pub\.", text) and "_" not in text
    assert tab.locator(".controls li.met").count() == 2


def test_words_that_the_model_does_not_know_are_told_and_not_marked_as_obeyed(opened):
    tab = opened("#n=1&steps=3")
    finished(tab)
    assert tab.locator("#warning").is_hidden()
    tab.fill("#start", "My dog ___ in the garden.")
    write(tab)
    assert "it does not know 'My', 'dog', 'garden'" in tab.inner_text("#warning")
    assert tab.locator(".controls li.met").count() == 0
    mark = " ".join(tab.inner_text(".controls li.open").split())
    assert mark.startswith("– infill") and mark.endswith("not checked")
    tab.fill("#start", "The ___ in the city centre.")
    write(tab)
    assert tab.locator("#warning").is_hidden() and tab.locator(".controls li.met").count() == 1


def test_how_sure_it_is_is_shown_only_while_a_text_forms(opened):
    tab = opened("#n=1&steps=20&length=12")
    finished(tab)
    assert tab.inner_text(".sureness") == "" and tab.locator(".word[title*='sure']").count() == 0
    tab.get_by_label("Step", exact=True).fill("3")
    assert re.fullmatch(r"\d+ % sure", tab.inner_text(".sureness")) and tab.locator(".word[title*='sure']").count() > 0
    tab.keyboard.press("End")
    assert tab.inner_text(".sureness") == ""


def test_the_temperature_is_the_models_own(opened):
    tab = opened("#n=1&steps=3")
    finished(tab)
    own = TextDiffusion.from_pretrained("e2e").model.sampling.temperature
    assert float(tab.input_value("#temperature")) == own and "temperature" not in asked(tab)
    hush(tab)
    tab.get_by_role("button", name="tags").click()
    finished(tab)
    assert "temperature" not in asked(tab)


def test_of_several_candidates_each_can_be_seen(opened):
    tab = opened("#n=1&steps=4&length=12&field.food=Indian&candidates=3")
    (chosen,) = finished(tab)
    buttons = tab.locator(".siblings button")
    assert buttons.count() == 3 and tab.locator(".siblings .chosen").count() == 1
    seen = set()
    for i in range(3):
        buttons.nth(i).click()
        seen |= set(texts(tab))
    assert chosen in seen and len(seen) > 1


@pytest.fixture
def late_texts(monkeypatch):
    """Texts come long after their last drafts, as those that are chosen and checked slowly do."""
    finish = TextDiffusion.finish_rows

    def finish_late(*given):
        time.sleep(2)
        return finish(*given)

    monkeypatch.setattr(TextDiffusion, "finish_rows", finish_late)


def shows_no_draft(tab):
    assert tab.locator(".card.done").count() == tab.locator(".card").count()
    assert set(tab.locator(".sureness").all_inner_texts()) == {""} and tab.locator(".word[title*='sure']").count() == 0


def test_a_text_that_comes_after_all_drafts_were_shown_takes_their_place(opened, late_texts):
    asked = {"n": 2, "steps": 3, "length": 12, "field": {"food": "Indian"}, "candidates": 3}
    answer = httpx.post(f"{opened.url}api/generate", json=asked, timeout=180).json()
    tab = opened("#n=2&steps=3&length=12&field.food=Indian&candidates=3", motion="no-preference")
    assert finished(tab) == [text["text"] for text in answer["texts"]]
    shows_no_draft(tab)


def test_a_text_without_drafts_is_shown(opened, monkeypatch):
    """A slow connection may lose all of them."""
    monkeypatch.setattr("difflm.app.studio.job.Job.watch", lambda *_: None)
    for motion in ("no-preference", "reduce"):
        for ask in ("#n=2&steps=3&length=12", "#n=1&steps=3&edit=The+Eagle+is+a+pub+near+the+river."):
            tab = opened(ask, motion=motion)
            assert all(re.search(r"\w", text) for text in finished(tab))
            shows_no_draft(tab)


def test_a_text_that_comes_while_the_time_is_held_is_shown_at_its_end_and_marked_there_only(opened, late_texts):
    from playwright.sync_api import expect

    tab = opened("#n=1&steps=3&length=12", motion="no-preference")
    expect(tab.locator("#step")).to_have_text("3/3", timeout=60_000)
    tab.get_by_role("button", name="Pause").click()
    assert tab.locator(".card.done").count() == 0
    finished(tab)
    shows_no_draft(tab)
    hush(tab)
    tab.click("#next")
    expect(tab.locator(".card.done")).to_have_count(0)  # the step of the last request is gone, too
    expect(tab.locator("#step")).to_have_text("3/3", timeout=60_000)
    tab.get_by_label("Step", exact=True).fill("0")
    finished(tab)
    assert tab.inner_text("#step") == "1/3" and tab.locator(".card.done.early").count() == 1
    tab.keyboard.press("End")
    shows_no_draft(tab)
    assert tab.locator(".card.early").count() == 0


def test_it_stops_when_told_to(opened):
    tab = opened("#n=2&steps=200", motion="no-preference")
    tab.wait_for_selector(".word")
    tab.keyboard.press("Escape")
    says(tab, r"^Stopped\.$")
    assert tab.get_by_role("button", name="Write", exact=True).first.is_visible()
    assert tab.locator(".card.stopped").count() > 0
    tab.goto(opened.url + "#n=1&steps=3")
    assert len(finished(tab)) == 1


def test_the_address_holds_the_request(opened):
    tab = opened(
        "#n=2&seed=5&steps=3&temperature=0.7&avoid=cheap&contains=coffee+shop&contains=riverside&guidance=20&field.food=Indian"
    )
    first = finished(tab)
    assert tab.input_value("#contains") == "coffee shop, riverside" and tab.input_value("#seed") == "5"
    hush(tab)
    tab.click("#next")
    assert finished(tab) != first
    assert asked(tab)["seed"] == ["6"]
    hush(tab)
    tab.go_back()
    assert finished(tab) == first  # the same seed gives the same texts


# ---- words in hand ----


def test_a_word_is_changed_and_the_model_writes_around_it(opened):
    tab = opened("#n=2&steps=3&length=12&field.food=Japanese")
    text = finished(tab)[0]
    tab.locator(".card .word").first.click()
    tab.get_by_label("Replacement").first.fill("Zizzi")
    hush(tab)
    tab.get_by_role("button", name="Rewrite around it").first.click()
    made = finished(tab)
    assert all(one.split()[0].rstrip(".,") == "Zizzi" for one in made)
    assert asked(tab)["keep"] == ["Zizzi"] and asked(tab)["edit"][0].startswith("Zizzi")
    assert asked(tab)["edit"][0].split()[1:] == text.split()[1:] and "length" not in asked(tab)
    assert tab.input_value("#start") == asked(tab)["edit"][0]
    tinted = tab.locator(".card").first.locator(".word.fresh").all_inner_texts()
    assert tinted and all(word in re.findall(r"\w+|\S", made[0]) for word in tinted)
    assert set(re.findall(r"\w+", made[0])) - set(re.findall(r"\w+", asked(tab)["edit"][0])) <= set(tinted)


def test_words_become_gaps_by_keyboard_alone(opened):
    tab = opened("#n=1&steps=3&length=12")
    text = finished(tab)[0]
    tab.get_by_role("button", name="Edit words").focus()
    for key in ["Enter", "ArrowRight", "Shift+ArrowRight"]:
        tab.keyboard.press(key)
    words = tab.locator(".word.picked").all_inner_texts()
    assert len(words) == 2
    hush(tab)
    tab.get_by_role("button", name="Gap ___:2").press("Enter")
    finished(tab)
    gapped = asked(tab)["infill"][0]
    assert gapped.split()[0] == text.split()[0] and gapped.count("___:2") == 1
    assert tab.locator(".controls li.met").count() == 1


def test_words_that_were_selected_are_avoided_from_now_on(opened):
    tab = opened("#n=1&steps=3&length=12")
    finished(tab)
    word = tab.locator(".word").filter(has_text=re.compile(r"^[a-z]{3,}$")).first
    unwanted = word.inner_text()
    word.dblclick()  # marks it as any text is marked
    assert tab.locator(".word.picked").all_inner_texts() == [unwanted]
    hush(tab)
    tab.get_by_role("button", name="Avoid", exact=True).click()
    assert unwanted not in re.findall(r"\w+", finished(tab)[0])
    assert asked(tab)["avoid"] == [unwanted]


def test_a_word_in_pieces_is_taken_whole(opened):
    """Byte pairs bring their own spaces."""
    tokens = ["Ziz", "zi", " is", " che", "ap"]
    marks = {"confidence": [1.0] * 5, "changed": [False] * 5, "space": [False] * 5}
    frame = {"sample": 0, "step": 0, "t": 0.0, "tokens": tokens, **marks}
    text = {"sample": 0, "text": "Zizzi is cheap", "tokens": ["Zizzi", "is", "cheap"], "controls": [], "seed": 0}
    events = [("queued", {"ahead": 0}), ("frame", {"frames": [frame]}), ("text", text), ("done", {"seconds": 0.1})]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    sent: list[Any] = []

    def answer(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    tab = opened("#n=1&steps=1", prepare=lambda tab: tab.route("**/api/stream", answer))
    assert finished(tab) == ["Zizzi is cheap"]
    tab.locator(".word").nth(4).click()
    assert tab.locator(".word.picked").all_inner_texts() == ["che", "ap"]
    hush(tab)
    tab.get_by_role("button", name="Gap ___", exact=True).last.click()
    finished(tab)
    assert sent[-1]["infill"] == "Zizzi is ___"


def test_escape_lets_words_go(opened):
    tab = opened("#n=1&steps=3&length=8")
    finished(tab)
    tab.locator(".word").nth(2).click()
    tab.keyboard.press("Escape")
    assert tab.locator(".word.picked").count() == 0 and tab.locator(".editor").is_hidden()
    assert tab.evaluate("document.activeElement.textContent") == "Edit words"


# ---- keeping and exporting ----


def test_kept_texts_outlive_the_page_and_are_compared(opened):
    tab = opened()
    one, other = finished(tab)
    for i in range(2):
        tab.locator(".keep-it").nth(i).click()
    tab.reload()
    finished(tab)
    assert tab.locator(".kept-card .text").all_inner_texts() == [one, other]
    tab.check("#compare")
    marked = tab.locator(".kept-card mark").all_inner_texts()
    assert marked and set(marked) <= set(other.split()) and set(other.split()) - set(one.split()) <= set(marked)
    tab.get_by_role("button", name="Delete all").click()
    assert tab.locator("#kept").is_hidden()


def test_the_player_is_saved_and_opens_without_a_network(opened, browser, tmp_path):
    tab = opened()
    made = finished(tab)
    tab.get_by_role("button", name="Export").click()
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Save HTML").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    context = browser.new_context(offline=True, reduced_motion="reduce")
    opened.contexts.append(context)
    player = context.new_page()
    player.on("pageerror", lambda error: opened.wrong.append(str(error)))
    player.goto(path.as_uri())
    assert player.evaluate("[...document.querySelectorAll('.text')].map(text => text.textContent)") == made
    assert player.locator(".controls li.met").count() == 4
    player.keyboard.press("Home")
    assert player.inner_text("#step") == "1/3"


def test_json_command_and_python_say_the_same_texts(opened, tmp_path, capsys):
    tab = opened(
        "#n=2&steps=4&seed=3&temperature=0.9&guidance=12"
        "&infill=The+___+isn't+%22near%22+___%3A2.&field.food=Indian&avoid=cheap"
    )
    made = finished(tab)
    tab.get_by_role("button", name="Export").click()
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Save JSON").click()
    download.value.save_as(tmp_path / "saved.json")
    saved = json.loads((tmp_path / "saved.json").read_text(encoding="utf-8"))
    assert [text["text"] for text in saved["texts"]] == made and saved["request"]["seed"] == 3
    command = shlex.split(tab.inner_text("#export-command"))
    assert command[:2] == ["difflm", "generate"]
    printed = CliRunner().invoke(app, [*command[1:], "--device", "cpu"])
    assert printed.stdout.splitlines() == made
    code = tab.inner_text("#export-python").replace("print(text, text.controls)", "print(text)")
    exec(compile(code, "snippet", "exec"), {})
    assert capsys.readouterr().out.splitlines() == made


def test_a_rewritten_text_is_the_same_in_python(opened, capsys):
    tab = opened("#n=1&steps=4&edit=The+Mill+is+a+cheap+pub+near+the+river.&keep=The+Mill&strength=0.4")
    made = finished(tab)
    tab.get_by_role("button", name="Export").click()
    exec(tab.inner_text("#export-python").replace("print(text, text.controls)", "print(text)"), {})
    assert capsys.readouterr().out.splitlines() == made
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.locator("[data-copies='export-command']").click()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert "--keep 'The Mill' --strength 0.4" in copied and copied == tab.inner_text("#export-command")


# ---- when something is wrong ----


def test_an_error_is_shown_at_its_field_until_somebody_types_there(opened):
    tab = opened("#n=1&steps=3")
    before = finished(tab)
    tab.fill("#contains", "Martian")
    tab.keyboard.press("Enter")
    says(tab, "see the marked field")
    wrong = tab.locator("#field-wrong")
    assert wrong.inner_text().startswith("This model does not know the word 'Martian'") and texts(tab) == before
    assert tab.get_attribute("#contains", "aria-errormessage") == "field-wrong" and tab.locator("#notice").is_hidden()
    tab.fill("#contains", "Japanese")
    assert wrong.count() == 0 and tab.get_attribute("#contains", "aria-invalid") is None
    assert "Japanese" in write(tab)[0] and tab.locator("#notice").is_hidden()
    opened.forgive(REFUSED)


def test_a_full_server_is_waited_for(opened):
    answers = iter([429])

    def full(route: Any) -> None:
        if next(answers, None) is None:
            route.continue_()
        else:
            body = json.dumps({"error": {"message": "the queue is full.", "type": "busy"}})
            route.fulfill(status=429, headers={"Retry-After": "3"}, content_type="application/json", body=body)

    tab = opened("#n=1&steps=3", prepare=lambda tab: tab.route("**/api/stream", full))
    says(tab, "busy; trying again in 3 s")
    assert len(finished(tab)) == 1
    opened.forgive(REFUSED)


@pytest.mark.parametrize("where", ["models", "stream"])
def test_a_lost_connection_is_said_and_tried_again(opened, where):
    tab = opened("#n=1&steps=3", prepare=lambda tab: tab.route(f"**/api/{where}", lambda route: route.abort()))
    assert "connection to the server was lost" in sentence(tab)
    tab.keyboard.press("Control+Enter")  # does no harm
    tab.unroute(f"**/api/{where}")
    tab.get_by_role("button", name="Try again").click()
    assert len(finished(tab)) == 1
    opened.forgive(REFUSED)


def test_a_stream_that_breaks_off_is_said(opened):
    half = 'event: queued\ndata: {"ahead": 0}\n\nevent: fra'

    def broken(route: Any) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=half)

    tab = opened("#n=1&steps=3", prepare=lambda tab: tab.route("**/api/stream", broken))
    assert "connection to the server was lost" in sentence(tab)
    assert tab.locator(".card.stopped").count() == 1


def test_an_error_in_mid_stream_is_said(opened):
    body = 'event: queued\ndata: {"ahead": 0}\n\nevent: error\ndata: {"message": "the request took too long."}\n\n'

    def late(route: Any) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    tab = opened("#n=1&steps=3", prepare=lambda tab: tab.route("**/api/stream", late))
    assert sentence(tab) == "The request took too long."


def test_a_token_is_asked_for_until_it_is_right(opened):
    def guarded(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer right":
            route.continue_()
        else:
            route.fulfill(status=401, content_type="application/json", body='{"error": {"message": "a token."}}')

    tab = opened("#n=1&steps=3", prepare=lambda tab: tab.route("**/api/*", guarded))
    for guess in ("wrong", "right"):
        tab.get_by_role("textbox", name="Token").fill(guess)
        tab.get_by_role("button", name="Continue").click()
        if guess == "wrong":
            tab.locator("#token-wrong").wait_for()
    assert len(finished(tab)) == 1
    tab.reload()
    assert len(finished(tab)) == 1  # remembered in this tab
    opened.forgive(REFUSED)


def test_a_token_in_the_address_is_used_and_taken_away(opened):
    seen: list[str | None] = []

    def listening(route: Any) -> None:
        seen.append(route.request.headers.get("authorization"))
        route.continue_()

    tab = opened("#n=1&steps=3&token=secret", prepare=lambda tab: tab.route("**/api/*", listening))
    finished(tab)
    assert set(seen) == {"Bearer secret"} and "secret" not in tab.url


# ---- how it looks ----


@pytest.mark.parametrize("width", [360, 1600])
def test_it_fits_narrow_and_wide_windows(opened, width):
    tab = opened("#n=4&steps=3&length=12&field.food=Japanese&infill=", width=width)
    finished(tab)
    tab.locator(".card .word").first.click()
    tab.locator(".keep-it").first.click()
    if width == 360:
        tab.click("#panel > summary")
    tab.click("#grammar > summary")
    tab.locator("#pos + details > summary").click()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    left = tab.evaluate("[...document.querySelectorAll('#texts .card')].map(card => card.getBoundingClientRect().left)")
    assert len(set(left)) == (1 if width == 360 else 2)
    tab.get_by_role("button", name="Export").click()
    assert tab.evaluate("document.getElementById('export-dialog').scrollWidth") <= width


def test_only_what_the_model_can_be_asked_is_offered(opened):
    def other_model(route: Any) -> None:
        found = route.fetch().json()
        found.update(field=None, pos=None, length=None, edit=None, label={"topic": ["food", "sport"]})
        found.update(tree={"labels": ["S", "NP"]}, span={"labels": ["VP"]}, infill={"sizes": False})
        route.fulfill(json=found)

    def posted(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(status=422, json={"error": {"message": "no.", "type": "invalid_request"}})

    bodies: list[Any] = []

    def prepare(tab: Any) -> None:
        tab.route("**/api/controls", other_model)
        tab.route("**/api/stream", posted)

    tab = opened("#n=1&steps=3", prepare=prepare)
    sentence(tab)
    tab.click("#grammar > summary")
    shown = {part: tab.locator(f"[data-part='{part}']").first.is_visible() for part in
             ("length", "field", "pos", "tree", "span", "label", "contains", "avoid")}  # fmt: skip
    assert [part for part, visible in shown.items() if not visible] == ["length", "field", "pos"]
    tab.get_by_label("topic").select_option("sport")
    tab.fill("#tree", "(S (NP * *) *)")
    tab.fill("#span", "1,2,NP 3,4,VP")
    tab.fill("#start", "The pub")
    tab.get_by_role("button", name="Write", exact=True).first.click()
    sentence(tab)
    assert bodies[-1] == {
        "n": 1, "steps": 3, "infill": "The pub ___", "label": {"topic": "sport"}, "tree": "(S (NP * *) *)",
        "span": ["1,2,NP", "3,4,VP"],
    }  # fmt: skip
    opened.forgive(REFUSED)


def test_every_control_has_a_name_and_focus_can_be_seen(opened):
    tab = opened("#n=1&steps=3&length=8")
    finished(tab)
    nameless = tab.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea')].filter(e => e.checkVisibility()"
        " && !(e.labels?.length || e.ariaLabel || e.getAttribute('aria-label') || e.textContent.trim()))"
        ".map(e => e.outerHTML)"
    )
    assert nameless == []
    unseen = []
    for _ in range(40):
        tab.keyboard.press("Tab")
        unseen += tab.evaluate(
            "(() => { const e = document.activeElement; if (e === document.body) return [];"
            " const s = getComputedStyle(e), f = getComputedStyle(e.closest('.composer') ?? e);"
            " return s.outlineStyle !== 'none' || f.borderColor !== getComputedStyle(document.documentElement)"
            ".getPropertyValue('--line') ? [] : [e.outerHTML]; })()"
        )
    assert unseen == []


def test_no_part_of_the_page_names_another_place_or_writes_markup():
    for path in Path(difflm.app.studio.__file__).parent.iterdir():
        if path.suffix in (".html", ".js", ".css"):
            source = path.read_text(encoding="utf-8")
            assert not re.search(r"https?://|@import|url\(|\bstyle=|\bon\w+=|innerHTML|\beval\(", source), path.name
