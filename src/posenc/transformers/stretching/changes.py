"""Changes of modules and configs in place, and their way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

MISSING = "posenc: no such attribute"


@dataclass(eq=False)
class Change:
    """An attribute that was given another value.

    Args:
        owner: a module, config or other object.
        name: of the attribute.
        before: its value; ``MISSING`` if there was none.
        dtype: of the other value, if it is a tensor.
    """

    owner: Any
    name: str
    before: Any
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, owner: Any, name: str, value: Any) -> Change:
        """Give ``owner`` another value of an attribute."""
        inherited = name not in vars(owner) and callable(getattr(type(owner), name, None))
        before = MISSING if inherited else getattr(owner, name, MISSING)
        change = cls(owner, name, before, value.dtype if isinstance(value, Tensor) else None)
        setattr(owner, name, value)
        return change

    def undo(self) -> None:
        """Give it back the value it had, on the device of the present one, cast as that was."""
        if isinstance(self.before, str) and self.before == MISSING:
            delattr(self.owner, self.name)
            return
        now = getattr(self.owner, self.name)
        if isinstance(self.before, Tensor) and isinstance(now, Tensor):
            dtype = self.before.dtype if now.dtype == self.dtype else now.dtype
            self.before.data = self.before.data.to(now.device, dtype)
        setattr(self.owner, self.name, self.before)


Undoable = Change | RemovableHandle
"""A change, or a hook that was added."""


def undo(changes: Sequence[Undoable]) -> None:
    """Undo changes and remove hooks, the last first."""
    for change in reversed(changes):
        if isinstance(change, Change):
            change.undo()
        else:
            change.remove()


@contextmanager
def undone_on_error() -> Iterator[list[Undoable]]:
    """A list of changes, which are undone if an error leaves the context."""
    changes: list[Undoable] = []
    try:
        yield changes
    except BaseException:
        undo(changes)
        raise
