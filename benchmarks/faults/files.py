"""Damaged files: the JSON of a run and of its checkpoints, and files of texts. See `reliability.py`."""

import contextlib
import gzip
import io
import json
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.file_faults import start_child, wait_for_child
from benchmarks.faults.runs import RECIPE, SECONDS, Tally, Training
from difflm.app.cli import main

LIMIT = 20  # seconds of one command, after which it hangs
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 10**9, 10**30, 0.5, -1e308, 1e308, "", "x", "\x1b[31m", "x" * 10_000, "\ud800",
    "../../x", "/dev/zero", [], [[]], [0] * 1000, {}, {"a": {"b": []}}, [None], {"": None}
)  # fmt: skip


def damage_value(value: Any, draw: random.Random) -> Any:
    """The value with one part of it replaced, removed, renamed or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice([*value])
        made = dict(value)
        match draw.randrange(6):
            case 0:
                del made[key]
            case 1:
                made[key + "x"] = made.pop(key)
            case 2:
                made[key] = draw.choice(HOSTILE)
            case _:
                made[key] = damage_value(value[key], draw)
        return made
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        return [*value[:at], *([damage_value(value[at], draw)] if draw.random() < 0.7 else []), *value[at + 1 :]]
    return draw.choice(HOSTILE)


def damage_bytes(data: bytes, draw: random.Random) -> bytes:
    """The bytes with some of them changed, removed, inserted, or cut off."""
    made = bytearray(data)
    at = draw.randrange(len(made)) if made else 0
    match draw.randrange(5):
        case 0:
            del made[at:]
        case 1:
            del made[at : at + draw.randint(1, 20)]
        case 2:
            made[at:at] = draw.randbytes(draw.randint(1, 20))
        case 3:
            made[at:at] = draw.choice([b"[" * 100_000, b"9" * 5000, b"\0", b"\xff\xfe", b"\x1b]0;x\x07", b'"', b"\r\n"])
        case _:
            for _ in range(draw.randint(1, 4)):
                if made:
                    made[draw.randrange(len(made))] = draw.randrange(256)
    return bytes(made)


def damage_json(data: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.3:
        return damage_bytes(data, draw)
    made = json.dumps(damage_value(json.loads(data.splitlines()[0] if b"\n{" in data else data), draw))
    return made.encode()


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def try_command(argv: list[object], tally: Tally, where: str, allowed: str = "had no effect") -> None:
    """Run a command in this process: it works, or says in one or two lines what is wrong."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with deadline(LIMIT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(one) for one in argv])
    except BaseException as error:
        kind = "hangs" if isinstance(error, TimeoutError) else "traceback"
        tally.faults.append(f"{where}: {kind}: {''.join(traceback.format_exception(error)[-2:])[-400:]}")
        return
    lines = err.getvalue().splitlines()
    said = [line for line in lines if "WARNING" not in line]
    if any(sign in out.getvalue() + err.getvalue() for sign in "\x1b\x07\x9b"):
        tally.faults.append(f"{where}: escape codes")
    elif code and not 1 <= len(said) <= 2:
        tally.faults.append(f"{where}: exit code {code} and {len(said)} lines: {err.getvalue()[-300:]!r}")
    else:
        tally.add("rejected in one or two lines" if code else allowed)


def run_in_child(folder: Path, work: Callable[[Tally], str]) -> dict[str, object]:
    """Let a child do all tries, so that nothing that happens there ends the whole; with the most memory it took."""
    import resource  # Windows has none, and fuzzing works there

    found, log = folder / "found.json", folder / "said-files.txt"

    def whole() -> int:
        tally = Tally()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        lost = work(tally)
        taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        found.write_text(json.dumps({**tally.result(lost), "megabytes": round(taken)}))
        return 0

    found.unlink(missing_ok=True)
    ended = wait_for_child(start_child(whole, log), log, 15 * SECONDS)
    if not found.exists():
        return {
            "tries": 0,
            "outcome": "",
            "lost": "",
            "faults": [f"the process ended: {ended.code} {ended.said[-500:]}"],
        }
    result: dict[str, object] = json.loads(found.read_text())
    return result


def damage_configs(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Damage one JSON file of a run at a time; generate with it, or resume it."""
    training = Training(folder)

    def work(tally: Tally) -> str:
        out = folder / "damaged"
        generate: list[object] = ["generate", out, "--seed", 1]
        resume: list[object] = ["train", training.recipe, "--out", out, "--device", "cpu", "--resume"]
        commands = {"config.json": generate, "tokenizer.json": generate, "recipe.json": resume, "state.json": resume}
        commands["metrics.jsonl"] = resume
        for k in range(count):
            name = draw.choices([*commands], [8, 4, 1, 1, 1])[0]
            if not (out / "config.json").exists() or k == 0 or commands[name] is resume:
                shutil.rmtree(out, ignore_errors=True)
                shutil.copytree(training.whole, out)
            path = out / "checkpoints" / f"step-{RECIPE['steps']}" / name if name == "state.json" else out / name
            whole = path.read_bytes()
            path.write_bytes(damage_json(whole, draw))
            try_command(commands[name], tally, f"damaged {name}, number {k}")
            if commands[name] is generate:
                path.write_bytes(whole)
            else:
                shutil.rmtree(out)
        return "nothing"

    return run_in_child(folder, work)


def write_data_file(folder: Path, k: int, draw: random.Random) -> Path:
    """A file of texts of any kind, and damaged."""
    lines = [f"The pub number {i} serves food near the river." for i in range(40)]
    plain = "\n".join(lines).encode() + b"\n"
    table = ("text\n" + "\n".join(f'"{line}"' for line in lines)).encode()
    objects = "\n".join(json.dumps({"text": line}) for line in lines).encode()
    kind = (".txt", ".csv", ".jsonl")[k % 3]
    data = {".txt": plain, ".csv": table, ".jsonl": objects}[kind]
    if k >= 12:
        for _ in range(draw.randint(1, 3)):
            data = damage_bytes(data, draw)
    else:
        special = [b"", b"\n" * 100, data.decode().encode("utf-16"), b"\0" * 1000, b"x" * 2_000_000, b"\xff" * 100]
        special += [
            data.replace(b"\n", b"\r"),
            data * 50,
            b'{"text": ' * 10_000,
            b'"' + data,
            b"\xef\xbb\xbf" + data,
            data,
        ]
        data = special[k]
    packed = k % 4 == 3
    if packed:
        data = gzip.compress(data)
        data = damage_bytes(data, draw) if draw.random() < 0.5 else data
    path = folder / f"data-{k}{kind}{'.gz' if packed else ''}"
    path.write_bytes(data)
    return path


def damage_data(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Train a step on damaged files of texts; a refused one leaves no run behind."""
    training = Training(folder)

    def work(tally: Tally) -> str:
        out = folder / "read"
        for k in range(count):
            shutil.rmtree(out, ignore_errors=True)
            if k == count - 1:
                path = folder / "pipe.txt"
                path.unlink(missing_ok=True)
                os.mkfifo(path)
            else:
                path = write_data_file(folder, k, draw)
            argv = ["train", training.recipe, f"data={path}", "steps=1", "--out", out, "--device", "cpu"]
            before = len(tally.faults), tally.outcomes.get("trained", 0)
            try_command(argv, tally, f"texts {path.name}", "trained")
            trained = tally.outcomes.get("trained", 0) > before[1]
            if len(tally.faults) == before[0] and out.exists() != trained:
                tally.faults.append(f"texts {path.name}: {out.name} is {'there' if out.exists() else 'not there'}")
            path.unlink()
        return "nothing; a rejected file leaves no directory"

    return run_in_child(folder, work)
