"""Everything that posenc raises on purpose.

Each message says which argument is wrong, what was expected, what came, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch

__all__ = [
    "ArgumentError",
    "BackendRefusal",
    "CheckpointError",
    "DataError",
    "Interrupted",
    "LengthError",
    "OutputError",
    "PosencError",
    "UnknownNameError",
]

MOST = 1500
"""Characters of a part of a message."""


class PosencError(Exception):
    """Base of all errors that posenc raises on purpose.

    Args:
        argument: what is wrong, by the name the caller knows it by.
        expected: what would have been right.
        got: what came.
        remedy: what to do about it.
    """

    def __init__(self, argument: str, *, expected: str, got: object, remedy: str) -> None:
        self.argument = _shortened(argument)
        self.expected = _shortened(expected)
        self.got = _shortened(str(got))
        self.remedy = remedy
        message = f"{self.argument}: expected {self.expected}, got {self.got}. {remedy}"
        if torch.compiler.is_dynamo_compiling():
            # Under fullgraph=True, Dynamo reports an exception by its positional arguments only.
            raise ValueError(message)
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.argument, self.expected, self.got, self.remedy)


def _shortened(text: str) -> str:
    """A text without its middle if it is too long to be read."""
    return text if len(text) <= MOST else f"{text[: MOST // 2]} … {text[-MOST // 4 :]}"


def _rebuild(
    kind: type[PosencError], argument: str, expected: str, got: str, remedy: str
) -> PosencError:
    """Restore an error that crossed a process boundary."""
    return kind(argument, expected=expected, got=got, remedy=remedy)


class ArgumentError(PosencError, ValueError):
    """An argument has the wrong shape, rank, dtype, device or value."""


class LengthError(ArgumentError):
    """A position lies outside what an encoding can represent."""


class UnknownNameError(ArgumentError):
    """A name (of an encoding, option, backend, task …) that does not exist."""

    @classmethod
    def of(cls, argument: str, name: str, valid: Iterable[str]) -> UnknownNameError:
        """An error that lists the close matches of ``name`` first, then all valid names.

        Case, hyphens and spaces make no difference to what is close: ``RoPE`` is ``rope``.
        """
        names = sorted(valid)
        plain = {_plain(each): each for each in names}
        close = [
            plain[each] for each in difflib.get_close_matches(_plain(name), plain, n=3, cutoff=0.5)
        ]
        hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
        listed = ", ".join(names) or "none"
        return cls(
            argument, expected="a known name", got=repr(name), remedy=f"{hint}Valid: {listed}."
        )


def _plain(name: str) -> str:
    """A name as it is compared with others."""
    return name.casefold().replace("-", "_").replace(" ", "_")


class BackendRefusal(PosencError, RuntimeError):
    """A backend that was asked for by name cannot do the job."""


class DataError(PosencError, ValueError):
    """A text, corpus or data set that cannot be used."""


class CheckpointError(PosencError, RuntimeError):
    """A checkpoint that is damaged, incomplete or of another kind."""


class Interrupted(PosencError):
    """Work that was asked to stop, and has saved where it was."""


class OutputError(PosencError, OSError):
    """An output folder that exists, is read-only or is full."""
