"""Back to the Future: Unsupervised Backprop-based Decoding for Counterfactual and Abductive Commonsense Reasoning
(DELOREAN; Qin et al., 2020)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.controls.soft_texts import SoftTexts
from difflm.diffusion.samplers.loop import Frame


@dataclass(frozen=True)
class Delorean:
    """Fills gaps between given words with a left-to-right model that was never trained to. Each pass moves the logits
    ỹ of the gaps towards the words behind them (backward), and mixes them with those that follow from the words before
    (forward). The gaps of each pass are a candidate.

    The paper ranks candidates by BERT's next-sentence scores; here the model itself says how likely a candidate and
    the words behind it are."""

    passes: int = 20
    iterations: int = 20  # gradient steps of a backward pass
    step_size: float = 0.01  # η, in units of ‖ỹ‖; the paper's 3e-4 is for GPT-2, where ỹ has 50,257 logits a word
    forward_weight: float = 0.88  # γ
    temperature: float = 0.1  # of the words that a forward pass reads

    def decode(self, texts: SoftTexts) -> Iterator[Frame]:
        """The best candidate so far after every pass."""
        logits = self.forward(texts, None)
        best, best_nats = texts.known, torch.full(texts.known.shape[:1], float("inf"), device=texts.known.device)
        words_nats = torch.zeros_like(texts.known, dtype=torch.float)
        for i in range(self.passes):
            logits = self.forward(texts, self.backward(texts, logits))
            tokens = texts.choose(logits)
            with torch.no_grad():
                nats = texts.nats(texts.read(texts.one_hot(tokens)), tokens)
            total = (nats * (texts.free | texts.context)).sum(-1)
            better = (total < best_nats).unsqueeze(1)
            best, best_nats = torch.where(better, tokens, best), torch.minimum(total, best_nats)
            words_nats = torch.where(better, nats, words_nats)
            yield texts.frame(i, self.passes, best, words_nats)

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
