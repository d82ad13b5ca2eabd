"""What the cache keeps, re-orders and forgets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posenc import Cache, Layout
from posenc.attention import LayerCache
from posenc.errors import ArgumentError


def chunk(rows: int, length: int, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.full((rows, 2, length, 3), value)
    return keys, keys + 0.5


def test_append_keeps_regular_layouts_regular() -> None:
    cache = LayerCache()
    assert cache.length == 0
    cache.append(*chunk(1, 3, 0.0), Layout.sequence(3))
    keys, values, layout = cache.append(*chunk(1, 2, 1.0), Layout.sequence(2, start=3))
    assert keys.shape == values.shape == (1, 2, 5, 3)
    assert layout.start == 0
    assert layout.order.tolist() == [[0, 1, 2, 3, 4]]
    _, _, layout = cache.append(*chunk(1, 1, 2.0), Layout.sequence(1, start=9))
    assert layout.start is None
    assert layout.positions[0, :, 0].tolist() == [0, 1, 2, 3, 4, 9]


def test_padding_documents_and_special_tokens_are_kept() -> None:
    cache = LayerCache()
    cache.append(*chunk(2, 3, 0.0), Layout.padded([3, 1], side="left"))
    _, _, layout = cache.append(*chunk(2, 1, 1.0), Layout.sequence(1, start=3))
    assert layout.valid is not None
    assert layout.valid.tolist() == [[True, True, True, True], [False, False, True, True]]
    packed = Layout.packed([1, 2]).concat(Layout.sequence(1))
    assert packed.document is not None
    assert packed.document.tolist() == [[0, 1, 1, 0]]


def test_select_reorders_rows_as_beam_search_does() -> None:
    cache = Cache(2)
    keys = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 4, 5)
    for layer in cache.layers:
        layer.append(keys, -keys, Layout.padded([4, 3, 2], side="left"))
    cache.select(torch.tensor([2, 2, 0]))
    for layer in cache.layers:
        assert layer.keys is not None
        assert layer.layout is not None
        assert layer.keys[:, 0, 0, 0].tolist() == [2, 2, 0]
        assert layer.layout.valid is not None
        assert layer.layout.valid.sum(1).tolist() == [2, 2, 4]


def test_truncate_keeps_the_newest_and_drops_the_graph() -> None:
    cache = Cache(1)
    keys = torch.randn(1, 1, 6, 2, requires_grad=True)
    cache[0].append(keys * 2, keys * 3, Layout.sequence(6))
    cache.truncate(4)
    assert cache.length == 4
    assert cache[0].keys is not None
    assert not cache[0].keys.requires_grad
    assert cache[0].layout is not None
    assert cache[0].layout.start == 2
    cache.truncate(10)
    assert cache.length == 4


def test_layouts_of_other_kinds_do_not_mix() -> None:
    cache = LayerCache()
    cache.append(*chunk(1, 3, 0.0), Layout.sequence(3))
    with pytest.raises(ArgumentError, match="1 axes as in the cached part"):
        cache.append(*chunk(1, 4, 0.0), Layout.image(2, 2))


def test_following_goes_on_where_the_past_ends() -> None:
    cache = LayerCache()
    assert cache.following(3).start == 0
    cache.append(*chunk(1, 3, 0.0), Layout.sequence(3, start=2))
    for kept in (2, 0):
        cache.truncate(kept)
        assert cache.length == kept
        assert cache.following(4).start == 5
    cache.append(*chunk(1, 3, 0.0), Layout.packed([1, 2]))
    with pytest.raises(ArgumentError, match="no plain sequence"):
        cache.following(1)


def test_truncate_forgets_the_graph() -> None:
    cache, weight = LayerCache(), torch.ones(1, requires_grad=True)
    keys, values = chunk(1, 3, 1.0)
    layout = replace(Layout.at(torch.arange(3.0) * weight), signal=weight.expand(1, 3, 1))
    cache.append(keys * weight, values * weight, layout)
    cache.truncate(2)
    assert cache.keys is not None
    assert cache.values is not None
    assert cache.layout is not None
    assert cache.layout.signal is not None
    kept = (cache.keys, cache.values, cache.layout.positions, cache.layout.signal)
    assert not any(tensor.requires_grad for tensor in kept)
