"""Contenders that fail, in a module that a process of its own can import."""

from __future__ import annotations

import os

import torch
from benchmarks.attention.contenders import Plain

from posenc.lab.bench.passes import Pass


class Failing(Plain):
    """Raises an error."""

    def prepare(self, call: object) -> Pass:
        raise KeyError("nothing")


class Environment(Plain):
    """Fails with the settings of its process."""

    def prepare(self, call: object) -> Pass:
        blocks = os.environ["MALLOC_MMAP_THRESHOLD_"]
        raise RuntimeError(f"{torch.get_num_threads()} threads, blocks of {blocks}")


class Fatal(Plain):
    """Takes its process with it."""

    def prepare(self, call: object) -> Pass:
        os._exit(1)
