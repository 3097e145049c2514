"""Fuzzing of everything that reads what others wrote: `python -m benchmarks.faults.fuzz --seconds 600 [--only NAME …]`.

Each target takes text, bytes or JSON that hypothesis draws, or damages a good example, and may raise nothing but an
error for people, of one or two lines. `make test-slow` runs all of them for a minute, `make test-slow FUZZ=3600` for an
hour. Where atheris is installed (it has wheels for x86), `--atheris NAME` lets it drive one of them by coverage.
"""

import argparse
import json
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks.faults.files import damage_bytes, damage_json
from difflm.annotators.trees import parse_tree
from difflm.app.studio.api import event, streamed
from difflm.app.studio.completions import CompletionAsked
from difflm.app.studio.limits import Limits
from difflm.app.studio.schemas import Asked
from difflm.controls import Infill, Span, Tags, WordCount, parse_control
from difflm.controls.patterns.json_schema import schema_tree
from difflm.controls.patterns.pattern import Json
from difflm.controls.patterns.regular import compile_characters
from difflm.data.labels import read_labels
from difflm.data.texts import read_chunks, read_examples, read_sources, read_texts
from difflm.data.tokenizers import Tokenizer
from difflm.data.words import join_words, split_words
from difflm.errors import DifflmError
from difflm.generation.requests import parse_request
from difflm.player.frames import Draft, pack_drafts, spaces, written
from difflm.runtime.files import read_json
from difflm.runtime.tensors import load_tensors
from difflm.training.checkpoints import go_back
from difflm.training.recipe import load_recipe

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
TEXT = st.text(max_size=80) | st.text("()[]{}|*+?\\.,-:_^$ aS12é\n", max_size=60)
RECIPE = b"method: difflm\ndata: my.txt\nsteps: 10\nmodel: {hidden: 32, layers: 1}\nlr: 3e-4\nwidths: [8, 16]\n"
REQUEST = (
    b'{"n": 2, "length": 14, "field": {"food": "Japanese"}, "contains": ["cheap"], "steps": 5, "span": ["1,2,VP"]}'
)
TABLE = b'text,src,trg\n"The pub, here",a b,c d\nAn inn,e,f\n'
ROWS = b'{"text": "The pub", "src": "a", "trg": "b", "topic": "x", "tags": ["DET", "NOUN"]}\n{"text": "An inn"}\n'
HEADER = (
    b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"I8","shape":[4],"data_offsets":[16,20]}}'
)
SCHEMA = (
    b'{"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}, "b": {"enum": ["x", null]}, "c": '
    b'{"type": "array", "items": {"type": "string", "pattern": "a+"}, "maxItems": 3}}, "required": ["a"]}'
)
METRICS = b'{"kind": "train", "step": 3, "loss": 1.5}\n{"kind": "validation", "step": 4}\n'
TOKENIZER = b'{"kind": "words", "words": ["START", "END", "UNK", "PAD", "a", "b"]}'

damaged = st.tuples(st.randoms(use_true_random=False), st.booleans())
FOLDER = Path(tempfile.mkdtemp(prefix="difflm-fuzz-"))


def check_refusal(work: Callable[[], object]) -> None:
    """Do something that may be refused, in one or two lines."""
    try:
        work()
    except DifflmError as error:
        said = str(error)
        assert said.strip() and len(said.splitlines()) <= 2, said


def damage(example: bytes, how: tuple[random.Random, bool], is_json: bool = False) -> bytes:
    draw, twice = how
    for _ in range(1 + twice):
        example = damage_json(example, draw) if is_json and not twice else damage_bytes(example, draw)
    return example


def put(name: str, data: bytes) -> Path:
    path = FOLDER / name
    path.write_bytes(data)
    return path


TARGETS: dict[str, Callable[[], Any]] = {}  # a fresh test of each: settings and a seed can be given to one only once


def target(*drawn: Any, **named: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a target, which takes what these strategies draw."""

    def keep(function: Callable[..., None]) -> Callable[..., None]:
        TARGETS[function.__name__] = lambda: given(*drawn, **named)(function)
        return function

    return keep


# -- targets ----------------------------------------------------------------------------------------------------------


@target(how=damaged, raw=st.binary(max_size=200), kind=st.sampled_from([".txt", ".csv", ".jsonl", ".txt.gz"]))
def read_files(how: Any, raw: bytes, kind: str) -> None:
    example = {".csv": TABLE, ".jsonl": ROWS}.get(kind, b"The old pub.\nAn inn.\n")
    path = put(f"data{kind}", raw if how[0].random() < 0.3 else damage(example, how))
    for read in (read_texts, lambda one: read_examples([one]), read_sources, lambda one: read_chunks(one, 7)):
        check_refusal(lambda read=read: list(read(path)))  # type: ignore[misc]
    if kind == ".jsonl":
        check_refusal(lambda: read_labels(path, "text"))


@target(how=damaged, key=st.sampled_from(["steps", "model.hidden", "widths", "lr", "x"]), value=TEXT)
def read_recipes(how: Any, key: str, value: str) -> None:
    path = put("recipe.yaml", damage(RECIPE, how))
    check_refusal(lambda: load_recipe(str(path)))
    check_refusal(lambda: load_recipe(str(path), [f"{key}={value}"]))
    put("recipe.yaml", RECIPE)
    check_refusal(lambda: load_recipe(str(path), [f"{key}={value}"]))


@target(text=TEXT)
def parse_controls(text: str) -> None:
    check_refusal(lambda: parse_tree(text))
    check_refusal(lambda: Span.parse(text))
    check_refusal(lambda: WordCount.parse(text))
    check_refusal(lambda: parse_control(text))
    check_refusal(lambda: (Infill(text).gaps, Infill(text).parts, Tags(tuple(text.split())).target))


@target(text=TEXT)
def parse_patterns(text: str) -> None:
    check_refusal(lambda: compile_characters(text, "ab 1é").accepts("ab 1"))


@target(how=damaged, raw=JSON)
def read_schemas(how: Any, raw: Any) -> None:
    for schema in (raw, damage(SCHEMA, how, is_json=True).decode(errors="replace")):
        check_refusal(lambda schema=schema: schema_tree(Json(schema).target))  # type: ignore[misc]


@target(text=st.text(max_size=60))
def split_and_join(text: str) -> None:
    words = split_words(text)
    assert split_words(join_words(words)) == words or "\n" in text


@target(how=damaged, tail=st.integers(-30, 30))
def read_checkpoints(how: Any, tail: int) -> None:
    header = damage(HEADER, how, is_json=True)
    data = struct.pack("<Q", max(0, len(header) + (tail if how[0].random() < 0.2 else 0))) + header + bytes(20)
    check_refusal(lambda: load_tensors(put("state.safetensors", data)))


@target(how=damaged)
def read_tokenizers(how: Any) -> None:
    check_refusal(lambda: Tokenizer.load(put("tokenizer.json", damage(TOKENIZER, how, is_json=True))))


@target(how=damaged, step=st.integers(0, 5))
def read_metrics(how: Any, step: int) -> None:
    path = put("metrics.jsonl", damage(METRICS, how))
    go_back(path.parent, step)
    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(record["step"] <= step for record in kept if record.get("kind") in ("train", "validation"))


@target(how=damaged, raw=JSON)
def read_requests(how: Any, raw: Any) -> None:
    for line in (json.dumps(raw), damage(REQUEST, how, is_json=True).decode(errors="replace")):
        check_refusal(lambda line=line: parse_request(line, "here").job())  # type: ignore[misc]
        for schema in (Asked, CompletionAsked):
            try:
                asked = schema.model_validate_json(line)
                if isinstance(asked, Asked):
                    check_refusal(partial(asked.check, Limits()))
                    check_refusal(asked.job)
            except ValidationError:
                pass
            except ValueError as error:  # half of a sign, which JSON can spell
                assert "surrogate" in str(error)


@target(raw=JSON, how=damaged)
def read_any_json(raw: Any, how: Any) -> None:
    path = put("any.json", damage(json.dumps(raw).encode(), how))
    check_refusal(lambda: read_json(path))


@target(st.lists(st.lists(st.text(max_size=5), max_size=6), min_size=1, max_size=4), st.booleans())
def write_frames(rows: list[list[str]], pieces: bool) -> None:
    """A frame is one line of JSON, and comes back with the spaces of its text."""
    drafts = list[Draft]()
    for step, tokens in enumerate(rows):
        drafts.append(Draft(0, step, 0.5, tokens, [0.5] * len(tokens), [False] * len(tokens)))
        sent = event(streamed(drafts[-1], 1, pieces), "frame")
        data = [line for line in sent.decode().splitlines() if line.startswith("data: ")]
        assert len(data) == 1 and json.loads(data[0][6:])["tokens"] == tokens
        if not any(token.startswith(" ") or "\n" in token for token in tokens) and not pieces:
            apart = spaces(tokens, pieces)
            shown = "".join(" " * space + token for token, space in zip(tokens, apart, strict=True))
            assert shown == written(tokens, pieces) or any(not token.split() for token in tokens)
    packed = json.loads(json.dumps(pack_drafts(drafts, pieces, {})))
    assert [frame["n"] for frame in packed] == [len(tokens) for tokens in rows]


SETTINGS = settings(deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck))


def fuzz(name: str, seconds: float, first_seed: int = 0, examples: int = 100) -> int:
    """Run a target with one seed after the other until the time is over; at least once. The number of seeds."""
    end, number = time.monotonic() + seconds, 0
    while not number or time.monotonic() < end:
        settings(SETTINGS, max_examples=examples)(seed(first_seed + number)(TARGETS[name]()))()
        number += 1
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="of the first examples")
    parser.add_argument("--atheris", choices=TARGETS, help="let atheris drive this target, without end")
    options = parser.parse_args()
    if options.atheris:
        atheris = __import__("atheris")
        atheris.Setup(sys.argv[:1], TARGETS[options.atheris]().hypothesis.fuzz_one_input)
        atheris.Fuzz()
    for name in options.only:
        count = fuzz(name, options.seconds / len(options.only), options.seed)
        print(f"{name}: {count} seeds from {options.seed} on, 100 examples each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
