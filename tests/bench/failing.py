"""Contenders that fail, in a module that a process of its own can import."""

from __future__ import annotations

import os

from benchmarks.attention.contenders import Plain

from posenc.bench.passes import Pass


class Failing(Plain):
    """Raises an error."""

    def prepare(self, call: object) -> Pass:
        raise KeyError("nothing")


class Fatal(Plain):
    """Takes its process with it."""

    def prepare(self, call: object) -> Pass:
        os._exit(1)
