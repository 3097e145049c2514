"""The studio's HTTP API on a real server: it says what the library says, to those who may ask, in one form."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from difflm.app.cli import main
from difflm.app.studio.limits import Limits
from difflm.app.studio.schemas import Asked
from difflm.app.studio.served import EXAMPLES, Served
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import generation_to_json
from difflm.player.frames import written
from tests.support.serving import PATIENCE, Gate, Running, events, need, running, wait_for

httpx = need("httpx2", "fastapi", "uvicorn")


def library(lm: TextDiffusion, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What the library makes of a request, without the time it took."""
    work = Asked(**asked).job()
    return [without_clock(generation_to_json(g)) for g in lm.generate(**work)]


def without_clock(text: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in text.items() if key not in ("seconds", "sample")}


REQUESTS: list[dict[str, Any]] = [
    {"steps": 4},
    {"n": 3, "seed": 7, "steps": 5},
    {"length": 9, "steps": 3, "seed": 2},
    {"n": 2, "contains": ["river"], "avoid": ["the"], "steps": 4},
    {"infill": "The ___ is ___:2.", "steps": 4},
    {"edit": "The old pub is cheap .", "keep": ["pub"], "strength": 0.6, "steps": 3},
    {"n": 2, "mbr": 3, "steps": 2, "temperature": 0.7, "sampler": "ddim"},
]


OPTIONS = {"clamp": False, "guidance": 3.0, "tree": "(S * (VP * *))", "span": ["0,1,NP", "2,3,VP"], "clamp_below": 0.5}

# -- what it says -----------------------------------------------------------------------------------------------------


def test_health_models_and_controls(client: httpx.Client, lm: TextDiffusion) -> None:
    assert client.get("/health").json() == {"status": "ok", "model": "tiny", "queue": 0}
    (facts,) = client.get("/api/models").json()["models"]
    assert facts["method"] == "difflm" and facts["longest"] == 24 and facts["parameters"] > 1000
    controls = client.get("/api/controls").json()
    assert controls["length"] == {"most": 24, "unit": "words"} and controls["infill"] == {"sizes": True}
    assert controls["field"] is None and controls["pos"] is None  # no classifier, nothing to ask it for
    assert set(controls["limits"]) == {"n", "steps", "candidates", "rows"}


def test_a_pattern_is_judged_before_anything_is_written(client: Any) -> None:
    def ask(pattern: str) -> dict[str, Any]:
        return client.post("/api/pattern", json={"pattern": pattern}).json()

    assert client.get("/api/controls").json()["pattern"] == {"unit": "words"}
    assert ask("The (old|red) inn( near)?") == {"message": None, "lengths": [3, 4], "unit": "words"}
    begun = time.process_time()
    for pattern in ("(", "zebra", "(a|b)*a(a|b){12}", "((a?){1000}){1000}", "x" * 3000):
        answer = ask(pattern)
        assert answer["lengths"] == [] and answer["message"] and "\n" not in answer["message"]
    assert time.process_time() - begun < 5
    assert client.post("/api/pattern", json={"pattern": "x" * 5000}).status_code == 422


def test_a_model_says_what_its_classifiers_know() -> None:
    from difflm.app.studio.limits import Limits
    from difflm.app.studio.served import Served

    controls = Served(TextDiffusion.from_pretrained("e2e"), "e2e").controls(Limits())
    assert "Japanese" in controls["field"]["food"] and "-" not in controls["field"]["food"]
    assert "NOUN" in controls["pos"]["tags"]
    assert "NP" in controls["tree"]["labels"] and controls["tree"] == controls["span"]


@pytest.mark.parametrize("asked", REQUESTS, ids=lambda asked: ",".join(asked))
def test_texts_are_those_of_the_library(client: httpx.Client, lm: TextDiffusion, asked: dict[str, Any]) -> None:
    answer = client.post("/api/generate", json=asked)
    assert answer.status_code == 200
    assert [without_clock(text) for text in answer.json()["texts"]] == library(lm, asked)


@pytest.mark.long
def test_many_at_once_get_what_each_would_get_alone(
    server: Running, client: httpx.Client, lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And share loops: held back at first, they need fewer than one each."""
    asked = [{**REQUESTS[k % len(REQUESTS)], "seed": k} for k in range(28)]
    expected = [library(lm, one) for one in asked]
    gate = Gate(monkeypatch)
    gate.open.clear()
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(client.post, "/api/generate", json=one) for one in asked]
        wait_for(lambda: gate.jobs + server.engine.queue == len(asked))
        gate.open.set()
        found = [answer.result().json()["texts"] for answer in answers]
    assert [[without_clock(text) for text in texts] for texts in found] == expected
    assert gate.jobs == len(asked) and gate.loops < len(asked)


@pytest.mark.parametrize("asked", REQUESTS, ids=lambda asked: ",".join(asked))
def test_a_stream_shows_every_step_and_ends_in_the_texts(
    client: httpx.Client, lm: TextDiffusion, asked: dict[str, Any]
) -> None:
    with client.stream("POST", "/api/stream", json=asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = list(events(answer.iter_lines()))
    names = [name for name, _ in found]
    assert names[0] == "queued" and names[-1] == "done" and set(names) <= {"queued", "frame", "text", "done"}
    texts = {data["sample"]: without_clock(data) for name, data in found if name == "text"}
    assert [texts[k] for k in sorted(texts)] == library(lm, asked)
    frames = [frame for name, data in found if name == "frame" for frame in data["frames"]]
    each = asked.get("mbr", 1)
    for sample in range(asked.get("n", 1) * each):
        made = [frame for frame in frames if frame["sample"] == sample]
        assert [frame["step"] for frame in made] == list(range(asked["steps"]))
        assert {frame["text"] for frame in made} == {sample // each}
        last = made[-1]
        assert len(last["tokens"]) == len(last["confidence"]) == len(last["changed"]) == len(last["space"])
        if each == 1:
            spaced = "".join(" " * space + token for space, token in zip(last["space"], last["tokens"], strict=True))
            assert spaced == texts[sample]["text"] == written(last["tokens"], pieces=False)


def test_gaps_are_filled(client: httpx.Client, lm: TextDiffusion) -> None:
    answer = client.post("/api/infill", json={"template": "The old ___ is cheap.", "steps": 4, "n": 2})
    texts = answer.json()["texts"]
    assert all(t["text"].startswith("The old ") and t["text"].endswith(" is cheap.") for t in texts)
    assert all(t["controls"][0]["satisfied"] for t in texts)


def test_the_player_holds_exactly_these_texts(client: httpx.Client, lm: TextDiffusion) -> None:
    asked = {"n": 2, "seed": 5, "steps": 4, "length": 7, "contains": ["river"]}
    answer = client.post("/api/player", json={"request": asked})
    assert answer.headers["content-type"].startswith("text/html")
    data = json.loads(re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', answer.text, re.S)[1])  # type: ignore[index]
    assert [text["text"] for text in data["texts"]] == [text["text"] for text in library(lm, asked)]
    assert [len(text["frames"]) for text in data["texts"]] == [4, 4]
    assert data["about"]["command"] == "difflm generate tiny -n 2 --seed 5 --steps 4 --length 7 --contains river"


@pytest.mark.parametrize("asked", [*REQUESTS, OPTIONS], ids=lambda asked: ",".join(asked))
def test_the_command_of_a_request_asks_for_the_same(asked: dict[str, Any]) -> None:
    """Every option exists, and has the value that was asked."""
    import shlex

    import typer

    from difflm.app.cli import app

    command: Any = typer.main.get_command(app)
    _, verb, rest = command.resolve_command(None, shlex.split(Asked(**asked).command("tiny"))[1:])
    parsed = verb.make_context("generate", rest).params
    for key, value in asked.items():
        assert str(parsed[key]) == str(value)


# -- what it refuses --------------------------------------------------------------------------------------------------


def fault(answer: httpx.Response) -> str:
    """The sentence of an error, which always has the same form."""
    (error,) = answer.json().values()
    assert set(error) == {"message", "type"} and error["message"].endswith((".", "…"))
    assert "Traceback" not in answer.text and str(Path.home()) not in answer.text
    return str(error["message"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"n": 17}, "n must be at most 16"),
        ({"n": 0}, "n must be between 1 and "),
        ({"n": 8, "mbr": 8}, "32 texts"),
        ({"steps": 201}, "steps must be at most 200"),
        ({"candidates": 9}, "candidates must be at most 8"),
        ({"length": 25}, "between 1 and 24"),
        ({"length": -1}, "between 1 and 24"),
        ({"stepz": 4}, "unknown key 'stepz'"),
        ({"infill": "no gap"}, "mark at least one gap"),
        ({"infill": "x" * 5000}, "5,000 characters"),
        ({"avoid": ["x"] * 33}, "33 entries"),
        ({"field": {"food": "Martian"}}, "Martian"),
        ({"temperature": 0}, "temperature"),
        ({"sampler": "/etc/passwd"}, "unknown sampler"),
        ({"keep": ["x"]}, "give edit as well"),
        ({"seed": 2**31}, "seed must be between 0 and "),
        ({"top_k": -1}, "top_k must be at least 1"),
        ([], "valid dictionary"),
        ({"contains": "pub"}, "contains: "),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(client: httpx.Client, asked: Any, said: str) -> None:
    for path in ("/api/generate", "/api/stream"):
        answer = client.post(path, json=asked)
        assert answer.status_code == 422 and said in fault(answer)


def test_bodies_that_are_no_json(client: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for body in (b"{", b"\xff\xfe", b"[" * 50_000, b"1" * 5_000, b'{"n": NaN, '):
        answer = client.post("/api/generate", content=body, headers=headers)
        assert answer.status_code in (400, 422) and fault(answer)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = client.post("/api/generate", content=b'{"n": 1}', headers={"content-type": kind})
        assert answer.status_code == 415 and fault(answer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", r'{"infill": "The \ud800 ___", "steps": 1}'),
        ("/api/generate", r'{"field": {"\ud800": 1}}'),
        ("/api/generate", r'{"\ud800": 1}'),
        ("/api/generate", r'{"contains": ["\ud800"]}'),
        ("/api/infill", r'{"template": "\udfff ___", "steps": 1}'),
        ("/v1/completions", r'{"prompt": "\ud800"}'),
        ("/v1/completions", r'{"prompt": "a", "model": "\ud800"}'),
        ("/v1/completions", r'{"prompt": "a", "controls": {"contains": ["\ud800"]}}'),
    ],
)
def test_half_a_character_is_refused(client: httpx.Client, path: str, body: str) -> None:
    answer = client.post(path, content=body.encode(), headers={"content-type": "application/json"})
    assert answer.status_code in (404, 422) and fault(answer)


def test_paths_and_methods_that_are_not_there(client: httpx.Client) -> None:
    assert client.get("/nothing").status_code == 404 and fault(client.get("/nothing"))
    wrong = client.get("/api/generate")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST" and fault(wrong)


@pytest.mark.parametrize(
    "name",
    ["..%2fapp.py", "../app.py", "%2e%2e/app.py", "/etc/passwd", "app.py", "page.html", "player.js%00", "nothing"],
)
def test_no_request_names_a_file(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/assets/{name}")
    assert answer.status_code == 404 and fault(answer)


def test_the_page_and_its_assets_come_from_the_package(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.status_code == 200 and "script-src 'self'" in page.headers["content-security-policy"]
    assert client.get("/assets/player.js").headers["content-type"].startswith("text/javascript")
    for answer in (page, client.get("/health"), client.get("/nothing")):
        assert answer.headers["x-content-type-options"] == "nosniff"


# -- who may ask ------------------------------------------------------------------------------------------------------


def test_only_names_of_this_machine_are_answered(client: httpx.Client, server: Running) -> None:
    """A page whose name was made to point at this machine sends its own name."""
    for host in ("evil.example", f"evil.example:{server.port}", "localhost.evil.example", "", "127.0.0.1.evil.example"):
        answer = client.get("/health", headers={"host": host})
        assert answer.status_code == 403 and fault(answer)
    for host in ("localhost", f"LOCALHOST:{server.port}", "127.0.0.1", "[::1]:80", "192.168.1.7"):
        assert client.get("/health", headers={"host": host}).status_code == 200


def test_pages_of_other_servers_are_refused(client: httpx.Client, server: Running) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://localhost"):
        answer = client.post("/api/generate", json={"steps": 1}, headers={"origin": origin})
        assert answer.status_code == 403 and fault(answer)
        assert "access-control-allow-origin" not in answer.headers
    assert client.get("/api/models", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # a link leads here
    own = {"origin": server.url, "sec-fetch-site": "same-origin"}
    assert client.post("/api/generate", json={"steps": 1}, headers=own).status_code == 200


@pytest.mark.long
def test_a_token_is_asked_of_everything_but_the_page(lm: TextDiffusion) -> None:
    with running(lm, token="open-sesame") as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        for path in ("/", "/health", "/docs", "/openapi.json", "/assets/player.js"):
            assert client.get(path).status_code == 200
        wrong = ({}, {"authorization": "Bearer open"}, {"authorization": "open-sesame"}, {"authorization": "Bearer é"})
        for headers in wrong:
            for path in ("/api/models", "/v1/models", "/nothing", "/assets"):
                answer = client.get(path, headers=[(k, v.encode()) for k, v in headers.items()])
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer" and fault(answer)
            assert client.post("/api/generate", json={"steps": 1}).status_code == 401
        right = {"authorization": "Bearer open-sesame"}
        assert client.get("/api/models", headers=right).status_code == 200
        assert client.get("/api/models", headers={**right, "host": "studio.example"}).status_code == 200
        assert client.get("/openapi.json").json()["security"] == [{"token": []}]


# -- how it describes itself ------------------------------------------------------------------------------------------


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_the_document_is_whole(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert {ref.rsplit("/", 1)[1] for ref in references(document)} <= set(schemas)
    assert "HTTPValidationError" not in schemas, "an error of another form"
    for path, item in document["paths"].items():
        for found in item.values():
            assert found["description"] and "403" in found["responses"], path
            for status, answer in found["responses"].items():
                assert answer["content"], f"{path} {status}"
                if status >= "400":
                    assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")


def test_words_of_a_text_are_weighed_given_all_others(client: httpx.Client, lm: TextDiffusion) -> None:
    text = "The old pub near the zebra serves Italian food ."
    words = client.post("/api/alternatives", json={"text": text}).json()["words"]
    assert [word["word"] or "zebra" for word in words] == text.split() and words[5]["p"] is None
    for word in words:
        shares = [one["p"] for one in word["likely"]]
        assert shares == sorted(shares, reverse=True) and len(shares) == 5 and sum(shares) <= 1.001
        assert all(one["p"] == word["p"] for one in word["likely"] if one["word"] == word["word"])
    for body, said in (({"text": " "}, "empty"), ({"text": "pub " * 99}, "at most 24"), ({}, "text")):
        refused = client.post("/api/alternatives", json=body)
        assert refused.status_code == 422 and said in refused.json()["error"]["message"]


def test_a_model_that_cannot_weigh_words_says_so(tiny_runs: dict[str, Path]) -> None:
    other = Served(TextDiffusion.from_pretrained(tiny_runs["autoregressive"]), "other")
    assert other.facts()["left_to_right"] and other.controls(Limits())["alternatives"] is None
    with pytest.raises(UsageError, match="how likely other words are"):
        other.find_alternatives("The old pub.")
    few = Served(TextDiffusion.from_pretrained("e2e-fast"), "e2e-fast")  # where the noise alone tells the text
    assert few.controls(Limits())["alternatives"] is None and few.facts()["examples"][0]["name"] == "four texts"


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_bundled_model_accepts_the_examples_that_the_page_offers(name: str) -> None:
    served = Served(TextDiffusion.from_pretrained(name), name)
    controls, examples = served.controls(Limits()), served.facts()["examples"]
    assert len(examples) >= 5
    for example in examples:
        assert all(controls.get(key, True) is not None for key in example["request"]), example
        asked = Asked.model_validate({"n": 4, **example["request"]})
        asked.check(Limits())
        served.lm.make_job(**asked.job())


@pytest.mark.long
def test_a_model_of_pieces_is_offered_what_the_command_can_ask_of_it() -> None:
    served = Served(TextDiffusion.from_pretrained("english-small"), "english-small")
    controls = served.controls(Limits())
    assert controls["length"] and controls["edit"] == {} and controls["infill"] == {"sizes": True}
    assert controls["pos"] is None and "everyday English" in served.facts()["learned"]


def test_the_examples_of_the_document_work(client: httpx.Client) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for name in ("Asked", "InfillAsked", "PlayerAsked", "CompletionAsked"):
        (example,) = schemas[name]["examples"]
        assert example.keys() <= schemas[name]["properties"].keys()


def test_the_page_about_the_api_names_everything_and_loads_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/docs").text
    assert f"curl {str(client.base_url).rstrip('/')}/api/generate " in page and ":8000" not in page
    document = client.get("/openapi.json").json()
    for path in document["paths"]:
        assert path in page
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in page
    linked = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert all(link.startswith(("/", "#")) for link in linked)
    assert all(client.get(link).status_code == 200 for link in linked if link.startswith("/"))
    assert {link[1:] for link in linked if link[0] == "#"} <= set(re.findall(r'id="([^"]+)"', page))


# -- the verb ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ctrl_c_tells_those_who_wait_and_ends(tiny_runs: dict[str, Path]) -> None:
    argv = [sys.executable, "-m", "difflm", "studio", str(tiny_runs["difflm"]), "--port", "0", "--no-browser"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            url = re.match(r"http://127\.0\.0\.1:\d+", process.stderr.readline())[0]  # type: ignore[index, union-attr]
            asked = {"n": 16, "steps": 200, "mbr": 2}
            with httpx.stream("POST", f"{url}/api/stream", json=asked, timeout=PATIENCE) as answer:
                happened = events(answer.iter_lines())
                assert next(name for name, _ in happened if name == "frame")
                process.send_signal(signal.SIGINT)
                assert ("error", {"message": "the server is stopping."}) in list(happened)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
        assert process.stderr and "Traceback" not in process.stderr.read()


def test_a_port_in_use_and_wrong_options_are_told(server: Running, tiny_runs: dict[str, Path], capsys: Any) -> None:
    run = str(tiny_runs["difflm"])
    for argv, said in (
        ([run, "--port", str(server.port)], "cannot listen on 127.0.0.1"),
        ([run, "--port", "70000"], "between 0 and 65535"),
        ([run, "--host", "no.such.host.invalid", "--insecure"], "cannot listen on no.such.host.invalid"),
        ([run, "--token", " "], "--token"),
        (["no-such-run"], "neither a bundled model nor a directory"),
    ):
        assert main(["studio", *argv, "--no-browser"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "", "0", "some.name", "127.0.0.1.example.org"])
def test_other_machines_are_not_served_without_a_token(host: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Refused before a model is loaded."""
    monkeypatch.delenv("DIFFLM_TOKEN", raising=False)
    monkeypatch.setattr("difflm.app.commands.studio.load_model", pytest.fail)
    assert main(["studio", "--host", host, "--no-browser"]) == 2
    said = capsys.readouterr().err
    assert "--token" in said and "--insecure" in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "given", [["--host", "0.0.0.0", "--insecure"], ["--host", "::", "--token", "x"], ["--host", "127.0.0.9"]]
)
def test_other_machines_are_served_if_that_is_asked_for(
    given: list[str], tiny_runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("difflm.app.studio.server.listen", lambda host, port: asked.append(host))
    for name in ("make_server", "serve"):
        monkeypatch.setattr(f"difflm.app.studio.server.{name}", lambda *arguments, **more: None)
    assert main(["studio", str(tiny_runs["difflm"]), *given]) == 0 and asked == [given[1]]


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["studio"]) == 2
    assert 'pip install ".[studio]"' in capsys.readouterr().err
