"""Changes of modules and configs in place, their way back, and the report of ``stretch``."""

from __future__ import annotations

from collections import Counter
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


@dataclass(frozen=True)
class StretchedPart:
    """One part of a report: a set of frequencies, an attention layer or a table.

    Args:
        path: name in the model.
        kind: class of the module.
        stretched: True if it was changed.
        encoding: what it has now, or why it was left alone.
    """

    path: str
    kind: str
    stretched: bool
    encoding: str


@dataclass(frozen=True)
class StretchReport:
    """Parts of a model with what each has now.

    Args:
        model: class of the model.
        method: of extension; "" if the model was restored.
        place: where the method acts: ``"frequencies"``, ``"attention"``, ``"tables"`` or
            ``"biases"``; "" if the model was restored.
        parts: those with positions.
        saved_as: what ``save_pretrained`` writes: ``"transformers"``, if transformers alone loads
            the stretched model; ``"posenc"``, if ``stretch(model)`` stretches it again after
            loading; "" if the model was restored, or neither loads what is saved.
        accelerated: True if restoring gave the model its own attention again.
    """

    model: str
    method: str
    place: str
    parts: tuple[StretchedPart, ...]
    saved_as: str = ""
    accelerated: bool = False

    @property
    def stretched(self) -> int:
        """Number of parts that were changed."""
        return sum(part.stretched for part in self.parts)

    def __str__(self) -> str:
        if not self.method:
            count = len(self.parts)
            changed = [f"{count} part{'s'[: count != 1]}"] * bool(count)
            changed += ["its own attention"] * self.accelerated
            return f"{self.model}: restored, {' and '.join(changed) or 'nothing was changed'}."
        lines = [f"{self.model}: {self.stretched} of {len(self.parts)} stretched ({self.method})."]
        counts = Counter((p.kind, p.stretched, p.encoding) for p in self.parts)
        lines += [
            f"  {count} × {kind}: {encoding if changed else 'left alone, ' + encoding}."
            for (kind, changed, encoding), count in counts.items()
        ]
        again = "" if self.saved_as == "transformers" else "; stretch(model) after loading"
        saved = f"Saved in the config for {self.saved_as}{again}"
        if not self.saved_as:
            why = "saving writes no method"
            if self.place == "tables":
                why = f"a saved {self.model} takes square tables alone"
            saved = f"For this process: {why}"
        return "\n".join([*lines, f"  {saved}."])
