"""What all commands share: where they print, how they fail."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import TextColumn
from rich.segment import Segment
from rich.text import Text

from posenc.errors import (
    ArgumentError,
    CheckpointError,
    DataError,
    Interrupted,
    OutputError,
    PosencError,
)

__all__ = [
    "ERRORS",
    "EXIT_CODES",
    "OUT",
    "Countdown",
    "Terminal",
    "Words",
    "exit_code",
    "help_of",
    "print_error",
    "print_json",
]

CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}"
    for begin, end in (
        *((0x00, 0x09), (0x0B, 0x20), (0x7F, 0xA0)),  # of terminals, but for tab and newline
        *((0x200E, 0x2010), (0x202A, 0x202F), (0x2066, 0x206A)),  # of writing directions
        (0xD800, 0xE000),  # halves of characters: bytes of a file's name that are no UTF-8
    )
    for code in range(begin, end)
}


class Terminal(Console):
    """Prints text as it is: brackets are no markup, and controls of terminals are replaced.

    What is printed has names of files and models in it, which may hold anything.

    Args:
        stderr: whether it prints on standard error.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The pieces to print, each without controls but those of the console itself."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(segment.text.translate(CONTROLS), segment.style)


class Words(TextColumn):
    """A column of a progress bar whose text is printed as it is."""

    def __init__(self, text_format: str, style: str = "none") -> None:
        super().__init__(text_format, style=style, markup=False)


OUT = Terminal()
ERRORS = Terminal(stderr=True)

EXIT_CODES = """Exit codes: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted."""


def help_of(command: Callable[..., None]) -> str:
    """A command's docstring as its help: paragraphs flow, indented commands stay in their lines."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    flowing = [
        textwrap.indent(textwrap.dedent(paragraph), "  ")
        if paragraph.startswith(" ")
        else " ".join(paragraph.split())
        for paragraph in paragraphs
    ]
    return "\n\n".join([*flowing, EXIT_CODES])


class Countdown:
    """Time left, from what has been done since the start.

    Args:
        clock: seconds that pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.start = self.done = 0.0

    def restart(self, done: float = 0.0) -> None:
        """Count from now on, with so much done before."""
        self.began, self.start, self.done = self.clock(), done, done

    def left(self, done: float, total: float) -> str:
        """``about 12 s left``, ``about 3 min left``; empty before there is anything to go by."""
        if done < self.done:  # another stage
            self.restart(done)
        self.done = done
        if done <= self.start or done >= total:
            return ""
        seconds = (self.clock() - self.began) * (total - done) / (done - self.start)
        if seconds < 90:
            return f"about {max(1, round(seconds))} s left"
        if seconds < 5400:
            return f"about {seconds / 60:.0f} min left"
        return f"about {seconds / 3600:.1f} h left"


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
    text = json.dumps(value, indent=1, ensure_ascii=False)
    if any(ord(character) in CONTROLS for character in text):
        text = json.dumps(value, indent=1)
    sys.stdout.write(text + "\n")
