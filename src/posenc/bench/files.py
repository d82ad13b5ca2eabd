"""Output files of a bench: readings as JSON, and charts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import vl_convert

from posenc.bench.chart import draw
from posenc.bench.results import Report
from posenc.storage import make_folder, write_bytes, write_json


@dataclass(frozen=True)
class ResultFiles:
    """Written files.

    Args:
        json: the whole report.
        pictures: the chart as PNG and SVG, if anything was measured.
    """

    json: Path
    pictures: tuple[Path, ...]


def write_results(report: Report, folder: Path) -> ResultFiles:
    """Write ``attention_<device>.json``, ``.png`` and ``.svg``, each atomically.

    Raises:
        OutputError: if the folder cannot be written to, or the disk is full.
    """
    make_folder(folder)
    name = f"attention_{str(report.settings['device']).partition(':')[0]}"
    json = folder / f"{name}.json"
    write_json(json, report.to_json())
    spec = draw(report)
    if spec is None:
        return ResultFiles(json, ())
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    write_bytes(png, vl_convert.vegalite_to_png(spec, scale=2))
    write_bytes(svg, vl_convert.vegalite_to_svg(spec).encode())
    return ResultFiles(json, (png, svg))
