"""Settings and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator

import pytest
import torch

from posenc.attention.backends.native.build import missing
from posenc.encoding.prepared import Prepared
from posenc.errors import BackendRefusal

# Traces with symbolic sizes hardly ever repeat a call: looking for it takes a quarter of the time.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

# Without a device, every torch.manual_seed keeps a formatted stack for one to come: a third of a
# millisecond each.
SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


NO_KERNELS = missing()
"""Reason against the compiled kernels on this machine, which tests may change for themselves."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is collected while modules are imported: a seventh of the time of that.

    Later it is seldom: traces of programs make many objects, and looking through them is a tenth
    of the time of tests of compiled code.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.set_threshold(100_000, 20, 20)
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests start first: none of them is left to one process at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A test that asks for the compiled kernels by name is skipped where there are none."""
    try:
        return (yield)
    except BackendRefusal as refusal:
        if NO_KERNELS is None or NO_KERNELS not in str(refusal):
            raise
        pytest.skip(NO_KERNELS)


@pytest.fixture(scope="session")
def imported() -> set[str]:
    """Modules whose objects are left out of garbage collection."""
    return set()


@pytest.fixture(autouse=True)
def _from_scratch(imported: set[str]) -> Iterator[None]:
    """Each test starts from the same seed, and leaves no compiled code behind.

    Objects of imported modules are frozen, many modules at a time: every measurement of memory
    collects garbage first, which takes most of a second where it goes through all that large
    libraries hold.
    """
    if len(sys.modules) > len(imported) + 50:
        imported.update(sys.modules)
        gc.collect()
        gc.freeze()
    SEED(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def entered() -> Iterator[Prepared]:
    """Calls share results."""
    with Prepared() as prepared:
        yield prepared


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
