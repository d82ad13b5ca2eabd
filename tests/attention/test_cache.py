"""The cache's contents: kept, re-ordered and forgotten."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from posenc import Cache, Encoding, Layout, create
from posenc.attention import Attention, LayerCache
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.models import Decoder, DecoderConfig


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
    cache, layout = Cache(2), Layout.padded([4, 3, 2], side="left")
    keys = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 4, 5)
    for layer in cache.layers:
        layer.append(keys, -keys, layout)
    cache.select(torch.tensor([2, 2, 0]))
    for layer in cache.layers:
        assert layer.keys is not None
        assert layer.layout is not None
        assert layer.keys[:, 0, 0, 0].tolist() == [2, 2, 0]
        assert layer.layout.valid is not None
        assert layer.layout.valid.sum(1).tolist() == [2, 2, 4]
    assert cache[0].layout is cache[1].layout  # what is computed of it serves all layers


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


@pytest.mark.parametrize(
    ("encoding", "causal", "kept"),
    [
        (create("rope", head_dim=8), True, True),
        (create("rope+alibi", heads=4, head_dim=8), True, True),
        (create("rope", head_dim=8), False, False),
        (create("rope", head_dim=8, learned=True), True, False),
        (create("xpos", head_dim=8), True, False),
        (create("alibi", heads=4), True, False),
    ],
)
def test_keys_are_transformed_once_where_that_is_the_same(
    encoding: Encoding, causal: bool, kept: bool
) -> None:
    """A decode step of RoPE rotates one key, not all that are cached."""
    layer = Attention(dim=32, heads=4, kv_heads=2, encoding=encoding, causal=causal).eval()
    x = torch.randn(2, 7, 32)
    lengths: list[int] = []
    if encoding.query_key is not None:
        encoding.query_key.register_forward_pre_hook(
            lambda _, operands: lengths.append(operands[1].shape[2])
        )
    cache = LayerCache()
    layouts = [Layout.padded([5, 3], side="left"), *(Layout.at(torch.tensor([t])) for t in (5, 9))]
    with torch.no_grad():
        parts = [layer(x[:, :5], layouts[0], cache=cache)]
        for token in (5, 6):
            piece = replace(layouts[token - 4], order=torch.tensor([[token]]))
            parts.append(layer(x[:, token : token + 1], piece, cache=cache))
        assert cache.layout is not None
        raw = layer.key(x).unflatten(-1, (2, 8)).transpose(1, 2)
        whole = layer(x, cache.layout)
    assert cache.keys is not None
    assert cache.transformed == kept
    seen = cache.layout.valid
    assert seen is not None
    kept_keys, raw_keys = (x.mT.movedim(-1, 1)[seen] for x in (cache.keys, raw))
    same = torch.allclose(kept_keys, raw_keys, atol=1e-6)  # projected token by token, and together
    assert same != kept
    if encoding.query_key is not None:
        assert lengths[1:3] == ([1, 1] if kept else [6, 7])
    if causal:
        got = torch.cat(parts, dim=1)
        torch.testing.assert_close(got[seen], whole[seen], rtol=1e-4, atol=1e-5)


def test_a_transform_has_its_scale_for_cached_keys_too() -> None:
    class Sharp(Rope):
        scale = 2.0

    torch.manual_seed(0)
    encoding = Encoding(query_key=Sharp(head_dim=8))
    layer = Attention(dim=16, heads=2, encoding=encoding, causal=True)
    x, cache = torch.randn(1, 6, 16), LayerCache()
    with torch.no_grad():
        parts = [
            layer(x[:, at : at + 2], Layout.sequence(2, at), cache=cache) for at in range(0, 6, 2)
        ]
        expected = layer(x, Layout.sequence(6))
    assert cache.transformed
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)


@torch.no_grad()
def test_tokens_are_written_in_place_and_copies_do_not_see_them() -> None:
    cache = LayerCache()
    cache.append(*chunk(1, 4, 0.0), Layout.sequence(4))
    cache.append(*chunk(1, 1, 1.0), Layout.sequence(1, 4))
    assert cache.keys is not None
    place = cache.keys.data_ptr()
    copies = copy.copy(cache), copy.deepcopy(cache)
    early = cache.keys
    for step in range(3):
        cache.append(*chunk(1, 1, 2.0 + step), Layout.sequence(1, 5 + step))
    assert cache.keys.data_ptr() == place
    assert early.shape[2] == 5
    for other in copies:
        other.append(*chunk(1, 1, 9.0), Layout.sequence(1, 5))
        assert other.keys is not None
        assert other.keys[0, 0, :, 0].tolist() == [0, 0, 0, 0, 1, 9]
    assert cache.keys[0, 0, :, 0].tolist() == [0, 0, 0, 0, 1, 2, 3, 4]


@torch.no_grad()
@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("there", [False, True])
def test_keys_or_values_that_are_replaced_are_read(name: str, there: bool) -> None:
    """By another tensor, or there is other data in the same one."""
    cache, (k, v) = LayerCache(), torch.randn(2, 1, 2, 8, 4)
    for at in range(6):  # there is room for two more
        cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1], Layout.sequence(1, at))
    if there:
        getattr(cache, name).data = 2 * getattr(cache, name)
    else:
        setattr(cache, name, 2 * getattr(cache, name))
    for at in range(6, 8):
        found = cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1], Layout.sequence(1, at))
    for x, got, other in zip((k, v), found[:2], ("keys", "values"), strict=True):
        factor = 2.0 if other == name else 1.0
        assert torch.equal(got[:, :, :6], factor * x[:, :, :6])
        assert torch.equal(got[:, :, 6:], x[:, :, 6:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["rows", "layout"])
def test_what_is_written_between_two_copies_of_a_cache_is_read(name: str) -> None:
    k, v = torch.randn(2, 2, 2, 3, 4)
    valid = torch.tensor([[True, True, True], [False, True, True]])
    cache, rows = LayerCache(), torch.tensor([0, 0])
    cache.append(k, v, replace(Layout.sequence(3), valid=valid))
    new = replace(Layout.sequence(1, 3), valid=torch.tensor([[True], [True]]))
    found = []
    for copied in [copy.copy(cache) for _ in range(2)]:
        if name == "rows":
            copied.select(rows)
            rows.fill_(1)
        else:
            copied.append(k[:, :, :1], v[:, :, :1], new)
            new.valid.data.fill_(False)  # type: ignore[union-attr]
        assert copied.layout is not None
        assert copied.layout.valid is not None
        found.append(copied.layout.valid)
    first, second = found
    if name == "rows":
        assert torch.equal(first, valid[[0, 0]])
        assert torch.equal(second, valid[[1, 1]])
    else:
        assert first[:, -1].all()
        assert not second[:, -1].any()


@torch.no_grad()
@pytest.mark.parametrize("name", ["rope", "alibi", "shaw", "tupe", "conv"])
@pytest.mark.parametrize("way", ["pickle", "save", "deepcopy"])
def test_decoding_goes_on_from_a_stored_cache(name: str, way: str) -> None:
    encoding = create(name, dim=16, heads=2, max_length=32, causal=True)
    layers = [Attention(dim=16, heads=2, causal=True, encoding=encoding).eval() for _ in range(2)]
    cache, x = Cache(2), torch.randn(1, 9, 16)

    def step(past: Cache, begin: int, end: int) -> torch.Tensor:
        layout, y = Layout.sequence(end - begin, begin), x[:, begin:end]
        for layer, own in zip(layers, past.layers, strict=True):
            y = layer(own.embed(encoding, y, layout), layout, cache=own)
        return y

    for begin, end in ((0, 5), (5, 6), (6, 7)):
        step(cache, begin, end)
    copied = stored(cache, way)
    for begin in (7, 8):
        expected = step(cache, begin, begin + 1)
        torch.testing.assert_close(step(copied, begin, begin + 1), expected)
    assert copied.length == cache.length == 9


def stored(cache: Cache, way: str) -> Cache:
    if way == "deepcopy":
        return copy.deepcopy(cache)
    if way == "pickle":
        unpickled: Cache = pickle.loads(pickle.dumps(cache))
        return unpickled
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded: Cache = torch.load(file, weights_only=False)
    return loaded


def test_a_graph_is_kept_through_what_is_appended() -> None:
    cache, keys = LayerCache(), torch.randn(1, 1, 3, 2, requires_grad=True)
    cache.append(keys, keys * 2, Layout.sequence(3))
    joined, _, _ = cache.append(
        torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), Layout.sequence(1, 3)
    )
    joined.sum().backward()
    assert keys.grad is not None


@pytest.mark.parametrize("name", ["rope", "alibi", "fire"])
def test_queries_alone_are_trained_through_a_cache(name: str) -> None:
    """Keys without gradients are saved for those of the queries: nothing may be written to them."""
    encoding = create(name, dim=16, heads=2, head_dim=8, max_length=16)
    layer = Attention(dim=16, heads=2, encoding=encoding, causal=True).requires_grad_(False)
    assert layer.query is not None
    weight, x = layer.query.weight.requires_grad_(), torch.randn(1, 6, 16)
    (expected,) = torch.autograd.grad(layer(x, Layout.sequence(6)).square().sum(), weight)
    cache = LayerCache()
    parts = [layer(x[:, at : at + 1], Layout.sequence(1, at), cache=cache) for at in range(6)]
    (got,) = torch.autograd.grad(torch.cat(parts, dim=1).square().sum(), weight)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("name", "options"), [("conv", {"causal": True}), ("abacus", {"digits": [1, 2, 3]})]
)
def test_what_embedding_looks_back_on_is_chosen_too(name: str, options: dict[str, Any]) -> None:
    """Features, ids and padding of the tokens before."""
    encoding, x = create(name, dim=8, **options).eval(), torch.randn(2, 5, 8)
    tokens = torch.tensor([[9, 1, 2, 3, 1], [9, 9, 9, 2, 1]])
    layout, rows = Layout.padded([5, 3], side="left"), torch.tensor([1, 1, 0])
    whole = encoding.embed(x[rows], layout.select(rows), tokens=tokens[rows])
    cache = LayerCache()
    cache.embed(encoding, x[:, :4], layout.slice(0, 4), tokens=tokens[:, :4])
    cache.select(rows)
    last = layout.slice(4, 5).select(rows)
    got = cache.embed(encoding, x[rows, 4:], last, tokens=tokens[rows, 4:])
    torch.testing.assert_close(got, whole[:, 4:])


@torch.no_grad()
def test_tokens_of_another_dtype_are_not_rounded() -> None:
    cache, third = LayerCache(), torch.full((1, 2, 1, 3), 1 / 3, dtype=torch.float64)
    for start, length in ((0, 2), (2, 1)):  # then there is room for one more
        cache.append(*chunk(1, length, 1.0), Layout.sequence(length, start))
    for found in cache.append(third, third, Layout.sequence(1, 3))[:2]:
        assert torch.equal(found[:, :, 3:], third)


def test_parts_beside_a_transform_are_those_of_the_encoding() -> None:
    encoding, cache = create("rope+shaw", head_dim=8), LayerCache()
    rest = cache.without_transform(encoding)
    assert cache.without_transform(encoding) is rest
    for name in ("score", "value"):
        setattr(encoding, name, copy.deepcopy(getattr(encoding, name)))
        found = cache.without_transform(encoding)
        assert (found.score, found.value) == (encoding.score, encoding.value)


def test_layers_share_what_they_would_compute_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles are computed twice for many steps, and a step's layout once, not in each layer."""
    config = DecoderConfig(vocabulary=11, dim=16, heads=2, layers=3, encoding="rope")
    model = Decoder(config).eval()
    cache = model.new_cache()
    calls: list[Layout] = []
    angles = Rope.angles

    def counted(self: Rope, layout: Layout) -> torch.Tensor:
        calls.append(layout)
        return angles(self, layout)

    monkeypatch.setattr(Rope, "angles", counted)
    tokens = torch.randint(11, (1, 5))
    with torch.no_grad():
        for begin in range(5):
            layout = Layout.sequence(1, begin)
            model(tokens[:, begin : begin + 1], layout, cache=cache)
    assert len(calls) == 2
    assert len({id(layer.layout) for layer in cache.layers}) == 1


def test_images_are_no_text_for_cached_keys_either() -> None:
    layer = Attention(dim=16, heads=2, encoding=create("rope", head_dim=8), causal=True)
    with pytest.raises(ArgumentError, match="1 axes"):
        layer(torch.randn(1, 6, 16), Layout.image(2, 3), cache=LayerCache())
