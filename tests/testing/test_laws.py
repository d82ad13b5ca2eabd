"""Every law, over every encoding of the registry."""

from __future__ import annotations

import pytest

from posenc.registry import ENCODINGS
from posenc.testing import LAWS, Subject


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_law(name: str, law: str) -> None:
    subject = Subject.of_entry(name, ENCODINGS[name])
    if law in subject.claims.exceptions:
        assert subject.claims.exceptions[law], "an exception needs its reason"
        return
    LAWS[law](subject)
