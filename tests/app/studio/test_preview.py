"""A faster model's text on the studio's page, while the model that taught it still writes: in a real browser."""

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from difflm.controls import Length
from difflm.generation.loops import Loop
from difflm.generation.pipeline import TextDiffusion
from tests.support.browsing import REFUSED, Opener, finished, says, texts
from tests.support.serving import Gate, Running, need, running, wait_for

pytestmark = pytest.mark.long  # a browser, and bundled models behind it

ONE = "#n=1&steps=40&length=12&seed=3"
FASTER = re.compile(r"/api/stream\?model=e2e-fast$")


@pytest.fixture(scope="module")
def models() -> dict[str, TextDiffusion]:
    return {name: TextDiffusion.from_pretrained(name) for name in ("e2e", "e2e-fast")}


@pytest.fixture(scope="module")
def server(models: dict[str, TextDiffusion]) -> Iterator[Running]:
    need("fastapi", "uvicorn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)  # two cores, whatever this machine has
        with running(models["e2e"], name="e2e", others=[(models["e2e-fast"], "e2e-fast")]) as found:
            yield found


@pytest.fixture
def opened(browser: Any, server: Running) -> Iterator[Opener]:
    opener = Opener(browser, f"{server.url}/")
    yield opener
    for context in opener.contexts:
        context.close()
    assert opener.wrong == []


def test_a_draft_is_there_first_and_gives_way_to_the_text(
    opened: Opener, models: dict[str, TextDiffusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"controls": [Length(12)], "seed": 3}
    (own,), (draft,) = models["e2e"].generate(1, steps=40, **asked), models["e2e-fast"].generate(1, **asked)
    go, step = threading.Event(), Loop.step

    def hold_teacher(loop: Loop) -> Any:
        """Its turns pass without a step."""
        return step(loop) if loop.lm is not models["e2e"] or go.wait(0.01) else None

    monkeypatch.setattr(Loop, "step", hold_teacher)
    tab = opened(ONE)
    tab.wait_for_selector(".preview:visible")
    assert tab.inner_text(".preview").splitlines() == ["Draft in 4 steps by e2e-fast", draft.text]
    assert tab.locator(".card.done").count() == 0
    go.set()
    assert finished(tab) == [own.text] != [draft.text]
    assert tab.locator(".preview").is_hidden()


def test_each_of_several_texts_has_its_own_draft(
    opened: Opener, models: dict[str, TextDiffusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = models["e2e-fast"].generate(3, controls=[Length(12)], seed=3)
    go, step = threading.Event(), Loop.step
    held = lambda loop: step(loop) if loop.lm is not models["e2e"] or go.wait(0.01) else None  # noqa: E731
    monkeypatch.setattr(Loop, "step", held)
    tab = opened("#n=3&steps=10&length=12&seed=3")
    wait_for(lambda: tab.locator(".preview:visible").count() == 3)
    assert [one.splitlines()[1] for one in tab.locator(".preview").all_inner_texts()] == [one.text for one in drafts]
    go.set()
    assert len(finished(tab)) == 3 and tab.locator(".preview:visible").count() == 0


def test_a_draft_that_comes_too_late_is_not_shown(
    opened: Opener, models: dict[str, TextDiffusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is finished before its draft is, and another request follows."""
    go, step = threading.Event(), Loop.step
    held = lambda loop: step(loop) if loop.lm is models["e2e"] or go.wait(0.01) else None  # noqa: E731
    monkeypatch.setattr(Loop, "step", held)
    tab = opened("#n=1&steps=6&length=12&seed=3")
    assert finished(tab)
    tab.route(FASTER, lambda route: route.abort())
    monkeypatch.setattr(Loop, "step", lambda loop: None if loop.lm is models["e2e"] else step(loop))
    go.set()
    tab.get_by_role("button", name="Write", exact=True).first.click()
    tab.wait_for_timeout(1500)
    assert tab.locator(".preview:visible").count() == 0 and tab.locator(".card.done").count() == 0
    tab.keyboard.press("Escape")
    opened.forgive(REFUSED)


def test_a_draft_ends_with_what_it_was_for(
    opened: Opener, models: dict[str, TextDiffusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped while its draft can be read."""
    step = Loop.step
    monkeypatch.setattr(Loop, "step", lambda loop: None if loop.lm is models["e2e"] else step(loop))
    tab = opened(ONE)
    tab.wait_for_selector(".preview:visible")
    tab.keyboard.press("Escape")
    tab.wait_for_selector(".card.stopped")
    assert tab.locator(".preview:visible").count() == 0


def test_stopping_stops_both(opened: Opener, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.open.clear()
    tab = opened(ONE, motion="no-preference")
    wait_for(lambda: len(server.engine.jobs) == 2)
    tab.keyboard.press("Escape")
    says(tab, r"^Stopped\.$")
    wait_for(lambda: all(job.over for job in server.engine.jobs))
    before = gate.frames
    gate.open.set()
    wait_for(lambda: not server.engine.scheduler.loops)
    assert gate.frames - before <= 4, "no step but those that were held"
    assert tab.locator(".preview").is_hidden() and tab.locator(".card.stopped").count() == 1


@pytest.mark.parametrize("fails", [lambda route: route.fulfill(status=422, json={}), lambda route: route.abort()])
def test_without_a_draft_the_page_is_as_ever(opened: Opener, fails: Any) -> None:
    tab = opened(ONE, prepare=lambda tab: tab.route(FASTER, fails))
    (text,) = finished(tab)
    assert text and tab.locator(".preview").is_hidden() and tab.locator("#notice").is_hidden()
    opened.forgive(REFUSED)


@pytest.mark.parametrize("ask", ["#n=1&steps=4", "#n=2&model=e2e-fast"])
def test_no_draft_where_it_would_not_help(opened: Opener, ask: str) -> None:
    """In as few steps, and by the faster model itself."""
    sent = list[str]()
    tab = opened(ask, prepare=lambda tab: tab.on("request", lambda request: sent.append(request.url)))
    assert all(finished(tab)) and all(texts(tab))
    assert len([url for url in sent if "/api/stream" in url]) == 1
