"""Methods, one file or folder per paper. `methods.yaml` lists them: a method's module, and with it torch, is imported
when the method is asked for.

Methods of other packages join through the entry points `difflm.methods`, or by `difflm.methods.register`."""

from difflm.methods.base import LISTED, Method, Row
from difflm.methods.base import TextSpec as TextSpec
from difflm.runtime.files import Json, read_own_table
from difflm.runtime.registry import Registry

OWN = {name: f"{__name__}.{row['class']}" for name, row in LISTED.items()}
METHODS: Registry[Method] = Registry("difflm.methods", Method, OWN)
register = METHODS.register


def list_methods() -> dict[str, Row]:
    """What is known of every method, ours without importing it."""
    plain = Row(kind="method", bound=True, unbound_by="")
    return {name: {**plain, **LISTED[name]} if name in LISTED else METHODS[name].describe() for name in METHODS}


def read_measured() -> Json:
    """What was measured of each method, and of each claim of a paper: `measured.yaml`, made from the great table."""
    return read_own_table("measured.yaml", __file__)
