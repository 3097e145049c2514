"""SeqDiffuSeq: a schedule for each position, moved by the losses until they grow evenly, and saved with the weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from difflm.app.cli import main
from difflm.app.plots.schedules import POINTS, sample_curve
from difflm.data.batches import Batch
from difflm.data.tokenizers import PAD
from difflm.diffusion.condition import Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Sqrt
from difflm.diffusion.samplers.loop import Steering
from difflm.diffusion.samplers.steps import STEPS
from difflm.diffusion.timesteps import StepSpan
from difflm.methods import METHODS, TextSpec
from difflm.methods.seqdiffuseq import PositionGaussian, PositionLosses, equalise
from difflm.networks import EncoderDecoder
from difflm.runtime.tensors import load_tensors
from tests.support.oracles import oracle_walk
from tests.support.tiny import assert_resumed_to_the_bit

CHAIN, BINS, WORDS, DIM = 2000, 100, 8, 16
SMALL = {"embedding_dim": 16, "hidden": 48, "layers": 1, "encoder_layers": 1, "heads": 2, "dropout": 0.0}


def moved_process(positions: int, chain: int = CHAIN) -> PositionGaussian:
    """A process whose positions differ: the loss of position k was measured to rise as t^(1 + k/2)."""
    process = PositionGaussian(Sqrt(), positions, chain)
    t = (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS
    losses = torch.stack([t ** (1 + k / 2) for k in range(positions)], 1)
    process.table.copy_(equalise(process.table, losses))
    return process


# -- the schedule moves -----------------------------------------------------------------------------------------------


class ExactLosses:
    """Squared errors of E[x_0 | x_t] where positions with the same number in `words` have the same word, and words are
    drawn apart from each other: there is nothing to learn but the schedule."""

    def __init__(self, process: PositionGaussian, words: list[int]) -> None:
        self.process, self.words = process, torch.tensor(words)
        self.vectors = torch.randn(WORDS, DIM, generator=torch.Generator().manual_seed(0))

    def __call__(self, t: Tensor, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        clean = self.vectors[torch.randint(WORDS, (len(t), len(self.words)), generator=draw)[:, self.words]]
        level = self.process.at(t)
        x = self.process.corrupt(clean, level, torch.randn(clean.shape, generator=draw))
        alpha, sigma = level.alpha.unsqueeze(-1), level.sigma.unsqueeze(-1)
        scores = (x * (alpha / sigma**2)) @ self.vectors.T - (alpha / sigma) ** 2 / 2 * self.vectors.square().sum(-1)
        together = (self.words == self.words.unsqueeze(1)).float() @ scores
        return (together.softmax(-1) @ self.vectors - clean).square().mean(-1)

    def correlations(self, draws: int) -> list[float]:
        """Of the mean loss in bins with their number, at each position."""
        t = torch.arange(1, CHAIN + 1).repeat_interleave(draws) / CHAIN
        losses = self(t, 99).view(BINS, -1, len(self.words)).mean(1)
        return [float(torch.corrcoef(torch.stack([torch.arange(BINS), one]))[0, 1]) for one in losses.T]

    def update(self, count: int, draws: int) -> None:
        times = PositionLosses(CHAIN, len(self.words), PAD, first=0, every=1)
        for number in range(count):
            t = torch.arange(1, CHAIN + 1).repeat_interleave(draws) / CHAIN
            losses = self(t, number)
            times.observe(t, losses, torch.ones_like(losses, dtype=torch.bool))
            times.adapt(self.process, number)


@pytest.mark.long
def test_three_updates_make_the_loss_of_an_exact_denoiser_linear_in_time():
    process = PositionGaussian(Sqrt(), 2, CHAIN)
    exact = ExactLosses(process, [0, 1])
    assert exact.correlations(20) == pytest.approx([0.953, 0.953], abs=0.01)
    exact.update(3, draws=100)
    start, moved = exact.correlations(200)
    assert start == pytest.approx(0.953, abs=0.01)  # the START of every text keeps its schedule
    assert moved >= 0.999


@pytest.mark.long
def test_easier_positions_get_more_noise():
    """Where four positions have the same word, each is told by all: the same error comes at a quarter of the SNR."""
    process = PositionGaussian(Sqrt(), 6, CHAIN)
    ExactLosses(process, [0, 1, 2, 2, 2, 2]).update(3, draws=30)
    alone, *repeated = torch.logit(process.table[CHAIN // 2, 1:]).tolist()
    assert [alone - one for one in repeated] == pytest.approx([np.log(4)] * 4, abs=0.2)


def test_a_table_is_moved_as_the_paper_moves_it():
    """Step by step with numpy, on losses that fall and rise."""
    draw = np.random.default_rng(0)
    table, losses = moved_process(5, 200).table.numpy(), draw.random((10, 5))
    expected = table.copy()
    for i in range(1, 5):
        rising = losses[:, i].copy()
        for b in range(1, 10):
            rising[b] = max(rising[b], rising[b - 1] + 1e-5)
        known = [rising[0] - (rising[1] - rising[0]) / 2, *rising, rising[-1] + (rising[-1] - rising[-2]) / 2]
        signals = [table.max(), *table[1:, i].reshape(10, 20).mean(1), table.min()]
        expected[:, i] = np.interp(np.linspace(known[0], known[-1], 201), known, signals)
    np.testing.assert_allclose(equalise(torch.from_numpy(table), torch.from_numpy(losses)), expected, rtol=1e-9)


@given(st.lists(st.lists(st.floats(0, 2), min_size=3, max_size=3), min_size=4, max_size=4))
def test_whatever_was_observed_signal_falls_from_end_to_end(losses):
    table = PositionGaussian(Sqrt(), 3, 40).table
    moved = equalise(table, torch.tensor(losses, dtype=torch.float64))
    assert bool((moved.diff(dim=0) < 0).all()) and torch.equal(moved[:, 0], table[:, 0])
    assert torch.equal(moved[[0, -1]], table[[0, -1]])


def test_losses_that_were_not_observed_leave_a_schedule_nearly_as_it_is():
    process, times = PositionGaussian(Sqrt(), 2, CHAIN), PositionLosses(CHAIN, 2, PAD, first=3, every=2)
    before = process.table.clone()
    for update in (0, 1, 2, 4):  # none of which is due
        times.adapt(process, update)
    assert torch.equal(process.table, before)
    times.adapt(process, 5)
    assert float((process.table - before).abs().max()) < 0.05


# -- two free times ---------------------------------------------------------------------------------------------------


def test_levels_of_texts_and_of_positions_agree():
    process, t = moved_process(4), torch.rand(6)
    level = process.at(t)
    assert level.alpha.shape == (6, 4) and level.t.shape == (6,)
    wide = process.at(t.unsqueeze(1).expand(6, 6))  # a canvas that is wider than the table
    torch.testing.assert_close(wide.log_snr[:, :4], level.log_snr)
    assert torch.equal(wide.log_snr[:, 4:], level.log_snr[:, 3:].expand(6, 2))
    plain = PositionGaussian(Sqrt(), 4, CHAIN).at(torch.arange(1, CHAIN) / CHAIN)
    known = Gaussian(Sqrt()).at(torch.arange(1, CHAIN) / CHAIN)
    torch.testing.assert_close(plain.log_snr, known.log_snr.unsqueeze(1).expand(-1, 4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gap", [1, 2, 4, 20])
def test_steps_may_be_skipped_with_no_error(gap):
    """With the truth for a denoiser every state is α_s x_0 + σ_s ε at each position, whatever the distance of steps;
    and the variance of a step is (1 − r)(1 − ᾱ_s)/(1 − ᾱ_t), r = ᾱ_t/ᾱ_s, of that position."""
    chain, positions, texts = 200, 3, 400
    process, times = moved_process(positions, chain), PositionLosses(chain, positions, PAD)
    grid = times.grid([StepSpan(chain // gap)], positions, torch.device("cpu"))
    clean = torch.randn(texts, positions, 4)
    walked = oracle_walk(process, STEPS["ddim"], grid, clean, Noise(0, torch.arange(texts)))
    begin = process.implied_noise(walked[0][1].x, clean, walked[0][1].level)
    for x, now in walked:
        torch.testing.assert_close(x, process.corrupt(clean, now.next_level, begin), rtol=1e-3, atol=1e-3)
    for x, now in oracle_walk(process, STEPS["ancestral"], grid, clean, Noise(1, torch.arange(texts))):
        signal, later = (level.alpha.double() ** 2 for level in (now.next_level, now.level))
        keep = later / signal
        expected = ((1 - keep) * (1 - signal) / (1 - later)).sqrt()
        _, std = process.posterior(now.x, clean, now.level, now.next_level)
        torch.testing.assert_close(std.squeeze(-1).double(), expected, rtol=2e-3, atol=1e-4)
        noise = process.implied_noise(x, clean, now.next_level)
        assert noise.std((0, 2)).tolist() == pytest.approx([1.0] * positions, abs=0.1)  # 4 errors of 1,600 draws: 0.07


# -- training and sampling --------------------------------------------------------------------------------------------


def build(**changes) -> torch.nn.Module:
    torch.manual_seed(0)
    return METHODS["seqdiffuseq"](**{**SMALL, **changes}).build(TextSpec(12, 8, 4))


def batch(count: int = 6) -> Batch:
    ids, lengths = torch.randint(4, 12, (count, 4), generator=torch.Generator().manual_seed(0)), torch.full((count,), 4)
    return Batch(ids.flip(1), lengths, ids, lengths, index=torch.arange(count))


def test_squared_errors_of_all_but_padding_are_observed():
    model = build()
    found = model(batch())
    assert set(found.terms) == {"mse", "rounding_ce", "terminal_norm"} and int(found.count) == 6 * 8
    assert (model.times.counts.sum(0) - BINS).tolist() == [6] * 6 + [0, 0]  # START, four words, END
    pseudo = float(torch.linspace(0, 0.5, BINS, dtype=torch.float64).sum())
    observed = model.times.sums.sum(0) - pseudo
    assert 0 < float(observed.sum()) < float(found.terms["mse"].detach())  # of which padding has the rest
    assert observed[6:].tolist() == pytest.approx([0, 0], abs=1e-6)
    assert model.capabilities.likelihood is None
    with torch.no_grad():
        model.nats(batch(), Noise(0, torch.arange(6)))
    assert (model.times.counts.sum(0) - BINS).tolist() == [6] * 6 + [0, 0]  # held-out texts are not


def test_the_encoder_runs_once_a_generation(monkeypatch):
    model, calls = build().eval(), []
    encode = EncoderDecoder.encode
    monkeypatch.setattr(EncoderDecoder, "encode", lambda *args: calls.append(1) or encode(*args))
    noise, source = Noise(0, torch.arange(3)), torch.full((3, 4), 5)
    steering = Steering(source=source, source_mask=torch.ones_like(source, dtype=torch.bool))
    frames = list(model.stream(noise, model.draw_lengths(noise), 8, replace(model.sampling, steps=7), steering))
    assert len(frames) == 7 and len(calls) == 1


def test_without_a_bound_validation_is_the_cross_entropy_of_noisy_words(tmp_path, capsys):
    """An untrained network's nats, by hand; and what a run says of them."""
    model, texts, noise = build().eval(), batch(), Noise(0, torch.arange(6))
    ids, mask = model.lengths.canvas(texts.ids, texts.lengths)
    t = model.times.time_of(torch.full((6,), 0.5))
    x = model.process.corrupt(
        model.denoiser.codec.encode(ids), t, noise.normal(0, 8, SMALL["embedding_dim"], stream=11)
    )
    told = Condition(texts.source, torch.ones_like(texts.source, dtype=torch.bool))
    with torch.no_grad():
        told = model.denoiser.prepare(told)
        log_p = model.denoiser(x, t, mask, told).logits.log_softmax(-1)
    expected = -log_p.gather(-1, ids.unsqueeze(-1)).sum((1, 2))
    assert model.nats(texts, noise).tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    (tmp_path / "pairs.csv").write_text("src,trg\n" + "a b,b a\nb c,c b\n" * 60)
    changes = [f"model.{key}={value}" for key, value in SMALL.items()]
    changes += ["steps=2", "batch_size=8", "warmup=0", "tokenizer=words", "more_than=0", f"data={tmp_path}/pairs.csv"]
    assert main(["train", "multi30k-seqdiffuseq", *changes, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "nats a word at the middle time, no likelihood" in said and "masked" not in said and "nats/token" not in said


@pytest.mark.long
def test_a_resumed_run_has_the_same_schedule(tmp_path, monkeypatch):
    """The schedule moves before updates 2 and 4; the run is stopped in between, with half of the losses observed."""
    for side in ("en", "de"):
        (tmp_path / f"pairs.{side}").write_text("".join(f"w{i % 7} w{i % 5}\n" for i in range(40)))
    changes = [f"model.{key}={value}" for key, value in SMALL.items()]
    changes += ["model.adapt_first=2", "model.adapt_every=2", "steps=6", "save_every=3", "batch_size=8", "warmup=0"]
    changes += ["tokenizer=words", "more_than=0", "longest=8", "source_longest=8", "validate_every=99"]
    data = f"data={tmp_path}/pairs.en,{tmp_path}/pairs.de"
    assert_resumed_to_the_bit(["train", "multi30k-seqdiffuseq", *changes, data], 4, tmp_path, monkeypatch)
    saved = load_tensors(tmp_path / "cut" / "model.safetensors")["denoiser.process.table"]
    fresh = PositionGaussian(Sqrt(), 8, CHAIN).table
    assert torch.equal(saved[:, 0], fresh[:, 0]) and not torch.equal(saved[:, 1], fresh[:, 1])


@pytest.mark.long
def test_training_finds_the_easier_positions():
    """The same difference as with an exact denoiser, log 4, by a network that learned that four words are the same."""
    model = build().train()
    model.times = PositionLosses(CHAIN, 8, PAD, width=200, first=100, every=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(201):
        model.begin_update(step)
        words = torch.randint(4, 12, (64, 2), generator=torch.Generator().manual_seed(step))
        ids, one = words[:, [0, 0, 0, 0, 1]], torch.ones(64, dtype=torch.int64)
        found = model(Batch(ids, 5 * one, ids[:, :1] * 0 + 4, one, index=torch.arange(64) + 64 * step))
        (found.total / found.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    *repeated, alone = torch.logit(model.process.table[CHAIN // 2, 1:6]).tolist()
    assert all(0.8 < alone - one < 2 for one in repeated)


def test_a_plot_shows_the_mean_of_all_positions():
    curve, process = sample_curve("run", moved_process(4)), moved_process(4)
    expected = process.at(torch.linspace(0, 1, POINTS).double()).alpha.mean(1)
    assert curve.alpha.tolist() == pytest.approx(expected.tolist())
