"""Threads side by side: all work is done, each thread on one core; an error or a reader who leaves stops the rest."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from difflm.generation.pipeline import TextDiffusion
from difflm.machine import is_found, turn
from difflm.runtime.threads import IsStopped, Work, run_parallel


@pytest.fixture(autouse=True)
def two_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def counting(*first: int) -> Work[int]:
    """Work that is shared by all threads: three numbers after each of these."""
    rest = iter(first)

    def work(stopped: IsStopped) -> Iterator[int]:
        for number in rest:
            yield from range(number, number + 3)

    return work


def test_all_work_is_done_and_each_thread_yields_in_its_order() -> None:
    found = list(run_parallel(counting(*range(0, 70, 10)), 7))
    assert sorted(found) == [10 * k + i for k in range(7) for i in range(3)]
    assert [value for value in found if value // 10 == 4] == [40, 41, 42]
    assert list(run_parallel(counting(), 0)) == []


def test_threads_work_side_by_side_on_one_core_each() -> None:
    meeting = threading.Barrier(2, timeout=20)  # nobody passes alone

    def work(stopped: IsStopped) -> Iterator[int]:
        meeting.wait()
        yield torch.get_num_threads()

    assert list(run_parallel(work, 9)) == [1, 1]
    assert torch.get_num_threads() == 2


def test_an_error_comes_to_the_reader_and_stops_the_others() -> None:
    stopped_early, turns = threading.Event(), iter(range(2))

    def work(stopped: IsStopped) -> Iterator[int]:
        if next(turns):
            raise ValueError("broken")
        for _ in range(2000):
            if stopped():
                stopped_early.set()
                return
            time.sleep(0.005)
        yield 0

    with pytest.raises(ValueError, match="broken"):
        list(run_parallel(work, 2))
    assert stopped_early.is_set()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by Linux")
@pytest.mark.parametrize("on", [True, is_found("openmp_products")])
def test_threads_side_by_side_stay_one_each_whatever_library_multiplies(on: bool) -> None:
    """ARM's products took as many threads as there are cores, in each of as many jobs. The switch may be on without
    that library, but not off with it."""
    both = threading.Barrier(2)

    def work(stopped: IsStopped) -> Iterator[int]:
        both.wait(60)
        before = {path.name for path in Path("/proc/self/task").iterdir()}
        torch.nn.functional.linear(torch.zeros(32, 384), torch.zeros(1536, 384), torch.zeros(1536))
        yield len({path.name for path in Path("/proc/self/task").iterdir()} - before)

    with turn(openmp_products=on):
        assert list(run_parallel(work, 2)) == [0, 0]


def test_a_lone_thread_has_the_answers_of_several_side_by_side() -> None:
    x, weight = torch.randn(48, 384), torch.randn(1536, 384)

    def work(stopped: IsStopped) -> Iterator[torch.Tensor]:
        yield torch.nn.functional.linear(x, weight)

    (alone,) = run_parallel(work, 1)
    answers = [*run_parallel(work, 2)]
    assert len(answers) == 2 and all(torch.equal(answer, alone) for answer in answers)


def test_a_reader_who_leaves_stops_all() -> None:
    begun: list[int] = []

    def work(stopped: IsStopped) -> Iterator[int]:
        for number in range(50):
            begun.append(number)
            yield number
            while not stopped():
                time.sleep(0.005)

    reader = run_parallel(work, 50)
    next(reader)
    reader.close()
    assert len(begun) <= 4


@pytest.mark.long
def test_texts_do_not_depend_on_the_number_of_cores() -> None:
    lm = TextDiffusion.from_pretrained("e2e")
    texts = []
    for cores in (1, 2):
        torch.set_num_threads(cores)
        texts.append([made.text for made in lm.generate(5, seed=5, steps=4)])
        (streamed,) = list(lm.stream(1, seed=5, steps=4))[-1]
        assert "".join(streamed.tokens).replace(" ", "") == texts[-1][0].replace(" ", "")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["autoregressive", "mdlm", "difflm"])
def test_nor_do_those_of_other_kinds_of_models(name: str, tiny_runs: dict[str, Path]) -> None:
    lm = TextDiffusion.from_pretrained(tiny_runs[name])
    few = {} if name == "autoregressive" else {"steps": 8}
    texts = []
    for cores in (1, 2, 3):
        torch.set_num_threads(cores)
        texts.append([made.text for made in lm.generate(13, seed=3, **few)])
    assert texts[0] == texts[1] == texts[2]


def test_runs_that_overlap_leave_the_number_of_threads_as_it_was() -> None:
    first, second = run_parallel(counting(0), 1), run_parallel(counting(10), 1)
    next(first), next(second)
    first.close()
    list(second)
    found: list[int] = []
    threading.Thread(target=lambda: found.append(torch.get_num_threads())).run()
    fresh = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    assert found == [2, 2]


def test_a_slow_reader_holds_the_work_back() -> None:
    made: list[int] = []

    def work(stopped: IsStopped) -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    reader = run_parallel(work, 1)
    next(reader)
    time.sleep(0.3)
    assert len(made) < 20
    reader.close()
