"""Ticks of charts differ, and intervals stay within what a metric can be."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import altair as alt
import pandas as pd
import pytest
import vl_convert

from posenc.lab.experiments.page import draw_charts
from posenc.lab.experiments.summary import summarise
from posenc.lab.reporting.charts import Chart
from posenc.lab.reporting.drawing import Up
from posenc.lab.reporting.numbers import Bounds, Estimate, estimate
from tests.support.samples import ACCURACY, LOSS, altered, sample

RANGES = (
    *([], [0.0, 0.0], [9.23, 9.23], [9.2301, 9.2312], [-0.001, 0.004], [-0.6, -0.2]),
    *([0.9991, 0.9999], [0.0, 1234.5], [-0.35, 1.7]),
)
"""None, one, nearly one, small, negative, near an end, wide and of both signs."""


def labels(values: list[float], **how: bool) -> list[str]:
    """The labels of the axis as they are drawn."""
    data = pd.DataFrame({"mean": values or [0.0]})
    chart = alt.Chart(data).mark_point().encode(y=Up(title="title", **how).axis(values))
    svg = vl_convert.vegalite_to_svg(chart.properties(height=320).to_dict())
    (axis,) = re.findall(r'role-axis-label".*?</g>', svg, re.DOTALL)
    return re.findall(r"<text[^>]*>([^<]*)</text>", axis)


@pytest.mark.parametrize("values", RANGES, ids=str)
@pytest.mark.parametrize("percent", [False, True])
def test_ticks_differ(values: list[float], percent: bool) -> None:
    drawn = labels(values, percent=percent, signed=percent)
    assert 3 <= len(drawn) <= 10
    assert len(set(drawn)) == len(drawn)
    unit = 100 if percent else 1
    numbers = [float(text.replace("−", "-").rstrip("%")) / unit for text in drawn]
    assert min(numbers) <= min(values, default=0) + 1e-9
    assert max(numbers) >= max(values, default=0) - 1e-9
    assert "+0%" not in drawn


def test_an_axis_ends_where_its_metric_does() -> None:
    axis = Up(title="", percent=True, bounds=Bounds(0.0, 1.0)).axis([0.97, 1.0]).to_dict()
    assert axis["scale"]["domain"][1] == 1.0


def test_intervals_are_of_what_is_possible() -> None:
    free = estimate([0.1, 0.54, 0.98])
    assert free.low < 0 < 1 < free.high, "as Student's t has it"
    shares = estimate([0.1, 0.54, 0.98], ACCURACY.bounds())
    assert shares.shown(".0%", "\n") == "54%\n(0\nto 100)"
    assert shares.to_json() == {"mean": pytest.approx(0.54), "low": 0.0, "high": 1.0, "n": 3}
    one = estimate([0.5], LOSS.bounds())
    assert one.to_json() == {"mean": 0.5, "low": None, "high": None, "n": 1}
    bleu = replace(ACCURACY, unit="BLEU")
    for interval, form, shown in (
        (shares, ".0%", "54% (0 to 100)"),
        (shares.scaled(-100), ".0f", "-54 (-100 to -0)"),
        (estimate([0.5, 0.51, 0.52], ACCURACY.bounds()), ".1%", "51.0% (48.5 to 53.5)"),
        (estimate([22.5, 38.7], bleu.bounds()), ".1f", "30.6 (0.0 to 100.0)"),
        (one, ".1f", "0.5"),
    ):
        assert interval.shown(form) == shown
    assert estimate([0.1, 2.0], LOSS.bounds()).shown(".1f").startswith("1.1 (0.0 to ")
    assert [Estimate(*of, 3).shown() for of in ((2.7, 0.05), (0.0066, 0.6), (612.0, 3.0))] == [
        "2.70 (2.65 to 2.75)",
        "0.01 (-0.59 to 0.61)",
        "612 (609 to 615)",
    ]


def test_no_band_and_no_tick_leaves_what_is_possible() -> None:
    """Seeds that disagree: some find nothing, some everything."""
    cycle, comparison = itertools.cycle([0.0, 0.5, 1.0]), sample(metric=ACCURACY)
    for metric in ("accuracy", "recall"):
        comparison = altered(comparison, lambda m: next(cycle), metric=metric)
    charts = {chart.key: chart.spec for chart in draw_charts(comparison, summarise(comparison))}
    for key, low in (("headline", 0.0), ("recall", 0.0), ("change", -1.0)):
        rows = [row for rows in charts[key]["datasets"].values() for row in rows if "low" in row]
        assert rows
        assert all(low <= row["low"] <= row["mean"] <= row["high"] <= 1 for row in rows)
        heights = [layer["encoding"].get("y", {}) for layer in charts[key]["layer"]]
        domains = [y["scale"]["domain"] for y in heights if "scale" in y]
        assert domains
        assert all(domain == [low, 1.0] for domain in domains)


def test_seeds_are_dots(charts: list[Chart]) -> None:
    spec = charts[0].spec
    (dots,) = [layer for layer in spec["layer"] if layer["mark"]["type"] == "circle"]
    assert len(spec["datasets"][dots["data"]["name"]]) == 3 * (6 * 4 + 1)


def test_charts_are_told_in_words(charts: list[Chart]) -> None:
    headline, *_ = charts
    assert headline.spec["description"] == headline.text
    for words in (
        "Loss on the same bytes. bits per byte against context length (bytes).",
        "rope: 2.81 (2.74 to 2.87) at 64, 3.92 (3.88 to 3.96) at 512",
        "learned: 3.08 (3.02 to 3.14) at 64.",
    ):
        assert words in headline.text
