"""Golden values: what the same requests and the same first steps of training gave before the code was changed.

    make golden        (python -m tests.support.golden: writes the records of this machine anew, into golden/ here)

A record names the machine that made it. On the same kind of machine everything is equal bit for bit, the digests of
weights included; on any other one numbers agree within 1e-4, and texts and digests are not compared. Two machines are
of the same kind if processor, version of torch, its vector instructions and the number of threads are the same. Logits
of open checkpoints have golden values of their own (test_open_models.py).
"""

import hashlib
import json
import math
import os
import platform
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

import difflm
from difflm.app.cli import main
from difflm.controls import Contains, Field, Length, Pattern
from difflm.generation.pipeline import TextDiffusion
from tests.support.open_checkpoints import MODELS, draw_weights, write_tokenizer, write_weights
from tests.support.tiny import write_grammar

FOLDER = Path(__file__).parent / "golden"
# `chat` begins with a model that has a template: tests/training/test_adapt.py trains it.
FILES = (path for path in sorted((Path(difflm.__file__).parent / "recipes").glob("*.yaml")) if path.stem != "chat")
RECIPES = {path.stem: path for path in FILES}
TINY = {
    "hidden": 32, "layers": 3, "encoder_layers": 1, "autoencoder_layers": 1, "heads": 2, "embedding_dim": 16,
    "latents": 4, "latent_dim": 8, "block": 4,
}  # fmt: skip
SHORT = [
    *("steps=2", "batch_size=4", "warmup=1", "clip=0"),
    *("log_every=1", "validate_every=2", "sample_every=0", "patience=0"),
]
TOLERANCE = 1e-4
# The vectors of `e2e-sed` lie along the singular vectors of counts, and of the tiny texts' singular values the 12th and
# the 13th are equal: rounding chooses the directions within their plane, and LAPACK the signs. A turn by 270 degrees
# takes x86's values to ARM's within 2e-6; other turns and signs move losses by up to 0.016, gradients and nats by up to
# 2.4 %. On the machine that made the record all are equal to the bit.
CHOSEN_BY_ROUNDING = {"e2e-sed": 0.05}


def describe_machine() -> dict[str, Any]:
    """What bits of results depend on."""
    kinds = {"model name", "CPU implementer", "CPU variant", "CPU part"}
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    parts = [line.split(":") for line in lines if line.split(":")[0].strip() in kinds]
    processor = {part[0].strip(): part[1].strip() for part in parts}
    return {
        "processor": processor or platform.processor(),
        "architecture": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "switches": os.environ.get("DIFFLM_SWITCHES", ""),
    }


# -- the first two steps of every recipe -------------------------------------------------------------------------------


class Runs:
    """Tiny runs of two steps in a folder, trained on small files, each when somebody first asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.values = folder, dict[str, dict[str, Any]]()
        texts = write_grammar(folder / "texts.txt", 80)
        foods = ["French" if "French" in text else "other" for text in texts]
        write_lines(folder / "labels.jsonl", ({"text": t, "food": f} for t, f in zip(texts, foods, strict=True)))
        draw = random.Random(0)
        sources = [draw.choices("abcdefgh", k=draw.randint(2, 9)) for _ in range(80)]
        write_lines(folder / "pairs.jsonl", ({"src": " ".join(s), "trg": " ".join(reversed(s))} for s in sources))

    def first_steps(self, recipe: str) -> dict[str, Any]:
        if recipe not in self.values:
            self.values[recipe] = self._train(recipe)
        return self.values[recipe]

    def _train(self, recipe: str) -> dict[str, Any]:
        """Losses and gradient norms of both steps, and a digest of the averaged weights behind them."""
        norms: list[float] = []

        def note_norm(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            grads = [p.grad.double() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            norms.append(float(torch.stack([grad.norm() for grad in grads]).norm()))

        argv = ["train", recipe, *self.changes(recipe), *SHORT, "--device", "cpu"]  # trains what it begins with
        hook = register_optimizer_step_pre_hook(note_norm)
        try:
            with redirect_stdout(sys.stderr):
                assert main([*argv, "--out", str(self.folder / recipe)]) == 0, argv
        finally:
            hook.remove()
        lines = map(json.loads, (self.folder / recipe / "metrics.jsonl").read_text().splitlines())
        timed = {"kind", "step", "lr", "seconds", "steps_per_second", "tokens_per_second", "likelihood"}
        records = [{key: value for key, value in line.items() if key not in timed} for line in lines]
        return {"records": records, "gradients": norms, "weights": digest(self.folder / recipe / "model.safetensors")}

    def run(self, recipe: str) -> Path:
        self.first_steps(recipe)
        return self.folder / recipe

    def changes(self, recipe: str) -> list[str]:
        values = yaml.safe_load(RECIPES[recipe].read_text())
        sizes = [f"model.{key}={TINY[key]}" for key in TINY if key in values["model"] and "init" not in values]
        if recipe == "adapt":
            return [f"model.pretrained={self.gpt2()}", f"data={self.folder / 'texts.txt'}", "widths=[]", "longest=64"]
        if values["method"] == "classifier":
            return [f"model.guides={self.run('e2e')}", f"data={self.folder / 'labels.jsonl'}", "widths=[]", *sizes]
        if recipe == "e2e-few":
            return [f"init={self.run('e2e')}", f"data={self.teacher_texts()}", "widths=[]", "licence=none"]
        start = [f"init={self.run('e2e')}"] if "init" in values else []
        data = "texts.txt"
        if values.get("task") == "prompts":
            data = "labels.jsonl"
        elif values.get("source_longest"):
            data = "pairs.jsonl"
        limits = [f"{key}=24" for key in ("longest", "source_longest") if values.get(key, 0) > 24]
        limits = limits if data == "pairs.jsonl" and not start else []
        return [f"data={self.folder / data}", "licence=none", "widths=[]", *start, *sizes, *limits]

    def teacher_texts(self) -> Path:
        """Texts of a tiny teacher, with the noise that they were made of."""
        path = self.folder / "teacher.jsonl"
        with path.open("w") as file, redirect_stdout(file):
            assert (
                main(["generate", str(self.run("e2e")), "-n", "40", "--sampler", "ddim", "--steps", "3", "--json"]) == 0
            )
        return path

    def gpt2(self) -> Path:
        """A model of others to start from."""
        folder, keys = self.folder / "gpt2", MODELS["diffugpt"]["keys"]
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS["diffugpt"]["config"]))
        renamed = {
            key.replace("denoise_model", "transformer").replace("embed_tokens", "transformer.wte"): weight
            for key, weight in draw_weights(keys).items()
        }
        write_weights(folder, renamed)
        write_tokenizer(folder, rows=110, marks=False)
        return folder


def write_lines(path: Path, rows: Iterator[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def digest(path: Path) -> str:
    """Of names, shapes and bits of all tensors of a file."""
    sha = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


# -- twelve requests ---------------------------------------------------------------------------------------------------

Ask = Callable[[TextDiffusion], Any]
BUNDLED: dict[str, tuple[str, Ask]] = {
    "words, plain": ("e2e", lambda lm: lm.generate(2, steps=8)),
    "words, field and length": (
        "e2e", lambda lm: lm.generate(2, controls=[Field("food", "Japanese"), Length(14)], steps=8),
    ),
    "words, phrase and pattern": (
        "e2e", lambda lm: lm.generate(1, controls=[Contains("by the riverside"), Pattern("The .*")], steps=8),
    ),
    "words, two gaps": ("e2e", lambda lm: lm.infill("The ___ is a ___:2 near Café Sicilia.", steps=8)),
    "words, few steps": ("e2e-fast", lambda lm: lm.generate(2)),
    "pieces, gap": ("english-small", lambda lm: lm.infill("We ___ because it was raining.", steps=6)),
    "pieces, phrase and length": (
        "english-small", lambda lm: lm.generate(1, controls=[Contains("garden"), Length(9)], steps=6),
    ),
}  # fmt: skip
SOURCE = "a b c d e f"
TRAINED: dict[str, tuple[str, Ask]] = {
    "characters, pattern": (
        "characters-laptop", lambda lm: lm.generate(1, controls=[Pattern("[A-Z][a-z]+ .*")], steps=4),
    ),
    "pieces of a tiny model": ("own-text", lambda lm: lm.generate(2, steps=4)),
    "a source, vectors": ("multi30k-laptop", lambda lm: lm.generate(source=SOURCE, steps=4)),
    "a source, one word after another": ("multi30k-encoder-decoder", lambda lm: lm.generate(source=SOURCE)),
    "blocks": ("e2e-block-diffusion", lambda lm: lm.generate(2, steps=4)),
}  # fmt: skip
SCORED = ("The Vaults is a pub near Café Adriatic.", "Alimentum is cheap.")


def ask_bundled(request: str) -> dict[str, Any]:
    name, ask = BUNDLED[request]
    return {"texts": [text.text for text in ask(TextDiffusion.from_pretrained(name))]}


def score_bundled() -> dict[str, Any]:
    return {
        "judge": TextDiffusion.from_pretrained("judge").score(list(SCORED)),
        "e2e": TextDiffusion.from_pretrained("e2e").score(list(SCORED), draws=2),
    }


def ask_trained(request: str, runs: Runs) -> dict[str, Any]:
    name, ask = TRAINED[request]
    return {"texts": [text.text for text in ask(TextDiffusion.from_pretrained(runs.run(name)))]}


# -- records -----------------------------------------------------------------------------------------------------------


def compare(found: Any, recorded: Any, exactly: bool, where: str = "", tolerance: float = TOLERANCE) -> Iterator[str]:
    """What differs from a record."""
    if isinstance(recorded, dict):
        if found.keys() != recorded.keys():
            yield f"{where}: {sorted(found)} instead of {sorted(recorded)}"
            return
        for key in recorded:
            yield from compare(found[key], recorded[key], exactly, f"{where}.{key}", tolerance)
    elif isinstance(recorded, list):
        if len(found) != len(recorded):
            yield f"{where}: {len(found)} values instead of {len(recorded)}"
            return
        for k, (mine, theirs) in enumerate(zip(found, recorded, strict=True)):
            yield from compare(mine, theirs, exactly, f"{where}[{k}]", tolerance)
    elif isinstance(recorded, float) and not exactly:
        if not math.isclose(found, recorded, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{where}: {found} instead of {recorded}"
    elif (exactly or not isinstance(recorded, str)) and found != recorded:
        yield f"{where}: {found!r} instead of {recorded!r}"


def read_record(name: str) -> tuple[dict[str, Any], bool]:
    """The values of a record, and whether this machine is of the kind that made it."""
    record = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return record["values"], record["machine"] == describe_machine()


def check(name: str, key: str, found: Any) -> None:
    values, exactly = read_record(name)
    tolerance = CHOSEN_BY_ROUNDING.get(key, TOLERANCE)
    faults = [*compare(json.loads(json.dumps(found)), values[key], exactly, key, tolerance)]
    assert not faults, "\n".join(faults)


def write_record(name: str, values: dict[str, Any]) -> None:
    FOLDER.mkdir(exist_ok=True)
    record = {"machine": describe_machine(), "values": values}
    (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_records() -> None:
    """All records anew, with one thread and short validations, as in the tests."""
    from tests import conftest

    assert conftest.VALIDATION_DRAWS
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        write_record("recipes", {recipe: runs.first_steps(recipe) for recipe in RECIPES})
        write_record("texts", {
            **{request: ask_bundled(request) for request in BUNDLED},
            **{request: ask_trained(request, runs) for request in TRAINED},
            "scores": score_bundled(),
        })  # fmt: skip


if __name__ == "__main__":
    write_records()
