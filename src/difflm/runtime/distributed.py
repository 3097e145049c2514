"""Several processes that work as one, as `torchrun` starts them. With a single process, nothing here has an effect."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from difflm.errors import DifflmError, UsageError
from difflm.machine import gpu_count, is_on

PATIENCE = timedelta(hours=24)  # the first process may read a large corpus, or save, while the others wait for it
BEAT, DEAD = 3.0, 30.0  # seconds between heartbeats, and without one until a process counts as dead
LEFT = b"left"  # the last heartbeat of a process that ended normally
# gloo's messages about a process that has ended; NCCL raises `DistError`.
LOST = ("onnection closed", "onnection reset", "roken pipe", "onnection refused", "imed out", "eer closed")


@dataclass(frozen=True)
class Processes:
    """All processes that work together, and which of them this one is."""

    rank: int = 0
    count: int = 1
    shards: bool = False  # whether weights, gradients and moments are sharded among them (FSDP)

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def rows(self, size: int) -> slice:
        """This process's part of `size` rows."""
        return slice(size * self.rank // self.count, size * (self.rank + 1) // self.count)

    def any(self, flag: bool = False) -> bool:
        """Whether any process raises the flag. All wait here for each other; a dead one is detected."""
        if self.count == 1:
            return flag
        raised = torch.tensor(int(flag))
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return bool(raised)

    def sum_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over all processes in float32, as one message."""
        flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
        if self.count > 1:
            dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def merge_rows(self, own: Tensor, size: int) -> Tensor:
        """All `size` rows, of which each process has computed its own."""
        if self.count == 1 or len(own) == size:
            return own
        whole = own.new_zeros(size, *own.shape[1:])
        whole[self.rows(size)] = own
        dist.all_reduce(whole)
        return whole

    def gather_json(self, value: Any) -> list[Any]:
        """The value of each process, by rank."""
        if self.count == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.merge_rows(torch.tensor([len(own)]), self.count).tolist()
        padded = torch.cat([own, own.new_zeros(max(sizes) - len(own))])
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded)
        return [json.loads(bytes(one[:size].numpy())) for one, size in zip(found, sizes, strict=True)]

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Give every process the first one's values."""
        for tensor in tensors if self.count > 1 else ():
            dist.broadcast(tensor.detach(), 0)


_current = Processes()


def current() -> Processes:
    """The processes that this one works with."""
    return _current


def divide_weights() -> None:
    """Shard weights, gradients and moments among the processes from now on."""
    global _current
    if _current.count == 1:
        raise UsageError("--shard divides a model among processes: start them with torchrun (docs/scale.md).")
    _current = replace(_current, shards=True)


@contextmanager
def join_processes() -> Iterator[Processes]:
    """Work with the other processes that torchrun started. Only the first one prints; if several fail, the first to
    fail reports why; and if one dies, the others end."""
    global _current
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = connect(rank, count)
    dist.init_process_group(choose_backend(), store=store, rank=rank, world_size=count, timeout=PATIENCE)
    _current = Processes(rank, count)
    stderr, ended = sys.stderr, threading.Event()
    beating = threading.Thread(target=watch_others, args=(store.clone(), rank, count, stderr, ended), daemon=True)
    beating.start()
    try:
        with ExitStack() as silence:
            if rank:
                nothing = silence.enter_context(open(os.devnull, "w"))
                silence.enter_context(redirect_stdout(nothing))
                silence.enter_context(redirect_stderr(nothing))
            yield _current
            _current.any()  # no process leaves while another one still works
    except Exception as error:
        if is_lost(error):
            report_loss(store, stderr, "another process")
        if not is_first(store, if_lost=False):  # who held the store has ended, and has reported why
            raise SystemExit(getattr(error, "exit_code", 1)) from None
        raise
    finally:
        ended.set()
        beating.join()
        on_loss.clear()
        with suppress(RuntimeError):
            dist.destroy_process_group()
        _current = Processes()


def connect(rank: int, count: int) -> Any:
    """The store by which processes find each other: torchrun's, or one in the first process."""
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(address, port, count, hosts, wait_for_workers=False)
    except RuntimeError:
        raise DifflmError(f"the other processes cannot be reached at {address}, port {port}.") from None


def choose_backend() -> str:
    """NCCL between GPUs, each of which belongs to one process, and gloo for what is in the host's memory."""
    if not is_on("gpu"):
        return "gloo"
    local, there = int(os.environ.get("LOCAL_RANK", "0")), gpu_count()
    if local >= there:
        raise UsageError(f"there are {there} GPUs here: give torchrun --nproc-per-node {there} or fewer.")
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"


def is_lost(error: BaseException) -> bool:
    """Whether this error means that another process has ended."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(words in str(error) for words in LOST)
    )


on_loss: list[Callable[[], str]] = []  # advice if a process is lost; the last entry applies


def is_first(store: dist.Store, if_lost: bool) -> bool:
    """Whether no other process has reported an error."""
    try:
        return bool(store.add("reported", 1) == 1)
    except RuntimeError:
        return if_lost


def report_loss(store: dist.Store, stderr: TextIO, who: str) -> None:
    """Report a lost process, unless another one has, and end this one: NCCL would wait for the lost one."""
    if not is_first(store, if_lost=True):
        os._exit(1)
    advice = f" {on_loss[-1]()}" if on_loss else ""
    print(f"difflm: {who} ended, and the others stop.{advice}", file=stderr, flush=True)
    os._exit(1)


def watch_others(store: dist.Store, rank: int, count: int, stderr: TextIO, ended: threading.Event) -> None:
    """Send heartbeats and wait for those of the others in the background: a machine that loses power closes no
    connection, and a GPU would wait for ever."""
    last: dict[int, tuple[bytes, float]] = {}
    beat = 0
    while not ended.is_set():
        beat += 1
        try:
            store.set(f"alive/{rank}", str(beat))
            for other in range(count):
                key = f"alive/{other}"
                value = store.get(key) if store.check([key]) else b""
                if other not in last or last[other][0] != value or value == LEFT:
                    last[other] = value, time.monotonic()
        except RuntimeError:
            if not ended.wait(BEAT):
                report_loss(store, stderr, "the first machine's torchrun")
            return
        for other, (_, seen) in last.items():
            if time.monotonic() - seen > DEAD:
                report_loss(store, stderr, f"process {other} of {count}")
        ended.wait(BEAT)
    with suppress(RuntimeError):
        store.set(f"alive/{rank}", LEFT.decode())
