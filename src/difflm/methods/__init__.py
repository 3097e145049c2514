"""One file a paper. Listing methods imports no torch: a method's parts are imported when it is built."""

from difflm.methods.autoregressive import AutoregressiveTwin
from difflm.methods.base import Method
from difflm.methods.classifier import GuidingClassifier
from difflm.methods.difflm import DiffLM
from difflm.methods.diffusion_lm import DiffusionLM
from difflm.methods.mdlm import Mdlm

METHODS: dict[str, type[Method]] = {
    m.name: m for m in (DiffusionLM, DiffLM, Mdlm, AutoregressiveTwin, GuidingClassifier)
}

__all__ = ["METHODS", "AutoregressiveTwin", "DiffLM", "DiffusionLM", "GuidingClassifier", "Mdlm", "Method"]
