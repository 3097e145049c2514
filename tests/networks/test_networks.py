"""Bodies: sizes, times, masks and how they start."""

import copy
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

from difflm.diffusion.base import Network, expand_levels
from difflm.diffusion.codecs import FixedEmbedding
from difflm.diffusion.codecs.embedding import Logits
from difflm.diffusion.denoiser import Denoiser, SelfConditioning
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Cosine
from difflm.fast.accelerate import exchange_parts
from difflm.fast.fused_blocks import (
    ByteDropout,
    FastGelu,
    FusedFeedForward,
    LinearGeluLinear,
    SumAndNorm,
    add_and_norm,
    at_once,
    dropped,
)
from difflm.methods import TextSpec
from difflm.methods.autoregressive import AutoregressiveTwin
from difflm.methods.difflm import DiffLM
from difflm.methods.diffusion_lm import DiffusionLM
from difflm.networks import BertLayout, Sizes, Transformer
from difflm.networks.cache import Growing
from difflm.networks.rotary import compute_rotations, rotate_vectors, split_projection
from difflm.networks.transformer import Attention, Context, FeedForward, additive, sinusoid, split_modulation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


def shaken(module: nn.Module) -> nn.Module:
    """Random weights everywhere: nothing is zero by its start."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module.eval()


def bodies() -> dict[str, nn.Module]:
    return {
        "adaptive": shaken(Transformer(6, 5, Sizes(32, 2, 4), time="adaptive")),
        "addition": shaken(Transformer(6, 5, Sizes(32, 2, 4), time="addition")),
        "none": shaken(Transformer(6, 5, Sizes(32, 2, 4), time="none")),
        "bert": shaken(BertLayout(6, 5, 32, 2, 4)),
    }


BODIES = bodies()
X = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(0))
T = torch.tensor([0.1, 0.5, 0.9])
each_body = pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_diffusion_lm_has_exactly_the_published_size():
    with torch.device("meta"):
        assert parameters(DiffusionLM().build(TextSpec(821, 64))) == 87_129_749


def test_difflm_and_its_twin_are_small_and_alike():
    with torch.device("meta"):
        ours, twin = (
            parameters(DiffLM().build(TextSpec(821, 64))),
            parameters(AutoregressiveTwin().build(TextSpec(821, 64))),
        )
    assert ours <= 17_500_000
    assert abs(ours - twin) < 0.1 * ours


@each_body
def test_one_time_for_a_text_is_that_time_at_each_position(body):
    assert torch.allclose(body(X, T), body(X, T[:, None].expand(3, 7)), atol=1e-5)


@pytest.mark.parametrize("name", ["adaptive", "addition", "bert"])
def test_the_time_of_a_position_reaches_that_position(name):
    """And all others, through attention."""
    body, times = BODIES[name], T[:, None].expand(3, 7)
    later = times + 0.05 * (torch.arange(7) == 2)
    with torch.no_grad():
        moved = (body(X, later) - body(X, times)).abs().amax(-1)
    assert bool((moved > 1e-6).all())
    assert float(moved[:, 2].mean()) > float(moved[:, 3:].mean())


def test_a_body_without_time_ignores_it():
    assert torch.equal(BODIES["none"](X, T), BODIES["none"](X, T / 2))


@each_body
def test_positions_that_do_not_exist_are_not_seen(body):
    mask = torch.arange(7) < torch.tensor([4, 7, 1])[:, None]
    other = torch.where(mask[..., None], X, 100 * torch.randn(3, 7, 6))
    assert torch.allclose(body(X, T, mask)[mask], body(other, T, mask)[mask], atol=1e-5)
    assert torch.allclose(body(X, T, mask)[0, :4], body(X[:1, :4], T[:1])[0], atol=1e-5)  # as if cut off
    assert float((body(X, T) - body(other, T)).detach()[mask].abs().max()) > 1e-4  # without the mask they are


@each_body
def test_every_position_sees_every_other(body):
    x = X.clone().requires_grad_()
    body(x, T)[:, 0].sum().backward()
    assert bool((x.grad.abs().amax(-1) > 0).all())


def test_a_causal_body_sees_no_later_position():
    body, x = shaken(Transformer(6, 5, Sizes(32, 2, 4), time="none", causal=True)), X.clone().requires_grad_()
    body(x, None)[:, 3].sum().backward()
    seen = x.grad.abs().amax(-1) > 0
    assert bool(seen[:, :4].all()) and not seen[:, 4:].any()


def test_the_adaptive_body_starts_as_the_identity_and_answers_nothing():
    body = Transformer(6, 5, Sizes(32, 3, 4, 0.5), time="adaptive")
    hidden = torch.randn(3, 7, 32)
    assert torch.equal(body.run(hidden, T, None, [None] * 3, 0)[0], hidden)
    assert not body(X, T).any()


def test_dropout_rests_outside_training():
    for body in BODIES.values():
        assert torch.equal(body(X, T), body(X, T))


def test_a_network_that_was_read_in_inference_mode_can_be_trained():
    """The rotations of a canvas are kept for later ones."""
    network, x = Transformer(6, 5, Sizes(16, 2, 2, 0.0), "none"), torch.randn(2, 16, 6)
    with torch.inference_mode():
        network(x, None)
    network.train()(x, None).sum().backward()
    assert network.input.weight.grad is not None


def test_rotation_depends_on_distance_alone():
    """⟨R_i q, R_j k⟩ is a function of i − j (Su et al., 2021), and turning keeps lengths."""
    q, k = torch.randn(16), torch.randn(16)
    cos, sin = compute_rotations(20, 16, torch.device("cpu"))
    turned_q, turned_k = rotate_vectors(q.expand(20, 16), cos, sin), rotate_vectors(k.expand(20, 16), cos, sin)
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 7):
        same = torch.stack([scores[i + distance, i] for i in range(20 - distance)])
        assert torch.allclose(same, same[:1].expand_as(same), atol=1e-4)
    assert torch.allclose(turned_q.norm(dim=-1), q.norm().expand(20), rtol=1e-5)
    later = compute_rotations(5, 16, torch.device("cpu"), start=15)
    assert torch.allclose(later[0], cos[15:]) and torch.allclose(later[1], sin[15:])


def test_the_sinusoid_is_the_published_one():
    """Cosines then sines of 1000·t, periods from 2π to 10,000·2π."""
    t = torch.tensor([0.0, 0.3])
    found = sinusoid(t, 128)
    assert found[0].tolist() == [1.0] * 64 + [0.0] * 64
    angles = 300.0 * 10_000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    assert torch.allclose(found[1].double(), torch.cat([angles.cos(), angles.sin()]), atol=1e-4)


@pytest.mark.parametrize("exploding", [False, True], ids=["preserving", "exploding"])
def test_the_network_sees_states_of_unit_scale(exploding):
    """Whatever t: 30,000 numbers of unit variance have a spread of 1 ± 5·0.004. Beside them, the last estimate."""
    table = torch.randn(50, 8)
    codec = FixedEmbedding(table, norm="sphere")
    process = Gaussian(Cosine(), exploding)
    denoiser = Denoiser(Echo(8), codec, process, self_conditioning=SelfConditioning("half"))
    clean = codec.encode(torch.randint(50, (400, 10)))
    t = torch.linspace(0, 1, 400)
    x = denoiser.process.corrupt(clean, t, torch.randn_like(clean))
    denoiser(x, t, previous=clean)
    inputs = denoiser.network.inputs
    spread = float(clean.square().mean().sqrt())
    assert float(inputs[..., :8].square().mean().sqrt()) == pytest.approx(spread, abs=0.02)
    assert torch.equal(inputs[..., 8:], clean)
    denoiser(x, t)
    assert not denoiser.network.inputs[..., 8:].any()


class Echo(Network):
    """A body that answers with the first numbers of what it is shown, and keeps that."""

    def __init__(self, out_dim):
        super().__init__()
        self.out_dim = out_dim

    def forward(self, inputs, t, mask=None):
        self.inputs = inputs
        return inputs[..., : self.out_dim]


class Silent(Network):
    """A body that has no opinion."""

    def forward(self, inputs, t, mask=None):
        return torch.zeros(*inputs.shape[:2], 5)


def test_logits_are_the_networks_opinion_and_the_evidence():
    table = torch.randn(5, 6)
    plain, told = (
        Denoiser(Silent(), FixedEmbedding(table, "sphere", prediction=Logits(evidence)), Gaussian(Cosine()))(X, T)
        for evidence in (False, True)
    )
    assert plain.evidence is None and not plain.logits.any()
    assert told.evidence is not None and torch.equal(told.logits, told.evidence)
    assert told.codec is not None and torch.allclose(told.clean, told.codec.expectation(told.logits))


@pytest.mark.parametrize("x0_std", [0.0, 0.4])
def test_evidence_is_the_likelihood_of_the_state_given_its_word(x0_std):
    """x_t = α(e + x0_std·ε) + σ·ε′: a Gaussian around α e whose variance is the sum of both."""
    codec, process = FixedEmbedding(torch.randn(5, 6), norm="sphere", x0_std=x0_std), Gaussian(Cosine())
    alpha, sigma = (expand_levels(v, X).double() for v in (process.at(T).alpha, process.at(T).sigma))
    spread = (sigma**2 + alpha**2 * x0_std**2).sqrt().unsqueeze(-1)
    mean = alpha.unsqueeze(-1) * codec.table().double()
    expected = torch.distributions.Normal(mean, spread).log_prob(X.double().unsqueeze(-2)).sum(-1)
    seen = codec.log_likelihood(X, process.at(T)).double()
    assert torch.allclose(seen.log_softmax(-1), expected.log_softmax(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("evidence", [True, False])
def test_every_choice_of_difflm_answers(evidence):
    model = DiffLM(embedding_dim=8, hidden=32, layers=1, heads=2, evidence=evidence).build(TextSpec(9, 16))
    belief = model.denoiser(torch.randn(2, 5, 8), torch.rand(2))
    assert belief.logits.shape == (2, 5, 9) and belief.clean.shape == (2, 5, 8)


def test_a_body_that_looks_is_given_the_mean_word_of_the_evidence():
    """The best guess without context is the third part of its input."""
    codec = FixedEmbedding(torch.randn(5, 6), norm="sphere", prediction=Logits(evidence=True))
    denoiser = Denoiser(Echo(5), codec, Gaussian(Cosine()))
    with torch.no_grad():
        codec.bias.copy_(torch.randn(5))
        evidence = denoiser(X, T).evidence
    assert torch.allclose(
        denoiser.network.inputs[..., 6:], (evidence + codec.bias).softmax(-1) @ codec.table(), atol=1e-5
    )


def test_learned_places_are_counted_from_both_ends_on_any_canvas():
    """A text's answer is the same on a wider canvas, even one wider than the longest text."""
    torch.manual_seed(0)
    body = Transformer(6, 5, Sizes(32, 2, 2, 0.0), positions=8).eval()
    nn.init.normal_(body.head.weight)
    x, t = torch.randn(1, 12, 6), torch.rand(1)
    narrow = body(x[:, :5], t, torch.ones(1, 5, dtype=torch.bool))
    wide = body(x, t, torch.arange(12)[None] < 5)[:, :5]
    assert torch.allclose(narrow, wide, atol=1e-5)
    assert not torch.allclose(narrow, body(x[:, :6], t, torch.ones(1, 6, dtype=torch.bool))[:, :5], atol=1e-2)


def test_modulations_at_once_are_those_of_each_layer():
    """Sums of eight numbers of size one, rounded in float32."""
    layers, condition = [torch.nn.Linear(8, 6 * 4) for _ in range(3)], torch.randn(5, 1, 8)
    together = zip(*(part.unbind(-3) for part in split_modulation(at_once(layers, condition), 3)), strict=True)
    for layer, whole in zip(layers, together, strict=True):
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = layer(condition).chunk(6, dim=-1)
        expected = [(shift_1, shift_2), (1 + scale_1, 1 + scale_2), (gate_1, gate_2)]
        for part, alone in zip(whole, expected, strict=True):
            assert torch.allclose(part, torch.stack(alone, -2), atol=1e-5)


def test_dropping_by_bytes_keeps_the_mean_and_drops_the_share():
    torch.manual_seed(0)
    kept = dropped(torch.ones(400, 512), 26)
    assert kept.unique().tolist() == [0.0, pytest.approx(256 / 230)]
    assert float((kept == 0).float().mean()) == pytest.approx(26 / 256, abs=0.003)
    for place in (0, 7):  # of eight numbers that share a draw
        assert float((kept[:, place] == 0).float().mean()) == pytest.approx(26 / 256, abs=0.06)


def test_dropout_that_is_not_compiled_for_a_gpu_is_the_usual_one():
    x = torch.randn(3, 8)
    torch.manual_seed(1)
    usual = nn.functional.dropout(x, 0.3)
    torch.manual_seed(1)
    assert torch.equal(ByteDropout(0.3)(x), usual)
    assert torch.equal(ByteDropout(0.3).eval()(x), x)


def sliced(packed: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values by the formula, one slice each."""
    q, k, v = (packed[:, :, part].transpose(1, 2) for part in range(3))
    if turn is None:
        return q, k, v
    cos, sin = turn
    half = cos.shape[-1] // 2
    signed = sin * torch.tensor([-1.0] * half + [1.0] * half, dtype=sin.dtype)  # of the angles themselves

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * signed

    return turned(q), turned(k), v


@pytest.mark.parametrize("turned", ["not", "alike", "by document"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_projection_is_split_with_its_gradients(turned, compiled):
    torch.manual_seed(0)
    packed = torch.randn(2, 5, 3, 3, 8, requires_grad=True)
    turn = None if turned == "not" else compute_rotations(5, 8, packed.device)
    if turned == "by document" and turn is not None:
        place = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
        turn = turn[0][place].unsqueeze(1), turn[1][place].unsqueeze(1)
    wanted = sliced(packed, turn)
    found = (torch.compile(split_projection) if compiled else split_projection)(packed, turn)
    with torch.no_grad():  # as when generating
        written = split_projection(packed, turn)
    grads = [torch.randn_like(one) for one in wanted]
    for own, other, true in zip(found, written, wanted, strict=True):
        assert torch.allclose(own, true, atol=1e-6) and torch.allclose(other, true, atol=1e-6)
    (slope,), (true,) = (torch.autograd.grad(parts, packed, grads) for parts in (found, wanted))
    assert torch.allclose(slope, true, atol=1e-6)


def test_gradients_of_a_split_projection_are_its_slopes():
    """In float64, twice."""
    torch.manual_seed(0)
    packed = torch.randn(1, 3, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = (angle.double() for angle in compute_rotations(3, 4, packed.device))
    assert torch.autograd.gradcheck(lambda x: split_projection(x, (cos, sin)), packed)
    assert torch.autograd.gradgradcheck(lambda x: split_projection(x, (cos, sin)), packed)


def test_the_gradient_of_a_projection_is_one_stack():
    """What a compiler is given has no slices that it would fill with zeros and add, and no gradient but that of y."""
    given: list[GraphModule] = []

    def keep(graph: GraphModule, _: Any) -> Any:
        given.append(graph)
        return make_boxed_func(graph.forward)

    attention, x = Attention(16, 2, 0.0), torch.randn(2, 70, 16, requires_grad=True)
    compiled = torch.compile(attention, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    compiled(x, Context(turn=compute_rotations(70, 8, x.device))).sum().backward()
    _, back = given
    names = [node.name for node in back.graph.nodes]
    assert not [name for name in names if "scatter" in name or "zeros" in name or name.startswith("new")]
    assert sum(name.startswith("stack") for name in names) == 1
    assert [name for name in names if name.startswith("tangents")] == ["tangents_1"]


def test_attention_puts_keys_and_values_behind_those_before():
    attention, x = Attention(16, 2, 0.0), torch.randn(2, 70, 16)
    turn, kept = compute_rotations(70, 8, x.device), Growing(None)
    assert torch.equal(attention(x, Context(turn=turn)), attention(x, Context(turn=turn, cache=kept)))
    first, last = x.split([69, 1], 1)
    grown = Growing(None)
    attention(first, Context(turn=(turn[0][:69], turn[1][:69]), cache=grown))
    attention(last, Context(turn=(turn[0][69:], turn[1][69:]), cache=grown))
    assert torch.allclose(kept.keys, grown.keys, atol=1e-6) and torch.allclose(kept.values, grown.values, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_fast_gelu_is_gelu(compiled):
    fast = torch.compile(FastGelu.apply) if compiled else FastGelu.apply
    x = torch.cat([torch.linspace(-10, 10, 20_001), torch.tensor([0.0, -0.0, -1e4, 1e4, -1e30, 1e30])])
    x, exact = x.requires_grad_(), x.double().requires_grad_()
    grad = torch.linspace(-1, 1, len(x))
    found, wanted = fast(x), nn.functional.gelu(exact)
    assert ((found - wanted).abs() <= 5e-7 * wanted.abs().clamp(1, 10)).all()
    (slope,), (true,) = torch.autograd.grad(found, x, grad), torch.autograd.grad(wanted, exact, grad.double())
    assert (slope - true).abs().max() < 5e-7
    assert abs(float(fast(torch.zeros(1)))) == 0


def test_the_fast_gelu_in_bfloat16_is_rounded_once():
    x = torch.linspace(-10, 10, 2001).bfloat16().requires_grad_()
    wide = x.detach().float().requires_grad_()
    found, wanted = FastGelu.apply(x), nn.functional.gelu(wide)
    (slope,), (true,) = torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), wide)
    for own, exact in ((found, wanted), (slope, true)):
        assert own.dtype is torch.bfloat16
        assert torch.allclose(own.float(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU here, nor Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(32, 8, 1024), (77, 24, 100), (130, 8, 1030)])
@pytest.mark.parametrize("biased", [False, True])
def test_layers_with_gelu_have_the_gradients_of_the_plain_operations(rows, hidden, inner, dtype, biased):
    """Without a GPU too: TRITON_INTERPRET=1 pytest tests/networks/test_networks.py -k gelu"""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scales = {(rows, hidden): 1.0, (inner, hidden): hidden**-0.5, (inner,): 1.0, (hidden, inner): inner**-0.5}
    scales |= {(hidden,): 1.0} if biased else {}
    given = [(scale * torch.randn(*size, device=device)).to(dtype).requires_grad_() for size, scale in scales.items()]
    exact = [part.double() for part in given]
    wanted = nn.functional.linear(nn.functional.gelu(nn.functional.linear(*exact[:3])), *exact[3:])
    found = LinearGeluLinear.apply(*given, *([] if biased else [None]))
    near = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 0.02}[dtype]
    assert (wanted - found).norm() < near * wanted.norm()
    grad = torch.randn(rows, hidden, device=device).to(dtype)
    slopes = torch.autograd.grad(wanted, given, grad.double()), torch.autograd.grad(found, given, grad)
    for one, other in zip(*slopes, strict=True):
        assert (one.double() - other.double()).norm() < near * one.double().norm()


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU here, nor Triton's interpreter")
@pytest.mark.parametrize("terms", [1, 2, 3])  # x, y and its bias
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 32, 64), (3, 7, 24), (1, 77, 100)])
def test_a_sum_and_its_norm_have_the_gradients_of_the_plain_operations(shape, dtype, terms):
    """Without a GPU too: TRITON_INTERPRET=1 pytest tests/networks/test_networks.py -k norm"""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, y = ((3 + torch.randn(*shape, device=device)).to(dtype).requires_grad_() for _ in range(2))
    *weights, bias = (torch.randn(shape[-1], device=device).requires_grad_() for _ in range(3))
    added = [x, y, bias][:terms]
    total = sum(part.double() for part in added)
    wanted = total, nn.functional.layer_norm(total, shape[-1:], *(part.double() for part in weights), 1e-5)
    found = SumAndNorm.apply(*added, *[None] * (3 - terms), *weights, 1e-5, dtype)
    near = {torch.float32: 5e-6, torch.float16: 4e-3}[dtype]
    assert all((one - other).norm() < near * one.norm() for one, other in zip(wanted, found, strict=True))
    given, grads = [*added, *weights], [torch.randn(*shape, device=device).to(dtype) for _ in "12"]
    slopes = (
        torch.autograd.grad(wanted, given, [grad.double() for grad in grads]),
        torch.autograd.grad(found, given, grads),
    )
    for one, other in zip(*slopes, strict=True):
        assert one.dtype is other.dtype and (one.double() - other.double()).norm() < near * one.double().norm()


@pytest.mark.parametrize("y", [None, torch.ones(2, 3, 8)])
def test_a_sum_and_its_norm_are_plain_ones_elsewhere(y):
    norm, x = nn.LayerNorm(8), torch.randn(2, 3, 8)
    total, normed = add_and_norm(norm, x, y)
    assert torch.equal(total, x if y is None else x + y) and torch.equal(normed, norm(total))
    total, normed = add_and_norm(norm, x, torch.ones(2, 3, 8), bias=norm.weight)
    assert torch.equal(total, x + 2) and torch.equal(normed, norm(total))


def test_layers_that_are_not_compiled_for_a_gpu_are_the_usual_ones():
    x = torch.randn(3, 8)
    plain = FeedForward(8, 32)
    fused = copy.deepcopy(plain)
    exchange_parts(fused, ["cpu"])
    assert type(fused) is FusedFeedForward and fused.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(fused(x), plain(x))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@needs_gpu
@pytest.mark.parametrize("length", [1, 13, 32, 64])
@pytest.mark.parametrize("how", ["plain", "masked", "turned", "causal", "all"])
def test_attention_of_short_texts_is_attention(length, how):
    """Values and gradients, to what bfloat16 resolves."""
    from difflm.fast.kernels.short_attention import attend

    torch.manual_seed(0)
    packed = torch.randn(3, length, 3, 2, 64, device="cuda").bfloat16().requires_grad_()
    there = torch.arange(length, device="cuda") < torch.tensor([[1], [length], [length // 2 + 1]], device="cuda")
    mask = additive(there, torch.bfloat16) if how in ("masked", "all") else None
    turn = compute_rotations(length, 64, packed.device) if how in ("turned", "all") else None
    causal = how in ("causal", "all")
    own = attend(packed, mask, *(turn or (None, None)), None, causal, 0.0)

    exact = packed.detach().double().requires_grad_()
    q, k, v = exact.permute(2, 0, 3, 1, 4)
    if turn is not None:
        q, k = (rotate_vectors(one, *(angle.double() for angle in turn)) for one in (q, k))
    scores = q @ k.transpose(-1, -2) / 8
    scores = scores if mask is None else scores + mask.double()[:, None, None]
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    wanted = (scores.softmax(-1) @ v).transpose(1, 2)
    grad = torch.randn_like(own)
    assert (own.double() - wanted).abs().max() < 0.03
    (found,), (true,) = torch.autograd.grad(own, packed, grad), torch.autograd.grad(wanted, exact, grad.double())
    assert (found.double() - true).abs().max() < 0.03 * (1 + true.abs().max())


@needs_gpu
def test_attention_of_short_texts_drops_alike_on_the_way_back():
    """Which pairs are kept is seen where all are alike and each value is a column of its own; under these, answers and
    all gradients are those of exact attention. Another seed keeps others, and the mean is kept."""
    from difflm.fast.kernels.short_attention import attend

    torch.manual_seed(0)
    texts, length, heads, drop = 3, 40, 2, 0.3
    seeds = [torch.tensor([seed], device="cuda") for seed in (1, 2)]
    alike = torch.zeros(texts, length, 3, heads, 64, device="cuda").bfloat16()
    alike[:, torch.arange(length), 2, :, torch.arange(length)] = 1
    kept, other = (attend(alike, None, None, None, seed, False, drop)[..., :length] > 0 for seed in seeds)
    kept = kept.transpose(1, 2)  # [B, heads, L, L]
    assert float(kept.float().mean()) == pytest.approx(1 - drop, abs=0.03)
    assert (kept != other.transpose(1, 2)).float().mean() > 0.3

    packed = torch.randn_like(alike).requires_grad_()
    exact = packed.detach().double().requires_grad_()
    q, k, v = exact.permute(2, 0, 3, 1, 4)
    shares = (q @ k.transpose(-1, -2) / 8).softmax(-1) * kept / (1 - drop)
    wanted, own = (shares @ v).transpose(1, 2), attend(packed, None, None, None, seeds[0], False, drop)
    grad = torch.randn_like(own)
    assert (own.double() - wanted).abs().max() < 0.05
    (found,), (true,) = torch.autograd.grad(own, packed, grad), torch.autograd.grad(wanted, exact, grad.double())
    assert (found.double() - true).abs().max() < 0.03 * (1 + true.abs().max())


@needs_gpu
def test_bert_answers_alike_by_either_attention():
    body = shaken(BertLayout(6, 5, 64, 2, 2)).cuda()
    exchange_parts(body, ["cuda"])
    x, mask = torch.randn(3, 40, 6, device="cuda"), torch.ones(3, 40, dtype=torch.bool, device="cuda")
    times = T.cuda()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        narrow = body(x, times, mask)
    with torch.no_grad():
        assert (narrow.float() - body(x, times, mask)).abs().max() < 0.1 * body(x, times, mask).abs().max()
