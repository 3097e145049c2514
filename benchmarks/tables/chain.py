"""Samplers of masks on a Markov chain with an exact denoiser: what remains wrong is the sampler's own error.

    python -m benchmarks.tables.chain                 # exact denoiser and exact quality of words
    python -m benchmarks.tables.chain --trained      # a small mdlm, and its quality head, trained on texts of the chain

For each sampler and number of steps: the share of transitions that the chain does not have, and the total variation
distance between the frequencies of transitions and their true probabilities (the idea is that of "Is your diffusion
sampler actually correct?", arXiv 2602.19619). The last row of each table is what as many true texts have.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from difflm.data.batches import Batch
from difflm.data.tokenizers import SPECIALS
from difflm.diffusion.base import Belief, Levels
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.samplers.discrete_steps import DISCRETE_STEPS
from difflm.diffusion.samplers.loop import Sampler, SamplerInputs
from difflm.methods import METHODS, TextSpec
from difflm.models.base import LanguageModel, Sampling

WORDS, LENGTH = 6, 24
SAMPLERS = ("ancestral", "first-hitting", "confidence", "remask", "prism")
STEPS = (4, 8, 16, 32)
SMALL = {"hidden": 64, "layers": 2, "heads": 2, "dropout": 0.0}


class Chain:
    """A chain in which about half of all transitions never happen, and its exact beliefs about masked texts."""

    def __init__(self, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        weights, happens = (torch.rand(WORDS, WORDS, generator=draw, dtype=torch.float64) for _ in range(2))
        rows = torch.where(happens < 0.5, 0.0, weights**3) + 0.5 * torch.eye(WORDS, dtype=torch.float64).roll(1, 1)
        self.transition = rows / rows.sum(1, keepdim=True)
        self.powers = torch.stack([torch.linalg.matrix_power(self.transition, k) for k in range(LENGTH + 1)])
        self.start = torch.linalg.matrix_power(self.transition, 1000)[0]
        self.process = Absorbing(WORDS)

    def draw(self, texts: int, seed: int = 0) -> Tensor:
        """Texts of the chain, [texts, LENGTH]."""
        random = torch.Generator().manual_seed(seed)
        words = [torch.multinomial(self.start, texts, replacement=True, generator=random)]
        for _ in range(LENGTH - 1):
            words.append(torch.multinomial(self.transition[words[-1]], 1, generator=random).squeeze(1))
        return torch.stack(words, 1)

    def leave_one_out(self, x: Tensor) -> Tensor:
        """p(word | all other positions), [B, L, words], from the nearest words on both sides."""
        here, place = x != WORDS, torch.arange(LENGTH).expand(x.shape)
        left = torch.where(here, place, -1).cummax(1).values.roll(1, 1)
        right = torch.where(here, place, LENGTH).flip(1).cummin(1).values.flip(1).roll(-1, 1)
        left[:, 0], right[:, -1] = -1, LENGTH
        words = [x.gather(1, side.clamp(0, LENGTH - 1)).clamp(max=WORDS - 1) for side in (left, right)]
        before = torch.where((left >= 0).unsqueeze(-1), self.powers[place - left.clamp(min=0), words[0]], self.start)
        after = self.powers[right - place].gather(-1, words[1][..., None, None].expand(-1, -1, WORDS, 1)).squeeze(-1)
        shares = before * torch.where((right < LENGTH).unsqueeze(-1), after, 1.0) + 1e-9  # neighbours may be impossible
        return shares / shares.sum(-1, keepdim=True)

    def believe(self, x: Tensor, level: Levels, previous: Tensor | None) -> Belief:
        shares = self.leave_one_out(x)
        logits, evidence = self.process.posterior_logits(shares.log(), x, level.t)
        right = shares.gather(-1, x.clamp(max=WORDS - 1).unsqueeze(-1)).squeeze(-1)
        return Belief(logits, evidence, state=shares, quality=right.logit(1e-9))

    def write(self, sampler: str, steps: int, texts: int) -> Tensor:
        """Texts by the exact denoiser."""
        grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64).unsqueeze(1).expand(-1, texts)
        mask, noise = torch.ones(texts, LENGTH, dtype=torch.bool), Noise(0, torch.arange(texts))
        rule = Sampler(DISCRETE_STEPS[sampler])
        *_, last = SamplerInputs(self.believe, self.process, grid, rule, noise, mask, (LENGTH,)).frames()
        return last.tokens

    def errors(self, texts: Tensor) -> tuple[float, float]:
        """The share of transitions that never happen, and the total variation distance of all."""
        pairs = texts[:, :-1] * WORDS + texts[:, 1:]
        found = torch.bincount(pairs.flatten(), minlength=WORDS**2).double().view(WORDS, WORDS) / pairs.numel()
        true = self.start.unsqueeze(1) * self.transition
        return float(found[self.transition == 0].sum()), float((found - true).abs().sum() / 2)


def train(chain: Chain, updates: int = 600, batch: int = 64) -> LanguageModel:
    """An mdlm, and then the same with a quality head, each trained for so many updates."""
    texts, size = chain.draw(20_000, seed=1) + len(SPECIALS), len(SPECIALS) + WORDS
    weights: dict[str, Tensor] = {}
    for quality_head in (False, True):
        torch.manual_seed(0)
        model = METHODS["mdlm"](**{**SMALL, "quality_head": quality_head}).build(TextSpec(size, LENGTH))
        model.observe(torch.eye(LENGTH + 1)[-1].long(), torch.bincount(texts.flatten(), minlength=size))
        model.load_state_dict({**model.state_dict(), **weights})
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
        for update in range(updates):
            index = torch.arange(update * batch, (update + 1) * batch)
            losses = model(Batch(texts[index % len(texts)], torch.full((batch,), LENGTH), index=index))
            optimizer.zero_grad()
            (losses.total / losses.count).backward()
            optimizer.step()
            schedule.step()
        print({name: f"{float(value.detach() / losses.count):.3f}" for name, value in losses.terms.items()}, flush=True)
        weights = model.state_dict()
    return model.eval()


@torch.no_grad()
def write_by(model: LanguageModel, sampler: str, steps: int, texts: int) -> Tensor:
    lengths = torch.full((texts,), LENGTH)
    *_, last = model.stream(Noise(0, torch.arange(texts)), lengths, LENGTH, Sampling(sampler, steps=steps))
    return last.tokens - len(SPECIALS)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", action="store_true")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--updates", type=int, default=600)
    asked = parser.parse_args(argv)
    chain = Chain()
    write: Callable[[str, int, int], Tensor] = chain.write
    if asked.trained:
        model = train(chain, asked.updates)
        write = lambda *how: write_by(model, *how)  # noqa: E731
    print("| sampler | " + " | ".join(f"{steps} steps" for steps in STEPS) + " |")
    print("|---" * (len(STEPS) + 1) + "|")
    for sampler in SAMPLERS:
        found = [chain.errors(write(sampler, steps, asked.texts)) for steps in STEPS]
        print(f"| `{sampler}` | " + " | ".join(f"{bad:.2%}, {far:.3f}" for bad, far in found) + " |", flush=True)
    bad, far = chain.errors(chain.draw(asked.texts))
    print(f"| true texts | {bad:.2%}, {far:.3f}" + " |" * len(STEPS))


if __name__ == "__main__":
    main()
