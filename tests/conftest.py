"""One thread (several test workers share the cores), one seed, and few, repeatable hypothesis examples."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("difflm", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("difflm")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Torch's own numbers are the same whichever tests run before."""
    torch.manual_seed(0)
