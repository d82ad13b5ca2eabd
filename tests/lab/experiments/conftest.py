"""Worker processes that start fast; the sample comparison, drawn and written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from posenc.lab.experiments.page import draw_charts
from posenc.lab.experiments.report import write_report
from posenc.lab.experiments.summary import summarise
from posenc.lab.reporting.charts import Chart
from tests.support.commands import forked_workers
from tests.support.samples import sample

__all__ = ["forked_workers"]


@pytest.fixture(scope="session")
def charts() -> list[Chart]:
    """The charts of the sample comparison."""
    comparison = sample()
    return draw_charts(comparison, summarise(comparison))


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the report on the sample comparison."""
    return write_report(sample(), tmp_path_factory.mktemp("sample") / "report")
