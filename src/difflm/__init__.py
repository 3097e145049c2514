"""Diffusion language models: text that forms all at once and can be steered while it does."""

from importlib import import_module
from typing import TYPE_CHECKING

from difflm.version import __version__ as __version__

if TYPE_CHECKING:
    from difflm.api import Run as Run
    from difflm.api import evaluate as evaluate
    from difflm.api import train as train
    from difflm.controls import Avoid as Avoid
    from difflm.controls import Contains as Contains
    from difflm.controls import Field as Field
    from difflm.controls import Infill as Infill
    from difflm.controls import Json as Json
    from difflm.controls import Label as Label
    from difflm.controls import Length as Length
    from difflm.controls import Pattern as Pattern
    from difflm.controls import Span as Span
    from difflm.controls import Tags as Tags
    from difflm.controls import Tree as Tree
    from difflm.controls import WordCount as WordCount
    from difflm.controls.gaps import Edit as Edit
    from difflm.errors import DifflmError as DifflmError
    from difflm.errors import UsageError as UsageError
    from difflm.evaluation.reports import Report as Report
    from difflm.generation.pipeline import TextDiffusion as TextDiffusion
    from difflm.generation.texts import Generation as Generation
    from difflm.generation.texts import Texts as Texts
    from difflm.generation.texts import TokenBelief as TokenBelief
    from difflm.player.frames import Draft as Draft

# Loaded on first use: `import difflm` and `difflm --help` must not wait for torch.
_NAMES = {
    "difflm.api": "Run evaluate train",
    "difflm.controls": "Avoid Contains Field Infill Json Label Length Pattern Span Tags Tree WordCount",
    "difflm.controls.gaps": "Edit",
    "difflm.errors": "DifflmError UsageError",
    "difflm.evaluation.reports": "Report",
    "difflm.generation.pipeline": "TextDiffusion",
    "difflm.generation.texts": "Generation Texts TokenBelief",
    "difflm.player.frames": "Draft",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'difflm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
