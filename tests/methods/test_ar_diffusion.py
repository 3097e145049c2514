"""AR-Diffusion: times of two levels, attention that knows the noise of what it reads, and texts from left to right."""

import json
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from difflm import TextDiffusion
from difflm.data.batches import Batch
from difflm.diffusion.base import Belief, Levels
from difflm.diffusion.bounds import ScoredTexts
from difflm.diffusion.codecs import FixedEmbedding
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Cosine, LogSnrShift, Sqrt
from difflm.diffusion.samplers.loop import Clamp, Denoise, Frame, Sampler, Steering
from difflm.diffusion.samplers.steps import STEPS
from difflm.diffusion.timesteps import StepSpan
from difflm.fast.inference import Inference
from difflm.methods import METHODS, TextSpec
from difflm.methods.ar_diffusion import TimeAttentionDecoder, TimeContext, TwoLevelBound, TwoLevelTimes
from difflm.models.diffusion import DiffusionModel, TrainedTexts
from difflm.networks import Sizes, SourceSizes
from tests.support.oracles import ENTROPY, JOINT, ExactDenoiser, denoise, sphere, word_vectors
from tests.support.tiny import train_quietly

SMALL = {"embedding_dim": 16, "hidden": 64, "layers": 2, "encoder_layers": 1, "heads": 2, "dropout": 0.0}

# -- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "levels"),
    [
        (0, [0, 0, 0, 0, 0]),
        (4, [0, 200, 400, 600, 800]),
        (1000, [996, 1096, 1197, 1297, 1397]),
        (2004, [1999, 1999, 1999, 1999, 1999]),
    ],
)
def test_levels_are_those_of_the_paper(index, levels):
    """Of a canvas of 5 positions and 2,000 diffusion steps."""
    times = TwoLevelTimes(5, 2000)
    assert times.levels_of(torch.tensor(index), 5).tolist() == levels
    assert times.last == 2004


@given(canvas=st.integers(1, 64), steps=st.integers(2, 300), width=st.integers(1, 80))
def test_times_rise_from_left_to_right_and_from_text_to_noise(canvas, steps, width):
    """Also where the canvas is wider than the positions that exist."""
    times = TwoLevelTimes(canvas, steps)
    levels = times.levels_of(torch.arange(times.last + 1), width)
    assert bool((levels.diff(dim=0) >= 0).all()) and bool((levels.diff(dim=1) >= 0).all())
    assert not levels[0, :canvas].any() and bool((levels[-1] == steps - 1).all())


def test_training_draws_every_index_alike():
    """25 indices of 3 positions and 23 steps, 20,000 draws: a share's standard error is 0.0014."""
    times = TwoLevelTimes(3, 23)
    t, weight = times.sample(Noise(0, torch.arange(20_000)), torch.ones(20_000, 3, dtype=torch.bool))
    every = (times.levels_of(torch.arange(times.last + 1), 3) / 22).float()
    distinct, among = every.unique(dim=0, return_inverse=True)
    expected = torch.bincount(among).double() / len(every)
    found, counts = t.unique(dim=0, return_counts=True)
    assert torch.equal(found, distinct) and bool((weight == 1).all())
    assert torch.allclose(counts.double() / 20_000, expected, atol=5 * 0.0014)


def test_the_grid_goes_down_evenly_spaced_indices():
    times = TwoLevelTimes(5, 2000)
    grid = times.grid([StepSpan(20)], 8, torch.device("cpu"))
    index = (torch.linspace(1, 0, 21).double() * 2004).round()
    assert grid.shape == (21, 1, 8)
    assert torch.equal(grid[:, 0], (times.levels_of(index, 8) / 1999).float())
    assert bool((grid[0] == 1).all()) and not grid[-1, :, :5].any()
    mixed = times.grid([StepSpan(4), StepSpan(2, 0.5)], 5, torch.device("cpu"))
    assert mixed.shape == (5, 2, 5) and torch.equal(mixed[0, 1], mixed[2, 0]) and not mixed[2:, 1].any()


# -- the network ------------------------------------------------------------------------------------------------------


def network() -> TimeAttentionDecoder:
    torch.manual_seed(0)
    made = TimeAttentionDecoder(3, 3, Sizes(16, 1, 2, 0.0), SourceSizes(12, 4, 1), positions=6).eval()
    for weight in (made.head.weight, made.biases):
        torch.nn.init.normal_(weight)
    return made


@torch.no_grad()
def test_scores_are_those_of_the_paper():
    """softmax over k of (q + b₁)·k + (q + b₂)·W τ_k, written out position by position; no position is turned."""
    made, x, told = network(), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    attention, (content, time) = made.blocks[0].attention, made.biases[:, :, 0]
    still = torch.ones(5, 8), torch.zeros(5, 8)
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    found = attention(x, TimeContext(mask, still, told=(told, made.biases)))
    q, k, v = attention.qkv(x).view(2, 5, 3, 2, 8).unbind(2)
    by_time = attention.time_key(told).view(2, 5, 2, 8)
    for text in range(2):
        for i in range(5):
            heads = []
            for h in range(2):
                here = q[text, i, h]
                scores = k[text, :, h] @ (here + content[h]) + by_time[text, :, h] @ (here + time[h])
                shares = (scores / 8**0.5).masked_fill(~mask[text], float("-inf")).softmax(0)
                heads.append(shares @ v[text, :, h])
            assert torch.allclose(found[text, i], attention.out(torch.cat(heads)), atol=1e-5)


@torch.no_grad()
def test_each_position_hears_the_time_of_every_other_and_none_of_those_that_do_not_exist():
    made, x, source = network(), torch.randn(1, 6, 3), torch.randint(0, 12, (1, 4))
    there, mask = torch.ones(1, 4, dtype=torch.bool), torch.arange(6).unsqueeze(0) < 5
    memory = made.encode(source, there)

    def answer(*times: float) -> Tensor:
        return made(x, torch.tensor([times]), mask, memory, there)[0, :5]

    plain, other = answer(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), answer(0.1, 0.2, 0.9, 0.4, 0.5, 0.6)
    assert bool(((plain - other).abs().amax(-1) > 1e-4).all())
    assert torch.allclose(plain, answer(0.1, 0.2, 0.3, 0.4, 0.5, 0.9), atol=1e-6)
    assert torch.allclose(made(x, torch.tensor([0.3]), mask, memory, there)[0, :5], answer(*[0.3] * 6), atol=1e-5)


# -- the model --------------------------------------------------------------------------------------------------------


def test_each_word_is_lost_and_counted_at_its_own_time():
    """Losses [B, L] by position: where time is 0 the state is the word's own vector but for the first level's noise."""
    torch.manual_seed(0)
    model = METHODS["ar-diffusion"](**SMALL).build(TextSpec(12, 8, 6))
    torch.nn.init.normal_(model.denoiser.network.head.weight)  # whose zeros would stop every gradient
    ids, lengths = torch.randint(4, 12, (64, 6)), torch.full((64,), 6)
    batch = Batch(ids, lengths, ids.flip(1), lengths, index=torch.arange(64))
    losses = model(batch)
    losses.total.backward()
    assert set(losses.terms) == {"mse", "rounding_ce", "terminal_norm"} and int(losses.count) == 64 * 8
    assert bool(model.denoiser.network.biases.grad.any())
    canvas, mask = model.lengths.canvas(ids, lengths)
    noise = Noise(3, torch.arange(64))
    t, _ = model.times.sample(noise, mask)
    condition = model.denoiser.prepare(model.condition_of(batch, canvas))
    corrupted = model.corrupt_batch(TrainedTexts(canvas, mask, condition, noise), t)
    level = model.process.at(t)
    expected = level.alpha.unsqueeze(-1) * corrupted.x0 + level.sigma.unsqueeze(-1) * corrupted.noise
    assert t.shape == (64, 8) and torch.allclose(corrupted.x_t, expected, atol=1e-5)


@torch.no_grad()
def test_the_exact_denoiser_attains_the_entropy_along_two_levels():
    """To four standard errors, and 0.01 nats that a rounding head which is not the exact posterior may cost."""
    cells, each = torch.arange(9).repeat_interleave(150), 150
    ids, times = torch.stack([cells // 3, cells % 3], 1), TwoLevelTimes(2, 2000)
    denoiser, mask = ExactDenoiser(Gaussian(Sqrt()), sphere(0.15)), torch.ones_like(ids, dtype=torch.bool)
    texts = ScoredTexts(denoiser, times, ids, mask, Noise(0, torch.arange(len(ids))))
    found = TwoLevelBound(0.1)(texts, 32)
    nats, p = found.mean(1).double().view(9, each), JOINT.flatten()
    error = float((p * nats.std(1)).square().sum().sqrt()) / each**0.5
    assert found.shape == (9 * each, 32) and error < 0.06
    assert abs(float(p @ nats.mean(1)) - ENTROPY) < 4 * error + 0.01


@pytest.mark.parametrize("method", ["ar-diffusion", "diffuseq-v2"])
@pytest.mark.parametrize("sampler", ["ancestral", "dpm-solver"])
def test_steps_that_are_recorded_write_the_same_texts(method, sampler):
    """Of texts that are made in four steps and in two, beside each other."""
    torch.manual_seed(0)
    sizes = {name: value for name, value in SMALL.items() if name in METHODS[method].model_fields}
    model = METHODS[method](**sizes).build(TextSpec(12, 8, 6)).eval()
    for weight in model.denoiser.network.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    source = torch.randint(4, 12, (3, 6))
    spans = [StepSpan(4), StepSpan(4), StepSpan(2)]
    steering = Steering(source=source, source_mask=torch.ones_like(source, dtype=torch.bool), spans=spans)
    noise = Noise(torch.full((3,), 5), torch.arange(3))
    sampling = model.sampling.change({"sampler": sampler, "steps": 4})

    def write(record: bool) -> list[Frame]:
        inference = Inference(model, record=record)
        with torch.no_grad():
            return [*inference.stream(noise, torch.full((3,), 8), 16, sampling, steering)]

    for a, b in zip(write(True), write(False), strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.state, b.state) and torch.equal(a.t, b.t)


# -- running sums, which each word continues from the one before ------------------------------------------------------

M, WORDS = 6, 5  # sums of random bits mod M


def believe_sums(codec: FixedEmbedding) -> Denoise:
    """The exact posterior p(y_n | x_t) of y_n = y_{n−1} + bit mod M, by the forward-backward algorithm; every position
    may have a time of its own."""
    change = ((torch.eye(M) + torch.eye(M).roll(1, 1)) / 2).log().clamp(min=-1e4)

    def believe(x: Tensor, level: Levels, previous: Tensor | None) -> Belief:
        evidence = codec.log_likelihood(x, level).unbind(1)
        forward, backward = [evidence[0]], [torch.zeros_like(evidence[0])]
        for here in evidence[1:]:
            forward.append(here + (forward[-1].unsqueeze(2) + change).logsumexp(1))
        for there in evidence[:0:-1]:
            backward.append(((backward[-1] + there).unsqueeze(1) + change).logsumexp(2))
        return Belief(torch.stack(forward, 1) + torch.stack(backward[::-1], 1), codec=codec)

    return believe


def last_changes(frames: Sequence[Frame]) -> Tensor:
    """The step at which each token changed for the last time, [B, L]."""
    tokens = torch.stack([frame.tokens for frame in frames])
    step = torch.arange(1, len(tokens)).view(-1, 1, 1)
    return ((tokens[1:] != tokens[:-1]) * step).amax(0).double()


@torch.no_grad()
def write_sums(grid: Tensor, texts: int) -> list[Frame]:
    """Frames by the exact denoiser, clamped as the paper does."""
    codec = FixedEmbedding(word_vectors(M, 16), norm="sphere")
    process, mask = Gaussian(LogSnrShift(Cosine(), -3.0)), torch.ones(texts, WORDS, dtype=torch.bool)
    sampler = Sampler(STEPS["ancestral"], (Clamp(codec),))
    return [*denoise(believe_sums(codec), process, grid, sampler, Noise(0, torch.arange(texts)), mask, (WORDS, 16))]


def share_of_sums(tokens: Tensor) -> float:
    """How many texts are running sums of bits."""
    return float((tokens.diff(dim=1) % M <= 1).all(1).double().mean())


@pytest.mark.long
def test_the_step_at_which_a_token_stops_changing_increases_with_its_place():
    """With the exact denoiser of running sums. Where all times are equal the first and the last token stop alike: read
    backwards, such sums are sums again. The error is the standard error of
    a mean difference."""
    grid = TwoLevelTimes(WORDS, 2000).grid([StepSpan(20)], WORDS, torch.device("cpu"))
    two_level, equal = (last_changes(write_sums(one, 2000)) for one in (grid, torch.linspace(1, 0, 21)))
    error = float((equal[:, -1] - equal[:, 0]).std()) / 2000**0.5
    assert bool((two_level.diff(dim=1).mean(0) > 0).all())
    assert float((two_level[:, -1] - two_level[:, 0]).mean()) > 10 * error
    assert float((equal[:, -1] - equal[:, 0]).mean().abs()) < 5 * error


def test_few_steps_of_two_levels_write_fewer_sums_than_steps_of_equal_times():
    """A finding, other than the paper's: with an exact denoiser five steps of equal times write 99.7 % running sums, of
    two levels 95 %."""
    grid = TwoLevelTimes(WORDS, 2000).grid([StepSpan(5)], WORDS, torch.device("cpu"))
    two_level, equal = (share_of_sums(write_sums(g, 1000)[-1].tokens) for g in (grid, torch.linspace(1, 0, 6)))
    assert equal > two_level + 0.02 and two_level > 0.9


# -- training ---------------------------------------------------------------------------------------------------------

RECIPE = {
    "method": "ar-diffusion",
    "model": SMALL,
    "tokenizer": "words",
    "more_than": 0,
    "longest": 8,
    "steps": 70,
    "batch_size": 32,
    "warmup": 20,
    "lr": 4e-3,
    "ema": 0.9,
    "validate_every": 999,
}


def sequences(count: int, seed: int) -> list[list[str]]:
    draw = random.Random(seed)
    return [[draw.choice("abcdefgh") for _ in range(6)] for _ in range(count)]


def train(folder: Path, pairs: Iterable[tuple[Sequence[str], Sequence[str]]], **changes: Any) -> TextDiffusion:
    rows = [{"src": " ".join(source), "trg": " ".join(target)} for source, target in pairs]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TextDiffusion.from_pretrained(
        train_quietly({**RECIPE, **changes, "data": str(folder / "pairs.jsonl")}, folder / "run")
    )


@torch.no_grad()
def write_texts(lm: TextDiffusion, sources: list[list[str]]) -> list[Frame]:
    source = torch.tensor(lm.tokenizer.encode_batch([" ".join(words) for words in sources]))
    steering = Steering(source=source, source_mask=torch.ones_like(source, dtype=torch.bool))
    model, noise = lm.model.eval(), Noise(0, torch.arange(len(source)))
    assert isinstance(model, DiffusionModel)
    return [*model.stream(noise, model.draw_lengths(noise), model.longest, model.sampling, steering)]


@pytest.mark.long
def test_unseen_sequences_are_reversed_and_only_the_source_says_how(tmp_path):
    """The paper's objective and its twenty steps, 70 updates. None of 48 sequences of 8^6 was trained on."""
    lm = train(tmp_path, ((words, words[::-1]) for words in sequences(4000, 0)))
    unseen = sequences(64, 1)

    def count_reversed(sources: list[list[str]]) -> int:
        rows = write_texts(lm, sources)[-1].tokens.tolist()
        found = [lm.tokenizer.decode(lm.model.lengths.words(row)).split() for row in rows]
        return sum(row == words[::-1] for row, words in zip(found, unseen, strict=True))

    assert count_reversed(unseen) >= 0.95 * 64
    assert count_reversed(unseen[1:] + unseen[:1]) <= 0.1 * 64
    # A text is likelier under its own source than under another's.
    source = torch.tensor(lm.tokenizer.encode_batch([" ".join(words) for words in unseen]))
    noise, lengths = Noise(0, torch.arange(64)), torch.full((64,), 6)
    own, other = (
        float(lm.model.nats(Batch(source.flip(1), lengths, one, lengths), noise, 4).mean())
        for one in (source, source.roll(1, 0))
    )
    assert lm.model.capabilities.likelihood == "bound" and own < 0.5 * other
    (alone,) = lm.generate(source=" ".join(unseen[0]))  # on a canvas of 16 positions, of which 8 exist
    assert alone.text == " ".join(reversed(unseen[0])) and alone.denoiser_calls == 20


@pytest.mark.long
def test_a_trained_model_settles_its_words_from_left_to_right(tmp_path):
    """Running sums mod 6 from a first word, 300 updates: 70 % are sums, of texts of random words 0.4 %."""
    draw = random.Random(0)

    def sums() -> list[str]:
        total, words = draw.randrange(M), []
        for _ in range(6):
            words.append("abcdef"[total % M])
            total += draw.randrange(2)
        return words

    texts = [sums() for _ in range(4000)]
    lm = train(tmp_path, ((words[:1] * 6, words) for words in texts), steps=300)
    count = 500
    frames = write_texts(lm, [words[:1] * 6 for words in texts[:count]])
    rows = [lm.tokenizer.decode(lm.model.lengths.words(row)).split() for row in frames[-1].tokens.tolist()]
    sums_made = sum(len(row) == 6 and all((ord(b) - ord(a)) % M <= 1 for a, b in pairwise(row)) for row in rows)
    assert sums_made >= 0.4 * count
    assert bool((last_changes(frames)[:, 1:7].mean(0).diff() > 0).all())
