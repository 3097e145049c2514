"""What is refused before anything is done: each error says what to do instead."""

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

import torch

from difflm.controls import Control
from difflm.controls.gaps import Edit
from difflm.controls.guidance import GuidanceSettings
from difflm.data.corpora import describe_texts
from difflm.data.tokenizers import UNK, Tokenizer
from difflm.diffusion.samplers.discrete_steps import ORDERED, SURE
from difflm.errors import UsageError, suggest
from difflm.fast.float32 import avoid_float64
from difflm.generation.requests import MOST_SEED
from difflm.machine import is_on
from difflm.models.base import LanguageModel, Sampling
from difflm.models.sampling import FAMILIES, SETTINGS, describe_range, refuse_foreign

MOST_TEXTS, MOST_CANDIDATES = 1_000_000, 1_000
SHOWN = 8  # how many unknown words a warning names


def check_device(device: str) -> torch.device:
    """Return an available device; "auto" is a GPU if there is one."""
    if device == "auto":
        device = "cuda" if is_on("gpu") else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type not in ("cpu", "cuda", "mps"):
            raise UsageError(f"difflm runs on cpu, cuda or mps, not on {chosen.type}. Try --device cpu.")
        torch.zeros(1, device=chosen)
        if chosen.type == "mps":
            avoid_float64()
    except (RuntimeError, AssertionError, TypeError):
        raise UsageError(f"device {device!r} is not available here. Try --device cpu.") from None
    return chosen


def check_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype | None:
    """Return a dtype that the device supports, given as such or by name."""
    known = [torch.float32, torch.bfloat16, torch.float16 if device.type == "cuda" else torch.int8]
    found = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if found is not None and found not in known:
        names = ", ".join(str(one).removeprefix("torch.") for one in known)
        raise UsageError(f"dtype must be {names} on {device.type}, not {dtype}.")
    return found


def check_eight_bits(model: LanguageModel) -> None:
    if not is_on("eight_bit"):
        raise UsageError("torch has no fast 8-bit matrix products for this processor: leave dtype out.")
    if not model.capabilities.denoises or not model.denoiser.network.position_parts():
        raise UsageError("dtype int8 is for diffusion models of words whose network is a Transformer: leave it out.")


def fastest_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the network's arithmetic: bfloat16 on GPUs, and on processors with matrix units for it; texts are as
    good (docs/performance.md). None: float32."""
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if is_on("matrix_units") else None


def check_request(
    n: int,
    seed: int,
    mbr: int = 1,
    candidates: int = 1,
    controls: Sequence[Control] | None = None,
    has_source: bool = False,
) -> None:
    """Reject invalid numbers. `controls` are those by which candidates are chosen; None: they are not known yet."""
    ranges = {"n": (n, 1, MOST_TEXTS), "seed": (seed, 0, MOST_SEED)}
    ranges |= {"mbr": (mbr, 1, MOST_CANDIDATES), "candidates": (candidates, 1, MOST_CANDIDATES)}
    for name, (value, low, high) in ranges.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise UsageError(f"{name} must be a whole number, not {value!r}.")
        if not low <= value <= high:
            raise UsageError(f"{'-n' if name == 'n' else f'--{name}'} must be between {low} and {high:,}, not {value}.")
    if wrong := [one for one in controls or () if not isinstance(one, Control) or one.name == Edit.name]:
        raise UsageError(f"controls must be a list of controls, such as [Length(14)]; {wrong[0]!r} is not a control.")
    if candidates > 1 and mbr > 1:
        raise UsageError("--candidates and --mbr both choose among candidates: give one of them.")
    if candidates > 1 and controls is not None and not any(control.head for control in controls):
        other = "give --rank bound or --rank RUN" if has_source else "give --infill"
        raise UsageError(
            "--candidates needs something to choose by: ask for a field, label, tags or tree, "
            f"{other}, or use --mbr instead."
        )


def parse_guidance(size: object, usual: GuidanceSettings) -> GuidanceSettings:
    """A model's default guidance settings with another size."""
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size <= 1000:
        raise UsageError(f"guidance must be a number from 0 to 1,000, or GuidanceSettings, not {size!r}.")
    return replace(usual, size=float(size))


def check_sampling(sampling: Sampling, model: LanguageModel) -> None:
    """Refuse settings that this model does not understand; `Sampling` itself refuses values out of range."""
    if sampling.sampler not in model.capabilities.step_rules:
        if sampling.sampler == "prism":
            raise UsageError(
                "the sampler prism needs a model with a quality head: train one from a run of mdlm, with init=RUN and "
                "model.quality_head=true."
            )
        hint, known = suggest(sampling.sampler, model.capabilities.step_rules), ", ".join(model.capabilities.step_rules)
        raise UsageError(f"unknown --sampler {sampling.sampler!r} for this model. {hint}Known: {known}.")
    if sampling.temperature == 0 and not model.capabilities.greedy:
        raise UsageError(f"--temperature {describe_range('temperature')}, not {sampling.temperature}.")
    if sampling.temperature != 1 and not model.capabilities.predicts_words:
        raise UsageError("a temperature needs a model that predicts words; use --noise-temperature here.")
    if sampling.length_beam and not model.capabilities.length_beam:
        raise UsageError("a length beam needs a model that chooses lengths beforehand; this one writes its own end.")
    if sampling.projection == "multi-hot" and sampling.projection_top_p == 1:
        raise UsageError("--projection multi-hot takes the likeliest words: give --projection-top-p below 1.")
    families = "diffusion", *model.capabilities.settings
    foreign = (name for name, family in FAMILIES.items() if family not in families)
    if changed := [name for name in foreign if getattr(sampling, name) != SETTINGS[name].default]:
        refuse_foreign(changed, families, "this one is not")
    if sampling.block and sampling.sampler not in ORDERED:
        raise UsageError(f"--block is for the samplers {', '.join(ORDERED)}; give --block 0 with {sampling.sampler}.")
    if sampling.sure != SURE and sampling.sampler not in ("threshold", "entropy-bound"):
        raise UsageError("--sure is for the samplers threshold and entropy-bound.")
    if sampling.revisions > 1 and not sampling.beams:
        raise UsageError("--revisions needs a beam search: give --beams as well.")
    if sampling.start not in model.capabilities.starts:
        known = ", ".join(model.capabilities.starts)
        raise UsageError(f"--start {sampling.start} is not for this model. Known: {known}.")


def warn_of_sources(sources: Sequence[Sequence[int]]) -> list[str]:
    """Warn of words of the sources, given as ids, that a model does not know."""
    unknown, tokens = sum(row.count(UNK) for row in sources), sum(map(len, sources))
    if not unknown:
        return []
    return [f"{unknown:,} of {tokens:,} tokens of the sources are words that this model does not know."]


def explain_unknown(unknown: Sequence[str], name: str, tokenizer: Tokenizer, data: str | None) -> list[str]:
    """Warn of words that a model does not know; `data` are the texts that it was trained on."""
    size = sum(bool(w.strip()) for w in tokenizer.known_words)
    named = ", ".join(repr(word) for word in unknown[:SHOWN])
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    them = "it" if len(unknown) == 1 else "them"
    knows = f"{name} knows {size:,} words" + (f" of {describe_texts(data)}" if data else "")
    other = " The bundled model english knows such words." if name == "e2e" else ""
    return [f"{knows}; it does not know {named}{more}, and cannot take {them} into account.{other}"]
