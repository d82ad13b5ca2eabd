"""Models of transformers without what they keep for others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor
from torch.nn import functional
from transformers.models.beit.modeling_beit import BeitRelativePositionBias
from transformers.models.data2vec.modeling_data2vec_vision import Data2VecVisionRelativePositionBias

from posenc.transformers.acceleration import accelerated, products
from tests.distributed.conftest import pool

__all__ = ["pool"]


@pytest.fixture(scope="package", autouse=True)
def _indices_of_one_model() -> Iterator[None]:
    """Indices of pairs of patches are made for each call.

    transformers keeps them for all models of a size, those too that were made inside a transform or
    as fake tensors, on which the next model of that size fails.
    """
    name = "generate_relative_position_index"
    with pytest.MonkeyPatch.context() as patch:
        for kind in (BeitRelativePositionBias, Data2VecVisionRelativePositionBias):
            patch.setattr(kind, name, staticmethod(getattr(kind, name).__wrapped__))
        yield


@pytest.fixture
def counted_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are PyTorch's, which tests count."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    for name in products.PRODUCTS:
        monkeypatch.setitem(products.PRODUCTS, name, product)


@pytest.fixture
def at_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls are computed by posenc too where only ``attn_implementation`` names it."""
    monkeypatch.setattr(accelerated, "DEFAULT", accelerated.AccelerateSettings())
