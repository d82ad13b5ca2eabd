"""Results of the scripts here, written to files, and tables of them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posenc.lab.bench.run import about

RESULTS = Path(__file__).parent / "results"

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def record(device: str = "cpu", **fields: object) -> dict[str, Any]:
    """The fields with date, device, machine and versions."""
    return about(device) | fields


def write_results(name: str, rows: list[dict[str, object]], **settings: object) -> Path:
    """Write rows with machine, versions and date to ``benchmarks/results/<name>.json``."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record(settings=settings, rows=rows), indent=1) + "\n")
    return path


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; vertical bars within cells are escaped, as they would end them."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def filled(page: str, parts: Mapping[str, str]) -> str:
    """A page with each part between ``<!-- NAME -->`` and ``<!-- end -->``.

    Raises:
        ValueError: if a part has no place in the page.
    """
    for name, text in parts.items():
        place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, count = place.subn(lambda match, text=text: match[1] + text + match[2], page)
        if not count:
            raise ValueError(f"the page has no place for {name}")
    return page
