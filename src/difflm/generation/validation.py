"""What is refused before anything is done: each error says what to do instead."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from difflm.controls import Control, Label, Span, Tags, Tree
from difflm.data.labels import Kind
from difflm.errors import UsageError
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel

MOST_TEXTS, MOST_STEPS = 1_000_000, 10_000


def refuse_vector_settings(sampling: Sampling) -> None:
    """Tokens have no noise of some size, and are always words."""
    usual = Sampling()
    for name in ("clamp", "draw", "noise_temperature", "noise_top_p"):
        if getattr(sampling, name) != getattr(usual, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is for models that diffuse vectors; this one diffuses tokens."
            )


def check_device(device: str) -> torch.device:
    """A device that is there; "auto" is a GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type not in ("cpu", "cuda"):  # others lack the float64 that lengths and draws need
            raise UsageError(f"difflm runs on cpu or cuda, not on {chosen.type}. Try --device cpu.")
        torch.zeros(1, device=chosen)
    except (RuntimeError, AssertionError):
        raise UsageError(f"device {device!r} is not available here. Try --device cpu.") from None
    return chosen


def check_dtype(dtype: torch.dtype | None, device: torch.device) -> None:
    known = [torch.float32, torch.bfloat16] + [torch.float16] * (device.type == "cuda")
    if dtype is not None and dtype not in known:
        raise UsageError(f"dtype must be {', '.join(map(str, known))} on {device.type}, not {dtype}.")


def check_request(n: int, seed: int, mbr: int) -> None:
    if not 1 <= n <= MOST_TEXTS:
        raise UsageError(f"-n must lie between 1 and {MOST_TEXTS:,}, not {n}.")
    if not 0 <= seed < 2**31:
        raise UsageError(f"--seed must lie between 0 and {2**31 - 1}, not {seed}.")
    if not 1 <= mbr <= 1000:
        raise UsageError(f"--mbr must lie between 1 and 1,000 candidates, not {mbr}.")


def check_candidates(candidates: int, mbr: int, controls: Sequence[Control]) -> None:
    if not 1 <= candidates <= 1000:
        raise UsageError(f"--candidates must lie between 1 and 1,000, not {candidates}.")
    if candidates > 1 and mbr > 1:
        raise UsageError("--candidates and --mbr both choose among candidates: give one of them.")
    if candidates > 1 and not any(control.head for control in controls):
        raise UsageError("--candidates are chosen by a classifier: ask for a field, a label, tags or a tree, or --mbr.")


def check_kinds(controls: Sequence[Control], kinds: Mapping[str, Kind]) -> None:
    """A label is of a whole text, tags are of words: what was learned as one cannot be asked for as the other."""
    meant: dict[Kind, str] = {"text": "a label of a whole text", "tags": "a tag for every word", "spans": "spans"}
    for control in controls:
        if (
            isinstance(control, Label | Tags | Span | Tree)
            and (kind := kinds.get(control.head, control.kind)) != control.kind
        ):
            asked = meant[control.kind]
            raise UsageError(f"{control.head!r} is {meant[kind]} in this classifier; {control.name} asks for {asked}.")


def check_names(settings: dict[str, Any]) -> None:
    known = [f.name for f in fields(Sampling)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise UsageError(f"unknown setting {name!r}. {hint}")


def check_sampling(sampling: Sampling, model: LanguageModel) -> None:
    if not 1 <= sampling.steps <= MOST_STEPS:
        raise UsageError(f"--steps must lie between 1 and {MOST_STEPS:,}, not {sampling.steps}.")
    if sampling.sampler not in model.samplers:
        known = ", ".join(model.samplers)
        raise UsageError(f"unknown sampler {sampling.sampler!r} for this model. Known: {known}.")
    if not 0 <= sampling.temperature <= 10 or (sampling.temperature == 0 and not model.greedy):
        raise UsageError(f"--temperature must lie above 0 and up to 10, not {sampling.temperature}.")
    if sampling.temperature != 1 and not model.predicts_words:
        raise UsageError("a temperature needs a model that predicts words; use --noise-temperature here.")
    if not 0 <= sampling.noise_temperature <= 10:
        raise UsageError(f"--noise-temperature must lie between 0 and 10, not {sampling.noise_temperature}.")
    if not 0 < sampling.noise_top_p <= 1:
        raise UsageError(f"--noise-top-p must lie above 0 and up to 1, not {sampling.noise_top_p}.")
    if not 0 <= sampling.clamp_below <= 1:
        raise UsageError(f"--clamp-below must lie between 0 and 1, not {sampling.clamp_below}.")
    if isinstance(model, DiffusionModel) and model.denoiser.codec.holds_tokens:
        refuse_vector_settings(sampling)
    if not 0 <= sampling.contrast <= 100:
        raise UsageError(f"--contrast must lie between 0 and 100, not {sampling.contrast}.")
    if sampling.contrast and not (isinstance(model, DiffusionModel) and model.can_hide_known):
        raise UsageError("a contrast needs a model of masks over whole texts, such as mdlm.")
    if sampling.top_k < 0:
        raise UsageError(f"--top-k must be at least 1 (0: all words), not {sampling.top_k}.")
    if not 0 < sampling.top_p <= 1:
        raise UsageError(f"--top-p must lie above 0 and up to 1, not {sampling.top_p}.")
    if not 0 <= sampling.beams <= 1000:
        raise UsageError(f"--beams must lie between 1 and 1,000 (0: draw instead), not {sampling.beams}.")
