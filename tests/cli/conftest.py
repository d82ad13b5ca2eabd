"""The command line within the process of the tests."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from posenc.cli import app


@pytest.fixture
def posenc(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command: its exit code, and what it printed to either stream."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["posenc", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app.run()
        printed = capsys.readouterr()
        code = ended.value.code
        return int(code or 0), " ".join(printed.out.split()), " ".join(printed.err.split())

    return run
