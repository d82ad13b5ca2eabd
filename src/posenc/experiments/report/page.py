"""The page of a report: one self-contained HTML file."""

from __future__ import annotations

import vl_convert
from markupsafe import Markup

from posenc.experiments.gates import reason
from posenc.experiments.report.charts import looks
from posenc.experiments.results import Comparison, Metric
from posenc.experiments.statistics import BREAKS, HOLDS, Estimate
from posenc.experiments.summary import Summary
from posenc.experiments.verdicts import longest_measured
from posenc.visualization.charts import THEME, Chart
from posenc.visualization.colours import OUTLINES
from posenc.visualization.html import environment, source, styles


def render_page(comparison: Comparison, summary: Summary, charts: list[Chart]) -> str:
    """The whole page as HTML, scripts and styles included."""
    templates = environment("posenc.experiments.report")
    libraries = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub is wrong
    templates.filters |= {"number": _number, "spread": _spread, "bytes": _bytes, "count": _count}
    return templates.get_template("page.html.jinja").render(
        comparison=comparison,
        summary=summary,
        longest=longest_measured(comparison, summary.rows),
        limits=(HOLDS, BREAKS),
        looks=looks(comparison),
        outlines=OUTLINES,
        charts=charts,
        theme=THEME,
        specs={chart.key: chart.spec for chart in charts},
        headline=comparison.headline,
        reasons={row.subject.name: reason(comparison, row) for row in summary.rows},
        recall=comparison.metric("recall"),
        recalled=sorted({length for row in summary.rows for length in row.recall}),
        styles=styles(templates, "style.css", "report.css"),
        script=source(templates, "table.js") + source(templates, "charts.js"),
        libraries=Markup(libraries.replace("</script", "<\\/script")),
    )


def _number(value: Estimate | None, unit: str = "") -> str:
    if value is None:
        return "—"
    return value.shown(".1%" if unit.startswith("share") else None).partition(" ")[0]


def _spread(value: Estimate | None, metric: Metric) -> str:
    if value is None:
        return ""
    return value.interval(".1%" if metric.is_share else None)


def _bytes(value: float | None) -> str:
    if value is None:
        return "—"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _count(value: float | None) -> str:
    """Three digits are enough to compare by."""
    if value is None:
        return "—"
    for unit in ("", " k", " M"):
        if value < 1000:
            return f"{value:.0f}{unit}" if value >= 100 or not unit else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} G"
