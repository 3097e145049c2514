"""Whatever reads what others wrote is fuzzed: a little among the long tests, and for a minute among the slow ones; for
as many seconds as DIFFLM_FUZZ says (`make test-slow FUZZ=3600`). A failure tells its example."""

import os
import time

import pytest

from tests.support.serving import need

need("fastapi")

from benchmarks.faults.fuzz import TARGETS, check_refusal, fuzz  # noqa: E402

SECONDS = float(os.environ.get("DIFFLM_FUZZ") or 60)


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_a_little_fuzzing(name: str) -> None:
    assert fuzz(name, 0, examples=50) == 1
    assert fuzz(name, 0, first_seed=1, examples=5) == 1, "and again"


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_fuzzing(name: str) -> None:
    """With other examples each time."""
    assert fuzz(name, SECONDS / len(TARGETS), time.time_ns() % 10**9)


def test_fuzzing_finds_a_traceback() -> None:
    """And a complaint that fills a page."""
    from difflm.errors import DifflmError

    def complain() -> None:
        raise DifflmError("one\ntwo\nthree")

    for fault, kind in ((lambda: {}["key"], KeyError), (complain, AssertionError)):
        with pytest.raises(kind):
            check_refusal(fault)
