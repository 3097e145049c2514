"""PPLM, DELOREAN and COLD on models small enough to know the answer."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from difflm.controls import Avoid, Contains, Control, Infill, Label, Length, ModelInfo
from difflm.data.labels import Labelling
from difflm.data.tokenizers import END, PAD, START, Words
from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import left_to_right
from difflm.errors import UsageError
from difflm.generation.jobs import Generation
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.rivals.cold import (
    ColdSearch,
    fluency_energy,
    phrase_energy,
    run_langevin,
    straight_through,
)
from difflm.methods.rivals.delorean import Delorean, DeloreanSearch
from difflm.methods.rivals.gaps import SoftTexts
from difflm.methods.rivals.pplm import Pplm, PplmRule, add_delta, bag_nats
from difflm.methods.rivals.prefix_classifier import PrefixClassifier
from difflm.models.autoregressive import BANNED, Autoregressive
from difflm.models.base import Sampling
from difflm.networks import Sizes

VOCABULARY = 9  # the four specials and five words
A, B, C, D, E = range(4, 9)
SAMPLING = Sampling("autoregressive", steps=8)


@pytest.fixture(scope="module")
def twin() -> Autoregressive:
    """Random weights, far from uniform."""
    model = Autoregressive(VOCABULARY, 8, Sizes(32, 2, 4, 0.0), SAMPLING)
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.35)
    return model.eval()


class Bigram:
    """Each word depends on the last one alone; the answer to a soft word is the mixture, exactly."""

    longest, start, end, pad = 8, START, END, PAD

    def __init__(self, rows: dict[int, dict[int, float]]) -> None:
        self.table = torch.full((VOCABULARY, VOCABULARY), 1e-4)
        for last, following in rows.items():
            self.table[last, list(following)] = torch.tensor(list(following.values())).float()
        self.table /= self.table.sum(-1, keepdim=True)
        self.banned = torch.zeros(VOCABULARY, dtype=torch.bool)
        self.banned[list(BANNED)] = True

    def read(self, words: Tensor, caches: object = None, memory: object = None) -> tuple[Tensor, list]:
        return (words @ self.table).log(), []


# After A the likeliest word is B, but nothing except C leads to D.
BRIDGE = Bigram({START: {A: 1}, A: {B: 0.6, C: 0.4}, B: {E: 1}, C: {D: 1}, D: {END: 1}, E: {END: 1}})


def texts(model, *rows: list[int]) -> SoftTexts:
    width = max(map(len, rows))
    return SoftTexts(model, torch.tensor([row + [PAD] * (width - len(row)) for row in rows]))


class Asynchronous(TorchDispatchMode):
    """Fails where a value of the device would be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


def last(frames):
    *_, frame = frames
    return frame


class CountedReads:
    """A model that counts its calls."""

    def __init__(self, model) -> None:
        self.model, self.calls = model, 0

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def read(self, *args):
        self.calls += 1
        return self.model.read(*args)


# -- PPLM -------------------------------------------------------------------------------------------------------------


def bag(*words: int):
    return lambda prefix: lambda p: bag_nats(p, words)


def test_pplm_without_a_step_is_plain_sampling(twin):
    noise = Noise(3, torch.arange(16))
    plain = last(left_to_right(twin, noise, 8, SAMPLING))
    rule = PplmRule(twin, bag(C), step_size=0.0)
    for _ in range(2):  # a rule can decode one batch after the other
        frame = last(left_to_right(twin, noise, 8, SAMPLING, [rule]))
        assert torch.equal(frame.tokens, plain.tokens)
        written = plain.tokens != PAD
        assert torch.allclose(frame.confidence[written], plain.confidence[written], atol=1e-5)


def test_pplm_lowers_its_loss_at_every_iteration(twin):
    prefix = torch.tensor([[A, B, B], [C, A, E]])
    with torch.no_grad():
        answers, caches = twin.read(torch.cat([torch.full((2, 1), START), prefix], 1), [])
    log_p, history = answers[:, -1].log_softmax(-1), [(k[:, :, :-1], v[:, :, :-1]) for k, v in caches]
    rule = PplmRule(twin, bag(D), step_size=0.05)
    losses = []
    for n in range(6):
        moved = replace(rule, iterations=n).move(prefix, prefix[:, -1:], history, log_p)
        with torch.no_grad():
            losses.append(rule.loss(rule.attributes(prefix), prefix[:, -1:], moved, log_p))
    losses = torch.stack(losses)
    assert (losses[1:] < losses[:-1]).all()
    alone = rule.move(prefix[1:], prefix[1:, -1:], [(k[1:], v[1:]) for k, v in history], log_p[1:])
    together = rule.move(prefix, prefix[:, -1:], history, log_p)
    for one, both in zip(alone, together, strict=True):
        assert torch.allclose(one[0], both[0][1:], atol=1e-5) and torch.allclose(one[1], both[1][1:], atol=1e-5)


def test_pplm_moves_along_the_gradient(twin):
    """By finite differences of the loss in float64, along a random direction."""
    model = Autoregressive(VOCABULARY, 8, Sizes(32, 2, 4, 0.0), SAMPLING)
    model.load_state_dict(twin.state_dict())
    model.eval()
    prefix = torch.tensor([[A, B, B]])
    with torch.no_grad():
        answers, caches = model.read(torch.tensor([[START, A, B, B]]), [])
    log_p, history = answers[:, -1].log_softmax(-1), [(k[:, :, :-1], v[:, :, :-1]) for k, v in caches]
    rule = PplmRule(model, bag(D), kl_scale=0.5, window=2)
    torch.manual_seed(0)
    direction = [torch.randn_like(torch.stack(layer)[..., 1:, :]) for layer in history]
    zeros = [torch.zeros_like(d).requires_grad_() for d in direction]
    loss = rule.loss(rule.attributes(prefix), prefix[:, -1:], add_delta(history, zeros), log_p)
    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(loss.sum(), zeros), direction, strict=True))
    with torch.no_grad():
        ahead, behind = (
            rule.loss(rule.attributes(prefix), prefix[:, -1:], add_delta(history, [s * d for d in direction]), log_p)
            for s in (1e-2, -1e-2)
        )
    assert float(slope) == pytest.approx(float((ahead - behind) / 2e-2), rel=0.02)


def test_pplm_writes_words_of_its_bag_more_often_the_larger_its_steps(twin):
    noise = Noise(1, torch.arange(128))
    shares = []
    for size in (0.0, 0.1, 0.5):
        rule = PplmRule(twin, bag(D), step_size=size, fusion=1.0)
        tokens = last(left_to_right(twin, noise, 6, SAMPLING, [rule])).tokens
        shares.append(float((tokens == D).sum() / (tokens >= A).sum()))
    assert shares[0] < shares[1] < shares[2]


def test_fusion_is_the_geometric_mean_of_both_models(twin):
    prefix = torch.tensor([[A, B]])

    def logits(fusion: float) -> Tensor:
        rule, caches = PplmRule(twin, bag(D), step_size=0.5, fusion=fusion), []
        with torch.no_grad():
            for i, word in enumerate([START, A, B]):
                answers, caches = twin.read(torch.tensor([[word]]), caches)
                out = rule(prefix[:, :i], answers[:, -1], caches)
        return out.log_softmax(-1)

    assert torch.allclose(logits(0.0), twin.read(torch.tensor([[START, A, B]]))[0][:, -1].log_softmax(-1), atol=1e-5)
    mean = (0.3 * logits(1.0) + 0.7 * logits(0.0)).log_softmax(-1)
    assert torch.allclose(logits(0.3), mean, atol=1e-5) and not torch.allclose(mean, logits(0.0), atol=0.01)


# -- soft texts -------------------------------------------------------------------------------------------------------


def test_hard_words_have_the_nats_of_the_twin(twin):
    """One-hot words are read as words: −log p of every position is the model's own cross-entropy."""
    ids, lengths = torch.tensor([[A, C, D, B], [E, B, PAD, PAD]]), torch.tensor([4, 2])
    nats, mask = twin.token_nats(ids, lengths)
    canvas = torch.tensor([[A, C, D, B, END], [E, B, END, PAD, PAD]])
    found = SoftTexts(twin, canvas)
    assert torch.allclose(found.nats(found.read(found.given), canvas) * mask, nats * mask, atol=1e-5)
    gaps = texts(twin, [A, FREE, D, B, END], [FREE, B, END])
    logits = 50.0 * gaps.one_hot(canvas)
    behind = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]])
    words = gaps.fill(gaps.possible(logits).softmax(-1))
    assert torch.allclose(gaps.context_nats(gaps.read(words)), (nats * behind).sum(1), atol=1e-4)
    assert torch.equal(gaps.choose(logits), canvas)


# -- DELOREAN ---------------------------------------------------------------------------------------------------------


def test_the_ends_of_the_mix_are_the_forward_and_the_backward_logits(twin):
    gaps = texts(twin, [A, FREE, FREE, B, END], [C, D, FREE, FREE, A])
    torch.manual_seed(0)
    free, backward = gaps.free.unsqueeze(-1), torch.randn(2, 5, VOCABULARY)
    pure = DeloreanSearch().forward(gaps, None)
    assert torch.equal(DeloreanSearch(forward_weight=1.0).forward(gaps, backward), pure)
    assert torch.equal(DeloreanSearch(forward_weight=0.0).forward(gaps, backward), backward * free)
    # Read at a low temperature, forward logits are those of greedy decoding.
    cold = DeloreanSearch(temperature=1e-4).forward(gaps, None)
    greedy = gaps.choose(cold)
    answers, _ = twin.read(torch.cat([torch.full((2, 1), START), greedy[:, :-1]], 1))
    assert torch.allclose(cold, answers * free, atol=1e-3)


def test_without_steps_backward_passes_change_nothing(twin):
    gaps = texts(twin, [A, FREE, FREE, B, END])
    start = DeloreanSearch().forward(gaps, None)
    assert torch.equal(DeloreanSearch(step_size=0.0).backward(gaps, start), start)
    fixed = replace(DeloreanSearch(), step_size=0.0, passes=3)
    assert torch.equal(fixed.decode(gaps), gaps.choose(start))


def test_delorean_finds_the_bridge():
    """In a batch with a text whose gap stands elsewhere, and which is easy."""
    gaps = texts(BRIDGE, [A, FREE, D, END], [A, B, FREE, END])
    assert gaps.choose(DeloreanSearch().forward(gaps, None))[:, :3].tolist() == [[A, B, D], [A, B, E]]
    assert DeloreanSearch().decode(gaps).tolist() == [[A, C, D, END], [A, B, E, END]]


def test_backward_steps_lower_the_loss_of_the_words_behind(twin):
    gaps = texts(twin, [A, FREE, FREE, B, END], [FREE, D, A, END])
    start = DeloreanSearch().forward(gaps, None)

    def nats(logits: Tensor) -> Tensor:
        return gaps.context_nats(gaps.read(gaps.fill(gaps.possible(logits).softmax(-1))))

    assert (nats(DeloreanSearch(step_size=0.01).backward(gaps, start)) < nats(start)).all()


# -- COLD -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_fluency_is_the_cross_entropy_with_the_twin(twin):
    """Of hard words the model's side is that of plain reading; the energy is least where ỹ is the model's answer."""
    gaps, ids = texts(twin, [A, FREE, FREE, END]), torch.tensor([[A, C, D, END]])
    torch.manual_seed(0)
    y = 3 * gaps.one_hot(ids) + 0.1 * torch.randn(1, 4, VOCABULARY)
    allowed = [A, B, C, D, E]
    answers, _ = twin.read(torch.tensor([[START, A, C]]))
    p, q = answers[0, 1:, allowed].softmax(-1), y[0, 1:3][:, allowed].log_softmax(-1)
    energy = fluency_energy(gaps, gaps.read(gaps.fill(straight_through(gaps, y))), y)
    assert float(energy) == pytest.approx(float(-(p * q).sum()), rel=1e-5)
    y[0, 1:3] = answers[0, 1:]
    entropy = -(p * p.log()).sum()
    assert float(fluency_energy(gaps, gaps.read(gaps.one_hot(ids)), y)) == pytest.approx(float(entropy), rel=1e-5)


def test_langevin_dynamics_draw_from_the_energy():
    """For E = y²/2 and noise of variance 2η the stationary variance is 1 / (1 − η/2), at any η."""
    torch.manual_seed(0)
    eta = 0.5
    noises = (math.sqrt(2 * eta) * torch.randn(20_000) for _ in range(60))
    y = run_langevin(lambda y: y.square() / 2, torch.zeros(20_000), eta, noises)
    assert float(y.var()) == pytest.approx(1 / (1 - eta / 2), rel=0.04)  # four standard errors
    assert float(y.mean()) == pytest.approx(0, abs=0.04)


def test_cold_lowers_its_energy(twin):
    gaps = texts(twin, [A, FREE, FREE, B, END], [FREE, FREE, D, A, END])
    phrases = torch.tensor([[[D, FREE]], [[E, C]]])
    cold = ColdSearch(step_size=0.3)
    torch.manual_seed(0)
    y = torch.randn(2, 5, VOCABULARY)
    zeros = (torch.zeros_like(y) for _ in range(100))
    lower = run_langevin(lambda y: cold.energy(gaps, y, phrases), y, cold.step_size, zeros)
    with torch.no_grad():
        assert (cold.energy(gaps, lower, phrases) < cold.energy(gaps, y, phrases) - 0.5).all()


def test_fluency_alone_is_greedy_decoding(twin):
    gaps = texts(twin, [A, FREE, FREE, FREE], [FREE, FREE, FREE, FREE])
    cold = ColdSearch(steps=20, noise_scale=0.0, context_weight=0.0, top_k=VOCABULARY)
    greedy = gaps.choose(DeloreanSearch(temperature=1e-4).forward(gaps, None))
    assert torch.equal(cold.decode(gaps, Noise(0, torch.arange(2))), greedy)


@pytest.mark.long
def test_cold_finds_the_bridge_and_places_phrases():
    samples = Noise(0, torch.arange(2))
    gaps = texts(BRIDGE, [A, FREE, D, END], [A, B, FREE, END])
    assert ColdSearch().decode(gaps, samples).tolist() == [[A, C, D, END], [A, B, E, END]]
    phrases = torch.tensor([[[C, D]], [[B, FREE]]])
    free = texts(BRIDGE, [A, FREE, FREE, END], [FREE, FREE, FREE, END])
    found = ColdSearch(phrase_weight=2.0).decode(free, samples, phrases)
    assert found[0].tolist() == [A, C, D, END] and B in found[1]


def test_the_energy_of_phrases_is_their_expected_count(twin):
    gaps = texts(twin, [A, FREE, FREE, FREE, END])
    torch.manual_seed(0)
    y = torch.randn(1, 5, VOCABULARY, requires_grad=True)
    q = gaps.possible(y)[0].softmax(-1)
    phrases = torch.tensor([[[C, D], [E, FREE], [FREE, FREE]]])
    pair = q[1, C] * q[2, D] + q[2, C] * q[3, D]
    single = q[1:4, E].sum()
    found = phrase_energy(gaps, y, phrases)
    assert found.item() == pytest.approx((-pair.log() - single.log()).item(), rel=1e-5)
    (g,) = torch.autograd.grad(found.sum(), y, retain_graph=True)
    (by_hand,) = torch.autograd.grad(-pair.log() - single.log(), y)
    assert torch.allclose(g, by_hand, atol=1e-5)


# -- as decoders ------------------------------------------------------------------------------------------------------

VOCABULARY_WORDS = Words(["START", "END", "UNK", "PAD", "a", "b", "c", "d", "."])
INFO = ModelInfo(VOCABULARY_WORDS, 8, 0)
TOPIC = Labelling("topic", "text", ("-", "no", "yes"))
LABELLED = ModelInfo(VOCABULARY_WORDS, 8, 0, {"topic": TOPIC})


def untrained_classifier() -> PrefixClassifier:
    return PrefixClassifier([TOPIC], 32, 8, VOCABULARY, Sizes(16, 1, 2, 0.0))


def generate(twin: Autoregressive, n: int, *controls: Control, **asked: Any) -> list[Generation]:
    lm = TextDiffusion(twin, VOCABULARY_WORDS, {"method": "autoregressive"})
    return lm.generate(n, controls=controls, **asked)


@pytest.fixture
def quick(monkeypatch):
    """Searches of a few steps."""
    delorean, cold = partial(DeloreanSearch, passes=2, iterations=3), partial(ColdSearch, steps=10)
    monkeypatch.setattr("difflm.methods.rivals.delorean.DeloreanSearch", delorean)
    monkeypatch.setattr("difflm.methods.rivals.cold.ColdSearch", cold)


@pytest.mark.parametrize("method", ["delorean", "cold"])
def test_gaps_are_filled_between_the_given_words(twin, quick, method):
    for template in ("a ___:2 b", "___:3 d", "a b ___ c", "c ___", "a ___ x"):
        for text in generate(twin, 2, Infill(template), method=method):
            assert text.controls[0]["satisfied"] or text.warnings, text
            assert text.tokens[-1] == template[-1] or template.endswith("_")
    (text,) = generate(twin, 1, Infill("a ___ c"), Length(5), method=method)
    assert len(text.tokens) == 5 and text.controls[0]["satisfied"]


def test_a_gap_of_any_length_ends_with_its_sentence():
    plan = Delorean(BRIDGE, INFO, [Infill("a ___ d")])
    assert plan.canvas == [A, *[FREE] * 6, D, END]
    found = torch.tensor([[A, B, E, C, E, C, C, D, END], [A, B, B, C, B, C, E, D, END], [A, B, B, C, B, C, C, D, END]])
    begun = [[A, B, E, END, END, END, END], [A, B, B, C, B, C, E], [A, B, B, C, B, C, C]]
    assert plan.cut(found, 7).tolist() == begun
    fixed = Delorean(BRIDGE, INFO, [Infill("a ___:2 d")])
    assert fixed.cut(torch.tensor([[A, E, B, D, END]]), 4).tolist() == [[A, E, B, END]]


def test_requests_of_one_batch_are_searched_together(twin, quick):
    """Each finds what it finds alone."""
    lm = TextDiffusion(twin, VOCABULARY_WORDS, {"method": "autoregressive"})
    asked = [[Contains("d"), Length(4)], [Infill("a ___:2 c b")], [Contains("b c"), Contains("d")]]
    jobs = [lm.make_job(1, controls=controls, method="cold") for controls in asked]
    together = {owner: made[0].text for owner, made in lm.run_jobs(jobs)}
    alone = {k: lm.generate(1, controls=controls, method="cold")[0].text for k, controls in enumerate(asked)}
    assert together == alone


@pytest.mark.parametrize("search", [DeloreanSearch(passes=2, iterations=3), ColdSearch(steps=4)])
def test_calls_are_counted(twin, search):
    counted = CountedReads(twin)
    gaps = texts(counted, [A, FREE, FREE, B, END])
    search.decode(gaps, *([Noise(0, torch.arange(1))] if isinstance(search, ColdSearch) else []))
    assert counted.calls == search.calls(gaps)


@pytest.mark.parametrize(
    ("method", "control"),
    [("pplm", Infill("a ___")), ("delorean", Contains("a")), ("cold", Avoid("a"))],
)
def test_what_they_cannot_take_is_said(twin, method, control):
    with pytest.raises(UsageError, match=f"{method} cannot take {control.name}: "):
        generate(twin, 1, control, method=method)


@pytest.mark.long
def test_pplm_is_led_by_a_classifier_of_prefixes(twin):
    """The label is whether D comes next, by a classifier that reads it off the expected word's vector."""
    torch.manual_seed(0)
    classifier = untrained_classifier()
    optimiser = torch.optim.Adam(classifier.parameters(), 1e-2)
    for _ in range(60):
        words = torch.randint(A, VOCABULARY, (64, 3))
        told = classifier(twin.view(words).detach()).text("topic")[:, -1]
        loss = nn.functional.nll_loss(told, torch.where(words[:, -1] == D, 2, 1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    noise, found = Noise(0, torch.arange(64)), []
    for strength in (0.0, 0.5):
        plan = Pplm(twin, LABELLED, [Label("topic", "yes")], [classifier.eval().requires_grad_(False)], strength)
        tokens = last(left_to_right(twin, noise, 8, SAMPLING, Pplm.rules([(plan, slice(0, 64))]))).tokens
        found.append(float((tokens == D).sum() / (tokens >= A).sum()))
    assert found[1] > 1.5 * found[0]


def test_pplm_counts_its_calls_and_imposes_what_is_exact(twin):
    for text in generate(twin, 2, Contains("d"), Length(6), method="pplm"):
        assert all(check["satisfied"] for check in text.controls)
    (text,) = generate(twin, 1, Length(6), method="pplm")
    assert text.denoiser_calls == 1 + 6 * (PplmRule.iterations + 3)  # END is decoded as well
    counted = CountedReads(twin)
    *_, frame = left_to_right(counted, Noise(0, torch.arange(1)), 3, SAMPLING, [PplmRule(counted, bag(D))])
    assert counted.calls == 1 + frame.step * (PplmRule.iterations + 3)


@pytest.mark.long
def test_no_inner_loop_waits_for_the_device(twin):
    gaps, noise = texts(twin, [A, FREE, FREE, B, END]), Noise(torch.tensor([7]), torch.arange(1))
    assert gaps.gaps == (1, 3)  # asked once, before the loops
    with Asynchronous(), pytest.raises(AssertionError):
        bool(gaps.free.any())
    with Asynchronous():
        DeloreanSearch(passes=2, iterations=2).decode(gaps)
        ColdSearch(steps=3).decode(gaps, noise, torch.tensor([[[D, FREE]]]))
        rule = PplmRule(twin, bag(D))
        last(left_to_right(twin, noise, 6, SAMPLING, [rule]))
        plan = Pplm(twin, LABELLED, [Label("topic", "yes"), Contains("b c")], [untrained_classifier()])
        last(left_to_right(twin, noise, 6, SAMPLING, Pplm.rules([(plan, slice(0, 1))])))
