"""Files that are damaged, planted or too large are noticed: one flipped bit, zeros after a power cut, links, bombs."""

import copy
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from difflm.app.cli import main
from difflm.controls import Length
from difflm.data.chat import Template
from difflm.data.texts import read_chunks, read_lines
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import PretrainedTokenizer
from difflm.errors import DifflmError, UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.runtime import files
from difflm.runtime.files import keep_lock, locked, read_checked, write_checked
from difflm.training.fit import train_run
from difflm.training.recipe import check, read_recipe
from difflm.training.run import bundled_runs, load_run, read_config
from difflm.training.texts import Setup
from difflm.training.trainer import Trainer
from tests.support.commands import copy_of
from tests.support.tiny import Silent, change_json, tiny_run, write_grammar

posix = pytest.mark.skipif(os.name != "posix", reason="needs links, named pipes and limits of POSIX")


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def resume(run: Path) -> None:
    train_run(Setup(check(read_recipe(run)), run, torch.device("cpu"), lambda *_: None, resume=True), Silent())


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of two steps on texts that were cut."""
    return tiny_run(tmp_path_factory.mktemp("damage"), "autoregressive", steps=2, split=40)


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize("name", ["ids.bin", "offsets.bin", "continues.bin"])
def test_one_flipped_bit_of_the_tokens_is_noticed_when_a_run_is_resumed(run, trained, name):
    path, draw = run / "data" / "train" / name, random.Random(0)
    whole = path.read_bytes()
    for damaged in [*(draw.randrange(8 * len(whole)) for _ in range(8)), None]:
        path.write_bytes(bytes(len(whole)) if damaged is None else whole)  # zeros: what a power cut leaves
        if damaged is not None:
            flip(path, damaged)
        with pytest.raises(DifflmError, match=f"{name} is damaged.*Delete the directory; it will be made") as refused:
            resume(run)
        assert "\n" not in str(refused.value)
    shutil.rmtree(path.parent)  # as the line says
    resume(run)
    assert (run / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_tokens_of_an_earlier_version_are_made_again(run):
    """They have no checksums that would tell whether they are damaged."""
    folder = run / "data" / "train"
    meta, ids = json.loads((folder / "meta.json").read_text()), (folder / "ids.bin").read_bytes()
    (folder / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k in ("source", "tokenizer", "cut")
        or k in ("count", "dtype", "tokens")}))  # fmt: skip
    assert TokenFile.open(folder).meta.keys().isdisjoint({"crc32", "format"})
    flip(folder / "ids.bin", 15)
    resume(run)
    assert TokenFile.open(folder).complete and (folder / "ids.bin").read_bytes() == ids


def test_tokens_and_metrics_are_synchronised(tmp_path, monkeypatch):
    """Every file of the tokens before its directory gets its name; the metrics with every checkpoint."""
    synced: list[str] = []
    before = files.sync_file

    def note(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        before(handle)

    if not Path("/proc/self/fd").exists():
        pytest.skip("only Linux tells the name of an open file")
    for module in ("runtime.files", "data.tokenfile"):
        monkeypatch.setattr(f"difflm.{module}.sync_file", note)
    tiny_run(tmp_path, "autoregressive", steps=2, save_every=1, split=40)
    tokens = ["ids.bin", "offsets.bin", "continues.bin"]
    assert [name for name in synced if name in tokens] == tokens
    assert synced.index("continues.bin") < synced.index("new") < synced.index("data")
    assert synced.count("metrics.jsonl") >= 2


def test_a_tokenizer_that_changed_is_noticed_when_a_run_is_resumed(run):
    words = json.loads((run / "tokenizer.json").read_text())
    words["words"][-1] += "x"
    (run / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(DifflmError, match=r"tokenizer\.json is damaged"):
        resume(run)


# -- configs ----------------------------------------------------------------------------------------------------------


def test_no_flipped_bit_of_a_bundled_json_file_is_loaded(tmp_path):
    """Every bit of the configs was tried once: of 144,232, 61,208 were still JSON, and none was loaded. Here some."""
    root, draw, parsed = bundled_runs()["e2e"].parent, random.Random(0), 0
    for path in sorted(root.rglob("*.json")):
        if path.name == "tokenizer.json":
            continue  # its fingerprint is in the config
        whole = path.read_bytes()
        right = read_checked(path)
        for bit in draw.sample(range(8 * len(whole)), 60):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            try:
                json.loads(data.decode())
            except ValueError:
                continue
            parsed += 1
            (tmp_path / path.name).write_bytes(data)
            try:
                assert read_checked(tmp_path / path.name) == right
            except DifflmError as error:
                assert "its checksum is wrong" in str(error)
    assert parsed > 150


def test_flips_that_were_loaded_before_are_refused_by_the_command(complaint, tmp_path):
    run = copy_of(bundled_runs()["e2e"], tmp_path)
    whole = (run / "config.json").read_text()
    for right, wrong in (('"heads": 6', '"heads": 4'), ('"temperature": 0.95', '"temperature": 8.95'),
                         ('"sha256"', '"sha257"'), ('"layers": 8', '"layers": 9'), ('"checksum"', '"chacksum"'),
                         ('"format": 2', '"format": 3')):  # fmt: skip
        assert right in whole
        (run / "config.json").write_text(whole.replace(right, wrong, 1))
        said = complaint(1, "generate", run)
        assert "damaged" in said and len(said.splitlines()) == 1


def test_a_config_changed_by_hand_is_loaded_only_if_its_checksum_is_null(complaint, tiny_runs, tmp_path):
    run = copy_of(tiny_runs["difflm"], tmp_path)
    config = json.loads((run / "config.json").read_text())
    sampling = {**config["sampling"], "steps": 3}
    (run / "config.json").write_text(json.dumps({**config, "sampling": sampling}))
    assert "If you changed it yourself, set its checksum to null" in complaint(1, "generate", run)
    change_json(run / "config.json", sampling=sampling)
    assert load_run(run)[0].sampling.steps == 3
    del config["checksum"]
    (run / "config.json").write_text(json.dumps(config))
    assert "its checksum is wrong" in complaint(1, "generate", run)
    for path in bundled_runs().values():
        assert read_config(path)["format"] == files.FORMAT


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sha257": "0"}, "unknown key 'sha257'. Did you mean 'sha256'?"),
        ({"sampling": {"steps": 3, "temperatura": 1.0}}, "sampling.temperatura"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ({"model": {"log_snr_shift": float("nan")}}, "model.log_snr_shift"),
        ({"model": {"dropout": float("inf")}}, "model.dropout"),
        ({"sha256": "0" * 64}, "its checksum is not the one that was saved"),
        ({"trained": 3}, "'trained' is not of the type dict"),
    ],
)
def test_unknown_keys_and_numbers_that_are_none_are_refused(complaint, tiny_runs, tmp_path, changes, said):
    run = copy_of(tiny_runs["difflm"], tmp_path)
    config = json.loads((run / "config.json").read_text())
    merged = {k: {**config[k], **v} if isinstance(v, dict) else v for k, v in changes.items()}
    change_json(run / "config.json", **merged)
    found = complaint(1, "generate", run)
    assert said in found and len(found.splitlines()) == 1


def test_weights_without_a_checksum_are_refused_in_a_new_run(complaint, tiny_runs, tmp_path):
    run = copy_of(tiny_runs["difflm"], tmp_path)
    config = read_checked(run / "config.json")
    write_checked(run / "config.json", {key: value for key, value in config.items() if key != "sha256"})
    assert "its checksum is not the one" in complaint(1, "generate", run)


@pytest.mark.parametrize("method", ["difflm", "autoregressive", "mdlm"])
def test_a_model_whose_answer_is_not_a_number_writes_no_text(tiny_runs, method):
    lm = TextDiffusion.from_pretrained(tiny_runs[method])
    with torch.no_grad():
        for weight in lm.model.parameters():
            weight.mul_(float("nan"))
    calls = [lambda: lm.generate(2), lambda: list(lm.batches(2))]
    calls += [lambda: lm.infill("The ___ pub.")] if method == "mdlm" else []
    for call in calls:
        with pytest.raises(DifflmError, match="the model's answer is not a number"):
            call()


# -- directories ------------------------------------------------------------------------------------------------------


@posix
@pytest.mark.kept("posix")
def test_a_removed_lock_is_made_again_unless_another_process_has_it(tmp_path):
    with locked(tmp_path / "run"):
        (tmp_path / "run" / ".lock").unlink()
        keep_lock(tmp_path / "run")
        with pytest.raises(DifflmError, match="is in use"), locked(tmp_path / "run"):
            pass
        (tmp_path / "run" / ".lock").unlink()
        code = "import sys, time; from pathlib import Path; from difflm.runtime.files import locked\n"
        code += "with locked(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], **pipes) as other:
            other.stdout.readline()
            with pytest.raises(DifflmError, match=f"process {other.pid} .* is writing there"):
                keep_lock(tmp_path / "run")
            assert (tmp_path / "run" / ".lock").exists()
            other.stdin.close()


def test_a_tokenizer_that_is_removed_while_a_run_trains_is_written_again(tmp_path, monkeypatch):
    save = Trainer.save
    monkeypatch.setattr(Trainer, "save", lambda self: (save(self), (self.run / "tokenizer.json").unlink()))
    run = tiny_run(tmp_path, "autoregressive", steps=1)
    assert load_run(run)


@posix
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "data", "checkpoints", ".lock"])
def test_planted_links_in_a_new_directory_are_not_followed(complaint, tmp_path, name):
    write_grammar(tmp_path / "my.txt", 50)
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "precious")
    code = 1 if name == ".lock" else 2
    complaint(code, "train", "own-text", f"data={tmp_path / 'my.txt'}", "steps=1", "--out", tmp_path / "out")
    assert (tmp_path / "precious").read_text() == "precious" and len(list((tmp_path / "out").iterdir())) == 1


# -- input ------------------------------------------------------------------------------------------------------------


@posix
def test_a_schema_from_a_pipe_or_without_an_end(complaint, tmp_path):
    os.mkfifo(tmp_path / "schema.json")
    assert "a pipe or a device" in complaint(1, "generate", "e2e", "--json-schema", tmp_path / "schema.json")
    assert "a pipe or a device" in complaint(1, "generate", "e2e", "--json-schema", "/dev/zero")
    (tmp_path / "large.json").write_text(" " * (1 << 20) + "{}")
    assert "that is no schema" in complaint(2, "generate", "e2e", "--json-schema", tmp_path / "large.json")


@posix
def test_metrics_that_are_a_pipe(complaint, tiny_runs, tmp_path):
    run = copy_of(tiny_runs["autoregressive"], tmp_path)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert main(["info", str(run)]) == 0
    with pytest.raises(DifflmError, match="a pipe or a device"):
        resume(run)


def test_a_line_without_an_end_is_refused_before_it_is_read(tiny_runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(read_lines, "__defaults__", (1 << 20,))
    (tmp_path / "my.txt").write_text("A pub.\n" + "word " * 300_000)
    (tmp_path / "my.jsonl").write_text(json.dumps({"text": "word " * 300_000}))
    for argv in (
        ("score", tiny_runs["difflm"], "my.txt"),
        ("train", "own-text", "data=my.txt", "steps=1", "--out", "run"),
        ("generate", tiny_runs["difflm"], "--input", "my.jsonl"),
    ):
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        assert main([*map(str, argv)]) == 1
        said = capsys.readouterr().err
        assert "has more than 1 MiB. Break it into lines" in said.splitlines()[-1] and "Traceback" not in said
    assert sum(map(len, read_chunks(tmp_path / "my.txt", 64))) == 1_500_007  # pieces take no more memory


def test_arguments_that_are_not_utf_8(complaint):
    for argv in (["generate", "e2e", "--infill", "caf\udce9 ___"], ["caf\udce9"], ["train", "caf\udce9.txt"]):
        said = complaint(2, *argv)
        assert "is not UTF-8: 'caf" in said and len(said.splitlines()) == 1


def test_half_a_character_is_refused_in_python(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    for call in (lm.score, lm.infill, lm.edit):
        with pytest.raises(UsageError, match="half of a surrogate pair"):
            call("The \ud800 ___")


@posix
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 10**10 }}", "takes more than 512 MiB"),
        (
            "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "more than",
        ),
        ("{{ 'x' | center(5000000) }}", "writes more than"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than 1 seconds"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_chat_template_has_limits(monkeypatch, tmp_path, template, said):
    program = Path(sys.modules["difflm.data.template_process"].__file__).read_text().replace("= 5, ", "= 1, ")
    (tmp_path / "short.py").write_text(program)  # five seconds are long for a test
    monkeypatch.setattr("difflm.data.template_process.__file__", str(tmp_path / "short.py"))
    monkeypatch.setattr("difflm.data.template_process.SECONDS", 1)
    made = Template("{% if bomb %}" + template + "{% endif %}{{ text }}", Path("there"))
    assert made.render(bomb=False, text="é") == "é"
    with pytest.raises(DifflmError, match=said) as refused:
        made.render(bomb=True, text="")
    assert "\n" not in str(refused.value)
    assert made.render(bomb=False, text="again") == "again"


def tokenizer_with(**parts: object) -> dict[str, object]:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "aa": 2}, "merges": [["a", "a"]]}
    return {"version": "1.0", "added_tokens": [], "model": model, **parts}


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        (tokenizer_with(normalizer={"type": "Sequence", "normalizers": [REPLACE] * 40}), "1000 times as long"),
        (tokenizer_with(decoder={"type": "Sequence", "decoders": [{**REPLACE, "content": "a" * 2000}]}), "1000 times"),
        (tokenizer_with(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}), "table of characters"),
        (tokenizer_with(normalizer={"type": "Precompiled", "precompiled_charsmap": "="}), "adding|table of characters"),
        (tokenizer_with(model={"type": "BPE", "vocab": {"a": 0, "b": 1 << 31}, "merges": []}), "an id above"),
        (tokenizer_with(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}), "cannot read it"),
        (tokenizer_with(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
                                       "invert": False}), "cannot read the texts"),
    ],
)  # fmt: skip
def test_a_tokenizer_of_others_has_limits(definition, said):
    with pytest.raises((DifflmError, ValueError), match=said) as refused:
        PretrainedTokenizer(definition).encode("a" * 40 + "b")
    assert "\n" not in str(refused.value)


# -- Python -----------------------------------------------------------------------------------------------------------


FORK = """
import os, signal, sys, torch
from difflm import Length, TextDiffusion
torch.set_num_threads(2)
lm = TextDiffusion.from_pretrained(sys.argv[1])
if not (child := os.fork()):
    signal.alarm(60)
    for call in (lambda: lm.generate(1), lambda: lm.score("The pub."), lambda: TextDiffusion.from_pretrained("judge"),
                 lambda: lm.infill("The ___ pub."), lambda: lm.edit("The pub."),
                 lambda: lm.generate(1, controls=[Length(5)]), lambda: lm.alternatives("The pub.")):
        try:
            call()
        except Exception as error:
            print(type(error).__name__, error)
    sys.stdout.flush()
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@posix
@pytest.mark.long
def test_a_forked_process_says_so_at_once(tiny_runs):
    argv = [sys.executable, "-c", FORK, tiny_runs["difflm"]]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 7
    assert all("DifflmError this process was forked" in line for line in done.stdout.splitlines())


def test_models_are_not_pickled_and_texts_are(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    for call in (pickle.dumps, copy.deepcopy):
        with pytest.raises(UsageError, match=r"save it with lm\.save_pretrained"):
            call(lm)
    texts = lm.generate(2, steps=2)
    for again in (pickle.loads(pickle.dumps(texts)), copy.deepcopy(texts)):
        assert again == texts
        with pytest.raises(UsageError, match=r"use lm\.alternatives"):
            _ = again[0].alternatives


def test_none_is_no_controls(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    for call in (lm.generate, lambda **asked: lm.infill("The ___ pub.", **asked)):
        assert [*map(str, call(steps=2, controls=None))] == [*map(str, call(steps=2))]
    assert lm.generate(1, steps=2, controls=[Length(7)])[0].controls[0]["name"] == "length"
