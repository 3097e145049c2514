"""What devices without float64 compute (Apple's `mps`, which cannot be tried here): a CPU that refuses float64."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from difflm.data.batches import Batch
from difflm.diffusion.noise import Noise
from difflm.errors import UsageError
from difflm.fast.float32 import WithoutFloat64
from difflm.generation.checks import check_device
from difflm.methods import METHODS, TextSpec
from tests.support.processes import SIZES, start, train


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.dtype is torch.float64:
                raise TypeError(f"{func} makes float64, which this device does not have")
        return found


@pytest.mark.long
def test_a_device_that_refuses_does():
    with Refusing(), pytest.raises(TypeError, match="float64"):
        torch.zeros(2).double()


@pytest.mark.long
@pytest.mark.parametrize("method", ["mdlm", "difflm", "autoregressive"])
def test_texts_are_written_without_float64(method):
    with WithoutFloat64(), Refusing():
        model = METHODS[method](**SIZES).build(TextSpec(30, 16, 0, 0, None)).eval()
        model.observe(torch.ones(17, dtype=torch.int64), torch.ones(30, dtype=torch.int64))
        noise = Noise(0, torch.arange(2))
        lengths = model.draw_lengths(noise)
        *_, last = model.stream(noise, lengths, 16, model.sampling.change({"steps": 2}))
        assert last.tokens.shape[0] == 2


@pytest.mark.long
@pytest.mark.parametrize("method", ["mdlm", "difflm", "autoregressive"])
def test_models_are_trained_without_float64(tmp_path, method, monkeypatch):
    """Validation included, whose sums are as narrow."""
    monkeypatch.setattr("difflm.training.validation.VALIDATION_DRAWS", 4)
    with WithoutFloat64(), Refusing():
        trainer = start(tmp_path, method)
        train(trainer, 2)
        value, _ = trainer.validator.measure([Batch(np.full((4, 6), 7), np.full(4, 6))])
    assert np.isfinite(value)


def test_a_device_that_is_not_there_is_one_line():
    with pytest.raises(UsageError, match="is not available here"):
        check_device("mps")
    with pytest.raises(UsageError, match="cpu, cuda or mps"):
        check_device("meta")
