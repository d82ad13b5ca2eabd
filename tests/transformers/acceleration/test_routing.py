"""The code that computes a call whose mask hides nothing, or only the keys outside of a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Grid, Layout
from posenc.attention.dispatch import BACKENDS
from posenc.transformers.acceleration.routing import dense_attention, plain_attention
from tests.attention.comparing import built

KEYS = 40


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of keys of the calls by the kernel of one query."""
    calls: list[int] = []
    native = BACKENDS["native"]
    found = native.query_kernel

    def watched(q: Tensor, k: Tensor, v: Tensor, *, plain: bool) -> Any:
        kernel = found(q, k, v, plain=plain)
        calls.extend([k.shape[2]] * (kernel is not None))
        return kernel

    monkeypatch.setattr(native, "query_kernel", watched)
    return calls


@built
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(
    ("change", "calls"),
    [
        ({}, [KEYS]),
        ({"window": 7}, [7]),
        ({"queries": 2}, []),
        ({"dtype": torch.float32}, []),  # in few numbers PyTorch's is as fast
        ({"padded": True}, []),
        ({"dropout": 0.5}, []),
        ({"graded": True}, []),
    ],
)
def test_one_query_goes_to_what_reads_keys_once(
    change: dict[str, Any], calls: list[int], scale: float | None, by_kernel: list[int]
) -> None:
    queries, dtype = change.get("queries", 1), change.get("dtype", torch.bfloat16)
    torch.manual_seed(0)
    sizes = ((2, 4, queries, 16), (2, 2, KEYS, 16), (2, 2, KEYS, 16))
    q, k, v = (torch.randn(size).to(dtype) for size in sizes)
    q.requires_grad_("graded" in change)
    key = Layout.sequence(KEYS)
    if "padded" in change:
        key = Layout.padded([KEYS, KEYS - 9], side="left")
    query = key.slice(KEYS - queries, KEYS)
    grid = Grid(query, key, queries == 1, change.get("window"))
    dropout = change.get("dropout", 0.0)
    found = plain_attention(q, k, v, grid, dropout=dropout, scale=scale)
    assert by_kernel == calls
    if dropout or found is None:
        assert dropout or queries > 1 or "padded" in change
        return
    expected, _ = dense_attention(q, k, v, None, grid.visible, dropout=0.0, scale=scale)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
