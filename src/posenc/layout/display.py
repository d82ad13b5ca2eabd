"""Layouts and grids as a line of text (``repr``) and as HTML (notebooks).

The line reads shapes only, to avoid a device sync. The HTML has no scripts, style sheets or links;
text and lines use ``currentColor`` and fills are mid-tones, for light and dark backgrounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

CELLS = 64
"""Most tokens drawn along an axis; of more, evenly spaced ones are drawn."""

DOTS = 576
"""Most tokens of an image drawn."""

SIDE = 192
"""Height of a picture in pixels."""

FILLS = ("#3584c6", "#d9742b", "#2c9c6a", "#c2508c", "#8a6ed0", "#a3892a")
PADDING = "#8a929b"

EDGE = 14
"""Margin in pixels, for labels."""


OPTIONAL_TENSORS = ("document", "valid", "special", "signal")


def layout_line(layout: Any) -> str:
    """``Layout(length=1024, batch=1, axes=1, document=…)``; ``…`` abbreviates a tensor."""
    _, length, axes = layout.positions.shape
    items = [f"length={length}", f"batch={layout.batch}", f"axes={axes}"]
    items += [f"start={layout.start}"] if layout.start is not None else []
    items += [f"extent={layout.extent}"] if layout.extent is not None else []
    items += [f"{name}=…" for name in OPTIONAL_TENSORS if getattr(layout, name) is not None]
    dtype, device = layout.positions.dtype, layout.positions.device
    items += [f"dtype={dtype}"] if dtype != torch.float32 else []
    items += [f"device={device}"] if device.type != "cpu" else []
    return f"Layout({', '.join(items)})"


def grid_line(grid: Any) -> str:
    """Both layouts (or the one for both), the causal flag, the window and the intervals."""
    same = grid.query is grid.key
    sides = f"of({grid.query}" if same else f"query={grid.query}, key={grid.key}"
    window = "" if grid.window is None else f", window={grid.window}"
    intervals = "" if grid.intervals is None else ", intervals=…"
    return f"Grid{'.' if same else '('}{sides}, causal={grid.causal}{window}{intervals})"


def layout_html(layout: Any) -> str:
    """Positions of the first row, of at most ``CELLS`` tokens (``DOTS`` of an image).

    Over the index for one axis, else as rows and columns; one colour per document, padding grey.
    """
    _, length, axes = layout.positions.shape
    most = CELLS if axes == 1 else DOTS
    at = _evenly(length, most)
    rows = layout.positions[0, at].detach().cpu().tolist()
    marks = (layout.document, layout.valid)
    document, valid = (None if mark is None else mark[0, at].tolist() for mark in marks)
    down = [float(row[0]) for row in rows]
    across = [float(n) for n in at] if axes == 1 else [float(row[1]) for row in rows]
    numbers = list(dict.fromkeys(document or []))
    width = SIDE if axes > 1 else 2 * SIDE
    dots = []
    for token, (x, y) in enumerate(zip(_spread(across, width), _spread(down, SIDE), strict=True)):
        fill = FILLS[numbers.index(document[token]) % len(FILLS)] if document else FILLS[0]
        if valid is not None and not valid[token]:
            fill = PADDING
        # Rows of an image count downwards, positions in a text upwards.
        height = y if axes > 1 else SIDE - y
        dots.append(f'<circle cx="{EDGE + x:.1f}" cy="{EDGE + height:.1f}" r="2" fill="{fill}"/>')
    above = f"position {_ends(down)} ↑" if axes == 1 else f"columns {_ends(across)} →"
    across_below = _text(EDGE, EDGE + SIDE + 11, f"token {_ends(across)} →")
    side_label = across_below if axes == 1 else _rotated_text(f"rows {_ends(down)} →")
    frame = (
        f'<path d="M{EDGE} {EDGE}V{EDGE + SIDE}H{EDGE + width}" fill="none" '
        'stroke="currentColor" stroke-opacity="0.4"/>'
    )
    note = _omitted([(length, "tokens")], layout.batch, most)
    return _picture(
        repr(layout), note, [frame, _text(EDGE, EDGE - 4, above), side_label, *dots], width, SIDE
    )


def grid_html(grid: Any) -> str:
    """Mask of the first row, of at most ``CELLS`` queries (down) and keys (across)."""
    lengths = grid.query.positions.shape[1], grid.key.positions.shape[1]
    sampled = replace(grid, query=_sampled(grid.query), key=_sampled(grid.key))
    visible = sampled.visible[0, 0]
    rows, columns = visible.shape
    size = SIDE / max(rows, columns, 1)
    runs = [
        f'<rect x="{EDGE + begin * size:.2f}" y="{EDGE + number * size:.2f}" '
        f'width="{(end - begin) * size:.2f}" height="{size:.2f}"/>'
        for number, row in enumerate(visible.tolist())
        for begin, end in _runs(row)
    ]
    width, height = columns * size, rows * size
    shapes = [
        f'<g fill="{FILLS[0]}" shape-rendering="crispEdges">{"".join(runs)}</g>',
        f'<rect x="{EDGE}" y="{EDGE}" width="{width:.2f}" height="{height:.2f}" '
        'fill="none" stroke="currentColor" stroke-opacity="0.5"/>',
        _text(EDGE, EDGE - 4, f"keys 0 … {lengths[1] - 1} →"),
        _rotated_text(f"queries 0 … {lengths[0] - 1} →"),
    ]
    named = list(zip(lengths, ("queries", "keys"), strict=True))
    note = _omitted(named, max(grid.query.batch, grid.key.batch))
    return _picture(repr(grid), note, shapes, width, height)


def _sampled(layout: Any) -> Any:
    """The layout of at most ``CELLS`` evenly spaced tokens."""
    at = _evenly(layout.length)
    parts = {n: getattr(layout, n) for n in ("positions", "order", "document", "valid")}
    chosen = {n: None if part is None else part[:, at] for n, part in parts.items()}
    others = dict.fromkeys(("special", "signal", "start", "extent"))
    return replace(layout, **chosen, **others, consecutive=False)


def _evenly(length: int, most: int = CELLS) -> list[int]:
    """At most ``most`` evenly spaced indices below ``length``, including the first and last."""
    if length <= most:
        return list(range(length))
    return [round(n * (length - 1) / (most - 1)) for n in range(most)]


def _omitted(lengths: Sequence[tuple[int, str]], batch: int, most: int = CELLS) -> str:
    """A sentence on how much is drawn, or nothing if all is."""
    shown = [f"{most} of {length:,} {name}" for length, name in lengths if length > most]
    shown += [f"the first of {batch} rows"] if batch > 1 else []
    return f"Shown: {', '.join(shown)}." if shown else ""


def table_html(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, note: str
) -> str:
    """An HTML table of unescaped text."""
    start = ' style="text-align:left;padding:2px 12px 2px 0"'
    head = "".join(f'<th scope="col"{start}>{_escape(text)}</th>' for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td{start}>{_escape(text)}</td>" for text in row) + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return _figure(title, table, note)


def _escape(text: str) -> str:
    from html import escape  # here, to keep `import posenc` fast

    return escape(text)


def _figure(title: str, picture: str, note: str) -> str:
    below = f'<div style="opacity:0.75;font-size:85%">{_escape(note)}</div>' if note else ""
    return f"<div><div><code>{_escape(title)}</code></div>{picture}{below}</div>"


def _picture(title: str, note: str, shapes: Iterable[str], width: float, height: float) -> str:
    total = f"{width + 2 * EDGE:.0f}", f"{height + 2 * EDGE:.0f}"
    described = f"{title}: {note}" if note else title
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total[0]}" height="{total[1]}" '
        f'viewBox="0 0 {total[0]} {total[1]}" role="img" aria-label="{_escape(described)}" '
        f'style="max-width:100%;height:auto">{"".join(shapes)}</svg>'
    )
    return _figure(title, svg, note)


def _text(x: float, y: float, text: str) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="10" font-family="sans-serif" '
        f'fill="currentColor">{_escape(text)}</text>'
    )


def _rotated_text(text: str) -> str:
    """Text down the left side."""
    at = EDGE - 4
    return f'<g transform="rotate(90 {at} {EDGE})">{_text(at, EDGE + 7, text)}</g>'


def _ends(values: Sequence[float]) -> str:
    return f"{min(values):g} … {max(values):g}" if values else "none"


def _runs(row: Sequence[bool]) -> Iterable[tuple[int, int]]:
    """Runs of True as (begin, end)."""
    begin = None
    for index, value in enumerate([*row, False]):
        if value and begin is None:
            begin = index
        elif not value and begin is not None:
            yield begin, index
            begin = None


def _spread(values: Sequence[float], size: float) -> list[float]:
    """Values scaled to pixels from 0 to ``size``."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [(value - low) / (high - low) * size if high > low else size / 2 for value in values]
