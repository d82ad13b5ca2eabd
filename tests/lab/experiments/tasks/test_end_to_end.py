"""Every task from its settings to the words and charts of its report, in one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from posenc.lab.experiments.compare import compare
from posenc.lab.experiments.jobs import TrainingJob, carry_out
from posenc.lab.experiments.page import comparison_page
from posenc.lab.experiments.progress import Event
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.summary import summarise
from posenc.lab.experiments.tasks import TASKS
from posenc.lab.experiments.workers import Done

SMALL: dict[str, Any] = {"steps": 2, "seeds": (0,), "width": 16, "heads": 2, "layers": 1}


class Alone:
    """Stands in for the pool: does the runs here, one after the other."""

    def __init__(self, settings: ComparisonSettings, count: int) -> None:
        self.settings, self.task = settings, settings.entry.make(settings)

    def __enter__(self) -> Alone:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def run(
        self,
        orders: Iterable[TrainingJob | None],
        *,
        stop: Callable[[], bool],
        emit: Callable[[Event], None],
        done: Callable[[Done], None],
        **others: object,
    ) -> None:
        for order in orders:
            assert order is not None, "no other process holds a run"
            carry_out(order, self.task, self.settings, workers=1, stop=stop, emit=emit)
            done(Done(order=order, took=1.0))


def settings_of(name: str, folder: Path) -> ComparisonSettings:
    entry = TASKS[name]
    changes: dict[str, Any] = dict(entry.sample)
    if entry.reads_text and name != "word_order":
        rows = (f"{'ab ' * (i % 5 + 1)}{i}\t{i} {'BA ' * (i % 5 + 1)}\n" for i in range(2_000))
        changes["text"] = folder / "text.tsv"
        changes["text"].write_text("".join(rows))
    return ComparisonSettings(
        out=folder / "out",
        task=name,
        encodings=entry.defaults.encodings[:1],
        **{**SMALL, "batch": 4, **changes},
    )


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_ends_in_a_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posenc.lab.experiments.compare.WorkerPool", Alone)
    settings = settings_of(name, tmp_path)
    comparison = compare(settings)
    assert comparison.complete
    assert {subject.name for subject in comparison.subjects} == {v.name for v in settings.variants}
    controls = [s for s in comparison.subjects if s.role != "candidate"]
    assert controls, "a comparison in which nothing must fail shows no leak"
    summary = summarise(comparison)
    for sentence in summary.answer:
        assert sentence.endswith("."), sentence
        assert not re.search(r"\b(nan|inf|None)\b", sentence), sentence
    whole = comparison_page(comparison, summary)
    charts, page = whole.charts, whole.render()
    others = {metric.key for metric in comparison.metrics if not metric.headline} - {"seen"}
    assert {chart.key for chart in charts} == others | {"headline", "change", "cost"}
    assert comparison.title in page
    assert settings.entry.expectation.split(":")[0].split("'")[0] in page
    for metric in comparison.metrics:
        assert metric.unit != "share", f"{metric.key}: of what?"
    first = charts[0].spec
    assert "trained" in str(first["datasets"])
    titles = [layer["encoding"].get("x", {}).get("title") for layer in first["layer"]]
    assert comparison.headline.axis in titles
    assert comparison.length_unit.split()[0] in comparison.headline.axis
