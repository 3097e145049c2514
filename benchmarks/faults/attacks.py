"""Quiet damage of tokens and settings, words that are given, and bombs. See `reliability.py`."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.file_faults import run_command
from benchmarks.faults.files import LIMIT, deadline, run_in_child, try_command
from benchmarks.faults.runs import RECIPE, Tally, Training
from benchmarks.faults.server import tiny_studio_run
from difflm.errors import DifflmError


def flip_bit(data: bytes, draw: random.Random) -> bytes:
    made, bit = bytearray(data), draw.randrange(8 * len(data))
    made[bit // 8] ^= 1 << bit % 8
    return bytes(made)


def try_call(call: Callable[[], object], tally: Tally, where: str, allowed: str = "") -> None:
    """Call what must be refused in one line within the limit, unless an outcome is allowed."""
    try:
        with deadline(LIMIT):
            call()
    except (DifflmError, ValueError) as error:
        if "\n" in str(error):
            tally.faults.append(f"{where}: more than a line: {str(error)[:300]}")
        return tally.add("rejected in one line")
    except BaseException as error:
        tally.faults.append(f"{where}: {type(error).__name__}: {str(error)[:300]}")
        return
    tally.add(allowed) if allowed else tally.faults.append(f"{where}: accepted")


# -- files ------------------------------------------------------------------------------------------------------------


def damage_tokens(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Flip a bit of a run's tokens, or zero a stretch of them, and resume the run from the middle."""
    training, run, out = Training(folder), folder / "cut", folder / "damaged"
    train = ["train", training.recipe, "split=8", "--device", "cpu", "--out"]
    assert run_command([*train, run], training.log).code == 0

    def work(tally: Tally) -> str:
        names = sorted(path.relative_to(run) for path in run.glob("data/train/*"))
        for k in range(count + 1):
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(run, out)
            shutil.rmtree(out / "checkpoints" / f"step-{RECIPE['steps']}")
            (out / "model.safetensors").unlink()
            path = out / names[k % len(names)]
            whole = path.read_bytes()
            begin, length = draw.randrange(len(whole)), draw.randint(1, 512)
            zeros = bytes(len(whole[begin : begin + length]))
            damaged = whole[:begin] + zeros + whole[begin + length :] if draw.random() < 0.3 else flip_bit(whole, draw)
            path.write_bytes(damaged if k else whole)  # at first nothing is wrong, and the run must be resumed
            argv, where = [*train, out, "--resume"], f"{path.name}, number {k}"
            try_command(argv, tally if k else Tally(), where, "had no effect, bit-identical")
            made = out / "model.safetensors"
            if made.read_bytes() != (run / made.name).read_bytes() if made.exists() else k == 0:
                tally.faults.append(f"{where}: other weights")
        return "nothing: deleted tokens are made again"

    return run_in_child(folder, work)


def flip_settings(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Flip one bit of a JSON file of the bundled models, and load it."""

    def work(tally: Tally) -> str:
        from difflm.runtime.files import read_checked
        from difflm.training.run import bundled_runs, load_run

        copy = folder / "bundled"
        shutil.copytree(bundled_runs()["e2e"].parent, copy, copy_function=os.symlink)
        paths, parsed = sorted(copy.rglob("*.json")), 0
        for k in range(count):
            path = draw.choice(paths)
            target, whole = path.readlink(), path.read_bytes()
            damaged, allowed = flip_bit(whole, draw), ""
            with suppress(ValueError):
                value = json.loads(damaged)
                parsed, allowed = parsed + 1, "had no effect" if value == json.loads(whole) else ""
            path.unlink()
            path.write_bytes(damaged)
            of_run = (path.parent / "tokenizer.json").exists() and path.name != "tags.json"
            load = partial(load_run, path.parent) if of_run else partial(read_checked, path)
            try_call(load, tally, f"flip {k} of {path.relative_to(copy)}", allowed)
            path.unlink()
            path.symlink_to(target)
        return f"nothing; {parsed:,} were still JSON"

    folder.mkdir(parents=True, exist_ok=True)
    return run_in_child(folder, work)


# -- words and bombs --------------------------------------------------------------------------------------------------


def draw_given(draw: random.Random) -> str:
    word, number = draw.choice(["pub", "Eagle", "family", "Café", "can", "it", "Jones"]), draw.randint(1, 9999)
    return draw.choice([
        *(f"{a}{word}{b}" for a, b in ("''", '""', "‘’", "“”", "()", "[]")), f"{word}s'", f"{word}'s", f"{word}’s",
        *("don't", "I'd", "o'clock", "rock'n'roll", "cannot", "gonna", "e.g.", "a.m.", "B&B", "wait...", "two  spaces"),
        *(f"{word}-friendly", f"£{number}-{number + 5}", f"{number:,}", f"{number / 100:.2f}", f"{number % 12}pm"),
        *("--", "—", "…", "'", '"', "/", "-", f"-{number}", f"{number % 24}:30", word.upper(), "s", "not", "that", "£"),
    ])  # fmt: skip


def give_words(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Fill gaps between quotes, apostrophes, contractions, hyphens and numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (" ".join(draw_given(draw) for _ in range(8)) for _ in range(200))
    (folder / "given.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    run = tiny_studio_run(folder, f"data={folder / 'given.txt'}", "longest=60")

    def work(tally: Tally) -> str:
        from difflm.generation.pipeline import TextDiffusion

        lm = TextDiffusion.from_pretrained(run)
        while tally.tries < count and len(tally.faults) < 20:
            parts = [" ".join(draw_given(draw) for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(1, 3))]
            space = partial(draw.choice, [" ", " ", " ", "", "  "])
            gaps = [f"{space()}{draw.choice(['___', '___:1', '___:2'])}{space()}" for _ in range(len(parts) + 1)]
            template = draw.choice(["", gaps[0]]) + "".join(a + b for a, b in zip(parts, gaps[1:], strict=True))
            if re.search(r"___:\d\d", template):
                continue  # a number behind a gap would be its size
            pattern = r"(.*\S.*)".join(map(re.escape, re.split(r"___(?::\d)?", template.strip())))
            for made in lm.infill(template, n=2, seed=tally.tries, steps=2):
                if not re.fullmatch(pattern, made.text, re.DOTALL) or made.controls[0]["satisfied"] is False:
                    tally.faults.append(f"{template!r} became {made.text!r}")
            tally.add("templates printed as they were given")
        return "nothing"

    return run_in_child(folder, work)


FORK = """
import os, signal, sys, torch
from difflm import Length, TextDiffusion
torch.set_num_threads(2)
lm = TextDiffusion.from_pretrained(sys.argv[1])
if not os.fork():
    signal.alarm({limit})
    try:
        lm.{call}
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.wait()
"""


def draw_template(draw: random.Random) -> str:
    large = draw.randint(8, 30)
    return draw.choice([
        f"{{% for i in range(10**{large}) %}}{{% endfor %}}", f"{{{{ 'a' * 10**{large + 2} }}}}",
        f"{{% set n = namespace(s='ab') %}}{{% for i in range({large}0) %}}{{% set n.s = n.s ~ n.s %}}{{% endfor %}}",
        f"{{{{ 'x' | center({large * 10**6}) }}}}", "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{{ [].__class__.__mro__ }}", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ])  # fmt: skip


def draw_tokenizer(draw: random.Random) -> dict[str, Any]:
    """The file of a tokenizer whose texts grow, whose ids or tables are not its own, or which never ends."""
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * draw.randint(2, 9)}
    far = {"type": "BPE", "vocab": {"a": 0, "b": draw.randint(1 << 31, 1 << 32) - 1}, "merges": []}
    split = {"type": "Split", "pattern": {"Regex": draw.choice(["(a+)+$", "(a|aa)+$", "(a*)*$"])}, "invert": False}
    part: dict[str, Any] = draw.choice([
        {"normalizer": {"type": "Sequence", "normalizers": [grow] * draw.randint(20, 60)}}, {"model": far},
        {"decoder": {"type": "Sequence", "decoders": [{**grow, "content": "a" * draw.randint(2000, 90000)}]}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/" * draw.randint(5, 7) + "w=="}},
        {"pre_tokenizer": {**split, "behavior": "Isolated"}},
    ])  # fmt: skip
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "aa": 2}, "merges": [["a", "a"]]}
    return {"version": "1.0", "added_tokens": [], "model": model, **part}


def send_bombs(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Chat templates, tokenizers, pipes, devices, long lines, arguments, links and forks that mean no good."""
    run = tiny_studio_run(folder)
    recipe, out, precious = Training(folder).recipe, folder / "out", folder / "precious"

    def work(tally: Tally) -> str:
        from difflm.data.chat import Template
        from difflm.data.tokenizers import PretrainedTokenizer

        for k in range(count):
            where, accepted = f"bomb {k}", partial(try_command, tally=tally, where=f"bomb {k}", allowed="accepted")
            shutil.rmtree(out, ignore_errors=True)
            name = draw.choice(["config.json", "tokenizer.json", "model.safetensors"])
            match k % 7:
                case 0:
                    template = draw_template(draw)
                    try_call(lambda: Template(template, out).render(), tally, where)  # noqa: B023
                case 1:
                    tokenizer = draw_tokenizer(draw)
                    try_call(lambda: PretrainedTokenizer(tokenizer).encode("a" * 40 + "b"), tally, where)  # noqa: B023
                case 2:
                    shutil.copytree(run, out, copy_function=os.symlink)
                    (out / name).unlink()
                    os.mkfifo(out / name) if draw.random() < 0.5 else (out / name).symlink_to("/dev/zero")
                    accepted(["generate", out])
                case 3:
                    (folder / "long.txt").write_bytes(b"word " * draw.randint(7_000_000, 9_000_000))
                    accepted(["score", run, folder / "long.txt"])
                case 4:
                    bad = f"caf{chr(draw.randint(0xDC80, 0xDCFF))} ___"
                    argv = draw.choice(
                        [["generate", run, "--infill"], ["generate", run, "--contains"], ["score", run], []]
                    )
                    accepted([*argv, bad])
                case 5:
                    precious.write_text("precious")
                    out.mkdir()
                    name = draw.choice([name, "data", "checkpoints", ".lock", "recipe.json", "metrics.jsonl"])
                    (out / name).symlink_to(precious)
                    accepted(["train", recipe, "--out", out, "--device", "cpu"])
                    if precious.read_text() != "precious" or len([*out.iterdir()]) > 1:
                        tally.faults.append(f"{where}: the link {name} was followed")
                case _:
                    call = draw.choice(
                        ["generate(1)", "score('A pub.')", "infill('A ___')", "generate(controls=[Length(5)])"]
                    )
                    program = [sys.executable, "-c", FORK.format(call=call, limit=LIMIT), str(run)]
                    said = subprocess.run(program, capture_output=True, text=True, timeout=6 * LIMIT).stdout
                    if not said.startswith("DifflmError this process was forked") or said.count("\n") != 1:
                        tally.faults.append(f"{where}: {said[-300:]!r}")
                    tally.add("forked processes reported in one line")
        tally.faults += ["a command was not rejected"] * tally.outcomes.get("accepted", 0)
        return "nothing; no link was followed"

    return run_in_child(folder, work)
