"""A network, its codec and its process, answering one question: what is the clean text behind x_t?"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from difflm.diffusion.belief import Belief
from difflm.diffusion.codecs import Embedding
from difflm.diffusion.processes import Gaussian, expand_levels
from difflm.diffusion.processes.gaussian import Prediction


class OneDnn:
    """Torch's matrix products on a CPU. Asked for bfloat16 on an ARM processor without it, torch tries oneDNN, fails,
    and turns oneDNN off for the rest of the process: from then on float32, too, rounds otherwise. So it is off while
    anybody computes in bfloat16 there, and on again afterwards."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, True

    @contextmanager
    def avoided(self) -> Iterator[None]:
        with self.lock:
            self.before = self.before if self.inside else torch._C._get_mkldnn_enabled()
            self.inside += 1
            torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    torch._C._set_mkldnn_enabled(self.before)


ONE_DNN = OneDnn()


@contextmanager
def emulated(dtype: torch.dtype) -> Iterator[None]:
    with ONE_DNN.avoided(), torch.autocast("cpu", dtype=dtype):
        yield


def lacks_bfloat16() -> bool:
    """Whether oneDNN has no bfloat16 on this processor."""
    return torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast to `dtype`; `None` leaves things as they are, which in training may be autocast already."""
    if dtype is None:
        return nullcontext()
    if device.type == "cpu" and dtype is torch.bfloat16 and lacks_bfloat16():
        return emulated(dtype)
    return torch.autocast(device.type, dtype=dtype)


def cast_linears(network: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The same network with its matrices in `dtype`, so that autocast need not turn them at every call."""
    for part in network.modules():
        if isinstance(part, nn.Linear):
            part.to(dtype=dtype)
    return network


class Denoiser(nn.Module):
    """`belief = denoiser(x_t, t, mask, previous)`; t is [B] or [B, L].

    `predicts` names the network's answer. For "logits" the clean state is E[x_0] under them, and with `evidence` the
    likelihood of x_t at each position, known in closed form, is added to what the network says from context
    (Gulrajani & Hashimoto, 2023): the network need not learn to compare vectors with its own table.
    `step` is the s = t − step of the posterior mean. `precision` is the width of the network's own arithmetic; what
    stands around it stays in float32. `certain_below` is the time before which bounds trust the nearest word.
    """

    def __init__(
        self,
        network: nn.Module,
        codec: Embedding,
        process: Gaussian,
        predicts: Prediction,
        self_conditioning: bool = False,
        evidence: bool = False,
        step: float = 1 / 2000,
        certain_below: float = 0.0,
    ) -> None:
        super().__init__()
        self.network, self.codec, self.process = network, codec, process
        self.predicts, self.self_conditioning, self.evidence, self.step = predicts, self_conditioning, evidence, step
        self.certain_below = certain_below
        self.precision: torch.dtype | None = None

    def forward(self, x: Tensor, t: Tensor, mask: Tensor | None = None, previous: Tensor | None = None) -> Belief:
        with torch.autocast(x.device.type, enabled=False):
            evidence = self.seen(x, t) if self.evidence else None
            inputs = self.inputs(x, t, previous, evidence)
        with autocast_to(x.device, self.precision):
            out = self.network(inputs, t, mask).float()
        with torch.autocast(x.device.type, enabled=False):
            return self.tokens_belief(out, evidence) if self.predicts == "logits" else self.state_belief(out, x, t)

    def seen(self, x: Tensor, t: Tensor) -> Tensor:
        """What each position's own noisy vector says about its word, [B, L, V]."""
        alpha, sigma = self.word_noise(t)
        return self.codec.evidence(x, expand_levels(alpha, x), expand_levels(sigma, x))

    def word_noise(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """α and σ of q(x_t | w): the spread of x_0 around its word adds to the process's own."""
        alpha, sigma = self.process.alpha(t), self.process.sigma(t)
        spread = self.codec.x0_std
        return alpha, (sigma**2 + (alpha * spread) ** 2).sqrt() if spread else sigma

    def inputs(self, x: Tensor, t: Tensor, previous: Tensor | None, evidence: Tensor | None) -> Tensor:
        """The state at unit scale, beside the last estimate of the clean state (zeros where there is none) and the
        mean word of the evidence, which is the best guess without context."""
        parts = [x / expand_levels(self.process.prior_std(t), x)]
        if self.self_conditioning:
            parts.append(torch.zeros_like(x) if previous is None else previous)
        if evidence is not None:
            parts.append(self.codec.expectation(evidence + self.codec.bias))
        return torch.cat(parts, dim=-1)

    @property
    def view_dim(self) -> int:
        return 2 * self.codec.dim

    def view(self, x: Tensor, t: Tensor) -> Tensor:
        """What a classifier sees of x_t: the state at unit scale, and the mean word of its evidence."""
        state = x / expand_levels(self.process.prior_std(t), x)
        return torch.cat([state, self.codec.expectation(self.seen(x, t) + self.codec.bias)], -1)

    def levels(self) -> list[float]:
        """Some numbers that tell one curve of noise from another."""
        return self.process.log_snr(torch.linspace(0.1, 0.9, 5)).tolist()

    def tokens_belief(self, logits: Tensor, evidence: Tensor | None) -> Belief:
        if evidence is not None:
            logits = logits + evidence
        return Belief(self.codec.expectation(logits), logits, evidence=evidence, tokenwise=True)

    def state_belief(self, out: Tensor, x: Tensor, t: Tensor) -> Belief:
        clean = self.process.clean_from(self.predicts, out, x, t, self.earlier(t))
        return Belief(clean, self.codec.readout(clean))

    def earlier(self, t: Tensor) -> Tensor:
        return (t - self.step).clamp(min=0)

    def two_passes(self, x: Tensor, t: Tensor, mask: Tensor | None) -> Belief:
        """A belief that is a function of x_t alone: the first answer is the second's `previous`."""
        belief = cast(Belief, self(x, t, mask))
        return cast(Belief, self(x, t, mask, belief.clean)) if self.self_conditioning else belief
