"""Fixtures of the tests of attention."""

from __future__ import annotations

from typing import Any

import pytest

from posenc.attention import api


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each call that is planned."""
    calls: list[None] = []
    choose = api.choose

    def counting(*arguments: Any) -> Any:
        calls.append(None)
        return choose(*arguments)

    monkeypatch.setattr(api, "choose", counting)
    return calls
