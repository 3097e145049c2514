"""Diffusion-NAT: the network reads its own guess before the source."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from difflm import TextDiffusion
from difflm.data.batches import Batch
from difflm.diffusion.base import StepState
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import cross_entropy
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.samplers.discrete_steps import DISCRETE_STEPS, FEW
from difflm.diffusion.samplers.loop import Steering
from difflm.methods import METHODS, TextSpec
from difflm.methods.diffusion_nat import SelfPrompting, join_texts
from difflm.models.diffusion import DiffusionModel
from tests.support.oracles import JOINT, frequencies, sample, total_variation
from tests.support.pairs import sequences, train_reversals
from tests.support.token_oracles import ExactTokens, beliefs_of

WORDS, LENGTH = 12, 6
SMALL = {"hidden": 32, "layers": 1, "encoder_layers": 1, "heads": 2, "dropout": 0.0}
TEXT = st.lists(st.integers(4, 11), max_size=6)


def build(**changes) -> DiffusionModel:
    torch.manual_seed(0)
    model = METHODS["diffusion-nat"](**{**SMALL, **changes}).build(TextSpec(WORDS, 8, 8))
    assert isinstance(model, DiffusionModel)
    model.denoiser.network.head.weight.data.normal_()  # whose zeros would make every answer the same
    return model


def equal_reversals(count: int) -> Batch:
    source = torch.randint(4, WORDS, (count, LENGTH))
    lengths = torch.full((count,), LENGTH)
    return Batch(source.flip(1), lengths, source, lengths, index=torch.arange(count))


def asked(model: DiffusionModel, batch: Batch):
    """A batch at t = ½: its state, times, mask, and its encoded sources."""
    mask, t = torch.ones_like(batch.ids, dtype=torch.bool), torch.full((len(batch.ids),), 0.5)
    u = torch.rand(batch.ids.shape, generator=torch.Generator().manual_seed(0))
    condition = model.denoiser.prepare(model.condition_of(batch, batch.ids))
    return torch.where(u < 0.5, model.process.mask_id, batch.ids), t, mask, condition


@given(texts=st.lists(st.tuples(TEXT, TEXT), min_size=1), pads=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_joined_texts_have_no_gap_whatever_their_padding(texts, pads):
    firsts, seconds = zip(*texts, strict=True)

    def pad(rows, more: int) -> Tensor:
        width = max(1, max(map(len, rows)) + more)
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])

    lengths = [torch.tensor([len(row) for row in rows]) for rows in (firsts, seconds)]
    joined, mask = join_texts(pad(firsts, pads[0]), lengths[0], pad(seconds, pads[1]), lengths[1])
    for row, there, (first, second) in zip(joined, mask, texts, strict=True):
        assert row[there].tolist() == [*first, *second] and bool(there[: len(first) + len(second)].all())


def test_with_the_exact_conditionals_of_two_sources_pairs_are_drawn_as_they_are():
    """A table for each source, 32 truncated steps: of three words, none is cut off. Of 5,000 exact draws nine cells lie
    0.028 away once in a thousand times; what is drawn at once is drawn apart, which costs I/T nats."""
    for joint in (JOINT, JOINT.T.contiguous()):
        grid = torch.linspace(1, 0, 33, dtype=torch.float64)
        tokens = sample(ExactTokens(Absorbing(3), joint), DISCRETE_STEPS["truncated"], grid, 5_000)
        assert total_variation(frequencies(tokens), joint) < 0.028 + 0.5 * 0.26 / 32 * 4


def test_a_truncated_step_draws_from_the_fifteen_likeliest_words():
    torch.manual_seed(0)
    logits, process = torch.randn(200, 4, 40), Absorbing(40)
    x, now = torch.full((200, 4), process.mask_id), torch.ones(200)
    belief = beliefs_of(process, logits, x, now)
    noise = Noise(0, torch.arange(200)).uniform(0, 4, 3)
    state = StepState(process, x, belief, process.at(now), process.at(0 * now), lambda: noise)
    words = DISCRETE_STEPS["truncated"](state)
    rank = (logits > logits.gather(-1, words.unsqueeze(-1))).sum(-1)
    assert int(rank.max()) == FEW - 1
    assert bool((logits > logits.gather(-1, DISCRETE_STEPS["ancestral"](state).unsqueeze(-1))).sum(-1).max() >= FEW)


def test_the_network_answers_of_the_source_and_twice_of_its_own_guess():
    model = build().eval()
    denoiser, (x, t, mask, condition) = model.denoiser, asked(build(), equal_reversals(4))
    belief = Denoiser.forward(denoiser, x, t, mask, condition)
    for _ in range(2):
        joined = torch.cat([belief.tokens, condition.source], 1)
        told = replace(condition, source=joined, source_mask=torch.ones_like(joined, dtype=torch.bool))
        belief = Denoiser.forward(denoiser, x, t, mask, denoiser.prepare(told))
    assert torch.allclose(denoiser(x, t, mask, condition).logits, belief.logits, atol=1e-4)


def test_in_training_every_second_text_has_a_prompt_and_guesses_have_no_gradient(monkeypatch):
    """The gradient is that of the same prompts as fixed words."""
    model, batch, prompts = build().train(), equal_reversals(4), []
    x, t, mask, condition = asked(model, batch)
    prompt = SelfPrompting.prompt

    def spy(self, condition, guess, lengths):
        prompts.append((guess, lengths))
        return prompt(self, condition, guess, lengths)

    monkeypatch.setattr(SelfPrompting, "prompt", spy)
    cross_entropy(model.denoiser(x, t, mask, condition).logits, batch.ids).sum().backward()
    ((guess, lengths),) = prompts
    assert lengths.tolist() == [6, 0, 6, 0] and not guess.is_floating_point()
    own = {name: weight.grad for name, weight in model.denoiser.named_parameters()}
    model.zero_grad()
    with torch.no_grad():
        plain = Denoiser.forward(model.denoiser, x, t, mask, condition)
    assert torch.equal(guess[::2], plain.tokens[::2])
    fixed = prompt(model.denoiser, condition, guess, lengths)
    belief = Denoiser.forward(model.denoiser, x, t, mask, fixed)
    # A text without a prompt reads its source alone.
    assert torch.allclose(belief.logits[1::2], plain.logits[1::2], atol=1e-4)
    assert not torch.allclose(belief.logits[::2], plain.logits[::2], atol=1e-2)
    cross_entropy(belief.logits, batch.ids).sum().backward()
    for name, weight in model.denoiser.named_parameters():
        assert (own[name] is None) == (weight.grad is None)
        assert weight.grad is None or torch.allclose(own[name], weight.grad, atol=1e-5), name


def test_calls_count_all_three_answers():
    model, batch = build().eval(), equal_reversals(4)
    steering = Steering(source=batch.source, source_mask=torch.ones_like(batch.source, dtype=torch.bool))
    noise, sampling = Noise(0, torch.arange(4)), model.sampling.change({"steps": 5})
    with torch.no_grad():
        *_, last = model.stream(noise, batch.lengths, LENGTH, sampling, steering)
    assert model.calls(sampling, LENGTH) == 15 and last.calls.tolist() == [15] * 4


@pytest.mark.long
def test_unseen_sequences_are_reversed_and_prompts_do_no_harm(tmp_path):
    """Cross-entropy of masked words, half of them masked: no more with prompts than without."""
    sizes = {**SMALL, "hidden": 64, "layers": 2, "encoder_layers": 2}
    lm = TextDiffusion.from_pretrained(train_reversals(tmp_path, method="diffusion-nat", model=sizes, steps=160))
    unseen = sequences(32, 1)
    made = lm.generate(source=[" ".join(words) for words in unseen], steps=6)
    assert sum(text.text == " ".join(reversed(words)) for text, words in zip(made, unseen, strict=True)) >= 0.85 * 32
    source = torch.tensor(lm.encode([" ".join(words) for words in sequences(128, 2)]))
    lengths, model = torch.full((128,), LENGTH), lm.model.eval()
    batch = Batch(source.flip(1), lengths, source, lengths)
    with torch.no_grad():
        x, t, mask, condition = asked(model, batch)
        answers = model.denoiser(x, t, mask, condition), Denoiser.forward(model.denoiser, x, t, mask, condition)
    masked = x == model.process.mask_id
    told, plain = (cross_entropy(belief.logits, batch.ids)[masked].mean().item() for belief in answers)
    assert told <= 1.1 * plain < 0.1 * 2.08  # log 8: it reads the source
