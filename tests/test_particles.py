"""Feynman–Kac steering against the truth: resampled particles follow the exact conditional."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from oracles import denoise, total_variation
from test_guidance import CHANCES, EXACT, conditional, wish
from torch import Tensor

from difflm import Tags, TextDiffusion
from difflm.controls.guidance import Guidance, GuidanceSettings
from difflm.controls.particles import ResampleParticles, draw_parents
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import BoundDenoiser, Sampler
from difflm.diffusion.samplers.steps import STEPS
from difflm.errors import UsageError
from difflm.generation.jobs import GenerationJob
from difflm.models.base import Sampling
from difflm.models.batching import Layout, Row, make_batches


def draw_texts(particles: int, texts: int, steps: int = 40, power: float = 1.0, size: float = 0.0) -> Tensor:
    """Words of all particles, [texts · particles, 2], by the exact denoiser and the exact classifier."""
    rows = particles * texts
    mask = torch.ones(rows, 2, dtype=torch.bool)
    settings = GuidanceSettings("gradient", size, resample=power)
    guidance = Guidance([wish(CHANCES, rows)], EXACT, mask, settings)
    sampler = Sampler(STEPS["ancestral"], guide=guidance, resample=ResampleParticles(guidance, particles))
    frame, grid = None, torch.linspace(1, 0, steps + 1)
    with torch.no_grad():
        shape = EXACT.codec.state_shape(2)
        noise = Noise(0, torch.arange(rows))
        for frame in denoise(BoundDenoiser(EXACT, mask), EXACT.process, grid, sampler, noise, mask, shape):  # noqa: B007
            pass
    assert frame is not None
    return frame.tokens


def shares(tokens: Tensor) -> Tensor:
    counts = torch.bincount(3 * tokens[:, 0] + tokens[:, 1], minlength=9).double()
    return (counts / counts.sum()).view(3, 3)


@pytest.mark.long
def test_resampled_particles_of_the_model_alone_converge_to_the_posterior():
    """No gradient is climbed. One particle draws from the joint, 0.49 off; sixteen from the conditional."""
    far = [total_variation(shares(draw_texts(k, 8000 // k)), conditional(CHANCES)) for k in (1, 4, 16)]
    assert far[0] > 0.2 and far[1] < 0.6 * far[0] and far[2] < 0.05, far


def test_parents_are_as_many_as_their_weights_say():
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]])
    parents = draw_parents(weights, torch.tensor([0.1, 0.9])).view(2, 4)
    assert parents.tolist() == [[0, 0, 1, 2], [4, 5, 6, 7]]
    skewed, u = torch.tensor([[0.61, 0.3, 0.09]]).expand(4000, 3), Noise(0, torch.arange(4000)).uniform(0)
    found = torch.bincount(draw_parents(skewed, u) % 3, minlength=3) / 12000
    assert found.tolist() == pytest.approx([0.61, 0.3, 0.09], abs=0.01)


def test_particles_of_a_text_do_not_depend_on_other_texts():
    """By seed and number alone: the first texts of many are those of few."""
    assert draw_texts(4, 2, steps=6).equal(draw_texts(4, 5, steps=6)[:8])


@pytest.mark.long
def test_captured_steps_resample_the_same_particles():
    """Rows of a text share a batch on every device, and captured steps, whose arithmetic is the same, go on with the
    same rows. Texts of another request in the batch change nothing."""
    texts = []
    for record in (False, True):
        lm = TextDiffusion.from_pretrained("e2e")
        lm.inference.record = record
        asked = {"controls": [Tags(("PROPN", "AUX", "ADJ", "PUNCT"))], "candidates": 4, "steps": 3}
        jobs = [lm.make_job(1, seed, guidance=GuidanceSettings(resample=1.0), **asked) for seed in (3, 4)]
        texts.append([next(iter(made.values())).text for _, made in sorted(lm.run_jobs(jobs))])
        texts.append([text for job in jobs for _, made in lm.run_jobs([job]) for text in map(str, made.values())])
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_particles_are_as_many_as_batches_hold():
    job = GenerationJob(1, 0, Sampling(), plan=cast(Any, object()), each=3, together=3)
    with pytest.raises(UsageError, match="power of two, such as 4, not 3"):
        job.make_rows(cast(Any, None))


def test_rows_of_a_text_share_a_batch():
    """On a CPU guided batches hold two rows; particles of a text are not parted, on a GPU neither, and padding is
    whole texts."""
    layouts = [Layout(10 + 20 * (k // 8 % 2)) for k in range(88)]
    rows = [Row(0, k, layout, owner=k // 8, guided=True, together=8) for k, layout in enumerate(layouts)]
    model = cast(Any, SimpleNamespace(vocabulary=800, one_by_one=True))
    for kind in ("cpu", "cuda"):
        for batch in make_batches(model, rows, torch.device("cpu"), kind):
            assert len(batch.samples) % 8 == 0
            texts = [row.sample // 8 for row in batch.rows]
            assert all(len({*texts[k : k + 8]}) == 1 for k in range(0, len(texts), 8))
