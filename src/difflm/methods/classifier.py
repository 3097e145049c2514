"""A classifier of noisy texts that guides a frozen model (Dhariwal & Nichol, 2021; for text Li et al., 2022)."""

from difflm.methods.base import Sized


class GuidingClassifier(Sized):
    name = "classifier"

    guides: str = "e2e"
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    low_noise: float = 2.0  # half of the texts are learned from at the cleanest ½^this of all times
