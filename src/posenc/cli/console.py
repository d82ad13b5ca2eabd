"""What all commands share: where they print, how they fail."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.text import Text

from posenc.errors import (
    ArgumentError,
    CheckpointError,
    DataError,
    Interrupted,
    OutputError,
    PosencError,
)

__all__ = ["ERRORS", "EXIT_CODES", "OUT", "exit_code", "print_error", "print_json"]

OUT = Console(highlight=False)
ERRORS = Console(stderr=True, highlight=False)

EXIT_CODES = """Exit codes: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted."""


def exit_code(error: PosencError) -> int:
    """2 for what the user can mend in the command or its input, 130 if interrupted, else 1."""
    if isinstance(error, Interrupted):
        return 130
    mendable = (ArgumentError, DataError, OutputError, CheckpointError)
    return 2 if isinstance(error, mendable) else 1


def print_error(error: PosencError) -> None:
    """The error in red on standard error, its remedy on a line of its own."""
    ERRORS.print(
        Text.assemble(
            ("error: ", "bold red"),
            f"{error.argument}: expected {error.expected}, got {error.got}.",
        )
    )
    if error.remedy:
        ERRORS.print(Text(error.remedy))


def print_json(value: object) -> None:
    """``value`` as JSON on standard output, for machines."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
