"""Back to the Future: Unsupervised Backprop-based Decoding for Counterfactual and Abductive Commonsense Reasoning
(DELOREAN; Qin et al., 2020)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.controls.exact import Length
from difflm.controls.gaps import Infill
from difflm.diffusion.noise import Noise
from difflm.methods.rivals.base import Part
from difflm.methods.rivals.gaps import GapDecoder, SoftTexts


class Delorean(GapDecoder):
    """`DeloreanSearch`; the strength is its step size. Texts of a request share a search: the first one gets its best
    candidate, the second one the next best."""

    name, paper = "delorean", "Qin et al. 2020"
    takes = (Infill, Length)
    reason = "it searches for words that lead to the text after a gap."
    usual_strength = 0.03
    window = 15

    @classmethod
    def search(cls, texts: SoftTexts, noise: Noise, parts: Sequence[Part]) -> tuple[Tensor, int]:
        search, first = DeloreanSearch(step_size=parts[0][0].strength), [part.start for _, part in parts]
        one_each = SoftTexts(texts.model, texts.known[first])
        owner = [k for k, (_, part) in enumerate(parts) for _ in range(part.start, part.stop)]
        found = search.candidates(one_each)[:, owner]
        rank, rows = noise.samples % len(found), torch.arange(len(owner), device=found.device)
        return found[rank, rows], search.calls(one_each)


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
        return self.candidates(texts)[0]

    def candidates(self, texts: SoftTexts) -> Tensor:
        """The candidates of each text, [passes, B, W], the best first; those that repeat another come last."""
        logits, found, totals = self.forward(texts, None), list[Tensor](), list[Tensor]()
        for _ in range(self.passes):
            logits = self.forward(texts, self.backward(texts, logits))
            tokens = texts.choose(logits)
            with torch.no_grad():
                nats = texts.nats(texts.read(texts.one_hot(tokens)), tokens)
            seen = [(tokens == other).all(-1) for other in found]
            total = (nats * (texts.free | texts.context)).sum(-1)
            totals.append(total.masked_fill(torch.stack(seen).any(0), float("inf")) if seen else total)
            found.append(tokens)
        order = torch.stack(totals).argsort(dim=0, stable=True).unsqueeze(-1)
        return torch.stack(found).gather(0, order.expand(-1, -1, texts.known.shape[1]))

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
