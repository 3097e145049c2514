"""CDCD: score interpolation in warped time, and texts with given positions."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from difflm import Infill, TextDiffusion
from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD
from difflm.diffusion.base import Belief
from difflm.diffusion.codecs import FixedEmbedding, LearnedEmbedding
from difflm.diffusion.codecs.embedding import X0, Logits
from difflm.diffusion.condition import FREE, HIDDEN, UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser, MaskStack
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Objective, cross_entropy
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import interpolate
from difflm.diffusion.samplers.loop import BoundDenoiser, Sampler, SamplerInputs, Steering
from difflm.diffusion.samplers.steps import STEPS
from difflm.diffusion.timesteps import LearnedWarp
from difflm.fast.inference import Inference
from difflm.methods import METHODS, TextSpec
from difflm.methods.cdcd import LinearSigma
from difflm.models.diffusion import DiffusionModel
from tests.support.pairs import sequences
from tests.support.tiny import train_quietly

WORDS, DIM, DRAWS = 8, 16, 5000
ZIPF = 1 / torch.arange(1.0, WORDS + 1) / (1 / torch.arange(1.0, WORDS + 1)).sum()
SIZES = {"embedding_dim": 8, "hidden": 32, "layers": 1, "heads": 2, "dropout": 0.0}


def word_codec(evidence: bool = False) -> FixedEmbedding:
    table = torch.randn(WORDS, DIM, generator=torch.Generator().manual_seed(0))
    return FixedEmbedding(table, norm="sphere", prediction=Logits(evidence))


class ExactWords(Denoiser):
    """Independent words: p(w | x_t) in closed form. Of a pair of words whose first is given, the second has
    probabilities of its own; where the first is hidden, those of any pair."""

    def __init__(self, chances: Tensor = ZIPF, pairs: Tensor | None = None) -> None:
        super().__init__(nn.Identity(), word_codec(), Gaussian(LinearSigma(0.1, 30.0), exploding=True))
        self.chances, self.pairs = chances, pairs

    def forward(self, x, t, mask=None, condition=UNCONDITIONAL, previous=None) -> Belief:
        prior = self.chances.log().expand(*x.shape[:2], -1)
        if self.pairs is not None and condition.given is not None:
            first = condition.given[:, :1]
            known = self.pairs[first.clamp(min=0)].log()
            prior = torch.where((first >= 0).unsqueeze(-1), known, prior)
        return Belief(prior + self.codec.log_likelihood(x, self.process.at(t)), codec=self.codec)


def sample_words(denoiser: Denoiser, steps: int, warp: LearnedWarp | None = None, **bound) -> Tensor:
    """Word ids [DRAWS, L], read off by one more call at the end."""
    width = 1 if "condition" not in bound else bound["condition"].given.shape[1]
    mask = torch.ones(DRAWS, width, dtype=torch.bool)
    ask = BoundDenoiser(denoiser, mask, **bound)
    noise, grid = Noise(3, torch.arange(DRAWS)), torch.linspace(1, 0, steps + 1).unsqueeze(1).expand(-1, DRAWS)
    sampler, shape = Sampler(STEPS["euler"]), (width, DIM)
    with torch.no_grad():
        *_, last = SamplerInputs(ask, denoiser.process, grid, sampler, noise, mask, shape, warp=warp).frames()
        return ask(last.state, denoiser.process.at(torch.zeros(DRAWS)), None).tokens


def total_variation(tokens: Tensor, expected: Tensor) -> float:
    return float((torch.bincount(tokens.flatten(), minlength=WORDS) / tokens.numel() - expected).abs().sum() / 2)


@pytest.fixture(scope="module")
def curve() -> tuple[Tensor, Tensor]:
    """Times, close together where words are told apart, and the exact denoiser's cross-entropy there."""
    denoiser, times = ExactWords(), torch.linspace(0, 1, 61) ** 3
    ids = torch.searchsorted(ZIPF.cumsum(0), (torch.arange(DRAWS) + 0.5) / DRAWS).clamp(max=WORDS - 1).unsqueeze(1)
    noise = Noise(7, torch.arange(DRAWS)).normal(0, 1, DIM)
    clean = denoiser.codec.encode(ids)
    states = [(denoiser.process.corrupt(clean, t.expand(DRAWS), noise), t.expand(DRAWS)) for t in times]
    return times, torch.stack([cross_entropy(denoiser(x, t).logits, ids).mean() for x, t in states])


@pytest.fixture(scope="module")
def warp(curve) -> LearnedWarp:
    """Fitted as in training: on times that it draws itself."""
    warp, mask = LearnedWarp(), torch.ones(128, 1, dtype=torch.bool)
    optimiser = torch.optim.Adam(warp.parameters(), lr=0.05)
    for step in range(400):
        t, _ = warp.sample(Noise(1, step * 128 + torch.arange(128)), mask)
        optimiser.zero_grad()
        warp.fit_loss(t, interpolate(t, *curve).unsqueeze(1), mask).backward()
        optimiser.step()
    return warp


def test_warped_time_makes_the_cross_entropy_of_the_exact_denoiser_linear(curve, warp):
    u = torch.linspace(0, 1, 201)

    def straightness(t: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([u, interpolate(t, *curve)]))[0, 1])

    assert straightness(u) < 0.7
    assert straightness(warp.time_of(u)) > 0.999


def test_ten_euler_steps_draw_the_right_words_in_warped_time_alone(warp):
    """5,000 draws of eight words leave a total variation of about 0.015 by chance."""
    denoiser = ExactWords()
    linear, warped = (total_variation(sample_words(denoiser, 10, times), ZIPF) for times in (None, warp))
    assert linear > 0.08 and warped < 0.03


def test_the_score_is_that_of_the_noised_words():
    """(x̂_0 − x)/σ² is ∇ log p_t(x), which autograd takes of the mixture itself (card: equal to 3e-10 in float64)."""
    denoiser = ExactWords().double()
    x = torch.randn(6, 1, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).mul(3).requires_grad_()
    level = denoiser.process.at(torch.full((6,), 0.05, dtype=torch.float64))
    sigma = level.sigma[0]
    distance = (x - denoiser.codec.table()).square().sum(-1) / (2 * sigma**2)
    (score,) = torch.autograd.grad((ZIPF.double().log() - distance).logsumexp(-1).sum(), x)
    found = (denoiser(x, level).clean - x) / sigma**2
    assert torch.allclose(found, score, atol=1e-7)


@pytest.mark.parametrize("scores", [False, True])
def test_a_contrast_lowers_the_entropy_of_what_is_drawn(scores, warp):
    """Guidance of scale s = 1 + contrast. Of log-probabilities it draws p(w | given)^s p(w)^(1 − s), exactly so for
    independent words; of scores there is no such formula, but s = 1 is p(w | given)."""
    pairs = torch.tensor([[0.3, 0.25, 0.15, 0.1, 0.08, 0.06, 0.04, 0.02]]).expand(WORDS, -1)
    condition = Condition(given=torch.tensor([[4, FREE]]).expand(DRAWS, -1))
    denoiser, entropies = ExactWords(ZIPF.flip(0), pairs), []
    for scale in (1.0, 2.0, 4.0, 8.0):
        tokens = sample_words(denoiser, 12, warp, condition=condition, contrast=scale - 1, scores=scores)[:, 1]
        if scale == 1 or not scores:
            expected = (scale * pairs[0].log() + (1 - scale) * ZIPF.flip(0).log()).softmax(-1)
            assert total_variation(tokens, expected) < 0.03
        found = torch.bincount(tokens, minlength=WORDS) / DRAWS
        entropies.append(float(torch.special.entr(found).sum()))
    assert entropies == sorted(entropies, reverse=True) and entropies[0] - entropies[-1] > 0.5


@given(seed=st.integers(0, 1000), weight=st.floats(0.0, 2.0))
def test_guidance_of_scores_moves_the_mean_word(seed, weight):
    """x̂ + w (x̂ − x̂(∅)), where no probability would be negative; unlikely words of two beliefs that agree stay so."""
    generator, codec = torch.Generator().manual_seed(seed), word_codec()
    told = torch.randn(2, 3, WORDS, generator=generator).mul(0.1)
    free = told + torch.randn(2, 3, WORDS, generator=generator).mul(0.05)
    one, other = Belief(told, codec=codec), Belief(free, codec=codec)
    expected = one.clean + weight * (one.clean - other.clean)
    assert torch.allclose(one.contrasted(other, weight, scores=True).clean, expected, atol=1e-4)
    sure = torch.tensor([[[9.0, -9.0, -9.0]]]), torch.tensor([[[9.0, -9.0, -30.0]]])
    assert int(Belief(sure[0]).contrasted(Belief(sure[1]), 8.0).tokens) == 2  # what logarithms make of it
    assert int(Belief(sure[0]).contrasted(Belief(sure[1]), 8.0, scores=True).tokens) == 0


# -- the method -------------------------------------------------------------------------------------------------------


def build(source: int = 0, method: str = "cdcd", **changes) -> DiffusionModel:
    torch.manual_seed(0)
    model = METHODS[method](**{**SIZES, **changes}).build(TextSpec(12, 10, source))
    assert isinstance(model, DiffusionModel)
    nn.init.normal_(model.denoiser.network.head.weight)  # whose zeros would hide every difference
    return model


def some_texts(count: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 12, (count, 8), generator=generator)
    return Batch(ids, torch.randint(1, 9, (count,), generator=generator), index=torch.arange(count))


def test_the_noise_is_its_own_time_and_inputs_have_unit_variance():
    model = METHODS["cdcd"](hidden=32, layers=1, heads=2).build(TextSpec(12, 10))
    level = model.process.at(torch.tensor([0.0, 0.5, 1.0]))
    assert level.sigma.tolist() == pytest.approx([1.0, 150.5, 300.0], rel=1e-5) and level.alpha.tolist() == [1, 1, 1]
    assert level.scale.tolist() == pytest.approx([2**0.5, (150.5**2 + 1) ** 0.5, (300.0**2 + 1) ** 0.5], rel=1e-5)
    assert model.denoiser.codec.table().norm(dim=-1).tolist() == pytest.approx([16.0] * 12, rel=1e-5)
    state, *_ = model.denoiser.codec.inputs(model.process.prior(level[1:], torch.ones(2, 10, 256)), level[1:], None)
    assert float(state.min()) == pytest.approx(1) and float(state.max()) == pytest.approx(1)
    assert (model.sampling.sampler, model.sampling.steps) == ("euler", 200)


@pytest.mark.parametrize("method", ["cdcd", "sed"])
def test_the_loss_is_that_of_the_generated_positions(method, monkeypatch):
    """By hand from what the network answered; pads behind END are given where END is."""
    model, seen, batch = build(method=method, drop=0.3), [], some_texts(64)
    objective, conditions = type(model.objective), []
    calls = objective.__call__
    monkeypatch.setattr(objective, "__call__", lambda self, batch: (seen.append(batch), calls(self, batch))[1])
    place = MaskStack.place
    monkeypatch.setattr(MaskStack, "place", lambda *args: (conditions.append(args[-1].given), place(*args))[1])
    losses = model(batch)
    shown, corrupted = conditions[-1], seen[0]
    assert torch.equal(corrupted.mask, shown == FREE)
    told, ids = (shown >= 0).any(-1), corrupted.ids
    assert torch.equal(shown[shown >= 0], ids[shown >= 0]) and not (told & (shown == HIDDEN).any(-1)).any()
    assert 0.1 < float((shown == HIDDEN).any(-1).float().mean()) < 0.4 < float(told.float().mean())
    behind = (ids == END).cumsum(-1).bool() & (ids != END)
    end = shown.gather(1, (ids == END).int().argmax(-1, keepdim=True)) == FREE
    assert bool((ids[behind] == PAD).all()) and torch.equal(corrupted.mask[behind], end.expand_as(ids)[behind])
    answers = [one.belief for one in seen]
    if method == "cdcd":
        nats = cross_entropy(answers[0].logits, ids)[corrupted.mask]
    else:
        errors = [(one.clean - corrupted.x0).square().mean(-1)[corrupted.mask] for one in answers]
        nats = sum(errors) / 2 + cross_entropy(corrupted.codec.readout(corrupted.x0), ids)[corrupted.mask]
    terms = losses.detached().means()
    assert sum(float(value) for name, value in terms.items() if name not in ("warp", "loss")) == pytest.approx(
        float(nats.detach().mean()), rel=1e-4
    )


@pytest.mark.parametrize("contrast", [0.0, 2.0])
@pytest.mark.parametrize("method", ["cdcd", "sed"])
def test_given_tokens_are_returned_unchanged(method, contrast):
    model = build(method=method).eval()
    known = torch.full((5, 10), FREE)
    known[1, 3], known[2, ::2], known[3, :6] = 7, 9, torch.arange(4, 10)
    known[4] = torch.arange(10)
    sampling = model.sampling.change({"steps": 4, "contrast": contrast})
    with torch.no_grad():
        frames = list(
            model.stream(Noise(0, torch.arange(5)), torch.full((5,), 10), 10, sampling, Steering(known=known))
        )
    for frame in frames:
        assert torch.equal(frame.tokens[known >= 0], known[known >= 0])
    assert model.calls(sampling, 5) == (8 if contrast else 4)


@pytest.mark.parametrize("method", ["cdcd", "sed"])
def test_captured_steps_are_told_the_given_words_of_their_own_texts(method):
    """The second request is replayed by the steps of the first, with other words given."""
    model = build(method=method).eval()
    inference, sampling = Inference(model, record=True), model.sampling.change({"steps": 4, "contrast": 1.0})
    for seed, word in ((0, 5), (1, 9)):
        known = torch.full((3, 10), FREE)
        known[:, seed : seed + 4] = word
        asked = Noise(seed, torch.arange(3)), torch.full((3,), 10), 10, sampling, Steering(known=known)
        with torch.no_grad():
            *_, plain = model.stream(*asked)
            *_, replayed = inference.stream(*asked)
        assert torch.equal(plain.tokens, replayed.tokens) and bool((plain.tokens[known >= 0] == word).all())
        assert torch.allclose(plain.state, replayed.state, atol=1e-4)


@pytest.mark.parametrize("method", ["cdcd", "sed"])
def test_hidden_words_change_no_belief(method):
    """What guidance compares with is a function of the free positions' own states."""
    model = build(method=method).eval()
    words = torch.full((2, 10), FREE)
    words[:, 2:6] = torch.tensor([[4], [9]])
    x = torch.randn(1, 10, 8).repeat(2, 1, 1)
    x[1, 2:6] += 3.0
    level, mask = model.process.at(torch.full((2,), 0.3)), torch.ones(2, 10, dtype=torch.bool)
    ask = partial(model.denoiser, x, level, mask)
    with torch.no_grad():
        hidden, shown = ask(Condition(given=words).null()).logits, ask(Condition(given=words)).logits
    assert torch.equal(hidden[0], hidden[1]) and not torch.allclose(shown[0], shown[1])


@pytest.fixture(scope="module")
def markov_texts() -> Tensor:
    """Each word is followed by one of two others, as likely."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 8, (256, 1), generator=generator)
    for _ in range(7):
        ids = torch.cat([ids, (2 * ids[:, -1:] + torch.randint(0, 2, (256, 1), generator=generator)) % 8], 1)
    return ids + 4


def mean_cosine(codec: LearnedEmbedding) -> float:
    """Of the directions of two different words."""
    table = F.normalize(codec.table().detach()[4:], dim=-1)
    return float((table @ table.T).sum() - len(table)) / (len(table) * (len(table) - 1))


@pytest.mark.long
@pytest.mark.parametrize("term", ["ce", "mse"])
def test_cross_entropy_keeps_words_apart_and_squared_errors_make_them_one(term, markov_texts):
    """Which word it is costs nothing where all words have one vector; cross-entropy asks for the word itself."""
    model = build(sigma_min=0.1, sigma_max=10.0)
    if term == "mse":
        model.denoiser.codec = LearnedEmbedding(12, 8, prediction=X0())
        model.denoiser.network.head = nn.Linear(32, 8)
        model.objective = Objective({"mse": 1.0})
    lengths, optimiser = torch.full((64,), 8), torch.optim.Adam(model.parameters(), lr=2e-2)
    for step in range(120):
        index = torch.arange(64) + 64 * step
        optimiser.zero_grad()
        model(Batch(markov_texts[index % 256], lengths, index=index)).means()["loss"].backward()
        optimiser.step()
    assert mean_cosine(model.denoiser.codec) < 0.1 if term == "ce" else mean_cosine(model.denoiser.codec) > 0.9


# -- trained ----------------------------------------------------------------------------------------------------------

RECIPE = {
    "method": "cdcd",
    "model": {**SIZES, "embedding_dim": 16, "hidden": 64, "layers": 2, "sigma_min": 0.1, "sigma_max": 10.0},
    "tokenizer": "words",
    "more_than": 0,
    "longest": 8,
    "batch_size": 32,
    "warmup": 20,
    "lr": 4e-3,
    "ema": 0.9,
    "sample_every": 0,
}


def train(folder: Path, data: Path, **changes) -> TextDiffusion:
    return TextDiffusion.from_pretrained(train_quietly({**RECIPE, **changes, "data": str(data)}, folder / "run"))


@pytest.mark.long
def test_unseen_sequences_are_reversed_though_a_tenth_of_the_sources_is_dropped(tmp_path):
    rows = [{"src": " ".join(words), "trg": " ".join(reversed(words))} for words in sequences(4000, 0, 6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {**RECIPE["model"], "encoder_layers": 2}
    lm = train(tmp_path, tmp_path / "pairs.jsonl", task="seq2seq", model=model, steps=120)
    unseen = sequences(48, 1, 6)
    expected = [" ".join(reversed(words)) for words in unseen]
    for contrast in (0.0, 3.0):
        made = lm.generate(source=[" ".join(words) for words in unseen], steps=10, contrast=contrast)
        assert sum(text.text == right for text, right in zip(made, expected, strict=True)) >= 46
        assert {text.denoiser_calls for text in made} == {20 if contrast else 10}
    shuffled = lm.generate(source=[" ".join(words) for words in unseen[1:] + unseen[:1]], steps=10)
    assert sum(text.text == right for text, right in zip(shuffled, expected, strict=True)) <= 4
    assert lm.config["trained"]["validation"]["nats_per_token"] < 0.3


@pytest.mark.long
def test_given_words_are_continued_under_any_contrast(tmp_path):
    """Three words and the same three again: given either half, the other follows."""
    texts = [" ".join(words + words) for words in sequences(4000, 0, 3)]
    (tmp_path / "my.txt").write_text("".join(f"{text}\n" for text in texts))
    lm = train(tmp_path, tmp_path / "my.txt", steps=160)
    for half in ("___:3 c a f", "c a f ___:3", "___:1 a ___:1 c ___:1 f"):
        for contrast in (0.0, 7.0):
            made = lm.generate(8, controls=[Infill(half)], steps=10, contrast=contrast)
            assert [text.text for text in made].count("c a f c a f") >= 7
    free = lm.generate(60, steps=20)
    assert sum(text.tokens[:3] == text.tokens[3:] for text in free) >= 50
    assert len({text.text for text in free}) >= 45  # of 512 texts, 60 draws repeat about 3
