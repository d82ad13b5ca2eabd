"""A plugin of pytest that writes a line for each test as soon as it has ended.

The lines go to the file that ``POSENC_TEST_LINES`` names; the first has the names of all tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def _write(**line: object) -> None:
    with Path(os.environ["POSENC_TEST_LINES"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0" and session.items:
        _write(collected=[item.nodeid for item in session.items])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    reason = ""
    if report.failed:
        reason = getattr(report.longrepr, "reprcrash", report.longrepr)
        reason = str(getattr(reason, "message", reason))[:600]
    elif isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
    _write(item=report.nodeid, outcome=report.outcome, seconds=report.duration, reason=reason)
