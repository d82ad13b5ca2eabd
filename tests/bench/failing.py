"""Contenders that fail, in a module that a process of its own can import."""

from __future__ import annotations

import os

from posenc.bench.contenders import Plain, Prepared


class Failing(Plain):
    """Raises an error."""

    def prepare(self, call: object) -> Prepared:
        raise KeyError("nothing")


class Fatal(Plain):
    """Takes its process with it."""

    def prepare(self, call: object) -> Prepared:
        os._exit(1)
