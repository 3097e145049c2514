"""One thread (several test workers share the cores), one seed, few, repeatable hypothesis examples, short validations,
a browser, and the fixtures of tests/support/."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from difflm.machine import is_found, is_on
from difflm.training import validation

pytest.register_assert_rewrite("tests.support")
pytest_plugins = [
    f"tests.support.{name}"
    for name in ("browsing", "commands", "corpora", "drafts", "guides", "pairs", "pretrained", "serving", "tiny", "web")
]

CHROMIUM = Path("/usr/bin/chromium")
LINEAR = torch.nn.functional.linear
VALIDATION_DRAWS = validation.VALIDATION_DRAWS

torch.set_num_threads(1)
validation.VALIDATION_DRAWS = 64  # else half the time of a training of 30 steps goes into its validation
settings.register_profile("difflm", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("difflm")


def pytest_configure(config: pytest.Config) -> None:
    """Where there is a GPU, torch's compiler warns of itself, even while it is used as it should be."""
    if is_found("gpu"):
        config.addinivalue_line("filterwarnings", "default:[\\s\\S]*Triggered internally")
        config.addinivalue_line("filterwarnings", "default::UserWarning:torch")
        config.addinivalue_line("filterwarnings", "default::FutureWarning:torch")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("kept"):
        if is_found(mark.args[0]) and not is_on(mark.args[0]):
            pytest.skip(f"{mark.args[0]} is turned off, and nothing stands in for it")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own numbers are the same whichever tests run before, and so is its arithmetic. Where bfloat16 is turned
    on without being there, oneDNN is off: torch would turn it off at the first such product. Where it is turned either
    way, linear layers in it compute in float32 and round, as units for it do, but in tests of the products themselves:
    torch's own take up to twenty times as long."""
    torch.manual_seed(0)
    torch._C._set_mkldnn_enabled(is_found("bfloat16") or not is_on("bfloat16"))
    if is_found("bfloat16") != is_on("bfloat16") and not request.node.get_closest_marker("native"):
        monkeypatch.setattr(torch.nn.functional, "linear", round_linear)


def round_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    narrow = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    if narrow is not torch.bfloat16:
        return LINEAR(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        return LINEAR(*(None if part is None else part.bfloat16().float() for part in (x, weight, bias))).bfloat16()


@pytest.fixture
def whole_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation as it is for everybody."""
    monkeypatch.setattr(validation, "VALIDATION_DRAWS", VALIDATION_DRAWS)


@pytest.fixture(autouse=True)
def validated(request: pytest.FixtureRequest) -> None:
    """What trains for minutes is validated in whole."""
    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("whole_validation")


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
