"""Diffusion language models: text that forms all at once and can be steered while it does."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from difflm.controls.plan import Edit
    from difflm.errors import DifflmError, UsageError
    from difflm.generation.jobs import Draft, Generation
    from difflm.generation.pipeline import TextDiffusion

__version__ = "0.1.0"
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
    "Span",
    "Tags",
    "TextDiffusion",
    "Tree",
    "UsageError",
    "WordCount",
    "__version__",
]

# Loaded on first use: `import difflm` and `difflm --help` must not wait for torch.
_HOMES = {
    "Avoid": "difflm.controls",
    "Contains": "difflm.controls",
    "Edit": "difflm.controls.plan",
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
    "Draft": "difflm.generation.jobs",
    "Generation": "difflm.generation.jobs",
    "TextDiffusion": "difflm.generation.pipeline",
    "UsageError": "difflm.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'difflm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
