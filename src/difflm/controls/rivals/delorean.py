"""Back to the Future: Unsupervised Backprop-based Decoding for Counterfactual and Abductive Commonsense Reasoning
(DELOREAN; Qin et al., 2020)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.controls.exact import Infill, Length
from difflm.controls.rivals.base import Part
from difflm.controls.rivals.gaps import GapDecoder
from difflm.controls.rivals.soft_texts import SoftTexts
from difflm.diffusion.noise import Noise


class Delorean(GapDecoder):
    """`DeloreanSearch`; the strength is its step size."""

    name, paper = "delorean", "Qin et al. 2020"
    takes = (Infill, Length)
    reason = "it looks for words that lead to those behind a gap."
    usual_strength = 0.03
    window = 15

    @classmethod
    def search(cls, texts: SoftTexts, noise: Noise, parts: Sequence[Part]) -> tuple[Tensor, int]:
        search = DeloreanSearch(step_size=parts[0][0].strength)
        return search.decode(texts), search.calls(texts)


@dataclass(frozen=True)
class DeloreanSearch:
    """Fills gaps between given words with a left-to-right model that was never trained to. Each pass moves the logits
    ỹ of the gaps towards the words behind them (backward), and mixes them with those that follow from the words before
    (forward). The gaps of each pass are a candidate.

    The paper ranks candidates by BERT's next-sentence scores; here the model itself says how likely a candidate and
    the words behind it are."""

    passes: int = 20
    iterations: int = 20  # gradient steps of a backward pass
    step_size: float = 0.03  # η, in units of ‖ỹ‖; the paper's 3e-4 is for GPT-2, where ỹ has 50,257 logits a word
    forward_weight: float = 0.88  # γ
    temperature: float = 0.1  # of the words that a forward pass reads

    def calls(self, texts: SoftTexts) -> int:
        """Network calls of a search."""
        return texts.width + self.passes * (self.iterations + texts.width + 1)

    def decode(self, texts: SoftTexts) -> Tensor:
        """The best candidate of each text, [B, W]."""
        logits, best = self.forward(texts, None), texts.known
        best_nats = torch.full(best.shape[:1], float("inf"), device=best.device)
        for _ in range(self.passes):
            logits = self.forward(texts, self.backward(texts, logits))
            tokens = texts.choose(logits)
            with torch.no_grad():
                nats = texts.nats(texts.read(texts.one_hot(tokens)), tokens)
            total = (nats * (texts.free | texts.context)).sum(-1)
            best = torch.where((total < best_nats).unsqueeze(1), tokens, best)
            best_nats = torch.minimum(total, best_nats)
        return best

    def forward(self, texts: SoftTexts, backward: Tensor | None) -> Tensor:
        """ỹ_n = γ · LM(x, ỹ_<n) + (1 − γ) · ỹ_nᵇ, [B, W, V]; without backward logits γ is 1."""
        mixed = torch.zeros(*texts.known.shape, len(texts.impossible), device=texts.known.device)

        def decide(i: int, logits: Tensor) -> Tensor:
            if backward is not None:
                logits = self.forward_weight * logits + (1 - self.forward_weight) * backward[:, i]
            mixed[:, i] = torch.where(texts.free[:, i : i + 1], logits, 0)
            return (texts.possible(logits) / self.temperature).softmax(-1)

        texts.roll_out(decide)
        return mixed

    @torch.enable_grad()
    def backward(self, texts: SoftTexts, logits: Tensor) -> Tensor:
        """ỹ ← ỹ − η ‖ỹ‖ g / ‖g‖ with g = ∇ −log p(z | x, softmax ỹ); norms are of each text."""
        for _ in range(self.iterations):
            logits = logits.detach().requires_grad_()
            loss = texts.context_nats(texts.read(texts.fill(texts.possible(logits).softmax(-1))))
            (g,) = torch.autograd.grad(loss.sum(), logits)
            size, norm = (x.detach().flatten(1).norm(dim=1).view(-1, 1, 1) for x in (logits, g))
            logits = logits - self.step_size * size * g / norm.clamp(min=torch.finfo(g.dtype).tiny)
        return logits.detach()
