"""Checkpoints: safetensors and JSON, written atomically."""

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from difflm.runtime.files import explain_write_errors, read_json, write_json
from difflm.runtime.tensors import load_tensors, save_tensors

KEEP = 2  # checkpoints of a run that are kept on disk


def advise_resume(run: Path) -> str:
    """Advice for a run whose weights are damaged: resume from its newest complete checkpoint, if there is one."""
    newest = newest_checkpoint(run)
    return f"Resume from {newest} with --resume." if newest else "Copy or train it again."


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints of a run, rising. Temporary names begin with a dot and do not count."""
    found = run.glob("checkpoints/step-*/state.json")
    return sorted(int(p.parent.name.removeprefix("step-")) for p in found)


def newest_checkpoint(run: Path) -> Path | None:
    steps = checkpoint_steps(run)
    return run / "checkpoints" / f"step-{steps[-1]}" if steps else None


def save_checkpoint(run: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write a checkpoint directory atomically, then delete the oldest ones."""
    target = run / "checkpoints" / f"step-{step}"
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    for left in run.glob("checkpoints/.step-*"):  # by a process that was killed while it saved
        shutil.rmtree(left, ignore_errors=True)
    with explain_write_errors(target), ExitStack() as stack:
        temporary.mkdir(parents=True)
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        save_tensors(temporary / "state.safetensors", tensors)
        write_json(temporary / "state.json", state)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    for old in checkpoint_steps(run)[:-KEEP]:
        shutil.rmtree(run / "checkpoints" / f"step-{old}", ignore_errors=True)
    return target


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_tensors(path / "state.safetensors"), read_json(path / "state.json")
