"""Two processes on this machine, forked so that nothing is imported again."""

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from difflm.app.cli import main
from difflm.data.batches import Batch
from difflm.methods import METHODS, TextSpec
from difflm.runtime.distributed import join_processes
from difflm.training.recipe import check
from difflm.training.trainer import Trainer


def run_together(work: Callable[[], object], count: int = 2, timeout: float = 100.0) -> list[int | None]:
    """Run `work` in several processes that have joined; their exit codes."""

    def joined() -> int:
        with join_processes():
            work()
        return 0

    with running(joined, count, timeout) as processes:
        pass
    return [process.exitcode for process in processes]


def command_together(*argv: object, count: int = 2, timeout: float = 100.0) -> list[int | None]:
    """Run a command of difflm as torchrun would; the exit codes."""
    with running(lambda: main([str(one) for one in argv]), count, timeout) as processes:
        pass
    return [process.exitcode for process in processes]


@contextmanager
def running(
    work: Callable[[], int], count: int = 2, timeout: float = 100.0
) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Processes with the places that torchrun would give them; on leaving, they are waited for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        os.environ["RANK"] = str(rank)
        code = 1
        try:
            code = work()
        except SystemExit as left:
            code = int(left.code or 0)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=run, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    try:
        yield [*processes]
        deadline = time.monotonic() + timeout
        while processes[0].is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in processes:
            process.join(5)
    finally:
        for process in processes:
            process.kill()
            process.join()


SIZES = {"hidden": 32, "layers": 2, "heads": 2, "dropout": 0.0}


class Numbers:
    """Texts of random ids and lengths: the shares of a batch have different numbers of tokens."""

    def batch(self, step: int) -> Batch:
        draw = np.random.default_rng(step)
        lengths = draw.integers(2, 16, 8)
        ids = np.where(np.arange(16) < lengths[:, None], draw.integers(5, 30, (8, 16)), 0)
        return Batch(ids, lengths, index=8 * step + np.arange(8), seed=0)


def start(folder: Path, method: str, **changes) -> Trainer:
    recipe = {"method": method, "model": SIZES, "data": "none.txt", "longest": 16, "batch_size": 8, "warmup": 0}
    folder.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(0)
    model = METHODS[method](**SIZES).build(TextSpec(30, 16, 0, 0, None))
    return Trainer(model, check({**recipe, "steps": 20, **changes}), folder, torch.device("cpu"))


def train(trainer: Trainer, steps: int) -> None:
    texts, each = Numbers(), trainer.recipe.accumulate
    while trainer.step < steps:
        losses = trainer.train_step([texts.batch(each * trainer.step + k) for k in range(each)])
        trainer.check_finite({name: float(value) for name, value in losses.items()})
    trainer.save()
