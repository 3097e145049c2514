"""Reading the lengths of texts off their sources by a captured pass."""

from functools import partial

from torch import Tensor, nn

from difflm.diffusion.denoiser import Denoiser
from difflm.fast.cuda_graphs import CapturedCalls
from difflm.models.base import LanguageModel
from difflm.models.length_predictor import LengthPredictor


class CapturedLengths:
    """`read_lengths` of a length policy, captured for the denoiser that was asked last if its network allows it."""

    def __init__(self, policy: LengthPredictor) -> None:
        self.policy = policy
        self.reader: tuple[Denoiser, CapturedCalls] | None = None

    def __call__(self, denoiser: Denoiser, source: Tensor, mask: Tensor) -> Tensor:
        read = partial(LengthPredictor.read_lengths, self.policy, denoiser)
        if not denoiser.network.capturable:
            return read(source, mask)
        found = self.reader  # other threads may replace it
        if found is None or found[0] is not denoiser:
            found = denoiser, CapturedCalls(read, nn.ModuleList((denoiser, self.policy)))
            self.reader = found
        return found[1](source, mask)

    def clear_recorded(self) -> None:
        found, self.reader = self.reader, None
        if found is not None:
            found[1].clear_recorded()

    def __getstate__(self) -> dict[str, object]:
        """What copies and pickles have: not what was captured, which would bring the denoiser with it."""
        return {**self.__dict__, "reader": None}


def capture_lengths(model: LanguageModel) -> CapturedLengths | None:
    """Let the length policy of a model read sources by captured passes; None if it reads none."""
    policy = model.lengths if model.capabilities.denoises else None
    if not isinstance(policy, LengthPredictor):
        return None
    if not isinstance(policy.read_lengths, CapturedLengths):
        policy.read_lengths = CapturedLengths(policy)  # type: ignore[method-assign]
    return policy.read_lengths
