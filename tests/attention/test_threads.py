"""Workers limit themselves to one core each, and nothing else in the process."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
import torch

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention.backends.tiled import workers

COUNT = 3


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(COUNT)
    yield
    torch.set_num_threads(before)


def seen_by_a_new_thread() -> tuple[int, list[str]]:
    """Threads of PyTorch's operators, and of OpenMP's and MKL's, as a new thread has them."""
    seen: list[tuple[int, list[str]]] = []

    def look() -> None:
        threads = torch.get_num_threads()
        info = torch.__config__.parallel_info()
        seen.append((threads, re.findall(r"(?:omp|mkl)_get_max_threads\(\) : (\d+)", info)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return seen[0]


def test_concurrent_calls_leave_the_number_of_threads_alone() -> None:
    grid = Grid.of(Layout.sequence(300))
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 6, 300, 8)
    encoding = posenc.create("shaw", head_dim=8)
    alone = attend(q, k, v, grid, encoding, backend="tiled")
    running = threading.Barrier(4)
    counts: set[int] = set()
    wrong: list[str] = []

    def work() -> None:
        running.wait()
        for _ in range(4):
            own = q.clone().requires_grad_()
            output = attend(own, k, v, grid, encoding, backend="tiled")
            counts.add(torch.get_num_threads())
            output.sum().backward()
            counts.add(torch.get_num_threads())
            if not torch.allclose(output, alone, atol=1e-5):
                wrong.append("values of a concurrent call")

    before = seen_by_a_new_thread()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    running.wait()
    during = []
    while any(thread.is_alive() for thread in threads):
        during.append(seen_by_a_new_thread())
        counts.add(torch.get_num_threads())
    assert before[0] == COUNT
    assert set(before[1]) <= {str(COUNT)}
    assert all(each == before for each in [*during, seen_by_a_new_thread()])
    assert counts == {COUNT}
    assert not wrong


def test_workers_have_one_core_each() -> None:
    if not workers._can_limit_threads():
        pytest.skip("this build of PyTorch has no functions for the threads of one thread")
    seen: list[tuple[str, int]] = []

    def look(item: int) -> None:
        seen.append((threading.current_thread().name, torch.get_num_threads()))

    workers.side_by_side(look, range(6))
    assert len(seen) == 6
    assert {count for _, count in seen} == {1}
    assert all(name.startswith("posenc") for name, _ in seen)
    assert torch.get_num_threads() == COUNT


def test_without_the_functions_the_calling_thread_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_can_limit_threads", lambda: False)
    seen: list[tuple[int, str]] = []
    workers.side_by_side(
        lambda item: seen.append((item, threading.current_thread().name)), range(3)
    )
    assert seen == [(item, threading.current_thread().name) for item in range(3)]


def test_errors_of_workers_are_raised() -> None:
    def fail(item: int) -> None:
        raise ValueError(str(item))

    with pytest.raises(ValueError, match="0"):
        workers.side_by_side(fail, range(3))
    grid = Grid.of(Layout.sequence(9))
    assert attend(*torch.zeros(3, 1, 1, 9, 8), grid, Encoding(), backend="tiled").sum() == 0
