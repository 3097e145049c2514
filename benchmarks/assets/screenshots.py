"""Pictures of the studio and of the page without a server, for the documentation: both with the bundled model
`english`, in Chromium, the studio at three widths, light and dark.

    python -m benchmarks.assets.screenshots --out docs/images

Prints for the page without a server its size and how long a text takes.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = "/usr/bin/chromium"
MODEL = "english"
WIDTHS, THEMES = {360: 1180, 768: 1024, 1600: 900}, ("light", "dark")  # each width with its height
PATIENCE = 300_000  # milliseconds
HALFWAY = 0.4  # of the steps, in pictures of texts that form


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path("docs/images"))
    asked = options.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        with started("-m", "difflm", "studio", "--port", "0", "--no-browser") as address:
            for width in WIDTHS:
                for theme in THEMES:
                    take_studio(browser, address, width, theme, asked.out / f"studio-{width}-{theme}.png")
        with tempfile.TemporaryDirectory() as folder:
            demo = Path(folder) / "demo"
            subprocess.run([sys.executable, "-m", "browser.export", MODEL, str(demo)], check=True)
            with started("-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "-d", str(demo)) as address:
                take_demo(browser, address, asked.out / "browser-1600-light.png")
        browser.close()


@contextmanager
def started(*argv: str) -> Iterator[str]:
    """A server of this Python, and its address, which it prints when it is ready."""
    server = subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://[\w.:]+", line)))
        yield address
    finally:
        server.terminate()
        server.wait(60)


@contextmanager
def opened(browser: Browser, address: str, width: int, theme: Any) -> Iterator[Page]:
    context = browser.new_context(
        viewport={"width": width, "height": WIDTHS[width]}, color_scheme=theme, reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE)
    tab = context.new_page()
    tab.goto(address)
    yield tab
    context.close()


def take_studio(browser: Browser, address: str, width: int, theme: str, path: Path) -> None:
    """Light: the texts that the page begins with, while they form. Dark: finished, with a word in hand."""
    with opened(browser, address, width, theme) as tab:
        expect(tab.locator("#status")).to_have_text(re.compile(r"^\d+ texts? in "), timeout=PATIENCE)
        if theme == "light":
            move_to_halfway(tab)
        else:
            tab.locator(".card").first.locator(".word").nth(1).click()
        take(tab, path)


def take_demo(browser: Browser, address: str, path: Path) -> None:
    with opened(browser, address, 1600, "light") as tab:
        status = tab.locator("#status")
        expect(status).to_have_text(re.compile("^Ready"), timeout=PATIENCE)
        for template in ("My dog ___ in the garden.", ""):
            tab.fill("#template", template)
            tab.click("#write")
            expect(status).to_have_text(re.compile(r" s, \d+ steps$"), timeout=PATIENCE)
            print(f"{template!r}: {status.inner_text()}: {tab.inner_text('#text')}")
        tab.click("#example")
        tab.click("#write")
        expect(status).to_have_text(re.compile(r" s, \d+ steps$"), timeout=PATIENCE)
        print(f"{tab.input_value('#template')!r}: {status.inner_text()}: {tab.inner_text('#text')}")
        move_to_halfway(tab)
        take(tab, path)


def take(tab: Page, path: Path) -> None:
    tab.evaluate("document.activeElement.closest('.word') ?? document.activeElement.blur()")
    tab.screenshot(path=path)


def move_to_halfway(tab: Page) -> None:
    slider = tab.get_by_label("Step", exact=True)
    slider.fill(str(round(HALFWAY * int(slider.get_attribute("max") or 0))))


if __name__ == "__main__":
    main()
