"""The page of a report, one self-contained HTML file, and the folder it lies in."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from posenc.attention.user_cache import kept
from posenc.lab.reporting.charts import THEME, Chart, picture_files
from posenc.lab.reporting.drawing import Look
from posenc.lab.reporting.measurements import MeasuredValue, measurements_csv
from posenc.lab.reporting.numbers import Estimate, setting_in_words
from posenc.lab.reporting.opening import TONES, Opening
from posenc.lab.reporting.palette import DARK, LIGHT, OUTLINES
from posenc.storage import write_bytes

DENSE = 10
"""More verdicts than these are set tight."""

ALL_SHOWN, SHOWN = 21, 6
"""Lines of verdicts up to which all stand open, references aside; of more, so many verdicts do."""

NAME_LINE = 14
"""Characters of a name that fit into a line of the table of verdicts on a phone."""


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column of a table.

    Args:
        name: at its head.
        group: above the names of several.
        note: beside the name.
        text: set to the left.
        short: the name on a terminal, by default ``name``; None: shown on pages alone.
    """

    name: str
    group: str = ""
    note: str = ""
    text: bool = False
    short: str | None = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table.

    Args:
        text: what it says.
        small: beside or below it.
        value: to sort by.
        kind: ``name``, ``verdict``, ``rank`` or ``refused``; "" for a number.
        title: shown when it is pointed at.
    """

    text: str
    small: str = ""
    value: float | str | None = None
    kind: str = ""
    title: str = ""

    @classmethod
    def of(cls, value: Estimate | None, form: str | None = None) -> Cell:
        """A mean with its interval below it."""
        if value is None:
            return cls(text="—", kind="refused")
        mean = value.shown(form).partition(" ")[0]
        return cls(text=mean, small=value.interval(form), value=value.mean)


@dataclass(frozen=True, kw_only=True)
class TableSection:
    """A table that is sorted by a click on the head of a column.

    Args:
        key, title, guide: of its section.
        columns: in order; those of a group beside one another.
        rows: of cells, one a column.
        notes: names, and what is said of them below the table.
        marked: name in the first cell of the row that stands out.
    """

    key: str
    title: str
    guide: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[tuple[str, str], ...] = ()
    marked: str | None = None

    @property
    def groups(self) -> list[tuple[str, list[TableColumn]]]:
        """Columns by their groups; those without one by themselves."""
        numbered = groupby(enumerate(self.columns), lambda pair: pair[1].group or pair[0])
        return [
            (key if isinstance(key, str) else "", [column for _, column in pairs])
            for key, pairs in numbered
        ]


@dataclass(frozen=True, kw_only=True)
class MapSection:
    """Shares by row and column, a small map a name.

    Args:
        key, title, guide: of the section.
        corner: what the rows are.
        rows, columns: names of both.
        shares: by name, and in it by row.
    """

    key: str
    title: str
    guide: str
    corner: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    shares: Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term and what is said of it, in paragraphs."""

    name: str
    note: str = ""
    text: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TextSection:
    """A section in words.

    Args:
        key, title: of the section.
        paragraphs: first.
        lists: titles ("" for none), and the sentences under each.
        code: lines to copy, as they are.
        terms: last.
    """

    key: str
    title: str
    paragraphs: tuple[str, ...] = ()
    lists: tuple[tuple[str, Sequence[str]], ...] = ()
    code: str = ""
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report.

    Args:
        facts: on what was done, for one small line.
        opening: the answer.
        charts: the one that shows it first.
        looks: of the names in charts and verdicts.
        sections: tables, maps and words, in order.
        values: every number that was measured.
        command: that does it again.
        settings: everything else that it takes to do it again, by name.
        note: last.
    """

    facts: tuple[str, ...]
    opening: Opening
    charts: Sequence[Chart]
    looks: Mapping[str, Look]
    sections: Sequence[TableSection | MapSection | TextSection] = ()
    values: Sequence[MeasuredValue] = ()
    command: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    note: str = ""

    def render(self) -> str:
        """The page as HTML, scripts and styles included."""
        templates = environment("posenc.lab.reporting")
        judged = [row for row in self.opening.verdicts.rows if not row.reference]
        lines = sum(math.ceil(len(row.name) / NAME_LINE) for row in judged)
        folded = lines > ALL_SHOWN and len(judged) > SHOWN
        return templates.get_template("page.html.jinja").render(
            page=self,
            opening=self.opening,
            shown=SHOWN if folded else None,
            dense=len(self.opening.verdicts.rows) > DENSE,
            outlines=OUTLINES,
            specs={"theme": THEME, "specs": {chart.key: chart.spec for chart in self.charts}},
            settings={name: setting_in_words(value) for name, value in self.settings.items()},
            styles=styles(templates, "style.css", "report.css"),
            script=source(templates, "table.js") + source(templates, "charts.js"),
            libraries=Markup(bundled().replace("</script", "<\\/script")),
        )

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Names and contents: ``index.html``, ``measurements.csv``, and its charts as pictures."""
        yield "index.html", self.render().encode()
        yield "measurements.csv", measurements_csv(self.values).encode()
        yield from picture_files(self.charts)


def environment(*packages: str) -> Environment:
    """Templates of these packages, those of a package before those of the next, and the shared."""
    loaders = [PackageLoader(package) for package in (*packages, "posenc.lab.reporting")]
    made = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["json"] = _inline_json
    made.filters["tone"] = TONES.get
    made.filters["breakable"] = _breakable
    made.tests["of"] = lambda value, kind: type(value).__name__ == kind
    return made


def source(templates: Environment, name: str) -> Markup:
    """A template's own text, put into a page as it is."""
    assert templates.loader is not None  # given above
    return Markup(templates.loader.get_source(templates, name)[0])


def styles(templates: Environment, *names: str) -> Markup:
    """Style sheets one after the other, with the colours of light and dark paper before them."""
    light, dark = (
        ":root { " + " ".join(f"{name}: {colour};" for name, colour in colours.items()) + " }"
        for colours in (LIGHT, DARK)
    )
    colours = f"{light}\n@media screen and (prefers-color-scheme: dark) {{ {dark} }}\n"
    return Markup(colours) + Markup("").join(source(templates, name) for name in names)


def write_files(folder: Path, page: Page, records: Mapping[str, Any]) -> None:
    """Write the files of a page, and records as JSON by file name, into a folder that exists.

    Raises:
        OutputError: if a file cannot be written.
    """
    for name, content in page.files():
        write_bytes(folder / name, content)
    for name, record in records.items():
        write_bytes(folder / name, f"{json.dumps(record, indent=1)}\n".encode())


def _breakable(name: str) -> Markup:
    """A name that a narrow column breaks behind its signs, before it breaks words."""
    return Markup(re.sub("([,:=@])(?!$)", r"\1<wbr>", str(escape(name))))


def _inline_json(value: Any) -> Markup:
    """JSON that no HTML parser mistakes for markup."""
    return Markup(json.dumps(value).replace("<", "\\u003c"))


def bundled() -> str:
    """The scripts, from the user's cache after the first time: to bundle them takes seconds."""
    make: Callable[[], str] = vl_convert.javascript_bundle  # type: ignore[assignment]  # a wrong stub
    name = f"vega-{version('vl-convert-python')}.js"
    return kept("scripts", name, make, read=bytes.decode, write=str.encode)
