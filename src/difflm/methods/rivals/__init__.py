"""Rivals of diffusion: decoders by which a left-to-right model takes the same controls.

Decoders of other packages join through the entry points `difflm.decoders`, or by `difflm.methods.rivals.register`."""

from collections.abc import Sequence

from difflm.controls.base import Control
from difflm.controls.gaps import Edit
from difflm.controls.guidance import GuidanceSettings
from difflm.errors import UsageError, suggest
from difflm.methods.rivals.base import ControlDecoder
from difflm.methods.rivals.cold import Cold
from difflm.methods.rivals.delorean import Delorean
from difflm.methods.rivals.fine_tuning import FineTuning
from difflm.methods.rivals.fudge import Fudge
from difflm.methods.rivals.gaps import LeftOnly
from difflm.methods.rivals.masked_lm_gibbs import MaskedLmGibbs
from difflm.methods.rivals.pplm import Pplm
from difflm.models.base import LanguageModel
from difflm.runtime.registry import Registry

OWN: Sequence[type[ControlDecoder]] = (Fudge, Pplm, Delorean, Cold, LeftOnly, FineTuning, MaskedLmGibbs)
DECODERS: Registry[ControlDecoder] = Registry("difflm.decoders", ControlDecoder, {one.name: one for one in OWN})
register = DECODERS.register


def find_decoder(name: str) -> type[ControlDecoder]:
    if name not in DECODERS:
        hint = suggest(name, DECODERS, quoted=False)
        raise UsageError(f"unknown --method {name!r}. {hint}Known: {', '.join(DECODERS)}.")
    return DECODERS[name]


def choose_decoder(
    name: str,
    model: LanguageModel,
    method: str,
    controls: Sequence[Control],
    edit: Edit | None,
    guidance: GuidanceSettings | None,
) -> type[ControlDecoder]:
    """Return the decoder of this name, if it suits the request and the model, which was trained by a `method`."""
    found = find_decoder(name)
    if not isinstance(model, found.decodes):
        raise UsageError(f"{name} decodes {found.family}; this one is {method}.")
    if edit is not None:
        raise UsageError(f"{name} cannot edit: it starts only from the words around a gap.")
    if guidance is not None and guidance.climb == "sign":
        raise UsageError(f"guidance `original` moves word vectors, which {name} does not have: give a number.")
    if not controls:
        raise UsageError(f"{name} is a way to meet constraints: give one, such as --field food=Japanese.")
    return found


__all__ = ["DECODERS", "ControlDecoder", "choose_decoder", "find_decoder", "register"]
