"""Nothing that repeats asks the device for an answer: neither a loss, nor its gradient, nor a step of sampling.

Tensors of the device "meta" have shapes and no values. Whatever looks at a value (`.item()`, a boolean index, a shape
that data decide) fails on them, and so does what mixes them with a tensor that was made on the CPU: the two things that
make a GPU wait, and that no graph of it can record.
"""

from contextlib import nullcontext
from dataclasses import replace
from itertools import islice

import pytest
import torch

from difflm.data.batches import Batch
from difflm.diffusion.noise import Noise
from difflm.methods import METHODS, TextSpec
from difflm.methods.d3pm import Matrix
from difflm.models.base import LanguageModel
from difflm.models.diffusion import DiffusionModel
from difflm.runtime.delayed_flag import DelayedFlag
from tests.support.recorded import OnDevice
from tests.support.tiny import MODEL

WORDS, LONGEST, BATCH = 20, 16, 4
WRITERS = [name for name, one in METHODS.items() if one.kind in ("method", "baseline") and one.task != "seq2seq"]
READERS = [name for name, one in METHODS.items() if one.kind in ("method", "baseline") and one.task != "text"]


@pytest.fixture(autouse=True)
def plain_precision(monkeypatch):
    """Autocast does not know the device "meta"."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **more: nullcontext())
    monkeypatch.setattr("difflm.models.word_nats.most_masked", lambda *given: BATCH)  # which is found once a shape


def built(method: str, source_longest: int = 0) -> LanguageModel:
    """A model without values. What is found once and kept, before anything is recorded, is put there."""
    sizes = {**MODEL, "embedding_dim": 16} if METHODS[method].family == "gaussian" else MODEL
    model = METHODS[method](**sizes).build(TextSpec(WORDS, LONGEST, source_longest)).to("meta")
    process = getattr(model, "process", None)
    if isinstance(process, Matrix):
        square = torch.empty(WORDS, WORDS, device="meta")
        process.axes = lambda dtype: (square[0].to(dtype), square.to(dtype))
    return model


@pytest.mark.long
@pytest.mark.parametrize("method", WRITERS)
def test_a_loss_and_its_gradient_never_look_at_the_device(method):
    model = built(method).train()
    ids = torch.zeros(BATCH, LONGEST, dtype=torch.long, device="meta")
    lengths = torch.zeros(BATCH, dtype=torch.long, device="meta")
    with OnDevice():
        model(Batch(ids, lengths)).means()["loss"].backward()


@pytest.mark.long
@pytest.mark.parametrize("method", READERS)
def test_a_loss_from_a_source_never_looks_at_the_device(method):
    model = built(method, LONGEST).train()
    ids = torch.zeros(BATCH, LONGEST, dtype=torch.long, device="meta")
    lengths = torch.zeros(BATCH, dtype=torch.long, device="meta")
    with OnDevice():
        model(Batch(ids, lengths, source=ids, source_lengths=lengths)).means()["loss"].backward()


def asked() -> list[object]:
    """All samplers of a model of vectors and of one of masks, and the usual one of each other; the rest is long."""
    texts = TextSpec(WORDS, LONGEST)
    models = {name: METHODS[name](**MODEL).build(texts) for name in WRITERS}
    models = {name: model for name, model in models.items() if isinstance(model, DiffusionModel)}
    every = [(name, sampler) for name, model in models.items() for sampler in model.capabilities.step_rules]
    quick = [(name, one) for name, one in every if name in ("difflm", "mdlm") or one == models[name].sampling.sampler]
    return [pytest.param(*pair, marks=[] if pair in quick else pytest.mark.long) for pair in every]


@pytest.mark.long
@pytest.mark.parametrize("method, sampler", asked())
def test_a_step_never_looks_at_the_device(method, sampler, monkeypatch):
    """But for news of texts that are done, which are read long after they were sent."""
    monkeypatch.setattr(DelayedFlag, "__call__", lambda self, flag: False)
    model = built(method).eval()
    lengths = torch.full((BATCH,), LONGEST, device="meta")
    noise = Noise(torch.zeros(BATCH, dtype=torch.long, device="meta"), torch.arange(BATCH, device="meta"))
    sampling = METHODS[method](**MODEL).build(TextSpec(WORDS, LONGEST)).sampling
    stream = model.stream(noise, lengths, LONGEST, replace(sampling, sampler=sampler, steps=8))
    with torch.no_grad():
        next(stream)  # rules may put together what they need
        with OnDevice():
            frames = list(islice(stream, 5))
    assert len(frames) == 5 and all(frame.tokens.is_meta for frame in frames)
