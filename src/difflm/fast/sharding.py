"""A model whose weights, gradients and moments are divided among processes (FSDP2).

Torch's modules for that are slow to import, so they are imported only when needed."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from difflm.diffusion.timesteps import TimeSampler
from difflm.models.base import Losses, Trainable
from difflm.networks.transformer import Attention
from difflm.runtime.distributed import Processes, current

Model = TypeVar("Model", bound=Trainable)
WARP = "times."  # the prefix of the weights of a learned time warp


def local_part(tensor: Any) -> Tensor:
    """The rows of a sharded tensor that this process holds, in the same memory; other tensors unchanged."""
    return tensor.detach().to_local() if is_divided(tensor) else tensor


def is_divided(tensor: object) -> bool:
    """Whether this is a `DTensor`."""
    return hasattr(tensor, "to_local")


def shard_model(model: Model, device: torch.device) -> Model:
    """Shard the weights of a model by rows. Attention and feed-forward layers are gathered when they are called; all
    other weights, which models use outside of a `forward`, stay gathered from the start to the end of a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from torch.utils._pytree import SUPPORTED_NODES, register_dataclass

    # The layers return views, which the warning says must not be changed in place: blocks add them to another tensor.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    if Losses not in SUPPORTED_NODES:
        register_dataclass(Losses)  # so that FSDP finds the tensors at which backward starts
    mesh = init_device_mesh(device.type, (current().count,))
    trained = any(weight.requires_grad for weight in model.parameters())
    layers = [layer for network in model.networks() for layer in network.equal_blocks()]
    for part in dict.fromkeys(getattr(layer, name, None) for layer in layers for name in ("attention", "feed")):
        if isinstance(part, Attention | nn.Sequential):
            fully_shard(part, mesh=mesh)
    whole = {weight for name, weight in model.named_parameters() if name.startswith(WARP)}
    # A model in validation has no backward, which would shard its weights again.
    fully_shard(model, mesh=mesh, reshard_after_forward=not trained, ignored_params=whole)
    register_fsdp_forward_method(model, "nats")
    return model


def sum_gradients(processes: Processes, grads: Mapping[str, Any], scale: Tensor, ratio: Tensor) -> None:
    """Sum gradients over all processes, in float32, and multiply them by `scale`; backward has already averaged those
    of sharded weights. A time warp's loss is a mean over texts times this process's tokens, of which all processes
    together have `ratio` times as many."""
    if warp := [grad for name, grad in grads.items() if name.startswith(WARP)]:
        torch._foreach_mul_(warp, ratio / processes.count)
    if divided := [local_part(grad) for grad in grads.values() if is_divided(grad)]:
        torch._foreach_mul_(divided, scale * processes.count)
    if own := [grad for grad in grads.values() if not is_divided(grad)]:
        sums = processes.sum_tensors(own)
        torch._foreach_mul_(sums, scale)
        torch._foreach_copy_(own, sums)


def whole_tensors(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Gather sharded tensors, one after the other, in the first process's memory; all processes must call this."""
    if not current().shards:
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if is_divided(tensor) else tensor
        if current().first:
            found[name] = whole.cpu()
    return found


def divide_like(
    tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor], optimizer: Optimizer
) -> dict[str, Tensor]:
    """Shard the tensors of a checkpoint like the weights that they belong to."""
    from torch.distributed.tensor import DTensor

    numbered = [weight for group in optimizer.param_groups for weight in group["params"]]
    found = {}
    for key, tensor in tensors.items():
        part, name = key.split(".", 1)
        like: Any = numbered[int(name.split(".")[0])] if part == "optimizer" else weights.get(name)
        if is_divided(like) and like.shape == tensor.shape:
            rank, parts = current().rank, tensor.chunk(current().count)
            own = (parts[rank] if rank < len(parts) else tensor[:0]).to(like.to_local().device, copy=True)
            whole: Any = {"shape": tensor.shape, "stride": tensor.stride()}
            tensor = DTensor.from_local(own, like.device_mesh, like.placements, run_check=False, **whole)
        found[key] = tensor
    return found


# -- what a model learns beside its gradients --------------------------------------------------------------------------


def gather_observations(model: nn.Module, processes: Processes) -> bool:
    """Let time samplers that observe losses observe those of all processes; return whether there are any."""
    watching = [
        part
        for part in model.modules()
        if isinstance(part, TimeSampler) and type(part).observe is not TimeSampler.observe
    ]
    if processes.count == 1:
        return False
    for part in watching:
        part.observe = partial(observe_all, part.observe)  # type: ignore[method-assign]
    return bool(watching)


def observe_all(observe: Callable[[Tensor, Tensor, Tensor], None], t: Tensor, losses: Tensor, mask: Tensor) -> None:
    """Observe the times and losses of the whole batch, in its order."""
    observe(gather_rows(t), gather_rows(losses), gather_rows(mask.to(torch.uint8)).bool())


def gather_rows(own: Tensor) -> Tensor:
    found = [torch.empty_like(own) for _ in range(current().count)]
    dist.all_gather(found, own.contiguous())
    return torch.cat(found)
