"""Report of what ``accelerate`` did with a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class ReportedModule:
    """One module of a report, with the attention that runs in it.

    Args:
        path: name in the model.
        kind: its class in transformers.
        attention: what runs now: ``"posenc"``, or the module's own.
        reason: why.
    """

    path: str
    kind: str
    attention: str
    reason: str


@dataclass(frozen=True)
class AccelerateReport:
    """Modules of a model, with what computes their attention and why.

    Args:
        model: its class.
        modules: those with attention that posenc knows.
        difference: largest difference from the original's output on random inputs, as a share of
            its largest value; None if not checked.
        tried: the inputs that outputs were compared on, in words; "" if they were not.
        note: in a sentence, why nothing was changed or compared; "" if it was.
    """

    model: str
    modules: tuple[ReportedModule, ...]
    difference: float | None = None
    tried: str = ""
    note: str = ""

    @property
    def accelerated(self) -> int:
        """Number of modules whose attention posenc computes."""
        return sum(module.attention == "posenc" for module in self.modules)

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.accelerated} of {len(self.modules)} modules accelerated."]
        if not self.modules:
            lines = [f"{self.model}: {self.note}"]
        counts = Counter((m.kind, m.attention, m.reason) for m in self.modules)
        lines += [
            f"  {count} × {kind}: {attention}, {reason}."
            for (kind, attention, reason), count in counts.items()
        ]
        if self.difference is not None:
            lines.append(f"  Largest difference on random inputs: {self.difference:.1e}.")
            lines.append(f"  Tried: {self.tried}.")
        elif self.modules and self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)
