"""Products of eight bits: as near to float32 as eight bits can be, and of a text whatever stands beside it."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from difflm.app.cli import main
from difflm.diffusion.noise import Noise
from difflm.fast.cpu_layers import EightBitLinear, lacks_vnni, pack_weight
from difflm.fast.inference import Inference
from difflm.generation.pipeline import TextDiffusion
from difflm.machine import eight_bit_engine, turn
from tests.support.recorded import build_model

pytestmark = pytest.mark.usefixtures("on")


@pytest.fixture
def on() -> Iterator[None]:
    with turn(eight_bit=True):  # without an engine, the slow product stands in
        yield


@torch.no_grad()
def test_errors_are_those_of_rounding_to_eight_bits():
    """Half a step of each input times its weight, and of each weight times its input; rows of weights of any size."""
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 40), torch.randn(3, 17, 48) * torch.tensor([1.0, 30.0, 0.01]).view(3, 1, 1)
    layer.weight *= torch.logspace(-3, 3, 40).unsqueeze(1)
    layer.weight[0] = 0
    weight = layer.weight.abs()
    step = (x.amax((1, 2)).clamp(min=0) - x.amin((1, 2)).clamp(max=0)).view(3, 1, 1) / (255 / 2)  # 7 bits at least
    bound = step / 2 * weight.sum(1) + x.abs().sum(-1, keepdim=True) * weight.amax(1) / 127 / 2
    bound = bound + step / 2 * 48 * weight.amax(1) / 127 / 2
    error = (EightBitLinear(layer)(x) - layer(x)).abs()
    assert bool((error <= 1.01 * bound + 1e-6).all()) and bool((error[..., 1:] > 0).any())


@torch.no_grad()
def test_a_text_does_not_depend_on_those_beside_it():
    torch.manual_seed(0)
    layer = EightBitLinear(nn.Linear(32, 24))
    x = torch.randn(4, 9, 32)
    whole = layer(x)
    x[:3] *= 50
    assert torch.equal(layer(x)[3], whole[3]) and torch.equal(layer(x[3:])[0], whole[3])


@torch.no_grad()
@pytest.mark.skipif(eight_bit_engine() != "x86" or lacks_vnni(), reason="for x86 processors with VNNI")
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_both_products_of_x86_have_the_same_bits(monkeypatch, rows):
    torch.manual_seed(0)
    weight, x = torch.randn(40, 48), torch.randn(1, rows, 48)
    fast, scales = pack_weight(weight)
    monkeypatch.delattr(torch, "fbgemm_linear_int8_weight_fp32_activation")
    slow, same = pack_weight(weight)
    monkeypatch.undo()
    assert fast.func is not slow.func and torch.equal(scales, same) and torch.equal(fast(x), slow(x))


@torch.no_grad()
@pytest.mark.skipif(eight_bit_engine() is None or lacks_vnni(), reason="for fast products of eight bits")
def test_the_slow_product_is_the_fast_one(monkeypatch):
    """But for inputs that lie between two numbers, where either may round its own way: by a step, times a weight."""
    torch.manual_seed(0)
    weight, x = torch.randn(40, 48), torch.randn(2, 9, 48)
    fast, scales = pack_weight(weight)
    monkeypatch.setattr("difflm.fast.cpu_layers.eight_bit_engine", lambda: None)
    slow, same = pack_weight(weight)
    error = (fast(x) - slow(x)).abs() / (x.max() - x.min()) * 255
    assert torch.equal(scales, same) and float(error.mean()) < 0.05 and float(error.max()) < 3


def test_it_is_refused_where_torch_has_no_such_products(capsys):
    with turn(eight_bit=False):
        assert main(["generate", "e2e", "--dtype", "int8", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "no fast 8-bit matrix products" in said and len(said.splitlines()) == 1


def test_nothing_warns():
    """Torch warns of each function once in a process."""
    code = "import torch; from difflm.fast.cpu_layers import EightBitLinear; "
    code += "print(EightBitLinear(torch.nn.Linear(8, 8).requires_grad_(False))(torch.ones(2, 3, 8)).shape)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout and not done.stderr


AT_ONCE = """
import torch
from difflm.fast.cpu_layers import EightBitLinear
from difflm.runtime.threads import run_parallel
torch.set_num_threads(2)
layers = [torch.nn.Linear(384, 1536).requires_grad_(False) for _ in range(8)]
asked, inputs = [EightBitLinear(layer) for layer in layers], [torch.randn(1, 32, 384) for _ in range(2)]
answers = [[EightBitLinear(layer)(x) for layer in layers] for x in inputs]

turns = iter(range(2))

def ask(_):
    k = next(turns)
    for _ in range(50):
        yield sum(not torch.equal(layer(inputs[k]), y) for layer, y in zip(asked, answers[k]))

print("wrong:", sum(run_parallel(ask, 2)))
"""


@pytest.mark.long
def test_two_threads_may_ask_one_layer_at_once():
    """In a process of its own: on ARM, two threads that share a packed weight crash."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "wrong: 0\n", done.stderr


def test_texts_follow_the_model_and_are_about_those_of_float32():
    model = build_model("mdlm")
    inference = Inference(model, torch.int8)
    noise, lengths = Noise(0, torch.arange(6)), torch.full((6,), 12)

    def write(by: Inference) -> torch.Tensor:
        by.sync_weights()
        *_, last = by.stream(noise, lengths, 12, model.sampling.change({"steps": 4}))
        return last.tokens

    assert inference.denoiser.precision is None and inference.denoiser.network is not model.denoiser.network
    assert isinstance(inference.denoiser.network.blocks[0].feed[0], EightBitLinear)
    near = (write(inference) == write(Inference(model))).float().mean()
    assert near > 0.6  # a draw that differs moves those after it
    before = write(inference)
    with torch.no_grad():
        model.denoiser.network.blocks[0].feed[0].weight.mul_(-3)
    assert not torch.equal(write(inference), before)
    assert torch.equal(write(inference), write(Inference(model, torch.int8)))


@pytest.mark.long
def test_the_command_writes_with_it_or_says_why_not(capsys):
    assert main(["generate", "e2e", "--length", "9", "--steps", "2", "--dtype", "int8"]) == 0
    capsys.readouterr()
    assert main(["generate", "judge", "--dtype", "int8"]) == 2
    said = capsys.readouterr().err
    assert "int8 is for diffusion models" in said and len(said.strip().splitlines()) == 1


@pytest.mark.long
def test_the_bundled_model_writes_the_same_alone_and_among_others():
    lm = TextDiffusion.from_pretrained("e2e", dtype=torch.int8)
    asked = {"steps": 3, "seed": 2}
    assert [str(text) for text in lm.generate(2, **asked)] == [str(text) for text in lm.generate(5, **asked)][:2]
    many = [str(text) for text in lm.generate(14, **asked)]  # batches of four, which not all of them fill
    assert [str(text) for text in lm.generate(10, **asked)] == many[:10]
