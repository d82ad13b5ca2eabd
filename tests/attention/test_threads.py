"""Calls side by side share nothing, and leave the number of threads alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
import torch

import posenc
from posenc import Grid, Layout, attend

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
    alone = attend(q, k, v, grid, encoding, backend="blockwise")
    running = threading.Barrier(4)
    counts: set[int] = set()
    wrong: list[str] = []

    def work() -> None:
        running.wait()
        for _ in range(4):
            own = q.clone().requires_grad_()
            output = attend(own, k, v, grid, encoding, backend="blockwise")
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
