"""The pool of processes."""

from __future__ import annotations

from tests.distributed.conftest import pool

__all__ = ["pool"]
