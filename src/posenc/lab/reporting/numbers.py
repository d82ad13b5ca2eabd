"""Sizes, counts and values of settings as they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def size_in_words(size: float | None) -> str:
    """``420 MiB``; a dash for None."""
    if size is None:
        return "—"
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def time_in_words(seconds: float | None) -> str:
    """``1.3 ms``, ``2.0 s``; a dash for None."""
    if seconds is None:
        return "—"
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def count_in_words(count: float | None) -> str:
    """``147 k``: three digits are enough to compare by; a dash for None."""
    if count is None:
        return "—"
    for unit in ("", " k", " M"):
        if count < 1000:
            return f"{count:.0f}{unit}" if count >= 100 or not unit else f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} G"


def counted(number: int, noun: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def setting_in_words(value: object) -> str:
    """The value of a setting: items of a sequence between commas, those of a mapping by name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {item}" for key, item in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return str(value)
