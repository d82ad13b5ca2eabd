"""Headlines of reports: short names, the place of a verdict, and the form that fits a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from posenc.lab.reporting.sentences import sentence

LONGEST = 90
"""Characters of a headline, at most."""


def shortened(name: str, most: int) -> str:
    """A name of at most ``most`` characters, its end replaced by an ellipsis."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def at_times(length: int, trained: int, *, size: bool) -> str:
    """A length (``size``: of images) in times of the trained one: ``at 4 × the trained length``."""
    times = "" if length == trained else f"{length / trained:.3g} × "
    return f"at {times}the trained {'size' if size else 'length'}"


def fitting(texts: Iterable[str]) -> str:
    """The first that fits a line; the most detailed comes first."""
    return next(text for text in texts if len(text) <= LONGEST)


def of_one(label: str, verdict: str, at: str, changes: Sequence[tuple[str, ...]]) -> str:
    """The verdict on a model alone, with as many of its changes as fit.

    Args:
        label: of the model.
        verdict: in a word.
        at: the length of the verdict, in words.
        changes: metric, value at the trained length and value there, the deciding one first.
    """
    facts = {"label": label, "verdict": verdict, "at": at}
    return fitting(sentence("alone", changes=c, **facts) for c in (changes, changes[:1], ()))
