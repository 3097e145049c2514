"""Words as vectors, against brute force."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from difflm.diffusion.base import Levels
from difflm.diffusion.codecs import FixedEmbedding, LearnedEmbedding, Tokens
from difflm.diffusion.codecs.tokens import MaskedLookup
from difflm.diffusion.processes import GaussianLevels

norms = st.sampled_from(["none", "sphere", "layer"])
seeds = st.integers(0, 2**31)


def codec_of(norm: str, seed: int, words: int = 11, dim: int = 6) -> FixedEmbedding:
    table = torch.randn(words, dim, generator=torch.Generator().manual_seed(seed)) * 2 + 0.5
    codec = FixedEmbedding(table, norm=norm)
    with torch.no_grad():
        codec.bias.copy_(torch.randn(words, generator=torch.Generator().manual_seed(seed + 1)))
    return codec


def states(seed: int, dim: int = 6) -> torch.Tensor:
    return torch.randn(3, 4, dim, generator=torch.Generator().manual_seed(seed + 2))


@given(seed=seeds)
def test_vectors_on_the_sphere_have_length_root_d(seed):
    codec = codec_of("sphere", seed)
    assert torch.allclose(codec.table().norm(dim=-1), torch.full((11,), math.sqrt(6)), rtol=1e-5)
    cosine = torch.cosine_similarity(codec.table(), codec.raw, dim=-1)
    assert torch.allclose(cosine, torch.ones(11), atol=1e-5)  # the direction is the table's own


@given(seed=seeds)
def test_layer_norm_centres_and_scales_each_vector(seed):
    table = codec_of("layer", seed).table()
    assert torch.allclose(table.mean(-1), torch.zeros(11), atol=1e-5)
    assert torch.allclose(table.var(-1, unbiased=False), torch.ones(11), rtol=1e-3)


def test_free_vectors_stay_as_they_are():
    codec = codec_of("none", 0)
    assert torch.equal(codec.table(), codec.raw)


@given(norm=norms, seed=seeds)
def test_the_rounding_head_shares_the_table(norm, seed):
    codec, x = codec_of(norm, seed), states(seed)
    expected = torch.einsum("bld,vd->blv", x, codec.table()) + codec.bias
    assert torch.allclose(codec.readout(x), expected, atol=1e-5)
    learned = LearnedEmbedding(5, 6)
    learned.readout(x).sum().backward()
    assert learned.raw.grad is not None and bool(learned.raw.grad.any())
    assert sum(p.numel() for p in learned.parameters()) == 5 * 6 + 5  # one table and one bias, nothing twice


@given(norm=norms, seed=seeds)
def test_nearest_is_the_closest_of_all(norm, seed):
    codec, x = codec_of(norm, seed), states(seed)
    brute = torch.cdist(x.double(), codec.table().double().expand(3, -1, -1)).argmin(-1)
    assert torch.equal(codec.nearest(x), brute)
    ids = torch.arange(11).view(1, 11)
    assert torch.equal(codec.nearest(codec.encode(ids)), ids)


@given(norm=norms, seed=seeds)
def test_expectation_is_the_mean_of_the_vectors(norm, seed):
    codec = codec_of(norm, seed)
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(seed))
    p = logits.softmax(-1)
    by_hand = sum(p[..., w, None] * codec.table()[w] for w in range(11))
    assert torch.allclose(codec.expectation(logits), by_hand, atol=1e-5)
    certain = torch.full((1, 1, 11), -1e4)
    certain[..., 4] = 0
    assert torch.allclose(codec.expectation(certain)[0, 0], codec.table()[4], atol=1e-6)


@given(norm=norms, seed=seeds, alpha=st.floats(0.05, 1), sigma=st.floats(0.1, 30))
def test_evidence_is_the_gaussian_likelihood_up_to_a_constant(norm, seed, alpha, sigma):
    """Differences between words, in float32: the scores are sums of up to d·‖x‖‖e‖/σ², whose rounding is the error."""
    codec, x = codec_of(norm, seed), states(seed)
    scales = torch.tensor([alpha]), torch.tensor([sigma])
    found = codec.log_likelihood(x, GaussianLevels(scales[0], scales[0], *scales, scales[0])).double()
    normal = torch.distributions.Normal(alpha * codec.table().double(), sigma)
    exact = normal.log_prob(x.double().unsqueeze(2)).sum(-1)
    gap = (found - found[..., :1]) - (exact - exact[..., :1])
    assert float(gap.abs().max()) < 1e-5 * (1 + float(found.abs().max()))


@pytest.mark.parametrize("norm", ["none", "sphere", "layer"])
def test_encoding_looks_up_the_table(norm):
    codec = codec_of(norm, 3)
    ids = torch.tensor([[1, 0, 10], [4, 4, 2]])
    assert torch.equal(codec.encode(ids), codec.table()[ids])


def test_a_fixed_table_is_not_trained_but_saved():
    codec = codec_of("sphere", 0)
    assert "raw" not in dict(codec.named_parameters()) and "raw" in codec.state_dict()
    assert "raw" in dict(LearnedEmbedding(5, 4).named_parameters())


def test_a_tiny_start_is_harmless_on_the_sphere():
    """init_std chooses how fast directions move, not how long vectors are."""
    assert torch.allclose(LearnedEmbedding(9, 16, "sphere", init_std=1e-3).table().norm(dim=-1), torch.full((9,), 4.0))


@given(seed=seeds, masked=st.sampled_from([0.0, 0.5, 1.0]), length=st.integers(1, 20))
def test_gradients_of_masks_are_those_of_a_plain_lookup(seed, masked, length):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(8, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    x = torch.randint(7, (3, length), generator=generator)
    x[torch.rand(x.shape, generator=generator) < masked] = 7
    grad = torch.randn(*x.shape, 5, generator=generator, dtype=torch.float64)
    found, wanted = MaskedLookup.apply(x, table), F.embedding(x, table)
    assert torch.equal(found, wanted)
    slopes = [torch.autograd.grad(vectors, table, grad)[0] for vectors in (found, wanted)]
    assert slopes[0].shape == table.shape and torch.allclose(*slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("states", [50, 51])  # without a mask, and with one
def test_tokens_learn_on_a_gpu_as_elsewhere(states):
    torch.manual_seed(0)
    codec, x, grad = Tokens(50, 64, states), torch.randint(50, (32, 256)), torch.randn(32, 256, 64)
    x[torch.rand(x.shape) < 0.5] = states - 1
    found = []
    for device in ("cpu", "cuda"):
        own = codec.to(device)
        (vectors,) = own.inputs(x.to(device), Levels(torch.zeros(32, device=device)), None)
        found.append(torch.autograd.grad(vectors, own.raw, grad.to(device))[0].cpu())
    assert torch.allclose(*found, rtol=1e-4, atol=1e-3)
