"""Checkpoints: safetensors and JSON, written atomically."""

import re
import shutil
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from difflm.errors import DifflmError
from difflm.fast.sharding import is_divided, local_part
from difflm.runtime import files
from difflm.runtime.distributed import current
from difflm.runtime.files import Json
from difflm.runtime.tensors import encode_tensors, load_tensors, save_tensors

REPEATED = ("train", "validation")  # records that a resumed run writes again
KEEP = 2  # checkpoints kept on disk
STEP = re.compile("step-(0|[1-9][0-9]*)")
# Of a run that trains for minutes.
CLOCK = (("elapsed", float), ("checking", float), ("ended", float), ("checks", list), ("validated", list))


def advise_resume(run: Path) -> str:
    """Advice for a run whose weights are damaged: resume from its newest complete checkpoint, if there is one."""
    newest = newest_checkpoint(run)
    return f"Resume from {newest} with --resume." if newest else files.AGAIN


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the newest first. Names with a leading dot are temporary; any others are ignored."""
    found = [path.parent for path in run.glob("checkpoints/step-*/state.json") if STEP.fullmatch(path.parent.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def newest_checkpoint(run: Path) -> Path | None:
    return next(iter(list_checkpoints(run)), None)


def save_checkpoint(run: Path, step: int, tensors: Mapping[str, Tensor], state: Json) -> None:
    """Write a checkpoint directory atomically, then delete the oldest ones, and later ones, which were damaged. Of
    sharded weights each process writes a file, with its rows of each tensor; the first also has what is not sharded."""
    processes, target = current(), run / "checkpoints" / f"step-{step}"
    temporary = target.with_name(f".{target.name}.new")
    with files.explain_write_errors(target), ExitStack() as stack:
        if processes.first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            files.sync_directory(run)  # the directory of checkpoints may be new
        if processes.shards:
            processes.any()  # wait until the directory exists
            own = {name: local_part(t) for name, t in tensors.items() if is_divided(t) or processes.first}
            held = {name: part for name, part in own.items() if not is_divided(tensors[name]) or len(part)}
            sha256 = save_tensors(temporary / shard_name(processes.rank, processes.count), held)
            state = {**state, "shards": processes.gather_json(sha256)}
        else:
            state = {**state, "sha256": save_tensors(temporary / "state.safetensors", tensors)}
        if processes.first:
            files.write_checked(temporary / "state.json", state)
            shutil.rmtree(target, ignore_errors=True)
            temporary.replace(target)
            files.sync_directory(target.parent)
            found = list_checkpoints(run)
            kept = found[found.index(target) :][:KEEP]
            for other in {*found} - {*kept}:
                shutil.rmtree(other, ignore_errors=True)
    if processes.shards:
        processes.any()  # wait until the checkpoint exists


def shard_name(number: int, count: int) -> str:
    """The name of one process's file, if several save together."""
    return f"state-{number + 1:05}-of-{count:05}.safetensors"


def read_whole_config(run: Path) -> Json:
    """The config of a run; {} if there is none, or if it is damaged, since it will be written again."""
    try:
        config = files.read_checked(run / "config.json")
    except DifflmError:
        return {}
    return config if isinstance(config, dict) else {}


def save_weights(run: Path, tensors: Mapping[str, Tensor], name: str = "model.safetensors") -> str:
    """Write the weights of a run, and their checksum into its config. While they are replaced the config has both
    checksums, so a process that is killed in between leaves weights that can be loaded, and are checked."""
    data, sha256 = encode_tensors(tensors)
    config = {key: value for key, value in read_whole_config(run).items() if key != "next_sha256"}
    if config:
        files.write_checked(run / "config.json", {**config, "next_sha256": sha256})
    files.write_atomic(run / name, data)
    if config:
        files.write_checked(run / "config.json", {**config, "sha256": sha256})
    return sha256


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], Json]:
    """Read a checkpoint; of several files, which have some rows of every tensor each, these are joined."""
    advice = "Start the run again."
    state = files.read_checked(path / "state.json", advice)
    if not is_state(state) or path.name != f"step-{state['step']}":
        raise DifflmError(f"{path}/state.json does not describe a checkpoint.")
    shards, found = state.get("shards", []), defaultdict[str, list[Tensor]](list)
    sums = {shard_name(number, len(shards)): {"sha256": sha256} for number, sha256 in enumerate(shards)}
    for name, about in (sums or {"state.safetensors": state}).items():
        for key, part in load_tensors(path / name, advice).items():
            found[key].append(part)
        files.check_sha256(path / name, about, advice)
    return {key: torch.cat(parts) if len(parts) > 1 else parts[0] for key, parts in found.items()}, state


def part_tensors(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by the part that they belong to, which begins their names and ends at a point."""
    parts = defaultdict[str, dict[str, Tensor]](dict)
    for name, tensor in tensors.items():
        part, _, key = name.partition(".")
        parts[part][key] = tensor
    return parts


def is_state(state: Any) -> bool:
    """Whether this has the form of what a trainer saves with the tensors."""
    validation = state.get("validation", {}) if isinstance(state, dict) else None
    if not isinstance(validation, dict) or not isinstance(state.get("step"), int):
        return False
    numbers = [state.get("seconds"), *(value for key, value in validation.items() if key != "likelihood")]
    clock = state.get("clock", {})
    if not isinstance(clock, dict) or (clock and not all(isinstance(clock.get(key), kind) for key, kind in CLOCK)):
        return False
    shards = state.get("shards", [])
    if not isinstance(shards, list) or not all(isinstance(sha256, str) for sha256 in shards):
        return False
    return all(isinstance(number, int | float) for number in numbers)


def go_back(run: Path, step: int) -> None:
    """Remove what a process that was killed left behind: half a checkpoint, half a line of the metrics, and records of
    steps that the resumed run will repeat."""
    for left in run.glob("checkpoints/.step-*"):
        shutil.rmtree(left, ignore_errors=True)
    metrics, kept = run / "metrics.jsonl", list[str]()
    files.check_regular(metrics)
    if metrics.exists():
        for line in metrics.read_text(encoding="utf-8", errors="replace").split("\n"):
            record = files.parse_record(line)
            at = record.get("step")
            if record and (record.get("kind") not in REPEATED or (isinstance(at, int) and at <= step)):
                kept.append(f"{line}\n")
        files.write_atomic(metrics, "".join(kept))
