"""Encodings agree where their formulas meet."""

from __future__ import annotations

import pytest

from posenc.encodings.query_key.rope import Rope
from posenc.encodings.score.alibi import Alibi
from posenc.testing import IDENTITIES, LawBroken


@pytest.mark.parametrize("name", IDENTITIES)
def test_identity(name: str) -> None:
    IDENTITIES[name]()


def test_identities_bite(monkeypatch: pytest.MonkeyPatch) -> None:
    bias, angles = Alibi.bias, Rope.angles
    monkeypatch.setattr(Alibi, "bias", lambda self, offset: bias(self, offset) * 1.01)
    with pytest.raises(LawBroken, match="kerple_with_exponent_one_is_alibi: the bias is off by"):
        IDENTITIES["kerple_with_exponent_one_is_alibi"]()
    monkeypatch.setattr(Rope, "angles", lambda self, layout: angles(self, layout) * 0)
    with pytest.raises(LawBroken, match="makes no difference"):
        IDENTITIES["bidirectional_nope_is_order_blind"]()
