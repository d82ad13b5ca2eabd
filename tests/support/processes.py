"""Processes of tests that start fast."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext


def forking() -> BaseContext:
    """A context whose processes fork from a server that imports PyTorch once.

    Where the system has no such server, they are spawned, and each imports it.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(["posenc.experiments.workers", "torch._dynamo"])
    return multiprocessing.get_context("forkserver")
