"""`difflm translate`: a text for every source, in order; a killed command continues; wrong input is one line."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from difflm import TextDiffusion
from difflm.app.cli import main
from difflm.app.commands import translate as command
from difflm.app.commands import writing
from difflm.runtime.resumable import ResumableLines
from tests.support.pairs import sequences

SOURCES = [" ".join(words) for words in sequences(10, 3)]


@pytest.fixture(scope="module")
def expected(reverser) -> list[str]:
    return [text.text for text in TextDiffusion.from_pretrained(reverser).generate(source=SOURCES, steps=3)]


@pytest.fixture
def sources(tmp_path) -> Path:
    (tmp_path / "sources.txt").write_text("".join(f"{source}\n" for source in SOURCES))
    return tmp_path / "sources.txt"


@pytest.fixture
def pieces_of_three(monkeypatch):
    monkeypatch.setattr(command, "PIECE", {"cpu": 3})


def translated(*argv: object) -> int:
    return main(["translate", *map(str, argv), "--steps", "3"])


def test_every_source_has_its_text_in_its_line(reverser, sources, expected, capsys, pieces_of_three):
    assert translated(reverser, sources) == 0
    assert capsys.readouterr().out.splitlines() == expected


def test_columns_of_tables_and_standard_input_are_sources_too(reverser, expected, tmp_path, capsys, monkeypatch):
    (tmp_path / "a.csv").write_text("number,source\n" + "".join(f"1,{source}\n" for source in SOURCES))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"said": source}) + "\n" for source in SOURCES))
    assert translated(reverser, tmp_path / "a.csv") == 0
    assert translated(reverser, tmp_path / "b.jsonl", "--column", "said") == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(SOURCES).encode())))
    assert translated(reverser) == 0
    assert capsys.readouterr().out.splitlines() == 3 * expected


def test_json_has_the_source_and_counts_the_calls_of_all_candidates(reverser, sources, capsys, pieces_of_three):
    asked = ("--length", "5", "--contains", "b", "--avoid", "a")
    assert translated(reverser, sources, "--json", "--mbr", "4", *asked) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["source"] for row in rows] == SOURCES
    assert {row["denoiser_calls"] for row in rows} == {12}
    assert all(len(row["tokens"]) == 5 and "b" in row["tokens"] and "a" not in row["tokens"] for row in rows)


@pytest.mark.parametrize("written", [0, 1, 4, 9])
def test_an_interrupted_file_is_continued_and_becomes_the_same(
    reverser, sources, expected, tmp_path, capsys, monkeypatch, pieces_of_three, written
):
    out, partial = tmp_path / "new" / "out.txt", tmp_path / "new" / "out.txt.partial"
    put = writing.in_order

    def interrupted(batches, first=0):
        for number, text in enumerate(put(batches, first), first):
            if number == written:
                raise KeyboardInterrupt
            yield text

    with monkeypatch.context() as patch:
        patch.setattr(writing, "in_order", interrupted)
        assert translated(reverser, sources, "--out", out) == 1
    said = capsys.readouterr().err
    assert not out.exists() and partial.exists() == (written > 0)
    if written:
        assert f"{written} of 10 texts" in said and said.endswith("interrupted.\n")
        assert partial.read_text().splitlines()[1:] == expected[:written]
        with partial.open("a") as file:
            file.write("half a li")  # of a crash in the middle of a write
    made = []
    generation = TextDiffusion._generation
    with monkeypatch.context() as patch:
        patch.setattr(TextDiffusion, "_generation", lambda *args: made.append(1) or generation(*args))
        assert translated(reverser, sources, "--out", out) == 0
    assert out.read_text().splitlines() == expected and not partial.exists()
    assert len(made) == 10 - written


@pytest.mark.long
def test_a_killed_process_is_continued(reverser, sources, tmp_path):
    """SIGKILL cannot be caught: what is there afterwards is what was written."""
    out = tmp_path / "out.txt"
    argv = [
        sys.executable,
        "-m",
        "difflm",
        "translate",
        reverser,
        sources,
        "--out",
        out,
        "--steps",
        "400",
        "--device",
        "cpu",
    ]
    code = "from difflm.app.commands import translate; translate.PIECE['cpu'] = 1; from difflm.app.cli import main; "
    process = subprocess.Popen([sys.executable, "-c", code + f"main({[str(arg) for arg in argv[3:]]})"])
    partial = out.with_name("out.txt.partial")
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.read_bytes().count(b"\n") > 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = partial.read_bytes().count(b"\n") - 1
    assert 2 <= done < 10 and not out.exists()
    finished = subprocess.run(argv, capture_output=True, text=True)
    assert finished.returncode == 0 and f"{done} of 10 texts are already written" in finished.stderr
    whole = TextDiffusion.from_pretrained(reverser).generate(source=SOURCES, steps=400)
    assert out.read_text().splitlines() == [text.text for text in whole]


def test_other_arguments_do_not_continue_a_file(reverser, sources, tmp_path, complaint, monkeypatch):
    out = tmp_path / "out.txt"
    argv = ("translate", reverser, sources, "--out", out, "--steps")
    with monkeypatch.context() as patch:
        patch.setattr(ResumableLines, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main([str(arg) for arg in (*argv, 3)]) == 1
    assert "was started with another steps (3 then, 4 now)" in complaint(2, *argv, 4)
    assert "was started with another mbr" in complaint(2, *argv, 3, "--mbr", 2)
    sources.write_text("a b\n")
    assert "was started with another sources. Give" in complaint(2, *argv, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt.partial", "sources.txt"]
    out.write_text("mine\n")
    assert "is there already" in complaint(2, *argv, 3)
    assert out.read_text() == "mine\n"
    out.unlink()
    out.with_name("out.txt.partial").write_text("my own lines\n")
    assert "was not started by this command" in complaint(2, *argv, 3)


@pytest.mark.kept("posix")
def test_two_processes_do_not_write_one_file(reverser, sources, tmp_path, complaint):
    with ResumableLines(tmp_path / "out.txt", {}) as kept:
        kept.put("one")
        argv = ("translate", reverser, sources, "--out", tmp_path / "out.txt")
        assert "another process is writing" in complaint(1, *argv)
    assert kept.partial.read_text() == "{}\none\n"


@pytest.mark.parametrize(
    ("name", "content", "more", "code", "said"),
    [
        ("a.txt", "a b\n\nc d\n", (), 2, "line 2 of {} is empty"),
        ("a.txt", "a b\n" + "a " * 9 + "\n", (), 2, "line 2 of {} has 9 tokens; this model reads at most 8"),
        ("a.txt", "", (), 1, "there is no source in {}"),
        ("a.txt", None, (), 2, "{} does not exist"),
        ("a.txt", "a\n", ("--column", "src"), 2, "has one source per line and no columns"),
        ("a.csv", "src,trg\na,b\n,c\n", (), 2, "line 3 of {} is empty"),
        ("a.csv", "src,trg\na,b\n", ("--column", "scr"), 2, "Did you mean 'src'?"),
        ("a.csv", "said,trg\na,b\n", (), 2, "no column 'src' in line 1 of {}"),
        ("a.jsonl", '{"src": "a"}\n{"trg": "b"}\n', (), 2, "no column 'src' in line 2 of {}"),
        ("a.jsonl", '{"src": 3}\n', (), 1, "'src' in line 1 of {} is not a text"),
        ("a.txt", "a\n", ("--steps", "0"), 2, "--steps must be between 1 and 10,000"),
        ("a.txt", "a\n", ("--beams", "4"), 2, "--beams is for autoregressive models"),
        ("a.txt", "a\n", ("--length", "40"), 2, ""),
        ("a.txt", "a\n", ("--contains", "zebra"), 2, "zebra"),
        ("a.txt", "a\n", ("--guidance", "3"), 2, "--guidance is how strongly classifiers steer"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(reverser, tmp_path, complaint, name, content, more, code, said):
    path, out = tmp_path / name, tmp_path / "out.txt"
    if content is not None:
        path.write_text(content)
    assert said.format(path) in complaint(code, "translate", reverser, path, "--out", out, *more)
    assert {file.name for file in tmp_path.iterdir()} <= {name}


def test_a_run_without_sources_is_not_asked_to_translate_nor_one_with_them_to_do_without(
    reverser, tiny_runs, sources, complaint
):
    assert "was trained on texts without sources" in complaint(2, "translate", tiny_runs["difflm"], sources)
    assert "was trained on texts without sources" in complaint(2, "generate", tiny_runs["difflm"], "--source", "a b")
    assert "writes each text from a source: give one" in complaint(2, "generate", reverser)


def test_generate_writes_from_one_source_and_from_those_of_its_lines(reverser, tmp_path, capsys, expected):
    assert main(["generate", str(reverser), "--source", SOURCES[0], "--steps", "3"]) == 0
    lines = "".join(json.dumps({"source": source, "steps": 3}) + "\n" for source in SOURCES[:1] * 2)
    (tmp_path / "requests.jsonl").write_text(lines)
    assert main(["generate", str(reverser), "--input", str(tmp_path / "requests.jsonl")]) == 0
    assert capsys.readouterr().out.splitlines() == 3 * expected[:1]


def test_words_that_the_model_does_not_know_are_counted(reverser, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a zebra b\n")
    assert translated(reverser, tmp_path / "a.txt") == 0
    said = "1 of 3 tokens of the sources are words that this model does not know"
    assert said in capsys.readouterr().err
    assert main(["generate", str(reverser), "--source", "a zebra b", "--steps", "3"]) == 0
    assert said in capsys.readouterr().err
    (text,) = TextDiffusion.from_pretrained(reverser).generate(1, source="a zebra b", steps=3)
    assert text.warnings == [f"{said}."]


def test_candidates_are_ranked(reverser, tmp_path, complaint):
    (tmp_path / "a.txt").write_text("a b\n")
    argv = ("translate", reverser, tmp_path / "a.txt", "--candidates", 3)
    assert "give --rank bound or --rank RUN" in complaint(2, *argv)


def test_bench_has_no_sources(reverser, complaint):
    assert "writes from sources, which bench has none of" in complaint(2, "bench", reverser)
