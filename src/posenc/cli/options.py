"""Options that several commands have, and parsing of comma-separated values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.errors import ArgumentError


def option(
    help_text: str,
    default: str | bool = True,
    *,
    complete: Callable[[str], list[str]] | None = None,
) -> Any:
    """An option with its help, the displayed default, and completion of its value."""
    return typer.Option(help=help_text, show_default=default, autocompletion=complete)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")]
ComputeDevice = Annotated[str, option("Device: cpu, cuda or cuda:N.")]
TextFile = Annotated[
    Path | None, option("Text file or folder to measure on.", "posenc's own source")
]
Images = Annotated[
    Path | None,
    option(
        "Images to measure a ViT on: a folder of image files (in subfolders named as the classes, "
        "if known), or a .npy or .npz file of arrays.",
        "none",
    ),
]
TrainedLength = Annotated[
    int | None, option("Length the model was trained at, in tokens.", "max_position_embeddings")
]


def names(text: str | None) -> tuple[str, ...] | None:
    """The items of a comma-separated list; None for None."""
    if text is None:
        return None
    return tuple(item.strip() for item in text.split(",") if item.strip())


def numbers(name: str, text: str | None, *, least: int | None = None) -> tuple[int, ...] | None:
    """The whole numbers of a comma-separated list; None for None.

    Args:
        name: of the option, for messages.
        text: the list.
        least: smallest valid number, of which there must be one at least.

    Raises:
        ArgumentError: for anything else.
    """
    items = names(text)
    if items is None:
        return None
    try:
        values = tuple(int(item) for item in items)
    except ValueError:
        values = None
    if values is None or (least is not None and min(values, default=least - 1) < least):
        raise ArgumentError(
            name,
            expected="whole numbers" + ("" if least is None else f", {least} or more"),
            got=repr(text),
            remedy="Write 512,1024, for example.",
        )
    return values


def options_of(command: Any, arguments: list[str]) -> dict[str, str]:
    """The options of the invoked command, by the names of their parameters."""
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    options = {}
    for parameter in command.params:
        if parameter.name is not None and parameter.param_type_name == "option":
            # Of a flag that is on by default only the negation can have been given.
            negated = parameter.secondary_opts if parameter.default is True else []
            options[parameter.name] = max(negated or parameter.opts, key=len)
    return options
