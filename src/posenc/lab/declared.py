"""Options of the command line, as the fields of settings declare them."""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Option:
    """Declares that the command line has an option for a field of settings.

    Args:
        help: of the option.
        default: as it is displayed, where the field's own says nothing.
        group: heading of the options that it stands among.
        name: on the command line, in files and in messages; by default the field's.
    """

    help: str
    default: str = ""
    group: str = "Options"
    name: str = ""


def declared_options(kind: type) -> dict[str, tuple[Any, Option]]:
    """Annotations and options, with their names, of the fields of a dataclass that declare one."""
    return {
        field: (hint, replace(option, name=option.name or field))
        for field, hint in typing.get_type_hints(kind, include_extras=True).items()
        for option in getattr(hint, "__metadata__", ())
        if isinstance(option, Option)
    }
