"""What makes the studio a server for others: several models, metrics, pages of other origins, and its container."""

import copy
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from difflm.app.cli import main
from difflm.app.studio.limits import Limits
from difflm.app.studio.log import BOUNDS, Metrics
from difflm.app.studio.served import Models, Served
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from tests.support.serving import PATIENCE, need, running

httpx = need("httpx2", "fastapi", "uvicorn")

ROOT = Path(__file__).parents[3]
SMALL = {"steps": 3, "seed": 4}
PAGE = "https://pages.example"


@pytest.fixture(scope="module")
def models(tiny_runs: dict[str, Path]) -> dict[str, TextDiffusion]:
    return {name: TextDiffusion.from_pretrained(tiny_runs[name]) for name in ("difflm", "mdlm")}


@pytest.fixture(scope="module")
def client(models: dict[str, TextDiffusion]) -> Iterator[Any]:
    first, second = models.items()
    with (
        running(first[1], Limits(n=2), name=first[0], others=[second[::-1]], cors=[PAGE]) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as found,
    ):
        yield found


# -- several models ---------------------------------------------------------------------------------------------------


def test_a_request_names_its_model(client: Any, models: dict[str, TextDiffusion]) -> None:
    texts = {name: lm.generate(1, **SMALL)[0].text for name, lm in models.items()}
    assert len({*texts.values()}) == 2
    for name, text in texts.items():
        answer = client.post("/v1/completions", json={"model": name, "seed": 4, "controls": {"steps": 3}}).json()
        assert answer["model"] == name and answer["choices"][0]["text"] == text
        assert client.post(f"/api/generate?model={name}", json=SMALL).json()["texts"][0]["text"] == text
    assert client.post("/api/generate", json=SMALL).json()["texts"][0]["text"] == texts["difflm"], "the first one"
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["difflm", "mdlm"]
    assert [one["name"] for one in client.get("/api/models").json()["models"]] == ["difflm", "mdlm"]
    assert client.get("/v1/models/mdlm").json()["id"] == "mdlm"


def test_a_student_writes_first_where_its_teacher_takes_long(
    models: dict[str, TextDiffusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config names the teacher. Not without fewer steps, nor with other words, nor on one core, nor on a GPU."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)

    def previews(steps: int = 4, **changes: Any) -> list[str | None]:
        student = object.__new__(TextDiffusion)
        vars(student).update(vars(models["difflm"]))
        student.model, student.config = copy.copy(student.model), {**student.config, "teacher": "slow", **changes}
        student.model.sampling = replace(student.model.sampling, steps=steps)
        served = Models([Served(models["difflm"], "slow"), Served(student, "fast"), Served(models["mdlm"], "other")])
        return [facts["preview"] for facts in served.facts()]

    usual = models["difflm"].model.sampling.steps
    cores = 2
    assert previews() == ["fast", None, None]
    assert previews(teacher="another") == previews(tokenizer="0") == previews(steps=usual) == [None] * 3
    cores = 1
    assert previews() == [None] * 3
    cores = 2
    monkeypatch.setattr(TextDiffusion, "device", torch.device("cuda"))
    assert previews() == [None] * 3


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/api/generate?model=gpt", "/v1/models/gpt"]
)
def test_an_unknown_model_is_not_found(client: Any, path: str) -> None:
    body = {"model": "gpt", "messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"model": "gpt"}
    answer = client.get(path) if "models" in path else client.post(path, json=body if "v1" in path else {})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "the model 'gpt' is not served here; these are difflm, mdlm."


def test_two_models_of_one_name_are_refused(models: dict[str, TextDiffusion]) -> None:
    with (
        pytest.raises(UsageError, match="two models are called 'difflm'"),
        running(models["difflm"], name="a/difflm", others=[(models["mdlm"], "b/difflm")]),
    ):
        pass


# -- metrics ----------------------------------------------------------------------------------------------------------


def read(text: str) -> dict[str, float]:
    """Samples by name and labels; every one belongs to a metric whose type was told."""
    found, types = dict[str, float](), dict[str, str]()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            types.update([line.removeprefix("# TYPE ").split()])
        elif not line.startswith("# HELP "):
            name, value = re.fullmatch(r"(\w+(?:\{.*\})?) (\S+)", line).groups()  # type: ignore[union-attr]
            base = re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name)
            assert base in types, line
            found[name] = float(value)
    return found


def test_metrics_count_what_was_served(client: Any) -> None:
    before = read(client.get("/metrics").text)
    assert client.post("/api/generate", json={**SMALL, "n": 2}).status_code == 200
    assert client.post("/v1/completions", json={"model": "mdlm", "controls": {"steps": 3}}).status_code == 200
    assert client.post("/api/generate", json={"n": 99}).status_code == 422
    assert client.get("/no-such-path-as-this").status_code == 404
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    after = read(answer.text)
    grown = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    assert grown['difflm_requests_total{path="/api/generate",status="200"}'] == 1
    assert grown['difflm_requests_total{path="/api/generate",status="422"}'] == 1
    assert grown['difflm_requests_total{path="/v1/completions",status="200"}'] == 1
    assert grown['difflm_texts_total{model="difflm"}'] == 2 and grown['difflm_texts_total{model="mdlm"}'] == 1
    assert grown["difflm_request_seconds_count"] == grown['difflm_request_seconds_bucket{le="+Inf"}'] == 3
    assert after["difflm_queue"] == after["difflm_running_requests"] == after["difflm_running_texts"] == 0
    assert "no-such-path" not in answer.text, "nobody makes up new metrics"


def test_a_histogram_counts_everything_up_to_each_bound() -> None:
    metrics, seconds = Metrics(), [0.05, 0.06, 3.0, 500.0]
    for one in seconds:
        metrics.count_seconds(one)
    metrics.count("errors_total", type='a "quoted"\\\nkind')
    found = read(metrics.render({}))
    for bound in BOUNDS:
        key = f'difflm_request_seconds_bucket{{le="{bound:g}"}}'.replace("inf", "+Inf")
        assert found[key] == sum(one <= bound for one in seconds)
    assert found['difflm_request_seconds_bucket{le="+Inf"}'] == 4 and found["difflm_request_seconds_sum"] == 503.11
    assert found[r'difflm_errors_total{type="a \"quoted\"\\\nkind"}'] == 1


# -- other origins ----------------------------------------------------------------------------------------------------


def test_pages_of_an_origin_that_is_named_may_ask(client: Any) -> None:
    asked = {"origin": PAGE, "sec-fetch-site": "cross-site"}
    before = client.options("/api/generate", headers={**asked, "access-control-request-method": "POST"})
    assert before.status_code == 204 and before.headers["access-control-allow-origin"] == PAGE
    assert "content-type" in before.headers["access-control-allow-headers"]
    answer = client.post("/api/generate", json=SMALL, headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    for other in ("https://pages.example.org", "http://pages.example", "null"):
        refused = client.post("/api/generate", json=SMALL, headers={**asked, "origin": other})
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
        assert client.options("/api/generate", headers={**asked, "origin": other}).status_code == 403


@pytest.mark.parametrize("origin", ["*", "example.org", "https://example.org/page", "https://*.example.org"])
def test_what_is_no_origin_is_refused(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["studio", "--cors", origin]) == 2
    said = capsys.readouterr().err
    assert "is not an origin" in said and len(said.strip().splitlines()) == 1


# -- the container ----------------------------------------------------------------------------------------------------


def test_the_container_uses_what_there_is(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It cannot be built here: its paths, extras, options and port are compared with those of the project."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    steps = {word: [rest for name, rest in lines if name == word] for word, _ in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sources = [name for rest in steps["COPY"] for name in rest.split()[:-1]]
    assert all((ROOT / name).exists() for name in sources)
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert kept[0] == "*" and {f"!{name}" for name in sources} <= {*kept}
    assert {"README.md", "home_links.py", *project["license-files"], "pyproject.toml", "src"} <= {*sources}
    (install,) = (shlex.split(one) for rest in steps["RUN"] for one in rest.split("&&") if "pip" in one)
    extras = re.fullmatch(r"\.\[(.+)\]", install[-2])
    assert (
        install[-1] == "./models/english"
        and "models" in sources
        and extras
        and {*extras[1].split(",")} <= {*project["optional-dependencies"]}
    )
    assert install[install.index("-c") + 1] in sources
    version = re.match(r"python:3\.(\d+)-", steps["FROM"][0])
    assert version and int(version[1]) >= int(project["requires-python"].rpartition(".")[2])
    command = json.loads(steps["ENTRYPOINT"][0]) + json.loads(steps["CMD"][0])
    assert command[0] in project["scripts"] and command[-1] == "e2e"
    assert main(["studio", "--help"]) == 0
    offered = capsys.readouterr().out
    assert all(word in offered for word in command if word.startswith("--"))
    assert command[command.index("--port") + 1] == steps["EXPOSE"][0]
    address = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", steps["HEALTHCHECK"][0])
    assert address and address[1] == steps["EXPOSE"][0] and client.get(address[2]).status_code == 200
