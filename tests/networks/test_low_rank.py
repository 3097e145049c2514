"""Adapters of low rank: at the start they change nothing, later what is asked for."""

import copy

import pytest
import torch
from torch import nn

from difflm.errors import UsageError
from difflm.fast.accelerate import exchange_parts
from difflm.networks import Sizes, Transformer
from difflm.networks.low_rank import AdaptedLinear, adapt_linears


def make_network():
    torch.manual_seed(0)
    network = Transformer(8, 11, Sizes(16, 2, 2, 0.0)).eval()
    nn.init.normal_(network.head.weight)
    for block in network.blocks:
        nn.init.normal_(block.modulation.weight)
    return network


X, T = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0.1, 0.5, 0.9])


def fill(network):
    for layer in network.modules():
        if isinstance(layer, AdaptedLinear):
            nn.init.normal_(layer.lora_B, std=0.1)
    return network


def test_a_network_begins_as_it_was_and_learns_adapters_alone():
    network = make_network()
    before, state = network(X, T), copy.deepcopy(network.state_dict())
    adapt_linears(network, rank=4, alpha=8.0)
    assert torch.equal(network(X, T), before)
    learned = {name for name, weight in network.named_parameters() if weight.requires_grad}
    assert learned and all(name.endswith((".lora_A", ".lora_B")) for name in learned)
    assert not any("head" in name or "embed_time" in name for name in learned)
    network(X, T).square().sum().backward()
    torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 0.1).step()
    assert not torch.allclose(network(X, T), before)
    assert all(torch.equal(network.state_dict()[name], weight) for name, weight in state.items())


def test_the_product_is_scaled_by_alpha_over_rank():
    layer = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"out": nn.Linear(5, 3)})])})
    adapt_linears(layer, rank=2, alpha=6.0)
    adapted = fill(layer).blocks[0].out
    x = torch.randn(4, 5)
    product = x @ adapted.lora_A.T @ adapted.lora_B.T
    torch.testing.assert_close(adapted(x), x @ adapted.plain.T + adapted.bias + 3 * product)
    torch.testing.assert_close(adapted.weight, adapted.plain + 3 * adapted.lora_B @ adapted.lora_A)


def test_faster_parts_see_adapters():
    """They read the weights of layers themselves."""
    network = make_network()
    adapt_linears(network, rank=4, alpha=8.0)
    expected = fill(network)(X, T)
    exchange_parts(network, ["cpu"])
    torch.testing.assert_close(network(X, T), expected, atol=1e-5, rtol=1e-5)


def test_targets_choose_layers_and_unknown_ones_are_refused():
    network = make_network()
    adapt_linears(network, 2, 4.0, ["qkv"])
    adapted = [name for name, part in network.named_modules() if isinstance(part, AdaptedLinear)]
    assert adapted == ["blocks.0.attention.qkv", "blocks.1.attention.qkv"]
    with pytest.raises(UsageError, match=r"no q_proj. Known: .*attention.qkv"):
        adapt_linears(make_network(), 2, 4.0, ["q_proj"])
