"""Models that are saved, pushed and fetched again, by a stand-in for the Hugging Face Hub on this machine."""

import base64
import errno
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from difflm.controls import Label
from difflm.errors import DifflmError, UsageError
from difflm.generation.pipeline import TextDiffusion

TOKEN = "hf_right"


class Hub(ThreadingHTTPServer):
    """Repositories by name, of which each branch holds files; what changes them wants the token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.broken = False  # whether commits fail

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None: ...

    def answer(self, status: int, body: Any = None, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid user token."})
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(sent)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            if name in self.server.repos:
                return self.answer(
                    409, {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}
                )
            self.server.repos[name] = {"main": {}}
            self.server.private |= {name} if asked.get("private") or asked.get("visibility") == "private" else set()
            return self.answer(200, {"url": f"{self.server.url}/{name}", "name": name})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/(.+)", path)
        assert found, self.path
        name, what, branch = found.groups()
        branches = self.server.repos[name]
        if what == "branch":
            if branch in branches:
                return self.answer(409, {"error": "Reference already exists"})
            branches[branch] = dict(branches["main"])
            return self.answer(200)
        if what == "preupload":
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for one in json.loads(sent)["files"]
            ]
            return self.answer(200, {"files": files})
        if self.server.broken:
            return self.answer(500, {"error": "the disk of the Hub is full"})
        for line in map(json.loads, sent.splitlines()):
            if line["key"] == "file":
                branches[branch][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.answer(
            200, {"commitUrl": f"{self.server.url}/{name}/commit/{'a' * 40}", "commitOid": "a" * 40, "success": True}
        )

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(?:revision|tree)/(.+))?", path):
            name, asked, branches = found[1], found[2] or "main", self.server.repos.get(found[1], {})
            branch = next((b for b in branches if asked in (b, commit_of(b))), None)
            if branch is None:
                what = "RevisionNotFound" if branches else "RepoNotFound"
                return self.answer(404 if branches else 401, {"error": "Not found"}, X_Error_Code=what)
            files = self.server.repos[name][branch]
            if "/tree/" in path:
                return self.answer(
                    200, [{"type": "file", "path": p, "size": len(d), "oid": "0"} for p, d in files.items()]
                )
            told = [{"rfilename": one} for one in sorted(files)]
            return self.answer(
                200,
                {
                    "id": name,
                    "sha": commit_of(branch),
                    "siblings": told,
                    "private": False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                },
            )
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            name, commit, file = found.groups()
            branch = next((b for b in self.server.repos[name] if commit in (b, commit_of(b))), "")
            data = self.server.repos[name][branch][file]
            tags = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit_of(branch)}
            return self.answer(200, data, **tags)
        return self.answer(404, {"error": "Not found"})

    do_HEAD = do_GET


def commit_of(branch: str) -> str:
    return hashlib.sha1(branch.encode()).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs huggingface_hub")
    found = Hub()
    threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", found.url)  # read from HF_ENDPOINT when it is imported
    files = found.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield found
    found.shutdown()
    found.server_close()


def texts(lm: TextDiffusion, **asked: Any) -> list[str]:
    return [str(text) for text in lm.generate(2, steps=3, **asked)]


# -- directories ------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_again(lm, tmp_path):
    with torch.no_grad():  # weights that no file holds yet
        next(lm.model.parameters()).add_(0.01)
    folder = lm.save_pretrained(tmp_path / "deep" / "mine")
    again = TextDiffusion.from_pretrained(folder)
    assert texts(again) == texts(lm) and again.name == "mine"
    assert [path.name for path in tmp_path.joinpath("deep").iterdir()] == ["mine"], "nothing else is left"
    assert "# mine" in (folder / "README.md").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="already exists"):
        lm.save_pretrained(folder)


@pytest.mark.long
def test_classifiers_are_saved_with_their_model(lm, guide, tmp_path):
    again = TextDiffusion.from_pretrained(lm.guided_by(guide).save_pretrained(tmp_path / "mine"))
    assert again.labellings == lm.labellings and len(again.guides) == 1
    wanted = {"controls": [Label("food", again.labellings["food"].values[1])]}
    assert texts(again, **wanted) == texts(lm, **wanted)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "README.md"])
def test_a_full_disk_leaves_nothing_half_written(lm, tmp_path, monkeypatch, file):
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if Path(target).name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DifflmError, match="the disk is full") as told:
        lm.save_pretrained(tmp_path / "mine")
    assert "\n" not in str(told.value) and not [*tmp_path.iterdir()]


def test_a_model_that_is_no_run_is_not_saved_as_one(lm, tmp_path):
    made = TextDiffusion(lm.model, lm.tokenizer, {"method": "difflm", "parameters": 1})
    with pytest.raises(UsageError, match="its config lacks 'model'"):
        made.save_pretrained(tmp_path / "mine")
    assert not [*tmp_path.iterdir()]


# -- the Hub ----------------------------------------------------------------------------------------------------------


def test_a_model_is_pushed_and_fetched_again(lm, hub):
    where = lm.push_to_hub("me/tiny", token=TOKEN, private=True)
    assert where.startswith(f"{hub.url}/me/tiny/") and hub.private == {"me/tiny"}
    with torch.no_grad():
        next(lm.model.parameters()).add_(0.1)
    lm.push_to_hub("me/tiny", revision="warmer", token=TOKEN)
    main, branch = TextDiffusion.from_pretrained("me/tiny"), TextDiffusion.from_pretrained("me/tiny", revision="warmer")
    assert main.name == branch.name == "tiny"
    assert texts(branch) == texts(lm) and not torch.equal(*(next(m.model.parameters()) for m in (main, branch)))
    assert hub.repos["me/tiny"]["main"].keys() >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}


def test_what_the_hub_refuses_is_a_line_and_changes_no_file(lm, hub):
    with pytest.raises(DifflmError) as told:
        lm.push_to_hub("me/tiny", token="hf_wrong")
    assert str(told.value) == "me/tiny was not pushed: the Hub does not accept the token." and not hub.repos
    hub.broken = True
    with pytest.raises(DifflmError, match="me/tiny was not pushed: ") as told:
        lm.push_to_hub("me/tiny", token=TOKEN)
    assert "\n" not in str(told.value) and hub.repos == {"me/tiny": {"main": {}}}
    with pytest.raises(UsageError, match="is named OWNER/NAME, not 'tiny'"):
        lm.push_to_hub("tiny", token=TOKEN)


def test_what_the_hub_does_not_have_is_a_line(lm, hub):
    lm.push_to_hub("me/tiny", token=TOKEN)
    for name, revision, said in (("me/nothing", None, "model"), ("me/tiny", "nowhere", "revision")):
        with pytest.raises(UsageError, match=f"the Hub does not give it: there is no such {said} there") as told:
            TextDiffusion.from_pretrained(name, revision=revision)
        assert "\n" not in str(told.value)
    with pytest.raises(UsageError, match="a revision is for models on the Hub; e2e is on this machine"):
        TextDiffusion.from_pretrained("e2e", revision="main")


def test_a_hub_that_cannot_be_reached_is_a_line(lm, hub, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(DifflmError, match="me/tiny was not pushed: ") as pushed:
        lm.push_to_hub("me/tiny", token=TOKEN)
    with pytest.raises(UsageError, match="the Hub does not give it: ") as fetched:
        TextDiffusion.from_pretrained("me/tiny")
    assert "\n" not in str(pushed.value) + str(fetched.value)
