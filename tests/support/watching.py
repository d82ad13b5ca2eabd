"""Records whose readers are watched."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import partial
from inspect import isfunction
from typing import Any


class Watched:
    """A dataclass that keeps the paths of the fields that are read.

    Attributes:
        read: those that are no records themselves.
    """

    def __init__(self, record: Any, prefix: str = "", read: set[str] | None = None) -> None:
        self._record, self._prefix = record, prefix
        self.read: set[str] = set() if read is None else read

    def __getattr__(self, name: str) -> Any:
        shared = getattr(type(self._record), name, None)
        if isinstance(shared, property) and shared.fget is not None:
            return shared.fget(self)
        if isfunction(shared):
            return partial(shared, self)
        value = getattr(self._record, name)
        path = self._prefix + name
        if is_dataclass(value):
            return Watched(value, f"{path}.", self.read)
        self.read.add(path)
        return value
