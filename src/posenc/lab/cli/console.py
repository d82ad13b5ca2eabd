"""Printing, errors and exit codes of all commands."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from posenc.errors import (
    ArgumentError,
    CheckpointError,
    DataError,
    Interrupted,
    OutputError,
    PosencError,
)

if TYPE_CHECKING:
    from posenc.lab.reporting.opening import Opening
    from posenc.lab.reporting.page import TableSection

CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}"
    for begin, end in (
        *((0x00, 0x09), (0x0B, 0x20), (0x7F, 0xA0)),  # terminal controls except tab and newline
        *((0x200E, 0x2010), (0x202A, 0x202F), (0x2066, 0x206A)),  # writing directions
        (0xD800, 0xE000),  # surrogates: bytes of a file name that are not UTF-8
    )
    for code in range(begin, end)
}


class Terminal(Console):
    """Prints text without markup; control characters in it are replaced.

    Names of files and models may contain either.

    Args:
        stderr: print on standard error.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments to print, with control characters in their text replaced."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(segment.text.translate(CONTROLS), segment.style)


class PlainTextColumn(TextColumn):
    """A text column of a progress bar, without markup."""

    def __init__(self, text_format: str, style: str = "none") -> None:
        super().__init__(text_format, style=style, markup=False)


STYLES = {"good": "green", "fair": "yellow", "bad": "red", "none": "dim"}
"""Terminal styles by the tone of a verdict."""

OUT = Terminal()
ERRORS = Terminal(stderr=True)

EXIT_CODES = """Exit codes: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted."""


def help_of(command: Callable[..., None]) -> str:
    """Help text from a command's docstring: rejoined paragraphs, unchanged indented lines."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    rejoined = [
        textwrap.indent(textwrap.dedent(paragraph), "  ")
        if paragraph.startswith(" ")
        else " ".join(paragraph.split())
        for paragraph in paragraphs
    ]
    return "\n\n".join([*rejoined, EXIT_CODES])


def new_table(
    *columns: str, gap: int = 2, header: bool = True, wrapped: Collection[str] = ()
) -> Table:
    """A table without lines: text in the first column, numbers in the others.

    Args:
        columns: names.
        gap: spaces between columns.
        header: print the names.
        wrapped: columns whose words go into several lines where the terminal is too narrow.
    """
    table = Table(
        box=None, pad_edge=False, show_header=header, header_style="dim", padding=(0, gap, 0, 0)
    )
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if index else "left"
        table.add_column(column, justify=justify, no_wrap=column not in wrapped)
    return table


def print_line(text: str, *, indent: int = 0, style: str = "") -> None:
    """Print a line and what is wrapped of it, indented."""
    OUT.print(Padding(Text(text, style=style), (0, 0, 0, indent)))


def print_report(page: PurePath, *, gap: str = "\n") -> None:
    """Print the path of a report's page, or its URL on a store."""
    where = page.resolve() if isinstance(page, Path) else page
    OUT.print(Text.assemble(f"{gap}Report: ", (str(where), "bold")), soft_wrap=True)


def print_study(
    opening: Opening, tables: Iterable[TableSection] = (), answer: Iterable[str] = ()
) -> None:
    """Print tables, verdicts, the finding in a line, reasons, and ways to settle what is open."""
    from posenc.lab.reporting.opening import TONES

    print_tables(tables)
    verdicts = opening.verdicts
    if verdicts.rows:
        OUT.print(Text(f"\n{verdicts.title}", "dim"))
        table = new_table()
        for column in ("", *verdicts.columns):
            table.add_column(column, overflow="fold")
        for row in sorted(verdicts.rows, key=lambda row: row.reference):
            words = (Text(word or "—", STYLES[TONES.get(word, "none")]) for word in row.words)
            table.add_row(Text(row.name, "" if row.reference else "bold"), *words)
        OUT.print(table)
    if verdicts.guide:
        OUT.print(Text(verdicts.guide, "dim"))
    OUT.print(Text(f"\n{opening.headline}", "bold"), soft_wrap=True)
    for sentence in answer:
        OUT.print(Text(sentence))
    for remedy in opening.remedies:
        OUT.print(Text(f"{remedy.text} {remedy.command}".rstrip(": ")), soft_wrap=True)


def print_tables(tables: Iterable[TableSection]) -> None:
    """Print the columns that a terminal has room for, intervals below means where it is narrow."""
    for section in tables:
        OUT.print(Text(f"\n{section.guide}" if section.guide else "", "dim"))
        table = terminal_table(section, " ")
        if OUT.measure(table, options=OUT.options.update(width=1000)).maximum > OUT.width:
            table = terminal_table(section, "\n")
        OUT.print(table)
        for name, text in section.notes:
            OUT.print(Text(f"{name} {text}", "dim"))


def terminal_table(section: TableSection, between: str) -> Table:
    """A table with ``between`` means and their intervals, and in headings."""
    table = new_table()
    shown = [place for place, column in enumerate(section.columns) if column.short is not None]
    for place in shown:
        column = section.columns[place]
        name = (column.short or column.name).replace(" at ", f"{between}at ")
        style = "bold" if section.rows and section.rows[0][place].kind == "name" else ""
        wraps = bool(style) or (column.text and column.name != "#")
        justify: Literal["left", "right"] = "left" if wraps else "right"
        table.add_column(name, justify=justify, style=style, no_wrap=not wraps, overflow="fold")
    for row in section.rows:
        cells = (row[place] for place in shown)
        table.add_row(
            *(
                cell.text
                if cell.kind or not cell.small
                else f"{cell.text}{between}{cell.small.replace(' to ', f'{between}to ')}"
                for cell in cells
            )
        )
    return table


def command_line() -> str:
    """The running command, as a shell takes it."""
    return shlex.join(["posenc", *sys.argv[1:]])


class Display:
    """Progress on standard error: bars on a terminal, else lines.

    Args:
        columns: of the bars.
        shown: print anything at all.
    """

    def __init__(self, *columns: ProgressColumn, shown: bool) -> None:
        self.shown = shown
        self.live = shown and ERRORS.is_terminal
        self.bars = Progress(*columns, console=ERRORS, disable=not self.live, transient=True)

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()

    def emit(self, text: str, style: str = "") -> None:
        """Print a line, if anything is shown."""
        if self.shown:
            ERRORS.print(text, style=style, markup=False)


EARLY = 0.002
"""Share of the work up to which its time says nothing: programs start, and calls are compiled."""


class Countdown:
    """Estimate of the remaining time, from the progress so far.

    Args:
        clock: current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.start = self.done = 0.0

    def restart(self, done: float = 0.0) -> None:
        """Restart the estimate, with ``done`` completed before."""
        self.began, self.start, self.done = self.clock(), done, done

    def elapsed(self) -> float:
        """Seconds since the estimate was restarted."""
        return self.clock() - self.began

    def left(self, done: float, total: float) -> str:
        """``about 12 s left``, ``about 3 min left``; empty without an estimate."""
        from posenc.lab.reporting.numbers import in_minutes

        if done < self.done:  # another stage
            self.restart(done)
        self.done = done
        if done - self.start < EARLY * (total - self.start) or done >= total:
            return ""
        seconds = self.elapsed() * (total - done) / (done - self.start)
        return f"about {in_minutes(seconds)} left"


def exit_code(error: PosencError) -> int:
    """2 for an invalid command or input, 130 if interrupted, else 1."""
    if isinstance(error, Interrupted):
        return 130
    invalid = (ArgumentError, DataError, OutputError, CheckpointError)
    return 2 if isinstance(error, invalid) else 1


def print_error(error: PosencError) -> None:
    """Print an error in red on standard error, its remedy on the next line."""
    ERRORS.print(
        Text.assemble(
            ("error: ", "bold red"),
            f"{error.argument}: expected {error.expected}, got {error.got}.",
        )
    )
    if error.remedy:
        ERRORS.print(Text(error.remedy))


def print_json(value: object) -> None:
    """Print ``value`` as JSON on standard output, escaped where its encoding lacks a character."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    encoding = sys.stdout.encoding or "utf-8"
    lossless = text.encode(encoding, "replace").decode(encoding) == text
    if not lossless or any(ord(character) in CONTROLS for character in text):
        text = json.dumps(value, indent=1)
    sys.stdout.write(text + "\n")
