"""Models of transformers as on a processor on which oneDNN is the faster."""

from __future__ import annotations

import pytest
from torch import Tensor

from posenc.transformers.acceleration import products


@pytest.fixture(autouse=True)
def _onednn_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers compute by oneDNN in every dtype that it has kernels of here."""

    def twice(x: Tensor, weight: Tensor, end: float) -> float:
        products.product(x, weight, None)
        return 2.0

    monkeypatch.setattr(products, "_times_as_fast", twice)
    monkeypatch.setattr(products, "trial", products.trial.__wrapped__)
