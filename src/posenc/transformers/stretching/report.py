"""Report of what ``stretch`` and ``restore`` did with a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


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
            saved = f"For this process: a saved {self.model} takes square tables alone"
        return "\n".join([*lines, f"  {saved}."])
