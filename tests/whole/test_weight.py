"""Ratchets: how heavy the code is (benchmarks/weight.py) may only fall. Who lowers a count lowers its figure here."""

import pytest

from benchmarks import weight

FIGURES = {
    "lines of src/difflm": 41_805,
    "lines of diffusion, networks, models, methods": 13_850,
    "circles of files": 0,
    "isinstance of own classes": 62,
    "constant getattr and hasattr": 15,
    "Any": 196,
    "class attributes of LanguageModel": 6,
    "parameters of one function": 8,
    "lines of one function": 49,
    "late imports of methods": 0,
    "words of docs": 59_940,
    "plain text: files": 25,
    "plain text: functions": 131,
    "one field: files": 33,
    "one field: functions": 198,
    "gap with english: files": 35,
    "gap with english: functions": 197,
    "gap with english: functions before denoising": 68,  # before the first call of the denoiser, of drafts too
    "HTTP, one field: files": 44,  # as its threads take turns, one more or less
    "HTTP, one field: functions": 269,
}


@pytest.mark.parametrize(("what", "count"), weight.count_code().items())
def test_the_code_grows_no_heavier(what, count):
    assert count <= FIGURES[what], f"{what}: {count}, at most {FIGURES[what]}"


@pytest.mark.parametrize("name", weight.WALKS)
def test_a_request_enters_no_more_files_and_functions(name):
    counts = weight.count_walks([name])
    assert counts and {what: count for what, count in counts.items() if count > FIGURES[what]} == {}


def test_circles_are_seen_through_late_and_type_only_imports(tmp_path, monkeypatch):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").touch()
    (tmp_path / "room" / "a.py").write_text("def f():\n    from difflm.room import b\n")
    (tmp_path / "room" / "b.py").write_text("from importlib import import_module\nimport_module('difflm.room.c')\n")
    (tmp_path / "room" / "c.py").write_text("if TYPE_CHECKING:\n    from .a import f\n")
    (tmp_path / "room" / "d.py").write_text("from .a import f\n")
    monkeypatch.setattr(weight, "ROOT", tmp_path)
    weight.parse_all.cache_clear()
    try:
        assert weight.find_circles() == [["room/a.py", "room/b.py", "room/c.py"]]
    finally:
        weight.parse_all.cache_clear()
