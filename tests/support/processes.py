"""Two processes on this machine, forked so that nothing is imported again."""

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from difflm.app.cli import main
from difflm.runtime.distributed import join_processes


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
