"""Shell completion of arguments and options."""

from __future__ import annotations

from collections.abc import Iterable


def complete_encoding(incomplete: str) -> list[str]:
    """Encodings that start with ``incomplete``."""
    from posenc.registry import ENCODINGS

    return _last(incomplete, ENCODINGS, between="+")


def complete_encodings(incomplete: str) -> list[str]:
    """Completions of the last of several comma-separated encodings."""
    done, comma, last = incomplete.rpartition(",")
    return [f"{done}{comma}{name}" for name in complete_encoding(last)]


def complete_methods(incomplete: str) -> list[str]:
    """Completions of the last of several comma-separated methods of ``posenc extend``."""
    from posenc.extension import EXTENSIONS

    done, comma, last = incomplete.rpartition(",")
    names = [*EXTENSIONS, *(() if comma else ("all",))]
    return [f"{done}{comma}{name}" for name in _last(last, names, between="+")]


def complete_task(incomplete: str) -> list[str]:
    """Tasks of ``posenc compare`` that start with ``incomplete``."""
    from posenc.lab.experiments.tasks import TASKS

    return [name for name in TASKS if name.startswith(incomplete)]


def _last(incomplete: str, names: Iterable[str], *, between: str) -> list[str]:
    """Completions of the last of several names separated by ``between``."""
    done, joint, last = incomplete.rpartition(between)
    return [f"{done}{joint}{name}" for name in names if name.startswith(last)]
