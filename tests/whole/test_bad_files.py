"""Files that lie, never end or hide something: one line, no hang, no memory taken, nothing written over."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from difflm.app.cli import main
from difflm.data.texts import cut_text, read_chunks, read_texts
from difflm.data.tokenfile import encode_texts
from difflm.data.tokenizers import Bpe, Characters, Tokenizer, Words
from difflm.errors import DifflmError
from difflm.runtime.files import write_atomic
from difflm.runtime.tensors import SkipInit
from tests.support.commands import copy_of
from tests.support.tiny import change_json

posix = pytest.mark.skipif(os.name != "posix", reason="needs links, named pipes and devices")


def change_config(run: Path, **changes: object) -> None:
    config = json.loads((run / "config.json").read_text())
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            value = {**config[key], **value}
        changes[key] = value
    change_json(run / "config.json", **changes)


@pytest.mark.parametrize("method", ["difflm", "autoregressive"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocabulary": 10**7}, "its tokenizer has"),
        ({"vocabulary": 10}, "its tokenizer has"),
        ({"vocabulary": "many"}, "'vocabulary'"),
        ({"longest": 10**9}, "longest"),
        ({"longest": -1}, "longest"),
        ({"recipe": []}, "'recipe'"),
        ({"recipe": {"source_longest": "x"}}, "does not describe"),
        ({"method": ["difflm"]}, "not written by"),
        ({"model": {"layers": 10**9}}, "larger than its weights"),
        ({"model": {"hidden": 2**20}}, "larger than its weights"),
        ({"model": {"hidden": 10**30}}, "does not describe"),
        ({"model": {"heads": 0}}, "does not describe"),
        ({"model": {"heads": -1}}, "does not describe"),
        ({"sampling": {"steps": "many"}}, "sampling.steps"),
        ({"sampling": {"temperature": [1]}}, "sampling.temperature"),
        ({"sampling": ["steps"]}, "'sampling'"),
        ({"sampling": None}, "'sampling'"),
    ],
)
def test_a_config_that_does_not_fit_its_files(complaint, tiny_runs, tmp_path, method, changes, said):
    run = copy_of(tiny_runs[method], tmp_path)
    change_config(run, **changes)
    found = complaint(1, "generate", run)
    assert said in found and len(found.splitlines()) == 1


def test_no_tensor_is_allocated_beyond_the_weights():
    """2⁵⁰ floats would raise the allocator's own error."""
    with pytest.raises(ValueError, match="larger than its weights"), SkipInit({"a": torch.zeros(3)}):
        torch.nn.Linear(2**25, 2**25)
    with SkipInit({"a": torch.zeros(3)}), torch.device("meta"):
        assert torch.nn.Linear(2**25, 2**25).weight.is_meta


@pytest.mark.parametrize("content", ["[" * 100_000, '{"format": ' + "9" * 5000 + "}", '"\ud800"', "{"])
def test_json_that_cannot_be_read(complaint, tiny_runs, tmp_path, content):
    run = copy_of(tiny_runs["difflm"], tmp_path)
    for name in ("config.json", "tokenizer.json"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(content.encode("utf-8", "surrogatepass"))
        said = complaint(1, "generate", run)
        assert "not a readable JSON file" in said and len(said.splitlines()) == 1
        (run / name).write_bytes(whole)


@posix
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_the_place_of_a_file(complaint, tiny_runs, tmp_path, name, kind):
    run = copy_of(tiny_runs["difflm"], tmp_path)
    (run / name).unlink()
    os.mkfifo(run / name) if kind == "pipe" else (run / name).symlink_to("/dev/zero")
    assert len(complaint(2 if name == "config.json" else 1, "generate", run).splitlines()) == 1


@posix
def test_texts_from_a_pipe_or_a_device(complaint, tiny_runs, tmp_path):
    os.mkfifo(tmp_path / "my.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name in ("my.txt", "zero.txt"):
        assert "a pipe or a device" in complaint(1, "score", tiny_runs["difflm"], tmp_path / name)


@pytest.mark.parametrize(
    "content",
    ["a: " + "[" * 400, "steps: " + "9" * 5000, "steps: 2001-99-99", 'steps: !!int ""', "x" * 70_000, "model: [1]",
     "a: &a [x, x]\nb: &b [*a, *a]\nmodel: [*b, *b]", "- 1", "\x00", "steps: !!python/object:os.system {}"],
)  # fmt: skip
def test_recipes_that_cannot_be_read(complaint, tmp_path, content):
    (tmp_path / "my.yaml").write_text(content)
    assert len(complaint(2, "train", tmp_path / "my.yaml", "--out", tmp_path / "run").splitlines()) == 1
    value = content.partition(": ")[2]
    if value and "\n" not in content:
        said = complaint(2, "train", "own-text", "data=my.txt", f"steps={value}", "--out", tmp_path / "run")
        assert len(said.splitlines()) == 1 and len(said) < 1000


@posix
def test_a_pipe_instead_of_a_recipe_or_requests(complaint, tiny_runs, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe or a device" in complaint(1, "train", tmp_path / "pipe", "--out", tmp_path / "run")
    assert "a pipe or a device" in complaint(1, "generate", tiny_runs["difflm"], "--input", tmp_path / "pipe")


# -- writing ----------------------------------------------------------------------------------------------------------


@posix
def test_a_link_stays_a_link_and_its_target_is_written(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "target").write_text("old")
    for name, target in (("link", "deep/target"), ("dangling", "deep/new")):
        (tmp_path / name).symlink_to(target)
        write_atomic(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink() and (tmp_path / target).read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["dangling", "deep", "link", "new", "target"]


@posix
def test_nothing_is_renamed_over_a_folder_a_pipe_or_a_device(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    for name, said in (("folder", "it is a directory"), ("pipe", "a pipe or a device"), ("device", "a pipe or a dev")):
        with pytest.raises(DifflmError, match=said):
            write_atomic(tmp_path / name, "text")
    assert (tmp_path / "folder").is_dir() and (tmp_path / "pipe").is_fifo() and Path("/dev/null").is_char_device()
    assert len(list(tmp_path.iterdir())) == 3


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le"])
def test_texts_in_another_encoding(code, tmp_path):
    (tmp_path / "my.txt").write_text("A pub.\nAn inn.\n", encoding=code)
    with pytest.raises(DifflmError, match="UTF-8") as refused:
        list(read_texts(tmp_path / "my.txt"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("build", [Words.build, Characters.build, lambda texts: Bpe.build(texts, 300)])
def test_a_long_text_has_the_tokens_of_its_pieces(build, monkeypatch):
    texts = ["The old pub, near  the river: £30 (cheap). Isn't it?" * 9, "An inn"]
    tokenizer = build(texts * 20)
    assert "".join(cut_text(texts[0], 25)) == texts[0] and max(map(len, cut_text(texts[0], 25))) <= 25
    assert list(cut_text("a" * 5, 2)) == ["aa", "aa", "a"]
    monkeypatch.setattr(cut_text, "__defaults__", (25,))
    monkeypatch.setattr("difflm.data.tokenfile.MOST_CHARACTERS", 25)
    assert encode_texts(tokenizer, texts) == tokenizer.encode_batch(texts)


def test_a_line_of_any_length_is_cut_into_chunks_at_once(tmp_path):
    """Ten seconds and more, where each chunk copies the rest."""
    (tmp_path / "my.txt").write_text("one line " * 2_000_000)
    began = time.process_time()
    assert sum(map(len, read_chunks(tmp_path / "my.txt", 64))) == 18_000_000 and time.process_time() - began < 3


LONG_LINE = """
import resource, sys
from pathlib import Path
from difflm.data.texts import Example, read_texts
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import Bpe
folder = Path(sys.argv[1])
(folder / "my.txt").write_text("".join(f"words{i} " for i in range(10_000)) * 100)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenizer = Bpe.build(["word word1 word2"], 300)
tokens = TokenFile.build(folder / "tokens", map(Example, read_texts(folder / "my.txt")), tokenizer, {})
taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(len(tokens), (folder / "my.txt").stat().st_size, 1024 * taken)
"""


@posix
@pytest.mark.long
def test_a_single_line_is_tokenised_piece_by_piece(tmp_path):
    """Tokenised at once, this one took 150 times its size."""
    said = subprocess.run([sys.executable, "-c", LONG_LINE, tmp_path], capture_output=True, text=True, check=True)
    count, size, taken = map(int, said.stdout.split())
    assert count == 1 and taken < 60 * size


# -- the terminal -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["difflm", "autoregressive"])
def test_escape_codes_of_a_run_do_not_reach_the_terminal(tiny_runs, tmp_path, capsys, method):
    run = copy_of(tiny_runs[method], tmp_path)
    words = json.loads((run / "tokenizer.json").read_text())
    words["words"][4:] = [f"\x1b]0;{word}\x07\x9b2J" for word in words["words"][4:]]
    (run / "tokenizer.json").write_text(json.dumps(words))
    change_config(run, tokenizer=Tokenizer.load(run / "tokenizer.json").fingerprint(), recipe={"data": "\x1b[2Jtexts"})
    metric = {"kind": "metric", "model": "\x1b[31m", "name": "\x9b31m", "value": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(metric) + "\n")
    for argv in (["generate", run], ["generate", run, "--json"], ["info", run], ["info", run, "--json"]):
        assert main([str(arg) for arg in argv]) == 0
        said = "".join(capsys.readouterr())
        assert "2J" in said and not [sign for sign in "\x1b\x07\x9b" if sign in said]
        if argv[0] == "generate" and "--json" in argv:
            assert "\x1b]0;" in json.loads(said)["text"] and "\x9b2J" in json.loads(said)["text"]


def test_escape_codes_in_an_error_do_not_reach_the_terminal(complaint, tmp_path):
    assert "\x1b" not in complaint(2, "generate", tmp_path / "\x1b[31mrun")
