"""A report's files, of which all are written or none."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import altair as alt
import pytest

from posenc.errors import CheckpointError, OutputError
from posenc.lab.experiments.page import comparison_page, draw_charts
from posenc.lab.experiments.report import LiveReport, write_report
from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.summary import summarise
from posenc.lab.folders import output_folder
from posenc.lab.reporting.annotations import LINE_HEIGHT
from posenc.lab.reporting.charts import Chart
from posenc.lab.reporting.drawing import NARROW_HEIGHT, Across, Drawing, Point, Up, looks
from posenc.lab.reporting.numbers import Estimate
from posenc.lab.reporting.palette import CONTROL, LIGHT
from tests.support.samples import ACCURACY, LOSS, altered, sample


def draw(comparison: Comparison) -> dict[str, Chart]:
    return {chart.key: chart for chart in draw_charts(comparison, summarise(comparison))}


def layers(chart: Chart, mark: str) -> list[dict[str, Any]]:
    return [layer for layer in chart.spec["layer"] if layer["mark"]["type"] == mark]


def rows(chart: Chart, layer: dict[str, Any]) -> list[dict[str, Any]]:
    return chart.spec["datasets"][layer["data"]["name"]]


def test_files(report: Path) -> None:
    folder = report.parent
    assert report == folder / "index.html"
    pictures = {
        f"{key}.{kind}"
        for key in ("headline", "change", "loss_by_position", "recall", "training_loss", "cost")
        for kind in ("png", "svg")
    }
    tables = {"comparison.json", "measurements.csv"}
    assert {path.name for path in folder.iterdir()} == {report.name, *pictures, *tables}
    for path in folder.iterdir():
        assert path.stat().st_size > 500, path
    assert (folder / "headline.png").read_bytes().startswith(b"\x89PNG")
    again = Comparison.from_json(json.loads((folder / "comparison.json").read_text()))
    assert again == sample()
    with (folder / "measurements.csv").open() as file:
        values = list(csv.DictReader(file))
    found = {tuple(row[key] for key in ("model", "method", "metric", "length")) for row in values}
    assert {("rope", "window=64", "loss", "64"), ("alibi", "", "recall", "512")} <= found
    (last,) = [
        row
        for row in values
        if (row["model"], row["metric"], row["length"]) == ("alibi", "loss", "512")
    ]
    assert float(last["value"]) == pytest.approx(2.87, abs=0.05)
    assert float(last["low"]) < float(last["value"]) < float(last["high"])
    assert last["count"] == "3"
    along = [row for row in values if row["metric"] == "loss_by_position"]
    assert along
    assert all(row["at"] and not row["length"] for row in along)
    assert [path.name for path in folder.parent.iterdir()] == ["report"]


def test_page_stands_alone(report: Path) -> None:
    page = report.read_text()
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(src|href)\s*=\s*["']?https?:""", own)
    assert "default-src 'none'" in own
    assert len(page) < 3_000_000


def test_page_says_what_was_found_and_how_to_get_it_again(report: Path) -> None:
    page = report.read_text()
    (heading,) = re.findall("<h1>(.*?)</h1>", page)
    assert heading == summarise(sample()).headline
    order = ("<h1>", 'id="chart-headline"', 'class="verdicts"', 'class="multiples"', 'id="table"')
    places = [page.index(part) for part in (*order, 'id="method"', 'id="provenance"')]
    assert places == sorted(places)
    bare = re.sub(r"</?span[^>]*>", "", page)
    assert "<code>posenc compare --encodings rope,alibi,t5 --out &lt;demo&gt;</code>" in bare
    assert "ab" * 32 in page
    assert "the learned table ends at position 63" in page
    assert "cannot" in page


def test_page_adapts_to_accuracies_and_generated_data() -> None:
    base = altered(sample(metric=replace(ACCURACY, learned=0.8)), 0.0, "nope")
    corpus = replace(base.provenance.corpus, files=0, train_bytes=0, name="symbols, generated")
    settings = {"options": {"symbols": 64}, "text": None}
    provenance = replace(base.provenance, corpus=corpus, settings=settings)
    told = {"expectation": "T5 holds (Kazemnejad et al. 2023).", "length_unit": "symbols"}
    comparison = replace(base, provenance=provenance, **told)
    page = comparison_page(comparison, summarise(comparison)).render()
    for words in (
        "trained at 64 symbols, tested at up to 512",
        "<h3>Expected from the literature</h3>",
        "<li>T5 holds (Kazemnejad et al. 2023).</li>",
        '<span class="verdict bad" title="unlearned: at the training length',
        "Not learned, so no verdict: ",
        "does not reach 80.0%",
        "<dd>symbols, generated</dd>",
        "symbols = 64",
    ):
        assert words in page, words
    charts = draw(comparison)
    assert "in points of a hundred" in charts["change"].guide
    assert "'+' + format(datum.value, '.0%')" in json.dumps(charts["change"].spec)
    assert "\"format(datum.value, '.0%')" in json.dumps(charts["headline"].spec)


@pytest.mark.parametrize(
    "comparison",
    [
        sample(seeds=(0,)),
        sample(lengths=(64,)),
        sample(complete=False),
        sample(metric=ACCURACY),
        replace(sample(complete=False), measurements=(), runs=()),
    ],
    ids=["one seed", "one length", "interrupted", "accuracy", "empty"],
)
def test_other_comparisons(comparison: Comparison, tmp_path: Path) -> None:
    assert write_report(comparison, tmp_path / "report").exists()


def test_a_subject_has_one_colour_in_all_charts(charts: list[Chart]) -> None:
    comparison = sample()
    seen: dict[str, set[str]] = {}
    for chart in charts:
        for scale in re.findall(r'"color": (\{"field": "subject".*?\]\})', json.dumps(chart.spec)):
            domain, colours = re.findall(r'"(?:domain|range)": (\[.*?\])', scale)
            for name, colour in zip(json.loads(domain), json.loads(colours), strict=True):
                seen.setdefault(name, set()).add(colour)
    assert len(seen) == len(comparison.subjects)
    assert all(len(colours) == 1 for colours in seen.values())
    references = {s.label for s in comparison.subjects if s.role != "candidate"}
    assert {name for name, colours in seen.items() if colours == {CONTROL}} == references
    candidates = seen.keys() - references
    assert len({next(iter(seen[name])) for name in candidates}) == len(candidates)


def test_colours_are_those_of_the_paper(charts: list[Chart]) -> None:
    """A colour that is not by name would stay the same on dark paper."""
    for chart in charts:
        assert re.findall(r'"#[0-9a-fA-F]+"', json.dumps(chart.spec)) == []
        named = set(re.findall(r'"(--[\w-]+)"', json.dumps(chart.spec)))
        assert named
        assert named <= LIGHT.keys()


def test_charts_keep_the_schema_of_vega_lite(charts: list[Chart]) -> None:
    for chart in charts:
        alt.TopLevelLayerSpec.validate(chart.spec)


def test_lines_are_named_at_their_ends(charts: list[Chart]) -> None:
    headline, *_ = charts
    (names,) = [
        rows(headline, layer)
        for layer in layers(headline, "text")
        if (layer["mark"].get("dx"), layer["mark"].get("color")) == (10, "--ink")
    ]
    labels = {subject.label for subject in sample().subjects} - {"learned"}
    assert {row["name"]: row["x"] for row in names} == dict.fromkeys(labels, 512)
    gap = min(abs(a["at"] - b["at"]) for a, b in itertools.combinations(names, 2))
    low, high = layers(headline, "line")[0]["encoding"]["y"]["scale"]["domain"]
    assert gap / (high - low) * NARROW_HEIGHT >= 0.999 * LINE_HEIGHT


def test_layers_are_of_the_fields_that_they_show() -> None:
    """Bands from low to high, and a level where it is not far above all lines."""

    def fields(trivial: float) -> set[tuple[str | None, ...]]:
        first = draw(sample(metric=replace(LOSS, trivial=trivial)))["headline"]
        channels = ("x", "x2", "y", "y2")
        return {
            (layer["mark"]["type"], *(layer["encoding"].get(c, {}).get("field") for c in channels))
            for layer in first.spec["layer"]
        }

    lines = {
        ("area", "x", None, "low", "high"),
        ("circle", "x", None, "mean", None),
        ("line", "x", None, "mean", None),
        ("point", "x", None, "mean", None),
        ("rect", "begin", "end", None, None),
        ("text", "begin", None, None, None),
        ("rule", "x", "x", "mean", "at"),
        ("text", "x", None, "at", None),
    }
    level = {("rule", None, None, "at", None), ("text", None, None, "at", None)}
    assert fields(4.9) == lines | level
    assert fields(9.0) == lines


def test_dashes_and_marks_tell_subjects_apart(charts: list[Chart]) -> None:
    """Lines tell candidates from references; marks all from one another."""
    (line,) = layers(charts[0], "line")
    lines = line["encoding"]["strokeDash"]["scale"]
    dashes = dict(zip(lines["domain"], lines["range"], strict=True))
    assert dashes["alibi"] == dashes["rope"] != dashes["rope (window 64)"] != dashes["nope"]
    for chart in charts:
        marks = [layer["encoding"] for layer in chart.spec["layer"] if "shape" in layer["encoding"]]
        assert len(marks) == 1
        pairs = zip(*(marks[0][c]["scale"]["range"] for c in ("color", "shape")), strict=True)
        assert len(set(pairs)) == len(sample().subjects)


@pytest.mark.parametrize(("longest", "log"), [(129, True), (128, False)])
def test_the_trained_range_is_shaded(longest: int, log: bool) -> None:
    """From where the axis begins to the trained length, which is a part of it that can be seen."""
    comparison = sample(lengths=(64, longest))
    headline = draw(comparison)["headline"]
    (area,) = layers(headline, "rect")
    assert [area["encoding"][side] for side in ("y", "y2")] == [{"value": 0}, {"value": "height"}]
    (row,), scale = rows(headline, area), area["encoding"]["x"]["scale"]
    assert row["end"] == comparison.train_length
    low, high = scale["domain"]
    assert row["begin"] == low < row["end"] < high == comparison.test_lengths[-1]
    assert (scale.get("type") == "log") == log, "lengths more than twice as long"
    place = math.log if log else float
    share = (place(row["end"]) - place(low)) / (place(high) - place(low))
    assert share == pytest.approx(0.16)


def test_no_change_is_drawn_from_nothing() -> None:
    """A translator that gets no word right scores 0 at the training length."""
    base = sample(seeds=(0,))
    base = replace(base, measurements=tuple(m for m in base.measurements if m.metric == "loss"))
    assert list(draw(base)) == ["headline", "change", "cost"], "of what was measured alone"

    def without(*subjects: str) -> set[str]:
        nothing = lambda m: 0.0 if m.subject in subjects else m.value  # noqa: E731
        charts = draw(altered(base, nothing, metric="loss", x=base.train_length))
        drawn = charts["change"].spec["datasets"].values() if "change" in charts else ()
        return {row["subject"] for data in drawn for row in data if "subject" in row}

    assert "rope" in without("alibi")
    assert "alibi" not in without("alibi")
    assert without(*(subject.name for subject in base.subjects)) == set()


def test_what_is_no_number_stays_out_of_the_page() -> None:
    """JSON has neither infinity nor NaN: a page with one shows no chart at all."""
    base = sample(seeds=(0,), lengths=(64, 128))
    first, *others = base.measurements
    comparison = replace(base, measurements=(replace(first, value=math.inf), *others))
    for chart in draw(comparison).values():
        json.dumps(chart.spec, allow_nan=False)
    means = ((1, math.nan, "NaN"), (2, 1.0, "1"))
    points = [Point("a", x, Estimate(mean, None, 1), told) for x, mean, told in means]
    drawing = Drawing(["a"], looks({"a": "candidate"}), "encoding")
    chart = drawing.lines("key", "title", "guide", points, (Across(title="x"), Up(title="y")))
    (first_rows, *_) = chart.spec["datasets"].values()
    assert [row["mean"] for row in first_rows] == [None, 1.0]


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(OutputError, match="which is in use"):
        write_report(sample(), tmp_path)
    assert (tmp_path / "mine").read_text() == "x"
    report = tmp_path / "report"
    write_report(replace(sample(), measurements=(), runs=()), report)
    write_report(sample(seeds=(0,), lengths=(64,)), report, overwrite=True)
    assert "One seed does not show" in (report / "index.html").read_text()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(path: Path, content: bytes) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OutputError("out", expected="", got="No space left on device", remedy="")
        path.write_bytes(content)

    monkeypatch.setattr("posenc.lab.reporting.page.write_bytes", full)
    with pytest.raises(OutputError, match="No space"):
        write_report(sample(seeds=(0,), lengths=(64,)), tmp_path / "report")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        write_report(sample(), tmp_path / "file" / "report")


def test_live_report_takes_a_twentieth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written = [0.0], []
    monkeypatch.setattr("posenc.lab.experiments.report.time.monotonic", lambda: now[0])

    def write(comparison: Comparison, folder: Path, *, overwrite: bool) -> None:
        written.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr("posenc.lab.experiments.report.write_report", write)
    live = LiveReport(tmp_path)
    while now[0] < 100.0:
        live(sample(seeds=(0,), lengths=(64,)))
        now[0] += 1.0
    assert written == [10.0, 50.0, 90.0]


def test_reports_written_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    start = threading.Barrier(4)

    def write(number: int) -> None:
        start.wait()
        for _ in range(20):
            with output_folder(folder, overwrite=True) as partial:
                (partial / "index.html").write_text(str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert (folder / "index.html").read_text() in "0123"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_fields_of_records_are_refused_if_unknown_or_missing() -> None:
    for change in ({"colour": 1}, {"runs": [{"subject": "x"}]}):
        with pytest.raises(CheckpointError, match="comparison"):
            Comparison.from_json(sample().to_json() | change)


def test_records_by_subject_and_metric() -> None:
    comparison = sample()
    assert comparison.headline.key == "loss"
    assert comparison.metric("recall") is not None
    assert comparison.metric("colour") is None
    assert set(comparison.values("alibi", "loss", 512)) == {0, 1, 2}
    assert comparison.values("learned", "loss", 512) == {}
