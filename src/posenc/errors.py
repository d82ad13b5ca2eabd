"""Exceptions of posenc.

Each message gives the argument, what was expected, what was passed, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial

import torch

MAX_CHARACTERS = 1500
"""Longest text quoted in a message."""


class PosencError(Exception):
    """Base class of all exceptions of posenc.

    Args:
        argument: name of the invalid argument, as the caller wrote it.
        expected: valid values.
        got: the value passed.
        remedy: how to fix it.
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
        parts = {"expected": self.expected, "got": self.got, "remedy": self.remedy}
        return partial(type(self), **parts), (self.argument,)


def _shortened(text: str) -> str:
    """The text, its middle replaced by an ellipsis if it is longer than ``MAX_CHARACTERS``."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[:750]} … {text[-375:]}"


class ArgumentError(PosencError, ValueError):
    """An argument has the wrong shape, rank, dtype, device or value."""


class VersionError(PosencError, ImportError):
    """An installed package is older than the oldest version that posenc supports."""


class LengthError(ArgumentError):
    """A position outside the range that an encoding can represent."""


class UnknownNameError(ArgumentError):
    """The name of an encoding, option, backend or task that does not exist."""

    @classmethod
    def of(cls, argument: str, name: str, valid: Iterable[str]) -> UnknownNameError:
        """An error that lists close matches of ``name``, then all valid names.

        Matching ignores case, and treats hyphens and spaces as underscores.
        """
        names = sorted(valid)
        by_plain = {_plain(valid_name): valid_name for valid_name in names}
        matches = difflib.get_close_matches(_plain(name), by_plain, n=3, cutoff=0.5)
        close = [by_plain[match] for match in matches]
        hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
        listed = ", ".join(names) or "none"
        return cls(
            argument, expected="a known name", got=repr(name), remedy=f"{hint}Valid: {listed}."
        )


def _plain(name: str) -> str:
    """The name in lower case, with underscores."""
    return name.casefold().replace("-", "_").replace(" ", "_")


class BackendRefusal(PosencError, RuntimeError):
    """The explicitly requested backend does not support these inputs."""


class DerivativeError(PosencError, RuntimeError):
    """A derivative of a gradient that has none."""


class RankError(PosencError, RuntimeError):
    """A collective that failed because another process did not take part."""


class DataError(PosencError, ValueError):
    """An unusable text, corpus or data set."""


class CheckpointError(PosencError, RuntimeError):
    """A damaged, incomplete or unsupported checkpoint."""


class Interrupted(PosencError):
    """A run stopped by a signal, after saving its state."""


class OutputError(PosencError, OSError):
    """An output folder that exists, is read-only or is full."""
