"""Losses that never see all logits: equal to those that do, gradients included, and small in memory."""

import os
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from difflm.data.batches import Batch, Batches
from difflm.data.texts import Example
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import Words
from difflm.diffusion.denoiser import autocast_to
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.timesteps import LowDiscrepancy
from difflm.methods import METHODS, TextSpec
from difflm.methods.masked_lm import MostlyAt
from difflm.models import diffusion
from difflm.models.word_nats import choose_rows, most_masked
from difflm.networks import Sizes, Transformer, head

WORDS, LONGEST, TEXTS = 70, 24, 64  # 70 is no multiple of 64
MASKED = ("mdlm", "cmlm", "d3pm-absorbing", "bert-mouth", "block-diffusion")
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}


def make_model(name, source_longest=0, words=WORDS, **more):
    torch.manual_seed(0)
    settings = {"hidden": 16, "layers": 1, "heads": 2, "dropout": 0.0, **more}
    model = METHODS[name](**settings).build(TextSpec(words, LONGEST, source_longest))
    for part in model.modules():
        if isinstance(part, head.WordHead):
            torch.nn.init.normal_(part.head.weight, std=0.5)
            torch.nn.init.normal_(part.head.bias)
    return model


def make_batch(sources=0, full=False):
    torch.manual_seed(1)
    ids, lengths = torch.randint(5, WORDS, (TEXTS, LONGEST)), torch.randint(3, LONGEST + 1, (TEXTS,))
    lengths = torch.full_like(lengths, LONGEST) if full else lengths
    told = (torch.randint(5, WORDS, (TEXTS, sources)), torch.full((TEXTS,), sources)) if sources else (None, None)
    return Batch(ids, lengths, *told, index=torch.arange(TEXTS), seed=3)


def losses_and_gradients(model, batch):
    model.zero_grad()
    losses = model(batch)
    losses.means()["loss"].backward()
    return losses, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_equal_losses(found, expected):
    (losses, gradients), (plain, others) = found, expected
    assert torch.allclose(losses.total, plain.total, rtol=1e-5)
    assert {*losses.terms} == {*plain.terms} and losses.count == plain.count
    assert all(torch.allclose(losses.terms[name], plain.terms[name], rtol=1e-5) for name in plain.terms)
    assert {*gradients} == {*others}
    for name, gradient in others.items():
        assert (gradients[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max() + 1e-8, name


@pytest.mark.parametrize(("name", "sources"), [*((name, 0) for name in MASKED), ("mdlm", 6), ("diffusion-nat", 6)])
def test_masked_words_alone_give_the_loss_of_all_logits(monkeypatch, name, sources):
    model, batch = make_model(name, sources), make_batch(sources)
    found = losses_and_gradients(model, batch)
    ((shape, rows),) = model._rows.items()
    assert (rows < shape.numel()) == (name != "block-diffusion")  # whose blocks have times of their own
    monkeypatch.setattr(diffusion, "is_linear", lambda *_: False)
    assert_equal_losses(found, losses_and_gradients(model, batch))


@pytest.mark.parametrize("name", ["mdlm", "block-diffusion"])
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("anneal", [0, 10])
def test_masked_words_alone_give_the_loss_of_a_loaded_network(monkeypatch, name, shift, anneal):
    model, batch = make_model(name, decoder=LLAMA, shift=shift, anneal=anneal).train(), make_batch()

    def measure():
        torch.manual_seed(0)  # who sees whom is drawn while attention opens
        return losses_and_gradients(model, batch)

    found = measure()
    assert model._rows
    monkeypatch.setattr(diffusion, "is_linear", lambda *_: False)
    assert_equal_losses(found, measure())


def test_parts_of_the_rows_give_the_loss_of_all_rows(monkeypatch):
    model, batch = make_model("mdlm"), make_batch()
    whole = losses_and_gradients(model, batch)
    monkeypatch.setitem(head.CHUNK, "cpu", 256 * 128)
    assert_equal_losses(losses_and_gradients(model, batch), whole)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [50, 300])  # one part, three parts
def test_weighed_nats_are_cross_entropies(monkeypatch, rows, smoothing):
    torch.manual_seed(0)
    monkeypatch.setitem(head.CHUNK, "cpu", 128 * 128)
    network = Transformer(8, WORDS, Sizes(8, 1, 2))
    torch.nn.init.normal_(network.head.weight)
    states, targets, weights = torch.randn(rows, 8, requires_grad=True), torch.randint(WORDS, (rows,)), torch.rand(rows)
    nats, total = head.weigh_nats(network, states, targets, weights, smoothing)
    (3 * total).backward()
    found = [states.grad.clone(), *(p.grad.clone() for p in (network.head.weight, network.head.bias))]
    states.grad = network.head.weight.grad = network.head.bias.grad = None
    plain = F.cross_entropy(network.answer(states), targets, reduction="none", label_smoothing=smoothing)
    (3 * (weights * plain).sum()).backward()
    assert torch.allclose(nats, plain, atol=1e-5) and not nats.requires_grad
    for ours, theirs in zip(found, (states.grad, network.head.weight.grad, network.head.bias.grad), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU here, nor Triton's interpreter")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "words"), [(70, 4100), (3, 8250), (128, 50)])
def test_the_kernel_computes_the_same_slopes(rows, words, dtype, smoothing):
    """Without a GPU too: TRITON_INTERPRET=1 pytest tests/models/test_word_nats.py -k kernel"""
    from difflm.fast.kernels.training import weigh_slopes_in_place

    torch.manual_seed(0)
    logits, targets, weights = 3 * torch.randn(rows, words), torch.randint(words, (rows,)), torch.rand(rows)
    logits[1], targets[0], weights[-1] = logits[1] + 1000, words - 1, 0.0
    logits, bias = F.pad(logits, (0, -words % 64)), F.pad(torch.randn(words), (0, -words % 64), value=float("-inf"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits, bias, targets, weights = logits.to(device, dtype), bias.to(device), targets.to(device), weights.to(device)
    nats, slopes, sums = head.weigh_slopes(logits.float(), bias, targets, weights, words, smoothing)
    found, own, totals = weigh_slopes_in_place(logits, bias, targets, weights, words, smoothing)
    assert own is logits and own.dtype == dtype and (own[:, words:] == 0).all()
    assert torch.allclose(found, nats, atol=1e-3, rtol=1e-5)
    assert torch.allclose(own.float(), slopes, atol=1e-7, rtol=1e-3 if dtype is torch.float32 else 1e-2)
    assert torch.allclose(totals, sums, atol=1e-5, rtol=1e-3)  # sums of numbers that are not rounded yet


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("rows", [100, 1000])  # one part, four parts
def test_a_gpu_gives_the_gradients_of_cross_entropy(monkeypatch, rows):
    """Of a large vocabulary in bfloat16, which differs by what it resolves."""
    torch.manual_seed(0)
    words = 5000
    monkeypatch.setitem(head.CHUNK, "cuda", 256 * 5056)
    network = Transformer(8, words, Sizes(64, 1, 2)).cuda()
    torch.nn.init.normal_(network.head.weight, std=0.3)
    states = torch.randn(rows, 64, device="cuda", requires_grad=True)
    targets, weights = torch.randint(words, (rows,), device="cuda"), torch.rand(rows, device="cuda")
    asked = states, network.head.weight, network.head.bias
    with autocast_to(states.device, torch.bfloat16):
        nats, total = head.weigh_nats(network, states, targets, weights, 0.1)
    found = torch.autograd.grad(total, asked)
    plain = F.cross_entropy(network.answer(states), targets, reduction="none", label_smoothing=0.1)
    assert (nats - plain).abs().max() < 0.1
    for ours, theirs in zip(found, torch.autograd.grad((weights * plain).sum(), asked), strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("name", ["mdlm", "autoregressive"])
def test_logits_are_computed_for_a_part_of_the_rows_at_a_time(monkeypatch, name):
    model, batch = make_model(name), make_batch()
    monkeypatch.setitem(head.CHUNK, "cpu", 256 * 128)
    network, sizes = model.network if name == "autoregressive" else model.denoiser.network, []
    monkeypatch.setattr(network, "slopes", lambda *given: sizes.append(given[0].shape) or head.weigh_slopes(*given))
    network.head.register_forward_pre_hook(lambda *_: pytest.fail("the head was asked of all positions"))
    losses_and_gradients(model, batch)
    assert len(sizes) > 2 and max(sizes) == (256, 128)


@pytest.mark.parametrize("name", ["mdlm", "cmlm", "d3pm-absorbing"])
def test_the_bound_needs_no_logits(monkeypatch, name):
    model, batch, noise = make_model(name).eval(), make_batch(), Noise(4, torch.arange(TEXTS))
    monkeypatch.setattr(diffusion, "has_linear_bound", lambda *_: False)
    plain = model.nats(batch, noise, 3)
    monkeypatch.undo()
    model.denoiser.network.head.register_forward_pre_hook(lambda *_: pytest.fail("the head was asked of all positions"))
    assert torch.allclose(model.nats(batch, noise, 3), plain, rtol=1e-5)


def test_the_autoregressive_loss_is_the_likelihood():
    model, batch = make_model("autoregressive"), make_batch()
    assert torch.allclose(model(batch).total, model.nats(batch).sum(), rtol=1e-5)


def test_rows_hold_the_masked_words_of_every_batch():
    """Of evenly spread times: hardly more than half of the words, whatever batch of the run it is."""
    texts, positions, process = 32, 256, Absorbing(9)
    for times, most in ((LowDiscrepancy(), 0.6), (MostlyAt(0.15), 0.45)):
        rows = most_masked(process, times, texts, positions, torch.device("cpu"))
        assert rows <= most * texts * positions
        for start in range(0, 32 * texts, texts):
            noise = Noise(5, torch.arange(start, start + texts))
            t, _ = times.sample(noise, torch.ones(texts, 1, dtype=torch.bool))
            z = process.corrupt(torch.zeros(texts, positions, dtype=torch.int64), t, noise.uniform(0, positions, 3))
            assert (z == process.mask_id).sum() <= rows


def test_rows_that_do_not_fit_count_on_average():
    wanted = torch.rand(40, generator=torch.Generator().manual_seed(0)) < 0.6
    values, count = torch.arange(40.0) ** 2, int(wanted.sum())
    sums = []
    for start in range(count):  # every beginning is as likely
        rows, factor = choose_rows(wanted, 10, torch.tensor([(start + 0.5) / count]))
        assert wanted[rows].all() and len(rows.unique()) == 10 and factor == count / 10
        sums.append((values[rows] * factor).sum())
    assert torch.stack(sums).mean() == pytest.approx(float(values[wanted].sum()))
    rows, factor = choose_rows(wanted, 30, torch.tensor([0.5]))
    assert factor == 1 and {*rows[:count].tolist()} == {*wanted.nonzero().flatten().tolist()}


@given(st.lists(st.booleans(), min_size=1, max_size=50), st.floats(0, 1, exclude_max=True), st.data())
def test_rows_are_sorted_by_rank(wanted, u, data):
    """Wanted ones from any of them on, in their order, then the others in theirs."""
    rows = data.draw(st.integers(1, len(wanted)))
    found, _ = choose_rows(torch.tensor(wanted), rows, torch.tensor([u], dtype=torch.float64))
    own, others = ([place for place, one in enumerate(wanted) if one is kind] for kind in (True, False))
    start = -int(u * len(own)) % len(own) if len(own) > rows else 0
    assert found.tolist() == [*own[start:], *own[:start], *others][:rows]


@pytest.mark.parametrize("chunk", [2**24, 256 * 128])
def test_bfloat16_keeps_the_loss(monkeypatch, chunk):
    model, batch = make_model("mdlm"), make_batch()
    whole, exact = losses_and_gradients(model, batch)
    monkeypatch.setitem(head.CHUNK, "cpu", chunk)
    with autocast_to(torch.device("cpu"), torch.bfloat16):
        narrow, gradients = losses_and_gradients(model, batch)
    for name in ("denoiser.network.head.weight", "denoiser.network.head.bias"):
        assert (gradients[name] - exact[name]).norm() < 0.02 * exact[name].norm()
    assert torch.allclose(narrow.total, whole.total, rtol=0.02) and narrow.total.dtype == torch.float32
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_a_full_canvas_needs_no_mask():
    model, batch = make_model("mdlm"), make_batch(full=True)
    padded = losses_and_gradients(model, batch)
    seen = []
    model.denoiser.network.register_forward_pre_hook(lambda _, given: seen.append(given[2]))
    assert_equal_losses(losses_and_gradients(model, replace(batch, full=True)), padded)
    assert seen == [None]


@pytest.mark.parametrize(("texts", "full"), [(["a b c d"] * 4, True), (["a b c d", "a b", "a b c d", "b"], False)])
def test_batches_know_whether_they_are_full(tmp_path, texts, full):
    words = Words.build(texts, 0)
    tokens = TokenFile.build(tmp_path / "tokens", map(Example, texts), words, {})
    assert all(Batches(tokens, 2, 0, (4,)).batch(step).full is full for step in range(4))
    assert not Batches(tokens, 2, 0, (4, 6)).batch(0).full
