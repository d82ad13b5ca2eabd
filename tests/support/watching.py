"""Records whose readers are watched, and calls whose tensors are."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import partial
from inspect import isfunction
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


class LargestTensor(TorchDispatchMode):
    """A mode that remembers the most numbers any operator's new tensor held, with its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.itemsize)
        return made
