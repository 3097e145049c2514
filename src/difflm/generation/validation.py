"""What is refused before anything is done: each error says what to do instead."""

from collections.abc import Sequence

import torch

from difflm.controls import Control
from difflm.errors import UsageError
from difflm.models.base import LanguageModel
from difflm.models.sampling import FAMILIES, SETTINGS, Sampling, describe_range, option_name

MOST_TEXTS = 1_000_000
FOREIGN = {  # why a model that is not of a family refuses its settings
    "vectors": "--{} is for models that diffuse vectors, which this one does not.",
    "masks": "a {} needs a model of masks over whole texts, such as mdlm.",
}


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


def check_request(
    n: int, seed: int, mbr: int = 1, candidates: int = 1, controls: Sequence[Control] | None = None
) -> None:
    """`controls` are those by which candidates are chosen; None: they are not known yet."""
    if not 1 <= n <= MOST_TEXTS:
        raise UsageError(f"-n must lie between 1 and {MOST_TEXTS:,}, not {n}.")
    if not 0 <= seed < 2**31:
        raise UsageError(f"--seed must lie between 0 and {2**31 - 1}, not {seed}.")
    if not 1 <= mbr <= 1000:
        raise UsageError(f"--mbr must lie between 1 and 1,000 candidates, not {mbr}.")
    if not 1 <= candidates <= 1000:
        raise UsageError(f"--candidates must lie between 1 and 1,000, not {candidates}.")
    if candidates > 1 and mbr > 1:
        raise UsageError("--candidates and --mbr both choose among candidates: give one of them.")
    if candidates > 1 and controls is not None and not any(control.head for control in controls):
        raise UsageError("--candidates are chosen by a classifier: ask for a field, a label, tags or a tree, or --mbr.")


def check_sampling(sampling: Sampling, model: LanguageModel) -> None:
    """Refuse settings that this model does not understand; `Sampling` itself refuses values out of range."""
    if sampling.sampler not in model.samplers:
        known = ", ".join(model.samplers)
        raise UsageError(f"unknown sampler {sampling.sampler!r} for this model. Known: {known}.")
    if sampling.temperature == 0 and not model.greedy:
        raise UsageError(f"--temperature {describe_range('temperature')}, not {sampling.temperature}.")
    if sampling.temperature != 1 and not model.predicts_words:
        raise UsageError("a temperature needs a model that predicts words; use --noise-temperature here.")
    for name, setting in SETTINGS.items():
        family = FAMILIES[name]
        if family in FOREIGN and family not in model.families and getattr(sampling, name) != setting.default:
            raise UsageError(FOREIGN[family].format(option_name(name)))
