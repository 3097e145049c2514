"""Controls: what can be asked of a text. `controls.plan` binds a list of them to a model."""

from difflm.controls.base import Check, Control, ModelInfo
from difflm.controls.exact import Avoid, Infill, Length
from difflm.controls.learned import Field, Label, Tags
from difflm.controls.phrases import Contains
from difflm.controls.syntax import Span, Tree

__all__ = [
    "Avoid",
    "Check",
    "Contains",
    "Control",
    "Field",
    "Infill",
    "Label",
    "Length",
    "ModelInfo",
    "Span",
    "Tags",
    "Tree",
]
