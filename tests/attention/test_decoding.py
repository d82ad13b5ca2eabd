"""One more token after a cached past, held to the whole sequence at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from posenc.attention import Attention, Cache, LayerCache, decoding, module
from posenc.encoding import BucketedTerms, Encoding, ScoreTerm
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.registry import create

SERVED = ("nope", "rope", "alibi", "kerple", "sandwich", "t5", "shaw", "rope+alibi", "rope+t5")
HALVES = ("rope@pairing=adjacent", "rope@fraction=0.5")
LENGTH = 11


def layer(name: str, *, kv_heads: int = 4, **options: object) -> Attention:
    torch.manual_seed(0)
    encoding = create(name, dim=32, heads=4, head_dim=8, max_length=64, causal=True)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    made = Attention(
        dim=32,
        heads=4,
        kv_heads=kv_heads,
        encoding=encoding,
        causal=True,
        **options,  # type: ignore[arg-type]
    )
    return made.eval()


@torch.no_grad()
def step_by_step(
    attention: Attention, x: torch.Tensor, *, prompt: int = 4, cache: LayerCache | None = None
) -> torch.Tensor:
    """Outputs of the tokens, those after the prompt one at a time."""
    cache = LayerCache() if cache is None else cache
    parts = [attention(x[:, :prompt], Layout.sequence(prompt), cache=cache)]
    parts += [
        attention(x[:, at : at + 1], Layout.sequence(1, at), cache=cache)
        for at in range(prompt, x.shape[1])
    ]
    return torch.cat(parts, dim=1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LEAST", 6)  # outgrown on the way


def forbid_attend(layer: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only calls of more than one query of a layer through to ``attend``."""
    whole = module.attend

    def refuse(q: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        assert q.shape[2] > 1, "not served"
        return whole(q, *rest, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(module, "attend", refuse)
    layer.attend = refuse


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", SERVED + HALVES)
def test_a_token_is_served_as_in_the_whole(
    name: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "AHEAD", 4)  # rotations read of some tokens at once
    attention = layer(name, kv_heads=kv_heads).double()
    x = torch.randn(2, LENGTH, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = attention(x, Layout.sequence(LENGTH))
    forbid_attend(attention, monkeypatch)
    torch.testing.assert_close(step_by_step(attention, x), expected)


Weights = dict[str, torch.Tensor]


def each(encoding: Encoding, change: Callable[[torch.Tensor, torch.Tensor], object]) -> Any:
    """A function that changes each parameter by its new weights."""
    return lambda others: [change(x, others[name]) for name, x in encoding.named_parameters()]


CHANGES: dict[str, Callable[[Encoding, Weights], object]] = {
    "written": lambda x, others: x.load_state_dict(others),
    "assigned": lambda x, others: x.load_state_dict(others, assign=True),
    "other data": lambda x, others: each(x, lambda p, y: setattr(p, "data", y))(others),
    "written data": lambda x, others: each(x, lambda p, y: p.data.copy_(y))(others),
    "another part": lambda x, others: (
        setattr(x, "score", copy.deepcopy(x.score)),
        x.load_state_dict(others),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["t5", "shaw", "rope+kerple"])
def test_a_table_that_changes_is_read_again(name: str, change: str) -> None:
    attention, x = layer(name), torch.randn(1, 6, 32)
    past = LayerCache()
    with torch.no_grad():
        step_by_step(attention, x, cache=past)
        weights = attention.encoding.state_dict()
        CHANGES[change](attention.encoding, {key: x.abs() + 1.0 for key, x in weights.items()})
        fresh = copy.deepcopy(past)
        token, where = torch.randn(1, 1, 32), Layout.sequence(1, 6)
        got = attention(token, where, cache=past)
        expected = copy.deepcopy(attention)(token, where, cache=fresh)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["alibi", "shaw"])
def test_half_precision_is_served_in_its_own_dtype(name: str, dtype: torch.dtype) -> None:
    attention = layer(name)
    x = torch.randn(1, LENGTH, 32)
    with torch.no_grad():
        expected = attention(x, Layout.sequence(LENGTH))
    got = step_by_step(attention.to(dtype), x.to(dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, atol=0.1, rtol=0.1)


def test_windows_documents_and_gradients_are_left_to_the_backends() -> None:
    x = torch.randn(1, LENGTH, 32)
    for window in (3, 4, 5, 6):  # the first step, of five keys, shows all or hides one
        windowed = layer("t5", window=window)
        with torch.no_grad():
            expected = windowed(x, Layout.sequence(LENGTH))
        torch.testing.assert_close(step_by_step(windowed, x), expected)
    packed, attention, cache = Layout.packed([5, LENGTH - 5]), layer("t5"), LayerCache()
    with torch.no_grad():
        expected = attention(x, packed)
        parts = [
            attention(x[:, at : at + 1], packed.slice(at, at + 1), cache=cache)
            for at in range(LENGTH)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)
    cache = LayerCache()
    attention(x[:, :4], Layout.sequence(4), cache=cache)
    last = attention(x[:, 4:5], Layout.sequence(1, 4), cache=cache)
    (gradient,) = torch.autograd.grad(last.sum(), attention.encoding.parameters())
    assert bool(gradient.any())


@torch.no_grad()
def test_rotations_ahead_are_read_again_after_a_changed_setting() -> None:
    attention, x = layer("rope"), torch.randn(1, 9, 32)
    cache = LayerCache()
    step_by_step(attention, x[:, :6], cache=cache)
    rotation = attention.encoding.query_key
    assert rotation is not None
    rotation.base = 3.0  # type: ignore[assignment]
    fresh = copy.deepcopy(cache)
    token, where = x[:, 6:7], Layout.sequence(1, 6)
    got, expected = (attention(token, where, cache=each) for each in (cache, fresh))
    torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_layers_that_share_a_cache_have_rotations_of_their_own() -> None:
    layers, cache, x = [layer("rope") for _ in range(2)], Cache(2), torch.randn(1, 9, 32)
    layers[1].encoding.query_key.base = 3.0  # type: ignore[union-attr, assignment]
    expected, parts = x, []
    for each in layers:
        expected = each(expected, Layout.sequence(9))
    for at in range(9):
        y = x[:, at : at + 1]
        for each, past in zip(layers, cache.layers, strict=True):
            y = each(y, Layout.sequence(1, at), cache=past)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)


class OfScale(ScoreTerm):
    """The offset in units of the scale of logits."""

    __module__ = "posenc.own"  # parts of others are read anew for each token
    by_position = True

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return scale * grid.offset[..., 0].unsqueeze(1).expand(-1, q.shape[1], -1, -1)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms:
        table = scale * torch.arange(-99.0, 100.0).expand(q.shape[1], -1)
        return (BucketedTerms(lambda offset: offset[..., 0].long() + 99, table=table),)


@torch.no_grad()
def test_terms_of_another_scale_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention(dim=32, heads=4, encoding=Encoding(score=OfScale()), causal=True).eval()
    forbid_attend(attention, monkeypatch)
    x, past = torch.randn(1, 7, 32), LayerCache()
    step_by_step(attention, x[:, :6], cache=past)
    attention.scale = 3.0
    got = attention(x[:, 6:], Layout.sequence(1, 6), cache=past)
    torch.testing.assert_close(got, attention(x, Layout.sequence(7))[:, 6:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "shaw", "rope+kerple"])
def test_the_terms_of_another_encoding_are_read(name: str) -> None:
    """Though those of the first are as they were."""
    attention, past = layer(name), LayerCache()
    first = attention.encoding
    step_by_step(attention, torch.randn(1, 6, 32), cache=past)
    attention.encoding = copy.deepcopy(first)
    for parameter in attention.encoding.parameters():
        parameter.add_(1.0).mul_(2.0)
    fresh = copy.deepcopy(past)
    token, where = torch.randn(1, 1, 32), Layout.sequence(1, 6)
    got, expected = (attention(token, where, cache=cache) for cache in (past, fresh))
    torch.testing.assert_close(got, expected)
