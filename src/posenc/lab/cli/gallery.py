"""``posenc gallery``: all encodings on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.text import Text

from posenc.errors import ArgumentError
from posenc.lab.cli.completion import complete_encodings
from posenc.lab.cli.console import ERRORS, OUT
from posenc.lab.cli.options import option


def gallery(
    out: Annotated[Path, option("Output file (.html).")] = Path("posenc-gallery.html"),
    encodings: Annotated[
        str | None,
        option("Encodings to draw, comma-separated.", "all", autocompletion=complete_encodings),
    ] = None,
) -> None:
    """Write an HTML page with the formula, plots, claims and source of every encoding.

    Examples:

        posenc gallery

        posenc gallery --encodings rope,alibi,t5 --out three.html
    """
    chosen = None
    if encodings is not None:
        chosen = [name.strip() for name in encodings.split(",") if name.strip()]
    if chosen == []:
        raise ArgumentError(
            "--encodings",
            expected="at least one name",
            got=repr(encodings),
            remedy="Run posenc list to see all names.",
        )
    if out.suffix not in (".html", ".htm"):
        raise ArgumentError(
            "--out",
            expected="a file ending in .html",
            got=out.name,
            remedy=f"Write {out.with_suffix('.html').name}, for example.",
        )
    from posenc.lab.visualization.gallery import write_gallery

    with ERRORS.status(Text("Drawing …")) as status:
        write_gallery(
            out, names=chosen, progress=lambda name: status.update(Text(f"Drawing {name} …"))
        )
    OUT.print(f"Gallery: {out}", soft_wrap=True)
