"""PPLM, DELOREAN and COLD on models small enough to know the answer."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from difflm.controls.cold import Cold, fluency_energy, phrase_energy, read_reversed, run_langevin, straight_through
from difflm.controls.delorean import Delorean
from difflm.controls.pplm import BagOfWords, Pplm, add_delta
from difflm.controls.soft_texts import SoftTexts
from difflm.data.tokenizers import END, PAD, START
from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import left_to_right
from difflm.models.autoregressive import BANNED, Autoregressive
from difflm.models.base import Sampling

VOCABULARY = 9  # the four specials and five words
A, B, C, D, E = range(4, 9)
SAMPLING = Sampling("autoregressive", steps=8)


@pytest.fixture(scope="module")
def twin() -> Autoregressive:
    """Random weights, far from uniform."""
    model = Autoregressive(VOCABULARY, 8, 32, 2, 4, 0.0, SAMPLING)
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


# -- PPLM -------------------------------------------------------------------------------------------------------------


def bag(*words: int) -> Tensor:
    found = torch.zeros(VOCABULARY)
    found[list(words)] = 1
    return found


def test_pplm_without_a_step_is_plain_sampling(twin):
    noise = Noise(3, torch.arange(16))
    plain = last(left_to_right(twin, noise, 8, SAMPLING))
    rule = Pplm(twin, [BagOfWords(bag(C))], step_size=0.0)
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
    rule = Pplm(twin, [BagOfWords(bag(D))], step_size=0.05)
    losses = []
    for n in range(6):
        moved = replace(rule, iterations=n).move(prefix, prefix[:, -1:], history, log_p)
        with torch.no_grad():
            losses.append(rule.loss(prefix, prefix[:, -1:], moved, log_p))
    losses = torch.stack(losses)
    assert (losses[1:] < losses[:-1]).all()
    alone = rule.move(prefix[1:], prefix[1:, -1:], [(k[1:], v[1:]) for k, v in history], log_p[1:])
    together = rule.move(prefix, prefix[:, -1:], history, log_p)
    for one, both in zip(alone, together, strict=True):
        assert torch.allclose(one[0], both[0][1:], atol=1e-5) and torch.allclose(one[1], both[1][1:], atol=1e-5)


def test_pplm_moves_along_the_gradient(twin):
    """By finite differences of the loss in float64, along a random direction."""
    model = Autoregressive(VOCABULARY, 8, 32, 2, 4, 0.0, SAMPLING)
    model.load_state_dict(twin.state_dict())
    model.eval()
    prefix = torch.tensor([[A, B, B]])
    with torch.no_grad():
        answers, caches = model.read(torch.tensor([[START, A, B, B]]), [])
    log_p, history = answers[:, -1].log_softmax(-1), [(k[:, :, :-1], v[:, :, :-1]) for k, v in caches]
    rule = Pplm(model, [BagOfWords(bag(D))], kl_scale=0.5, window=2)
    torch.manual_seed(0)
    direction = [torch.randn_like(torch.stack(layer)[..., 1:, :]) for layer in history]
    zeros = [torch.zeros_like(d).requires_grad_() for d in direction]
    loss = rule.loss(prefix, prefix[:, -1:], add_delta(history, zeros), log_p)
    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(loss.sum(), zeros), direction, strict=True))
    with torch.no_grad():
        ahead, behind = (
            rule.loss(prefix, prefix[:, -1:], add_delta(history, [s * d for d in direction]), log_p)
            for s in (1e-2, -1e-2)
        )
    assert float(slope) == pytest.approx(float((ahead - behind) / 2e-2), rel=0.02)


def test_pplm_writes_words_of_its_bag_more_often_the_larger_its_steps(twin):
    noise = Noise(1, torch.arange(128))
    shares = []
    for size in (0.0, 0.1, 0.5):
        rule = Pplm(twin, [BagOfWords(bag(D))], step_size=size, fusion=1.0)
        tokens = last(left_to_right(twin, noise, 6, SAMPLING, [rule])).tokens
        shares.append(float((tokens == D).sum() / (tokens >= A).sum()))
    assert shares[0] < shares[1] < shares[2]


def test_fusion_is_the_geometric_mean_of_both_models(twin):
    prefix = torch.tensor([[A, B]])

    def logits(fusion: float) -> Tensor:
        rule, caches = Pplm(twin, [BagOfWords(bag(D))], step_size=0.5, fusion=fusion), []
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
    pure = Delorean().forward(gaps, None)
    assert torch.equal(Delorean(forward_weight=1.0).forward(gaps, backward), pure)
    assert torch.equal(Delorean(forward_weight=0.0).forward(gaps, backward), backward * free)
    # Read at a low temperature, forward logits are those of greedy decoding.
    cold = Delorean(temperature=1e-4).forward(gaps, None)
    greedy = gaps.choose(cold)
    answers, _ = twin.read(torch.cat([torch.full((2, 1), START), greedy[:, :-1]], 1))
    assert torch.allclose(cold, answers * free, atol=1e-3)


def test_without_steps_backward_passes_change_nothing(twin):
    gaps = texts(twin, [A, FREE, FREE, B, END])
    start = Delorean().forward(gaps, None)
    assert torch.equal(Delorean(step_size=0.0).backward(gaps, start), start)
    fixed = replace(Delorean(), step_size=0.0, passes=3)
    assert torch.equal(last(fixed.decode(gaps)).tokens, gaps.choose(start))


def test_delorean_finds_the_bridge():
    """In a batch with a text whose gap stands elsewhere, and which is easy."""
    gaps = texts(BRIDGE, [A, FREE, D, END], [A, B, FREE, END])
    assert gaps.choose(Delorean().forward(gaps, None))[:, :3].tolist() == [[A, B, D], [A, B, E]]
    assert last(Delorean().decode(gaps)).tokens.tolist() == [[A, C, D, END], [A, B, E, END]]


def test_backward_steps_lower_the_loss_of_the_words_behind(twin):
    gaps = texts(twin, [A, FREE, FREE, B, END], [FREE, D, A, END])
    start = Delorean().forward(gaps, None)

    def nats(logits: Tensor) -> Tensor:
        return gaps.context_nats(gaps.read(gaps.fill(gaps.possible(logits).softmax(-1))))

    assert (nats(Delorean(step_size=0.01).backward(gaps, start)) < nats(start)).all()


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
    cold = Cold(step_size=0.3)
    torch.manual_seed(0)
    y = torch.randn(2, 5, VOCABULARY)
    zeros = (torch.zeros_like(y) for _ in range(100))
    lower = run_langevin(lambda y: cold.energy(gaps, y, phrases), y, cold.step_size, zeros)
    with torch.no_grad():
        assert (cold.energy(gaps, lower, phrases) < cold.energy(gaps, y, phrases) - 0.5).all()


def test_fluency_alone_is_greedy_decoding(twin):
    gaps = texts(twin, [A, FREE, FREE, FREE], [FREE, FREE, FREE, FREE])
    cold = Cold(steps=20, noise_scale=0.0, context_weight=0.0, top_k=VOCABULARY)
    greedy = gaps.choose(Delorean(temperature=1e-4).forward(gaps, None))
    assert torch.equal(last(cold.decode(gaps, Noise(0, torch.arange(2)))).tokens, greedy)


def test_cold_finds_the_bridge_and_places_phrases():
    samples = Noise(0, torch.arange(2))
    gaps = texts(BRIDGE, [A, FREE, D, END], [A, B, FREE, END])
    assert last(Cold().decode(gaps, samples)).tokens.tolist() == [[A, C, D, END], [A, B, E, END]]
    phrases = torch.tensor([[[C, D]], [[B, FREE]]])
    free = texts(BRIDGE, [A, FREE, FREE, END], [FREE, FREE, FREE, END])
    found = last(Cold(phrase_weight=2.0).decode(free, samples, phrases)).tokens
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


def test_texts_are_read_from_right_to_left(twin):
    """As plain reading of the reversed words, whatever the length of the text beside."""
    ids = torch.tensor([[A, C, D, END, PAD], [E, B, C, A, END]])
    canvas = SoftTexts(twin, ids)
    found = read_reversed(canvas, canvas.given)
    answers, _ = twin.read(torch.tensor([[START, D, C, A]]))
    assert torch.allclose(found[0, :4], answers[0, [2, 1, 0, 3]], atol=1e-5)
    answers, _ = twin.read(torch.tensor([[START, A, C, B, E]]))
    assert torch.allclose(found[1], answers[0, [3, 2, 1, 0, 4]], atol=1e-5)


def test_no_inner_loop_waits_for_the_device(twin):
    gaps, noise = texts(twin, [A, FREE, FREE, B, END]), Noise(torch.tensor([7]), torch.arange(1))
    assert gaps.gaps == (1, 3)  # asked once, before the loops
    with Asynchronous(), pytest.raises(AssertionError):
        bool(gaps.free.any())
    with Asynchronous():
        last(Delorean(passes=2, iterations=2).decode(gaps))
        last(Cold(steps=3).decode(gaps, noise, torch.tensor([[[D, FREE]]]), gaps))
        rule = Pplm(twin, [BagOfWords(bag(D))])
        last(left_to_right(twin, noise, 6, SAMPLING, [rule]))
