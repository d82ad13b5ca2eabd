"""Sinks and caps of the logits, against loops over queries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Attention, Encoding, Grid, Layout, attend, create
from posenc.attention.backends.native.build import missing
from posenc.attention.call import Call
from posenc.attention.decoding import attend_last
from posenc.attention.dispatch import BACKENDS
from posenc.errors import ArgumentError, BackendRefusal
from posenc.testing.backend_laws import serving
from tests.attention.comparing import agree
from tests.support.exhaustive import in_turn

HEADS, WIDTH, LENGTH = 4, 5, 11

GRIDS = {
    "causal": Grid.of(Layout.sequence(LENGTH), causal=True),
    "window": Grid.of(Layout.sequence(LENGTH), causal=True, window=3),
    "unseeing": Grid(Layout.sequence(LENGTH), Layout.sequence(LENGTH, 4), causal=True),
    "padded": Grid.of(Layout.padded([LENGTH, 4], side="left"), causal=True),
    "packed": Grid.of(Layout.packed([4, 5, 2]), causal=True),
}

ENCODINGS: dict[str, dict[str, Any]] = {
    "nope": {},
    "t5": {"heads": HEADS, "buckets": 4, "max_distance": 8, "causal": True},
    "shaw": {"head_dim": WIDTH, "max_distance": 2},
    "tupe": {"dim": 20, "heads": HEADS, "head_dim": WIDTH, "max_length": 20, "causal": True},
    "cope": {"head_dim": WIDTH, "max_length": 6},
}

EXTRAS = {"sinks": (True, None), "cap": (False, 0.7), "both": (True, 0.7)}


@dataclass(frozen=True)
class Case:
    """A call, and all that its output has gradients for."""

    q: Tensor
    k: Tensor
    v: Tensor
    grid: Grid
    encoding: Encoding
    sinks: Tensor | None
    softcap: float | None

    def by(self, backend: str) -> tuple[Tensor, Tensor]:
        operands = (self.q, self.k, self.v, self.grid, self.encoding)
        options: dict[str, Any] = {"sinks": self.sinks, "softcap": self.softcap}
        return attend(*operands, scale=0.4, backend=backend, return_lse=True, **options)

    def wanted(self) -> list[Tensor]:
        learned = [x for x in self.encoding.parameters() if x.requires_grad]
        return [self.q, self.k, self.v, *learned, *([] if self.sinks is None else [self.sinks])]

    def serving(self) -> list[str]:
        """Backends that serve it on this machine, besides the reference."""
        extras: dict[str, Any] = {"sinks": self.sinks, "softcap": self.softcap}
        found = serving(self.q, self.k, self.v, self.grid, self.encoding, **extras)
        return [name for name in found if name != "reference"]


def case(name: str, where: str, extras: str) -> Case:
    generator = torch.Generator().manual_seed(0)
    encoding = create(name, **ENCODINGS[name]).double()
    with torch.no_grad():
        for x in encoding.parameters():
            x.copy_(torch.randn(x.shape, generator=generator))
    q, k, v = (
        torch.randn(2, count, LENGTH, WIDTH, generator=generator).double().requires_grad_()
        for count in (HEADS, 2, 2)
    )
    with_sinks, cap = EXTRAS[extras]
    sinks = torch.tensor([-1.0, 0.0, 2.0, -math.inf], dtype=torch.float64).requires_grad_()
    return Case(q, k, v, GRIDS[where], encoding, sinks if with_sinks else None, cap)


def by_loop(case: Case) -> tuple[Tensor, Tensor]:
    """Row by row, from the logits without a cap."""
    grid, encoding = case.grid, case.encoding
    k, v = (x.repeat_interleave(2, 1) for x in (case.k, case.v))
    logits = 0.4 * case.q @ k.mT
    if encoding.score is not None:
        logits = logits + encoding.score(case.q, k, grid, scale=0.4)
    visible = grid.visible.expand(len(k), HEADS, -1, -1)
    weights, sums = torch.zeros_like(logits), torch.zeros_like(logits[..., 0])
    for place in torch.cartesian_prod(*map(torch.arange, logits.shape[:3])).tolist():
        b, h, i = place
        seen = logits[b, h, i][visible[b, h, i]]
        if case.softcap is not None:
            seen = case.softcap * (seen / case.softcap).tanh()
        total = seen.exp().sum()
        if case.sinks is not None:
            total = total + case.sinks[h].exp()
        if len(seen):
            index = (*map(torch.tensor, place), visible[b, h, i].nonzero().flatten())
            weights = weights.index_put(index, seen.exp() / total)
        if total:
            sums = sums.index_put(tuple(map(torch.tensor, place)), total.log())
        else:
            sums[b, h, i] = -math.inf
    output = weights @ v
    if encoding.value is not None:
        output = output + encoding.value(weights, grid)
    return output, sums


@pytest.mark.parametrize(
    ("extras", "where", "name"), in_turn(4, list(EXTRAS), list(GRIDS), list(ENCODINGS))
)
def test_values_and_gradients(name: str, where: str, extras: str) -> None:
    """In every backend; queries that see neither a key nor a sink give zeros, and a LSE of -inf."""
    given, found = case(name, where, extras), []
    for output, lse in (by_loop(given), *map(given.by, ("reference", *given.serving()))):
        parts = [output, 3 * lse.masked_fill(lse.isneginf(), 0.0)]
        loss = sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in parts)
        gradients = torch.autograd.grad(loss, given.wanted(), None, True, materialize_grads=True)
        found.append([output, lse, *gradients])
    for got in found[1:]:
        # Offsets, and what is found from them, are in float32.
        agree(got, found[0], 2e-6)


@pytest.mark.parametrize("name", ["t5", "cope"])
def test_second_derivatives(name: str) -> None:
    given, found = case(name, "causal", "both"), []
    for output, lse in map(given.by, ("reference", *given.serving())):
        loss = output.sin().sum() + lse.masked_fill(lse.isneginf(), 0.0).square().sum()
        first = torch.autograd.grad(loss, given.wanted(), create_graph=True)
        squares = sum(x.square().sum() for x in first)
        found.append(torch.autograd.grad(squares, given.wanted()))
    for got in found[1:]:
        agree(got, found[0], 1e-6)


def test_a_cap_has_no_place_in_the_fused_kernel() -> None:
    with pytest.raises(BackendRefusal, match="cap"):
        case("nope", "causal", "cap").by("sdpa")


def test_gradients_of_many_gates() -> None:
    """Rounding of the gradients of keys does not grow in sums over them."""
    encoding, length = create("forgetting", dim=16, heads=HEADS), 2000
    torch.manual_seed(0)
    given = [torch.randn(1, n, length, WIDTH) for n in (HEADS, 2, 2)]
    x, sinks = torch.randn(1, length, 16), torch.linspace(-1, 2, HEADS)
    found = []
    for backend, dtype in (("reference", torch.float64), ("native", torch.float32)):
        q, k, v, tokens, of_heads = (y.to(dtype) for y in (*given, x, sinks))
        layout = encoding.to(dtype).observe(tokens, Layout.sequence(length))
        grid = Grid(layout.slice(length - 300, length), layout, causal=True, window=70)
        output = attend(q[:, :, -300:], k, v, grid, encoding, sinks=of_heads, backend=backend)
        found.append(torch.autograd.grad(output.sin().sum(), list(encoding.parameters())))
    for true, mine in zip(*found, strict=True):
        assert (mine.double() - true).abs().max() < 2e-5 * true.abs().max()


def test_without_keys() -> None:
    """Rows that see nothing are zero, and their LSE is the sink."""
    q, k, sinks = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 0, 8), torch.arange(4.0)
    grid = Grid(Layout.sequence(3), Layout.sequence(3).slice(0, 0))
    output, lse = attend(q, k, k, grid, Encoding(), sinks=sinks, return_lse=True)
    assert not output.any()
    assert torch.equal(lse, sinks.view(1, 4, 1).expand(2, 4, 3))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sinks", [0.0] * HEADS, "a tensor of a floating dtype"),
        ("sinks", torch.zeros(HEADS, dtype=torch.int64), "a tensor of a floating dtype"),
        ("sinks", torch.zeros(HEADS + 1), f"shape [{HEADS}]"),
        ("sinks", torch.zeros(1, HEADS), f"shape [{HEADS}]"),
        ("sinks", torch.zeros(HEADS, device="meta"), "cpu as q"),
        ("softcap", 0.0, "a positive number"),
        ("softcap", math.inf, "a positive number"),
        ("softcap", True, "a positive number"),
    ],
)
def test_arguments_out_of_their_domain(name: str, value: Any, expected: str) -> None:
    q = torch.zeros(1, HEADS, 3, 8)
    with pytest.raises(ArgumentError) as raised:
        attend(q, q, q, Grid.of(Layout.sequence(3)), Encoding(), **{name: value})
    assert str(raised.value).startswith(name)
    assert expected in str(raised.value)


@pytest.mark.parametrize("options", [{"sinks": torch.zeros(HEADS)}, {"softcap": 30.0}])
def test_weights_that_are_no_softmax(options: dict[str, Any]) -> None:
    q = torch.zeros(1, HEADS, 3, 8)
    encoding = create("stick_breaking")
    assert encoding.score is not None
    assert encoding.score.replaces_softmax
    with pytest.raises(ArgumentError, match="replaces the softmax"):
        attend(q, q, q, Grid.of(Layout.sequence(3), causal=True), encoding, **options)


def layer(name: str = "nope", *, window: int | None = None, **options: Any) -> Attention:
    """An attention layer with sinks that are not zero, and a cap."""
    torch.manual_seed(0)
    attention = Attention(
        dim=32,
        heads=HEADS,
        kv_heads=2,
        encoding=create(name, **options),
        causal=True,
        window=window,
        sinks=True,
        softcap=0.3,
    )
    assert attention.sinks is not None
    assert not attention.sinks.any()
    torch.nn.init.normal_(attention.sinks)
    return attention


def test_layer() -> None:
    """The layer is its projections and ``attend``, and its sinks learn."""
    attention, x, layout = layer(), torch.randn(2, 7, 32), Layout.sequence(7)
    output = attention(x, layout)
    q, k, v = (
        m(x).view(2, 7, -1, 8).transpose(1, 2)  # type: ignore[misc]
        for m in (attention.query, attention.key, attention.value)
    )
    grid = Grid.of(layout, causal=True)
    own = attend(q, k, v, grid, Encoding(), sinks=attention.sinks, softcap=0.3, backend="reference")
    torch.testing.assert_close(output, attention.output(own.transpose(1, 2).flatten(2)))
    output.square().sum().backward()
    assert attention.sinks is not None
    assert attention.sinks.grad is not None
    assert attention.sinks.grad.abs().min() > 0
    assert "sinks" in attention.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("name", ["nope", "shaw"])
def test_last_token_by_one_query(
    name: str, by_kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused query of decoding is the definition's, where no logits would be rounded."""
    by_kernel = by_kernel and missing() is None
    if not by_kernel:
        native = BACKENDS["native"]
        monkeypatch.setattr(native, "query_kernel", lambda *_, **__: None)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 9, 8).to(dtype) for n in (HEADS, 2, 2))
    layout = Layout.sequence(9)
    grid = Grid(layout.slice(8, 9), layout, causal=True)
    extras: dict[str, Any] = {"sinks": torch.linspace(-1, 2, HEADS), "softcap": 0.7}
    given = (q[:, :, 8:], k, v, grid, create(name, **{"shaw": {"head_dim": 8}}.get(name, {})))
    with torch.no_grad():
        found = attend_last(Call(*given, scale=0.4, **extras))
        expected = attend(*given, scale=0.4, **extras, backend="reference")
    if (by_kernel and name == "nope") or dtype == torch.float32:
        torch.testing.assert_close(found, expected)
    else:
        assert found is None
