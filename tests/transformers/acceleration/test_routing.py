"""The code that computes a call whose mask hides nothing, or only the keys outside of a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Grid, Layout
from posenc.attention.dispatch import BACKENDS
from posenc.transformers.acceleration import accelerate, routing
from posenc.transformers.acceleration.accelerated import SHORTEST
from posenc.transformers.acceleration.routing import (
    LARGE,
    dense_attention,
    plain_attention,
    recorded,
)
from tests.attention.comparing import built
from tests.testing.tiny_models import tiny_model

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
        ({"few": 10**6}, []),
        ({"padded": True}, []),
        ({"dropout": 0.5}, []),
        ({"graded": True}, []),
    ],
)
def test_one_query_goes_to_what_reads_keys_once(
    change: dict[str, Any],
    calls: list[int],
    scale: float | None,
    by_kernel: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "FEW", change.get("few", 0))
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


HEADS = 4


def computed(rows: int, tokens: int, kind: str = "llama", **options: Any) -> set[str]:
    """What computed the layers of a model of 4 heads, whose outputs are its own."""
    model = tiny_model(kind)
    assert model.config.num_attention_heads == HEADS
    ids = torch.randint(3, 100, (rows, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, : options.pop("padding", 0)] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask)[0][mask.bool()]
        accelerate(model, check=False, **options)
        with recorded() as calls:
            got = model(ids, attention_mask=mask)[0][mask.bool()]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return {by for _, by, _ in calls}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize(
    ("rows", "tokens", "options", "by"),
    [
        (1, SHORTEST, {}, "posenc"),
        (1, SHORTEST - 1, {}, "its own"),
        (1, SHORTEST // 4, {"shortest": 0}, "posenc"),
        (LARGE // HEADS // (SHORTEST // 2) ** 2, SHORTEST // 2, {}, "posenc"),
        (LARGE // HEADS // (SHORTEST // 2) ** 2 - 1, SHORTEST // 2, {}, "its own"),
        (LARGE // HEADS // (SHORTEST // 4) ** 2, SHORTEST // 4, {}, "its own"),
        (LARGE // HEADS // (SHORTEST // 2) ** 2, SHORTEST // 2, {"padding": 3}, "its own"),
        (LARGE // HEADS // (SHORTEST // 2) ** 2, SHORTEST // 2, {"shortest": 200}, "its own"),
    ],
)
def test_long_and_large_calls_are_posencs(
    kind: str, rows: int, tokens: int, options: dict[str, Any], by: str
) -> None:
    """Causal ones, and windows."""
    assert computed(rows, tokens, kind, **options) == {by}


@pytest.mark.parametrize(("tokens", "by"), [(SHORTEST // 2, "its own"), (SHORTEST, "posenc")])
def test_all_keys_are_posencs_too(tokens: int, by: str) -> None:
    assert computed(1, tokens, "eurobert") == {by}
