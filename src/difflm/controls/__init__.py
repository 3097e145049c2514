"""Controls: what can be asked of a text. `controls.plan` binds a list of them to a model.

Controls of other packages join through the entry points `difflm.controls`, or by `difflm.controls.register`.
"""

from collections.abc import Sequence

from difflm.controls.base import Check as Check
from difflm.controls.base import Control
from difflm.controls.base import ModelInfo as ModelInfo
from difflm.controls.exact import Avoid, Contains, Length
from difflm.controls.gaps import Infill
from difflm.controls.learned import Field, Label, Span, Tags, Tree
from difflm.controls.patterns.pattern import Json, Pattern, WordCount
from difflm.errors import UsageError, suggest
from difflm.runtime.registry import Registry

EXACT: Sequence[type[Control]] = (Length, Contains, Avoid, Pattern, WordCount, Json, Infill)
OWN: Sequence[type[Control]] = (*EXACT, Field, Label, Tags, Tree, Span)

CONTROLS: Registry[Control] = Registry("difflm.controls", Control, {control.name: control for control in OWN})
register = CONTROLS.register


def parse_control(pair: str) -> Control:
    """The registered control for NAME=VALUE."""
    name, equals, value = pair.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"control {pair!r} is not of the form NAME=VALUE.")
    if broken := CONTROLS.broken.get(name):  # also where a package takes a name that is ours
        raise UsageError(broken)
    if name not in CONTROLS:
        known = [other for other in CONTROLS if CONTROLS[other] not in OWN]
        installed = f"Installed: {', '.join(known)}." if known else "No package with further controls is installed."
        raise UsageError(f"unknown control {name!r}. {suggest(name, known, quoted=False)}{installed}")
    try:
        return CONTROLS[name].parse(value)
    except (ValueError, TypeError) as error:
        raise UsageError(f"control {name}: {error}.") from None
