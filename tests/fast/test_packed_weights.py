"""Weights that are laid out beforehand give the answers of those that are not, to the bit on one machine. Without ARM's
library they are copied, and the rest is the same."""

from collections.abc import Iterator

import pytest
import torch

from difflm.fast.cpu_layers import pack_layers
from difflm.fast.inference import Inference, position_layers
from difflm.machine import turn
from difflm.networks.transformer import Sizes, Transformer
from tests.support.recorded import build_model


@pytest.fixture(autouse=True)
def packed() -> Iterator[None]:
    torch._C._set_mkldnn_enabled(True)  # whose products are those of packed weights
    with turn(packed_weights=True):
        yield


@torch.no_grad()
@pytest.mark.parametrize(("texts", "positions"), [(1, 16), (1, 48), (4, 32)])
def test_a_network_answers_to_the_bit_as_without(texts: int, positions: int) -> None:
    torch.manual_seed(0)
    network = Transformer(24, 37, Sizes(48, 2, 3)).eval()
    for weight in network.parameters():
        weight.normal_(std=0.3)
    x, t, mask = torch.randn(texts, positions, 24), torch.rand(texts), torch.ones(texts, positions, dtype=torch.bool)
    before = network(x, t, mask)
    pack_layers(position_layers(network))
    network.blocks[0].feed[0].weight.zero_()  # what was packed is what is read
    assert torch.equal(network(x, t, mask), before)


def test_a_model_that_learned_since_writes_with_its_new_weights() -> None:
    model = build_model("mdlm")
    inference = Inference(model)
    inference.sync_weights()
    network, x = model.denoiser.network, torch.randn(1, 16, model.denoiser.network.input.in_features)
    with torch.no_grad():
        assert torch.equal(inference.denoiser.network(x, None), network(x, None))
        network.input.weight.mul_(-2)
        inference.sync_weights()
        assert torch.equal(inference.denoiser.network(x, None), network(x, None))
    assert inference.denoiser.network is not network and network.input.weight.requires_grad


def test_without_the_switch_the_network_itself_writes() -> None:
    model = build_model("mdlm")
    with turn(packed_weights=False):
        assert Inference(model).denoiser.network is model.denoiser.network
