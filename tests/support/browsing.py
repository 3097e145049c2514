"""The studio's page in a browser: opening it, and what a test asks of it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from difflm.generation.pipeline import TextDiffusion
from tests.support.serving import need, running

TWO = "#n=2&steps=3&length=12&field.food=Japanese"
REFUSED = "Failed to load resource"  # the browser's own line for an answer that is an error


class Opener:
    """Opens the page; at the end there must have been no error and no request to anywhere else."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser, self.url = browser, url
        self.contexts: list[Any] = []
        self.wrong: list[str] = []

    def __call__(self, ask: str = TWO, width: int = 1600, prepare: Any = None, motion: str = "reduce") -> Any:
        context = self.browser.new_context(
            viewport={"width": width, "height": 900}, reduced_motion=motion, accept_downloads=True
        )
        self.contexts.append(context)
        context.set_default_timeout(180_000)
        tab = context.new_page()
        tab.on("console", lambda message: message.type in ("error", "warning") and self.wrong.append(message.text))
        tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        tab.on("request", lambda request: request.url.startswith((self.url, "blob:")) or self.wrong.append(request.url))
        if prepare:
            prepare(tab)
        tab.goto(self.url + ask)
        return tab

    def forgive(self, beginning: str) -> None:
        """Errors that the test brought about."""
        assert any(told.startswith(beginning) for told in self.wrong)
        self.wrong = [told for told in self.wrong if not told.startswith(beginning)]


def says(tab: Any, pattern: str) -> None:
    from playwright.sync_api import expect

    expect(tab.locator("#status")).to_have_text(re.compile(pattern), timeout=180_000)


def finished(tab: Any) -> list[str]:
    """The texts, once the page says that all are there."""
    says(tab, r"^\d+ texts? in ")
    return texts(tab)


def texts(tab: Any) -> list[str]:
    return tab.evaluate("[...document.querySelectorAll('#texts .text')].map(text => text.textContent)")


def hush(tab: Any) -> None:
    """What the page says next is new."""
    tab.evaluate("document.getElementById('status').textContent = ''")


def write(tab: Any) -> list[str]:
    hush(tab)
    tab.get_by_role("button", name="Write", exact=True).first.click()
    return finished(tab)


def asked(tab: Any) -> dict[str, list[str]]:
    return parse_qs(urlsplit(tab.url).fragment)


def sentence(tab: Any) -> str:
    tab.wait_for_selector("#notice:visible")
    return tab.inner_text("#notice p")


def load_axe(tab: Any) -> None:
    """Put axe-core into a page; the test is skipped where nobody has installed it, except in CI, where it fails."""
    places = [Path(__file__).parents[2] / "node_modules", Path(os.environ.get("NODE_PATH", "node_modules"))]
    axe = next((path for place in places if (path := place / "axe-core/axe.min.js").exists()), None)
    if axe is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs axe-core: npm install --no-save axe-core")
    tab.evaluate(axe.read_text(encoding="utf-8") + "; 0")


def axe_faults(tab: Any) -> list[str]:
    return tab.evaluate("axe.run().then(found => found.violations.map(one => `${one.impact} ${one.id}: ${one.help}`))")


@pytest.fixture(scope="module")
def studio() -> Iterator[str]:
    """The address of a server of our own."""
    need("fastapi", "uvicorn")
    with running(TextDiffusion.from_pretrained("e2e"), name="e2e") as found:
        yield f"{found.url}/"


@pytest.fixture
def opened(browser: Any, studio: str) -> Iterator[Opener]:
    opener = Opener(browser, studio)
    yield opener
    for context in opener.contexts:
        context.close()
    assert opener.wrong == []
