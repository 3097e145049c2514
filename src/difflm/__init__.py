"""Diffusion language models: text that forms all at once and can be steered while it does."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from difflm.version import __version__

if TYPE_CHECKING:
    from difflm.api import Run, evaluate, train
    from difflm.controls import (
        Avoid,
        Contains,
        Field,
        Infill,
        Json,
        Label,
        Length,
        Pattern,
        Span,
        Tags,
        Tree,
        WordCount,
    )
    from difflm.controls.edits import Edit
    from difflm.errors import DifflmError, UsageError
    from difflm.evaluation.reports import Report
    from difflm.generation.pipeline import TextDiffusion
    from difflm.generation.texts import Generation, Texts, TokenBelief
    from difflm.player.frames import Draft

__all__ = [
    "Avoid",
    "Contains",
    "DifflmError",
    "Draft",
    "Edit",
    "Field",
    "Generation",
    "Infill",
    "Json",
    "Label",
    "Length",
    "Pattern",
    "Report",
    "Run",
    "Span",
    "Tags",
    "TextDiffusion",
    "Texts",
    "TokenBelief",
    "Tree",
    "UsageError",
    "WordCount",
    "__version__",
    "evaluate",
    "train",
]

# Loaded on first use: `import difflm` and `difflm --help` must not wait for torch.
_HOMES = {
    "Avoid": "difflm.controls",
    "Contains": "difflm.controls",
    "Edit": "difflm.controls.edits",
    "Field": "difflm.controls",
    "Infill": "difflm.controls",
    "Json": "difflm.controls",
    "Label": "difflm.controls",
    "Length": "difflm.controls",
    "Pattern": "difflm.controls",
    "Span": "difflm.controls",
    "Tags": "difflm.controls",
    "Tree": "difflm.controls",
    "WordCount": "difflm.controls",
    "DifflmError": "difflm.errors",
    "Draft": "difflm.player.frames",
    "Generation": "difflm.generation.texts",
    "Report": "difflm.evaluation.reports",
    "Run": "difflm.api",
    "TextDiffusion": "difflm.generation.pipeline",
    "Texts": "difflm.generation.texts",
    "TokenBelief": "difflm.generation.texts",
    "UsageError": "difflm.errors",
    "evaluate": "difflm.api",
    "train": "difflm.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'difflm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
