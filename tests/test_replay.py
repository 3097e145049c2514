"""What is recorded does what it did: on a CPU by being called, on a GPU by being replayed."""

import pytest
import torch

from difflm.replay import WARM, Recorded


def counted(device: torch.device, calls: int) -> list[float]:
    total = torch.zeros(3, device=device)
    work = Recorded(lambda: total.add_(1).mul_(2), device)  # type: ignore[func-returns-value]
    for _ in range(calls):
        work()
    return total.tolist()


@pytest.mark.parametrize("calls", [1, WARM, WARM + 1, WARM + 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_call_does_the_work_once(device: str, calls: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    expected = 2.0 ** (calls + 1) - 2
    assert counted(torch.device(device), calls) == [expected] * 3
