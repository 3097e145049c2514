"""Linear layers for a CPU: with weights laid out in advance for an ARM processor's matrix products, which torch does at
every call, a fifth of the time of a text; and with products in eight bits, where torch has fast ones: four times the
rate of float32 on an ARM core without matrix units (docs/log)."""

import threading
import warnings
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.base import Network
from difflm.machine import eight_bit_engine, is_found, is_on

ROWS = 16  # that a layer reads at least: of few rows, torch's answers are those of another library


@torch.no_grad()
def pack_layers(layers: Iterable[nn.Module]) -> None:
    """For layers in float32 whose weights change no more. Without ARM's library weights are only copied."""
    for layer in layers:
        if type(layer) is not nn.Linear or layer.weight.dtype is not torch.float32:
            continue
        if not is_found("packed_weights"):
            layer.forward = partial(F.linear, weight=layer.weight.clone(), bias=layer.bias)  # type: ignore[method-assign]
        else:
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight, ROWS)
            multiply = partial(torch.ops.mkldnn._linear_pointwise.default, attr="none", scalars=[], algorithm="")
            layer.forward = partial(multiply, W=weight, B=layer.bias)  # type: ignore[method-assign]


Product = Callable[[Tensor], Tensor]
PACKING = threading.Lock()  # torch's engine and Python's filter of warnings are one for all threads


def lacks_vnni() -> bool:
    """Whether inputs must be of seven bits: sums of two products overflow on x86 processors that lack VNNI."""
    return eight_bit_engine() == "x86" and not is_on("vnni")


class EightBitLinear(nn.Linear):
    """Weights have a scale per output, inputs one per text, so a text does not depend on the others in its batch.
    Weights are packed at the first call and must not change afterwards. On ARM a packed weight also contains the
    workspace of its product, and two threads that use it at once crash, so each call takes one that is not in use."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.unused: list[tuple[Product, Tensor]] = []  # in the end as many as there are concurrent calls

    def forward(self, x: Tensor) -> Tensor:
        try:
            packed = self.unused.pop()
        except IndexError:
            packed = pack_weight(self.weight)
        multiply, scales = packed
        product = multiply(x) if x.shape[0] == 1 else torch.cat([multiply(text) for text in x.split(1)])
        self.unused.append(packed)
        if self.bias is None:
            return product.mul_(scales)
        return torch.addcmul(self.bias, product, scales, out=product)


@torch.no_grad()
def pack_weight(weight: Tensor) -> tuple[Product, Tensor]:
    """The product with a matrix of eight bits, and the scales of its rows, which are taken out of it: with scales of
    their own, torch's products are thirty times as slow on ARM."""
    scales = weight.float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    engine = eight_bit_engine()
    if engine is None:
        return partial(multiply_slowly, (weight.float() / scales.unsqueeze(1) * 127).round()), scales
    with PACKING, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch means to replace them, but has nothing as fast yet
        narrow = torch.quantize_per_tensor(weight.float() / scales.unsqueeze(1), 1 / 127, 0, torch.qint8)
        if engine == "x86" and not lacks_vnni() and hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation"):
            multiply = partial(multiply_plain, pack_plain(narrow.int_repr()))
            multiply(torch.zeros(1, 1, weight.shape[1]))  # it warns when it is first called
            return multiply, scales
        before, torch.backends.quantized.engine = torch.backends.quantized.engine, engine
        try:
            packed = torch.ops.quantized.linear_prepack(narrow, None)
        finally:
            torch.backends.quantized.engine = before
        return partial(multiply_packed, packed), scales


def multiply_slowly(weight: Tensor, x: Tensor) -> Tensor:
    """What the fast products compute: whole numbers of eight bits, here as floats, for processors without them."""
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    step = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-low / step).round()
    return F.linear(((x / step).round() + zero).clamp(0, 255) - zero, weight) * (step / 127)


def multiply_packed(weight: torch.ScriptObject, x: Tensor) -> Tensor:
    return torch.ops.quantized.linear_dynamic(x, weight, lacks_vnni())


def pack_plain(narrow: Tensor) -> tuple[Tensor, Tensor, Tensor, float, int, Tensor]:
    """What `multiply_plain` needs: the matrix, packed, the sums of its rows, its scale and zero, and no bias."""
    packed, sums = torch.fbgemm_pack_quantized_matrix(narrow), narrow.sum(1, dtype=torch.int32)
    return narrow, packed, sums, 1 / 127, 0, torch.zeros(len(narrow))


def multiply_plain(weight: tuple[Tensor, Tensor, Tensor, float, int, Tensor], x: Tensor) -> Tensor:
    """The same to the bit on x86, with a packed weight that is a tensor. The other one is an object of torch's scripts:
    it costs 20 to 60 µs a call to pass, in which no other thread can run Python (docs/log)."""
    return torch.fbgemm_linear_int8_weight_fp32_activation(x, *weight)


def use_eight_bits(network: Network) -> None:
    """Replace the linear layers of a network's blocks, but for those of the time: they read one row per text."""
    for part in network.position_parts():
        for name, layer in [*part.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(part, name, EightBitLinear(layer))
