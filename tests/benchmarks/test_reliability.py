"""The command that tries all faults, with few tries of each; and that it notices what falls."""

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.support.serving import need

need("fastapi", "uvicorn")

from benchmarks.faults.file_faults import Ended, FileCalls, start_child, wait_for_child  # noqa: E402
from benchmarks.faults.reliability import BEGIN, END, PARTS, write_table  # noqa: E402
from benchmarks.faults.runs import Tally, Training  # noqa: E402

FEW = {
    "kills": 3,
    "calls": 8,
    "full": 6,
    "twice": 1,
    "flips": 20,
    "configs": 30,
    "data": 14,
    "requests": 40,
    "leaving": 8,
    "tokens": 3,
    "settings": 3,
    "patterns": 3,
    "crowds": 3,
    "given": 3,
    "bombs": 7,
}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_a_part_with_few_tries(part: str, tmp_path: Path) -> None:
    found = PARTS[part][1](tmp_path / "part", FEW[part], random.Random(0))
    assert found["faults"] == [] and found["tries"] >= min(FEW[part], 6)  # type: ignore[operator]


@pytest.mark.long
def test_what_falls_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot rename does not end as it should, and without checksums a flipped bit is loaded."""
    training, tally, out = Training(tmp_path / "training"), Tally(), tmp_path / "training" / "run"
    with monkeypatch.context() as patch:
        patch.setattr("difflm.runtime.files.Path.replace", lambda path, target: shutil.copy(path, target))
        training.finish(out, tally, "without renames")
    assert tally.faults and "not as it was" in tally.faults[0]
    monkeypatch.setattr("difflm.training.run.check_sha256", lambda *_: None)
    assert PARTS["flips"][1](tmp_path / "training", 30, random.Random(0))["faults"]


def test_a_child_ends_at_the_call_that_is_named(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "folder" / "file"

    def work(calls: FileCalls) -> int:
        calls.install()
        path.parent.mkdir()
        path.write_bytes(b"12345678")
        path.rename(path.with_name("other"))
        return 3

    ends = []
    for at in range(1, 6):
        shutil.rmtree(path.parent, ignore_errors=True)
        ended = wait_for_child(start_child(lambda at=at: work(FileCalls(path.parent, "kill", at)), log), log, 60)  # type: ignore[misc]
        ends.append((ended.code, sorted((one.name, one.stat().st_size) for one in path.parent.glob("*"))))
    assert ends == [(-9, []), (-9, []), (-9, [("file", 4)]), (-9, [("file", 8)]), (3, [("other", 8)])]
    shutil.rmtree(path.parent)
    ended = wait_for_child(start_child(lambda: work(FileCalls(path.parent, "full", 3)), log), log, 60)
    assert ended.code == 70 and "No space left" in ended.said and path.stat().st_size == 4


def test_faults_are_told_in_the_table(tmp_path: Path) -> None:
    tally = Tally()
    good, bad = Ended(1, "difflm: the disk is full.\n"), Ended(1, "Traceback (most recent call last)\nKeyError: 1\n")
    assert tally.check(good, "here") and tally.check(Ended(-9, ""), "here") and not tally.faults
    for ended in (bad, Ended(-9, "", hung=True), Ended(2, ""), Ended(1, "difflm: a\ndifflm: b\ndifflm: c\n")):
        assert not tally.check(ended, "there")
    assert len(tally.faults) == 4 and "KeyError" in tally.faults[0] and "hangs" in tally.faults[1]
    tally.add("refused")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}\nafter\n")
    write_table(page, {"flips": tally.result("nothing")})
    flips = "| one bit of the weights is flipped | 1 | 1 refused | **4 fell** |\n"
    before, after = f"before\n{BEGIN}| fault | tries | outcome | lost |\n|---|---|---|---|\n", f"{END}\nafter\n"
    assert page.read_text() == before + flips + after
    write_table(page, {"twice": Tally().result("nothing")})  # the row of a part that was not tried again stays
    assert page.read_text() == f"{before}| two trainings in one directory | 0 |  | nothing |\n{flips}{after}"
