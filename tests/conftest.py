"""One thread (several test workers share the cores), one seed, few, repeatable hypothesis examples, and a browser."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

CHROMIUM = Path("/usr/bin/chromium")

torch.set_num_threads(1)
settings.register_profile("difflm", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("difflm")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Torch's own numbers are the same whichever tests run before."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    missing = [] if CHROMIUM.exists() else [f"no {CHROMIUM}"]
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing.append("no playwright")
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(" and ".join(missing))
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(CHROMIUM), args=arguments)
        yield started
        started.close()
