"""Processes of tests that start fast."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import BaseContext
from unittest.mock import patch

PRELOADED = ["posenc.lab.experiments.executors", "torch._dynamo"]

_ENVIRONMENT = dict(os.environ)


def forking() -> BaseContext:
    """A context whose processes fork from a server that imports PyTorch once.

    Where the system has no such server, they are spawned, and each imports it. The server outlives
    the test that starts it, so it gets the environment that this module was imported in: not, for
    instance, that test's cache folder with kernels that do nothing.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    multiprocessing.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, _ENVIRONMENT, clear=True):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")
