"""What patterns may cost: whatever is asked, it is refused or prepared in seconds, and nobody else waits for it."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from difflm.app.cli import app
from difflm.app.studio.limits import Limits
from difflm.controls import Avoid, Contains, Control, Infill, Json, Pattern, WordCount
from difflm.controls.patterns import token_automata
from difflm.controls.patterns.regular import compile_characters, minimise, number_rows, refine
from difflm.controls.patterns.token_automata import compile_pattern, intersect
from difflm.data.tokenizers import SPECIALS, Characters
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.runtime import work
from tests.support.serving import PATIENCE, Running, need, running, wait_for

TWO_PRIMES = ["(.{131})*", "(.{137})*"]
SETS_AND_A_LENGTH = [
    r"([^e][^e]\w[a-m][^a][^t][^e][a-m][^t][n-z][^o].[^a]\S[a-m]\S\W[^o][a-m][^a][ -m][^o]\S[a-m]\W[ -m])+",
    "(.{600})*",
]
MANY_SETS = ["(" + "".join(f"[^{chr(97 + k % 26)}{chr(97 + 7 * k % 26)}]" for k in range(397)) + ")+"]
SECONDS = 15.0  # of a core for what took 17 s to more than ten minutes; one or two on an idle machine


def nest_objects(depth: int) -> dict[str, Any]:
    """Objects in one another, with nothing required, so that every part may begin."""
    schema: dict[str, Any] = {"type": "integer"}
    for k in range(depth):
        schema = {"type": "object", "properties": {f"p{k}": schema, f"q{k}": {"type": "string"}}}
    return schema


def name_objects(depth: int) -> dict[str, Any]:
    """A few names, each of which stands for an object with eight of the next."""
    names = {f"d{k}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/d{k + 1}"} for key in "abcdefgh"}}
             for k in range(depth)}  # fmt: skip
    return {"$defs": {**names, f"d{depth}": {"type": "null"}}, "$ref": "#/$defs/d0"}


QUICK: dict[str, list[Control]] = {
    "two lengths": [Pattern(one) for one in TWO_PRIMES],
    "sets and a length": [Pattern(one) for one in SETS_AND_A_LENGTH],
    "many sets": [Pattern(one) for one in MANY_SETS],
    "nested counts": [Pattern("(((.{0,1000}a){0,1000}b){0,1000}c){0,1000}")],
    "names in a schema": [Json(name_objects(12))],
}
MORE: dict[str, list[Control]] = {
    "nested options": [Pattern("((((.?){9}){9}){9}x)*")],
    "options of sets": [Pattern("".join(f"[{chr(97 + k % 26)}{chr(97 + 7 * k % 26)}b]?" for k in range(331)))],
    "alternatives of scripts": [
        Pattern("(" + "|".join(rf"[\w{chr(0x4E00 + k)}]\s[\D{chr(0x400 + k)}]" for k in range(120)) + ")*")
    ],
    "one set of names": [Pattern("[" + r"\d\w\s" * 300 + "]*")],
    "four lengths": [Pattern(f"(.{{{n}}})*") for n in (13, 17, 19, 23)],
    "many lengths": [Pattern(f"(.{{{n}}})*") for n in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)],
    "letters somewhere": [Pattern(f".*{a}.*{b}.*") for a in "aeiou" for b in "tsr"],
    "all kinds": [
        *(Pattern(".*a.{6}"), Pattern("(.{7})*"), WordCount(5, 60)),
        *(Contains("old house"), Contains("river"), Avoid("the"), Avoid("new")),
    ],
    "signs that must appear": [Contains(one * 30) for one in ("!?", "?!", ".,", ",.")],
    "avoided words": [Avoid("".join(random.Random(k).choices("abcdefghij", k=25))) for k in range(32)],
    "avoided letters": [Pattern(".*"), *(Avoid("ab" * 400 + str(k)) for k in range(4))],
    "words and a length": [WordCount(400, 500), Pattern("(.{7})*")],
    "gaps and lengths": [Infill(" ".join(f"{a} ___" for a in "abcdefghijklmno") + " p"), *map(Pattern, TWO_PRIMES)],
    "words in gaps": [Infill("The ___ is ___:900 and ___:999999999 .")],
    "a long enum": [Json({"enum": ["".join(random.Random(k).choices("abcdef ", k=900)) for k in range(500)]})],
    "long strings": [
        Json({"type": "object", "properties": {f"k{k}": {"type": "string", "maxLength": 900} for k in range(30)}})
    ],
    "nested objects": [Json(nest_objects(30))],
    "optional properties": [Json({"type": "object", "properties": {f"k{k}": {"type": "null"} for k in range(5000)}})],
    "nested arrays": [
        Json({"type": "array", "items": {"type": "array", "items": {"type": "number"}, "maxItems": 99}, "maxItems": 99})
    ],
    "a schema and a length": [Json({"type": "array", "items": {"type": "number"}}), *map(Pattern, TWO_PRIMES)],
}


@pytest.fixture(scope="module")
def lm() -> TextDiffusion:
    return TextDiffusion.from_pretrained("english-small")


def prepare(lm: TextDiffusion, controls: list[Control]) -> None:
    """Prepare a request; it takes seconds, and if it is refused, in one line, and again at once."""
    begun = time.thread_time()
    try:
        lm.plan_controls(controls)
    except UsageError as error:
        assert "\n" not in str(error)
        assert time.thread_time() - begun < SECONDS
        begun = time.thread_time()
        with pytest.raises(UsageError) as again:
            lm.plan_controls(controls)
        assert str(again.value) == str(error) and time.thread_time() - begun < 0.1
    assert time.thread_time() - begun < SECONDS


@pytest.mark.parametrize("name", QUICK)
def test_hostile_controls_are_refused_in_seconds_and_then_at_once(lm: TextDiffusion, name: str) -> None:
    prepare(lm, QUICK[name])
    with pytest.raises(UsageError, match="too large"):
        lm.plan_controls(QUICK[name])


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_other_hostile_controls_take_seconds(lm: TextDiffusion, name: str) -> None:
    prepare(lm, MORE[name])


@pytest.mark.long
def test_random_patterns_take_seconds(lm: TextDiffusion) -> None:
    chance = random.Random(7)

    def make_pattern(depth: int = 0) -> str:
        kind = chance.randrange(7)
        if depth > 4 or kind == 0:
            return chance.choice([".", "a", "e", " ", r"\w", r"\s", "[^e]", "[a-m]", r"\W", r"\S", "[n-z ]"])
        if kind < 3:
            return "".join(make_pattern(depth + 1) for _ in range(chance.randint(2, 6)))
        if kind == 3:
            return f"({'|'.join(make_pattern(depth + 1) for _ in range(chance.randint(2, 5)))})"
        most = chance.choice([9, 40, 900])
        return f"({make_pattern(depth + 1)}){chance.choice(['*', '+', '?', f'{{{most}}}', f'{{0,{most}}}'])}"

    for _ in range(25):
        prepare(lm, [Pattern(make_pattern()) for _ in range(chance.randint(1, 4))])


def test_the_command_refuses_in_a_line(tmp_path: Path) -> None:
    asked = [part for one in TWO_PRIMES for part in ("--pattern", one)]
    begun = time.process_time()
    done = CliRunner().invoke(app, ["generate", "english-small", *asked], standalone_mode=False)
    assert done.return_value == 2 and "pattern: " in done.stderr and "too large" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.output
    assert time.process_time() - begun < 2 * SECONDS


# -- smaller ways to the same automata ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_states_are_merged_as_far_as_by_looking_at_all_of_them(seed: int) -> None:
    """Moore's way: labels are told apart by the labels that follow, until nothing changes."""
    rng = np.random.default_rng(seed)
    states, columns = int(rng.integers(1, 60)), int(rng.integers(1, 5))
    table, labels = rng.integers(0, states, (states, columns)), rng.integers(0, 2, states)
    found, known = refine(table, labels), number_rows(labels[:, None])
    while (finer := number_rows(np.column_stack([known, known[table]]))).max() > known.max():
        known = finer
    assert np.array_equal(found, known)


def test_long_chains_are_merged_in_their_length() -> None:
    """Every round splits off one state; a look at all states in each would take minutes."""
    states = 8_000
    table = np.minimum(np.arange(states + 1)[:, None] + 1, states)
    begun = time.thread_time()
    with work.share_budget() as budget:
        smallest, accepting = minimise(table, np.arange(states + 1) == states - 1)
    assert len(smallest) == states + 1 and accepting.sum() == 1
    assert budget.spent < 100 * states and time.thread_time() - begun < SECONDS


@pytest.mark.parametrize("seed", range(5))
def test_two_automata_together_accept_what_both_do(seed: int) -> None:
    chance, tokenizer = random.Random(seed), Characters(["a", "b"])
    parts = ["a", "b", ".", "(a|b)*", "a*", "(ab)*", "(..)*", "b?", "(b.{2})+"]
    one, other = (compile_pattern(".*" + "".join(chance.choices(parts, k=3)), tokenizer) for _ in range(2))
    both = intersect(one, other)
    for _ in range(300):
        ids = [chance.randrange(2) + len(SPECIALS) for _ in range(chance.randrange(9))]
        assert both.accepts(ids) == (one.accepts(ids) and other.accepts(ids))


def test_only_states_that_are_reached_together_count() -> None:
    """900 times 900 states would be too many; from the start, a hundredth of them is reached."""
    tokenizer = Characters(["a", "b"])
    both = intersect(compile_pattern("(a{30}){30}b*", tokenizer), compile_pattern("(a{9}){100}b*", tokenizer))
    assert both.accepts([len(SPECIALS)] * 900) and not both.accepts([len(SPECIALS)] * 899)


# -- ended by others --------------------------------------------------------------------------------------------------


def test_work_is_interrupted() -> None:
    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError), work.interrupt_work(check):
        compile_characters("(a?){1000}a{1000}", "ab")


def test_a_budget_is_shared_by_all_patterns_of_a_request(monkeypatch: pytest.MonkeyPatch, lm: TextDiffusion) -> None:
    """One of them is small enough; all together are not."""
    monkeypatch.setattr(work, "MAX_WORK", 60_000)
    controls = [Pattern(f".*{word} .*") for word in ("old", "new", "cold", "warm", "dark")]
    lm.plan_controls(controls[:1])
    with pytest.raises(UsageError, match="pattern: it is too large, and needs more than 60,000 steps"):
        lm.plan_controls(controls)


# -- over HTTP --------------------------------------------------------------------------------------------------------

SMALL = {"steps": 2, "n": 1, "seed": 1}


@pytest.fixture(scope="module")
def httpx() -> Any:
    return need("httpx2", "fastapi", "uvicorn")


@pytest.fixture(scope="module")
def server(lm: TextDiffusion, httpx: Any) -> Iterator[Running]:
    with running(lm, Limits()) as found:
        httpx.post(f"{found.url}/api/generate", json=SMALL, timeout=PATIENCE)
        yield found


@pytest.fixture
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bounds on its size, the product of two long lengths is prepared for minutes."""
    monkeypatch.setattr(work, "MAX_WORK", 10**12)
    monkeypatch.setattr(work, "MAX_SECONDS", 10**6)
    monkeypatch.setattr(token_automata, "MAX_RAW", 10**9)
    monkeypatch.setattr(token_automata, "MAX_RAW_SIZE", 10**12)


ENDLESS = {**SMALL, "pattern": ["(.{977})*", "(.{991})*"]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"pattern": TWO_PRIMES}),
        ("/api/stream", {"pattern": [*SETS_AND_A_LENGTH, "(.{599})*"]}),
        ("/api/pattern", {"pattern": MANY_SETS[0]}),
        ("/api/player", {"request": {"pattern": [".*a.{9}", *TWO_PRIMES]}}),
        ("/v1/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": name_objects(11)}}}),
    ],
)
def test_others_are_served_meanwhile(server: Running, httpx: Any, path: str, body: dict[str, Any]) -> None:
    waits, over = list[float](), threading.Event()

    def ask_health() -> None:
        while not over.is_set():
            begun = time.monotonic()
            assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
            waits.append(time.monotonic() - begun)
            time.sleep(0.02)

    asking = threading.Thread(target=ask_health)
    asking.start()
    other = threading.Thread(
        target=httpx.post, args=(f"{server.url}{path}",), kwargs={"json": body, "timeout": PATIENCE}
    )
    other.start()
    begun = time.monotonic()
    assert httpx.post(f"{server.url}/api/generate", json=SMALL, timeout=PATIENCE).status_code == 200
    assert time.monotonic() - begun < 60  # a second or two on an idle machine
    other.join(PATIENCE)
    over.set()
    asking.join(PATIENCE)
    assert max(waits) < 5  # some hundredths of a second on an idle machine
    refused = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE)
    assert "too large" in refused.text and (path == "/api/pattern" or refused.status_code in (400, 422))


@pytest.mark.long
def test_a_client_who_leaves_ends_the_preparing(server: Running, httpx: Any, no_limits: None) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/api/generate", json=ENDLESS, timeout=1.0)
    begun = time.monotonic()
    assert httpx.post(f"{server.url}/api/generate", json=SMALL, timeout=PATIENCE).status_code == 200
    assert time.monotonic() - begun < 30
    wait_for(lambda: server.engine.queue == 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body"), [("/api/generate", ENDLESS), ("/api/pattern", {"pattern": r"(\w{9}.{0,9}|.{0,19}\W){24}"})]
)
def test_a_deadline_ends_the_preparing(
    lm: TextDiffusion, httpx: Any, monkeypatch: pytest.MonkeyPatch, no_limits: None, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr("difflm.controls.patterns.regular.MAX_STATES", 10**9)
    with running(lm, Limits(seconds=1)) as server:
        late = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE)
        assert late.status_code == 503 and "time limit of 1 s" in late.json()["error"]["message"]
        wait_for(lambda: server.engine._binder.moved is None)


@pytest.mark.long
def test_patterns_with_too_many_transitions_for_a_step_are_refused(server: Running, httpx: Any) -> None:
    """A step took 6 s a text, and the server was reported as stuck."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    body = {**SMALL, "pattern": ["(.{3})*"], "contains": words}
    found = httpx.post(f"{server.url}/api/generate", json=body, timeout=PATIENCE)
    assert found.status_code == 422 and "transitions" in found.json()["error"]["message"]
