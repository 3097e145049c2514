"""COLD Decoding: Energy-based Constrained Text Generation with Langevin Dynamics (Qin et al., 2022)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.controls.exact import Contains, Length
from difflm.controls.gaps import Infill
from difflm.diffusion import FREE, Noise
from difflm.methods.rivals.base import Part
from difflm.methods.rivals.gaps import IMPOSSIBLE, GapDecoder, SoftTexts

LANGEVIN = 5  # the noise stream of the dynamics
# The noise's standard deviation from these shares of the steps on (released code: 1, 0.5 … of 2,000 iterations).
NOISE = ((0.0, 1.0), (0.025, 0.5), (0.25, 0.1), (0.5, 0.05), (0.75, 0.01))


class Cold(GapDecoder):
    """`ColdSearch` from left to right only; the guidance is the weight of constraints. Phrases are encouraged by their
    energy and not enforced."""

    name, paper = "cold", "Qin et al. 2022"
    takes = (Infill, Length, Contains)
    reason = "its energies are of gaps, lengths and words."
    usual_strength = 0.5
    window = 10

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.wanted, self.phrases = self.phrases, []

    @classmethod
    def search(cls, texts: SoftTexts, noise: Noise, parts: Sequence[Part]) -> tuple[Tensor, int]:
        search = ColdSearch(context_weight=parts[0][0].strength, phrase_weight=parts[0][0].strength)
        asked = [plan.wanted for plan, part in parts for _ in range(part.start, part.stop)]
        return search.decode(texts, noise, pad_phrases(asked, texts.known.device)), search.calls(texts)


def pad_phrases(rows: Sequence[Sequence[Sequence[int]]], device: torch.device) -> Tensor | None:
    """Phrases of each text as [B, M, n], padded with FREE; None if there are none."""
    most, size = max(map(len, rows)), max((len(phrase) for row in rows for phrase in row), default=0)
    filled = [[[*phrase, *[FREE] * (size - len(phrase))] for phrase in row] for row in rows]
    empty = [[FREE] * size]
    return torch.tensor([row + empty * (most - len(row)) for row in filled], device=device) if most else None


@dataclass(frozen=True)
class ColdSearch:
    """The words of the gaps are logits ỹ that descend an energy, with decreasing noise: fluency, the words behind a
    gap, and phrases that shall appear in it.

    The released code moves ỹ by Adam, which does not sample from exp(−E) at any step size; this is the paper's
    Langevin step. Fluency from right to left, which needs a model of reversed texts, is left out."""

    steps: int = 200
    step_size: float = 1.0  # η
    forward_weight: float = 0.6  # λ of fluency from left to right
    context_weight: float = 0.5
    phrase_weight: float = 0.5
    top_k: int = 5  # words among which the final ones are chosen
    noise_scale: float = 1.0

    def calls(self, texts: SoftTexts) -> int:
        """The network calls of a search."""
        return 2 * texts.width + self.steps

    def decode(self, texts: SoftTexts, noise: Noise, phrases: Tensor | None = None) -> Tensor:
        """The texts that were found, [B, W]. `phrases` [B, M, n] are ids that should appear in the gaps of each text,
        padded with FREE."""
        y = roll_out_greedily(texts)
        deviations = [[s for share, s in NOISE if share <= n / self.steps][-1] for n in range(self.steps)]
        noises = (
            s * self.noise_scale * noise.normal(n, *y.shape[1:], stream=LANGEVIN) for n, s in enumerate(deviations)
        )
        y = run_langevin(lambda y: self.energy(texts, y, phrases), y, self.step_size, noises)
        return self.discretise(texts, y, phrases)

    def energy(self, texts: SoftTexts, y: Tensor, phrases: Tensor | None = None) -> Tensor:
        """E(ỹ) of each text, [B]."""
        answers = texts.read(texts.fill(straight_through(texts, y)))
        total = self.forward_weight * fluency_energy(texts, answers, y)
        total = total + self.context_weight * texts.context_nats(answers)
        if phrases is not None:
            total = total + self.phrase_weight * phrase_energy(texts, y, phrases)
        return total

    def discretise(self, texts: SoftTexts, y: Tensor, phrases: Tensor | None = None) -> Tensor:
        """The words with the largest ỹ among the k that the model finds likeliest after those before, and words of
        phrases; [B, W]."""
        tokens, wanted = texts.known.clone(), torch.zeros_like(y[:, 0], dtype=torch.bool)
        if phrases is not None:
            wanted = texts.one_hot(phrases.flatten(1)).sum(1) > 0

        def decide(i: int, logits: Tensor) -> Tensor:
            best = texts.possible(logits).topk(min(self.top_k, logits.shape[-1])).indices
            allowed = wanted.scatter(1, best, True)
            chosen = texts.possible(y[:, i]).masked_fill(~allowed, 2 * IMPOSSIBLE).argmax(-1)
            tokens[:, i] = torch.where(texts.free[:, i], chosen, texts.known[:, i])
            return texts.one_hot(chosen)

        texts.roll_out(decide)
        return tokens


def roll_out_greedily(texts: SoftTexts) -> Tensor:
    """The model's logits of the gaps, each word the likeliest after those before, [B, W, V]: where ỹ begins."""
    found = torch.zeros(*texts.known.shape, len(texts.impossible), device=texts.known.device)

    def decide(i: int, logits: Tensor) -> Tensor:
        found[:, i] = logits
        return texts.one_hot(texts.possible(logits).argmax(-1))

    texts.roll_out(decide)
    return found


@torch.enable_grad()
def run_langevin(energy: Callable[[Tensor], Tensor], y: Tensor, step_size: float, noises: Iterable[Tensor]) -> Tensor:
    """ỹ ← ỹ − η ∇E(ỹ) + ε for every ε. If its variance is 2η, ỹ is drawn from exp(−E) as η → 0."""
    for noise in noises:
        y = y.detach().requires_grad_()
        (g,) = torch.autograd.grad(energy(y).sum(), y)
        y = y - step_size * g + noise
    return y.detach()


def straight_through(texts: SoftTexts, y: Tensor) -> Tensor:
    """The likeliest words, with the gradient of softmax ỹ. (That of softmax(ỹ / 0.001), which the released code has,
    is 0 but where two words are nearly as likely.)"""
    soft = texts.possible(y).softmax(-1)
    return texts.one_hot(soft.argmax(-1)) + soft - soft.detach()


def fluency_energy(texts: SoftTexts, answers: Tensor, y: Tensor) -> Tensor:
    """f_LM = −Σₜ Σᵥ p_LM(v | ỹ_<t) log softmax ỹₜ(v) over the gaps, [B]. The model's answer is the target, and no
    gradient reaches it."""
    target = texts.possible(answers).softmax(-1).detach()
    terms = -(target * texts.possible(y).log_softmax(-1)).sum(-1)
    return (terms * texts.free).sum(-1)


def phrase_energy(texts: SoftTexts, y: Tensor, phrases: Tensor) -> Tensor:
    """f_sim = −Σ log(expected number of times that a phrase appears in the gaps), [B]: the n-gram match of Liu et al.
    (2022) for one n-gram a phrase, without its Gumbel noise."""
    log_q = texts.possible(y).log_softmax(-1).masked_fill(~texts.free.unsqueeze(-1), IMPOSSIBLE)
    total = torch.zeros(*y.shape[:2], phrases.shape[1], device=y.device)
    for k, ids in enumerate(phrases.unbind(-1)):  # [B, M]
        here = log_q.gather(-1, ids.clamp(min=0).unsqueeze(1).expand(-1, y.shape[1], -1))
        here = F.pad(here[:, k:], (0, 0, 0, k), value=IMPOSSIBLE)
        total = total + torch.where((ids == FREE).unsqueeze(1), 0.0, here)
    return -(total.logsumexp(1) * (phrases[..., 0] != FREE)).sum(-1)
