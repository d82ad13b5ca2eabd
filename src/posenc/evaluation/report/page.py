"""The report of a study: a self-contained HTML page, pictures and tables.

Its headline is ``verdict.headline``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import vl_convert
from markupsafe import Markup

from posenc.evaluation.report.charts import draw_charts
from posenc.evaluation.results import Study
from posenc.evaluation.verdict import findings, headline, setting
from posenc.storage import make_folder, write_bytes
from posenc.visualization.charts import THEME, Chart, picture_files
from posenc.visualization.html import environment, source, styles


def write_study(study: Study, folder: Path) -> Path:
    """Write ``index.html``, charts, ``study.json`` and ``study.csv``; the path of the page.

    Raises:
        OutputError: if the folder cannot be written to.
    """
    make_folder(folder)
    for name, content in _contents(study):
        write_bytes(folder / name, content)
    return folder / "index.html"


def render_page(study: Study, charts: list[Chart]) -> str:
    """The HTML page with its scripts and styles."""
    templates = environment("posenc.evaluation.report")
    libraries = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub is wrong
    return templates.get_template("study.html.jinja").render(
        study=study,
        whens=(False, True) if study.tuned else (False,),
        setting=setting(study),
        headline=headline(study),
        findings=findings(study),
        lengths=lambda metric: (
            study.lengths[:: len(study.lengths) - 1 or 1] if metric.brief else study.lengths
        ),
        needles=next((metric for metric in study.metrics if metric.key == "needles"), None),
        charts=charts,
        specs={chart.key: chart.spec for chart in charts},
        theme=THEME,
        styles=styles(templates, "style.css", "study.css"),
        script=source(templates, "table.js") + source(templates, "charts.js"),
        libraries=Markup(libraries.replace("</script", "<\\/script")),
    )


def _contents(study: Study) -> Iterator[tuple[str, bytes]]:
    charts = draw_charts(study)
    yield "index.html", render_page(study, charts).encode()
    yield from picture_files(charts)
    yield "study.json", f"{json.dumps(study.to_json(), indent=1)}\n".encode()
    yield "study.csv", _table(study).encode()


def _table(study: Study) -> str:
    """All numbers as CSV, one per line."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["method", "tuned", "metric", "length", "at", "value"])
    for tuned in (False, True):
        for method, reading in study.ranked(tuned=tuned):
            start = [method.key, int(tuned)]
            for metric in study.metrics:
                if metric.key == "needles":
                    continue
                for length, value in reading.of(metric).items():
                    table.writerow([*start, metric.key, length, "", value])
            for position, value in reading.by_position:
                table.writerow([*start, "loss_by_position", study.goal, position, value])
            for length, shares in reading.needles.items():
                for depth, share in zip(study.depths, shares, strict=True):
                    table.writerow([*start, "needles", length, depth, share])
            speed = f"{study.counted}_per_second"
            table.writerow([*start, speed, study.goal, "", reading.per_second])
            table.writerow([*start, "peak_memory_bytes", study.goal, "", reading.peak_memory_bytes])
    return text.getvalue()
