"""The studio with a model that writes from sources: the API takes one, and the page has a box for it."""

from pathlib import Path
from typing import Any

import pytest

from difflm.generation.pipeline import TextDiffusion
from tests.support.browsing import Opener, asked, finished, says, write
from tests.support.serving import PATIENCE, Running, need

httpx = need("httpx2", "fastapi", "uvicorn")


@pytest.fixture(scope="module")
def lm(reverser: Path) -> TextDiffusion:
    return TextDiffusion.from_pretrained(reverser)


def test_the_api_takes_a_source_and_says_when_one_is_missing(server: Running, lm: TextDiffusion) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        assert client.get("/api/controls").json()["source"] == {"most": lm.model.capabilities.source_limit}
        answer = client.post("/api/generate", json={"source": "a b c d", "n": 2, "steps": 3})
        made = lm.generate(2, source="a b c d", steps=3)
        assert [text["text"] for text in answer.json()["texts"]] == [text.text for text in made]
        for body, said in (({}, "writes each text from a source"), ({"source": "a " * 9}, "has 9 tokens")):
            refused = client.post("/api/generate", json=body)
            assert refused.status_code == 422 and said in refused.json()["error"]["message"]


@pytest.mark.long
def test_the_page_asks_for_a_source_and_keeps_it_in_its_address(
    browser: Any, server: Running, lm: TextDiffusion
) -> None:
    opener = Opener(browser, server.url)
    tab = opener("")
    says(tab, "this model writes every text from one")
    assert tab.locator("#source").is_visible() and tab.evaluate("document.activeElement.id") == "source"
    assert tab.evaluate("document.getElementById('ask').checkValidity()") is False
    tab.fill("#source", "a b c d")
    tab.fill("#steps", "3")
    texts = write(tab)
    assert texts == [text.text for text in lm.generate(len(texts), source="a b c d", steps=3)]
    assert asked(tab)["source"] == ["a b c d"]
    tab.reload()
    assert finished(tab) == texts and tab.input_value("#source") == "a b c d"
    tab.fill("#avoid", "a")
    tab.click("#clear")
    assert tab.input_value("#source") == "a b c d"
    for context in opener.contexts:
        context.close()
    assert opener.wrong == []
