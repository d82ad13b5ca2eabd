"""Wrong arguments are refused at the boundary, each with the remedy; auto explains itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend, create, explain
from posenc.attention import BACKENDS, Attention, Backend
from posenc.attention.backends.common.base import Plan, Refusal, Result
from posenc.attention.backends.common.definition import attend_by_definition
from posenc.attention.backends.native.build import missing
from posenc.attention.problem.problem import Problem
from posenc.encoding import QueryKeyTransform
from posenc.errors import ArgumentError, BackendRefusal, UnknownNameError
from posenc.models import Decoder, DecoderConfig

GRID = Grid.of(Layout.sequence(5), causal=True)


def heads(*shape: int) -> Tensor:
    return torch.randn(*shape)


GOOD = {"q": heads(2, 4, 5, 8), "k": heads(2, 2, 5, 8), "v": heads(2, 2, 5, 8), "grid": GRID}

BAD = {
    "rank": ({"q": heads(4, 5, 8)}, r"q: expected shape \[B, heads, L, D\]"),
    "no tensor": ({"q": [[1.0]]}, "q: expected a tensor, got list"),
    "no grid": ({"grid": Layout.sequence(5)}, "grid: expected a Grid, got Layout"),
    "integers": ({"v": torch.ones(2, 2, 5, 8).long()}, "v: expected a floating dtype"),
    "dtypes": ({"k": heads(2, 2, 5, 8).double()}, "k: expected torch.float32 as q"),
    "devices": ({"k": heads(2, 2, 5, 8).to("meta")}, "k: expected cpu as q"),
    "rows": ({"v": heads(3, 2, 5, 8)}, "v: expected 2 batch rows"),
    "widths": ({"k": heads(2, 2, 5, 6)}, "k: expected head width 8"),
    "pairs": ({"v": heads(2, 2, 4, 8)}, "v: expected 2 heads and 5 tokens as k"),
    "groups": ({"q": heads(2, 5, 5, 8)}, "q: expected a number of heads that k's 2 divide"),
    "queries": ({"q": heads(2, 4, 6, 8)}, "grid.query: expected 6 tokens as q"),
    "keys": ({"k": heads(2, 2, 6, 8), "v": heads(2, 2, 6, 8)}, "grid.key: expected 6 tokens as k"),
    "layout rows": ({"grid": Grid.of(Layout.padded([5, 4, 3]))}, "expected 1 or 2 batch rows"),
    "encoding": ({"encoding": "rope"}, "encoding: expected an Encoding, got str"),
    "dropout": ({"dropout": 1.0}, "dropout: expected 0 ≤ dropout < 1"),
    "dropout as text": ({"dropout": "a"}, "dropout: expected 0 ≤ dropout < 1, got a"),
    "scale as text": ({"scale": "a"}, "scale: expected a positive number, got a"),
    "scale": ({"scale": float("nan")}, "scale: expected a positive number"),
    "negative scale": ({"scale": -1.0}, "scale: expected a positive number"),
    "axes": (
        {"grid": Grid.of(Layout.image(1, 5)), "encoding": posenc.create("alibi", heads=4)},
        "positions with 1 axes, as Alibi reads",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("function", [attend, explain])
def test_wrong_arguments(function, change: dict[str, object], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=message):
        function(**({"encoding": Encoding()} | GOOD | change))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [torch.strided, torch.jagged])
def test_nested_tensors_are_named_in_the_refusal(kind: torch.layout) -> None:
    def nested(*shape: int) -> Tensor:
        rows = [torch.ones(length, *shape) for length in (3, 5)]
        return torch.nested.nested_tensor(rows, layout=kind)

    x, layout = nested(16), Layout.sequence(5)
    q = nested(2, 8).transpose(1, 2)
    encoding = create("learned", dim=16, max_length=9) + create("rope", head_dim=8)
    layer = Attention(dim=16, heads=2, encoding=encoding)
    model = Decoder(DecoderConfig(vocabulary=5, dim=16, layers=1, heads=2))
    for call in (
        lambda: attend(q, q, q, Grid.of(layout), encoding),
        lambda: layer(x, layout),
        lambda: layer.project(x, layout),
        lambda: encoding.embed(x, layout),
        lambda: encoding.observe(x, layout),
        lambda: model(nested().long()),
        lambda: Layout.at(nested()),
        lambda: Layout.from_attention_mask(nested()),
    ):
        with pytest.raises(ArgumentError, match=r"a nested tensor.*Layout.packed"):
            call()


def test_every_message_has_a_remedy() -> None:
    with pytest.raises(ArgumentError) as caught:
        attend(**(GOOD | {"q": heads(4, 5, 8)}), encoding=Encoding())  # type: ignore[arg-type]
    assert "Split the heads" in str(caught.value)
    assert caught.value.remedy


def test_unknown_backend_lists_the_known() -> None:
    known = r"'sdpa'.*auto, blockwise, flex, native, reference, sdpa"
    with pytest.raises(UnknownNameError, match=known):
        attend(**GOOD, encoding=Encoding(), backend="sdp")  # type: ignore[arg-type]


class Doubled(Backend):
    """The definition, twice."""

    name = "doubled"

    def plan(self, problem: Problem) -> Plan | Refusal:
        if problem.dropout:
            return Refusal("it has no dropout")
        return Plan("twice", lambda *, lse: Result(2 * attend_by_definition(problem).output, None))


def test_backends_are_passed_as_instances() -> None:
    doubled, expected = Doubled(), 2 * attend(**GOOD, encoding=Encoding())  # type: ignore[arg-type]
    torch.testing.assert_close(attend(**GOOD, encoding=Encoding(), backend=doubled), expected)  # type: ignore[arg-type]
    how = explain(**GOOD, encoding=Encoding(), backend=doubled)  # type: ignore[arg-type]
    assert str(how) == "doubled (named): twice."
    layer = Attention(dim=32, heads=4, encoding=Encoding(), backend=doubled)
    x, layout = torch.randn(2, 5, 32), Layout.sequence(5)
    got = layer(x, layout)
    layer.backend = "reference"
    torch.testing.assert_close(got, 2 * layer(x, layout))
    with pytest.raises(BackendRefusal, match="'doubled', which cannot, because it has no dropout"):
        attend(**GOOD, encoding=Encoding(), backend=doubled, dropout=0.1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="backend: expected a name or a Backend, got int"):
        attend(**GOOD, encoding=Encoding(), backend=1)  # type: ignore[arg-type]


def test_names_of_backends_are_plain() -> None:
    assert all(name.isidentifier() for name in BACKENDS)


class CausalOnly(QueryKeyTransform):
    causal_only = True

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        return q, k


def test_causal_only_encodings_need_a_causal_grid() -> None:
    with pytest.raises(ArgumentError, match="causal=True"):
        attend(**(GOOD | {"grid": Grid.of(Layout.sequence(5))}), encoding=Encoding.of(CausalOnly()))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="causal"):
        posenc.Attention(dim=8, heads=2, encoding=Encoding.of(CausalOnly()))


def test_explain_says_how_and_why() -> None:
    told = explain(**GOOD, encoding=posenc.create("alibi", heads=4))  # type: ignore[arg-type]
    assert told.backend == "sdpa"
    assert "zero-copy view" in str(told)
    told = explain(**GOOD, encoding=posenc.create("shaw", head_dim=8))  # type: ignore[arg-type]
    assert told.backend == ("reference" if missing() else "native")
    assert "Not sdpa, because the fused kernel has no place for a value part." in str(told)
    for name in ("triton", "flex"):
        assert f"Not {name}, because its kernels run on CUDA devices, not on cpu." in str(told)


def test_autocast_gives_its_dtype_and_keeps_biases_wide() -> None:
    grid = Grid.of(Layout.sequence(64, start=4000), causal=True)
    q, k, v = (torch.randn(1, 4, 64, 8) for _ in range(3))
    encoding = posenc.create("alibi", heads=4)
    with torch.autocast("cpu", torch.bfloat16):
        got = attend(q, k, v, grid, encoding)
    assert got.dtype == torch.bfloat16
    exact = attend(q.double(), k.double(), v.double(), grid, encoding)
    assert (got.double() - exact).abs().max().item() < 0.05


def test_scale_of_methods_with_several_terms() -> None:
    assert Encoding().default_scale(64) == 0.125


def test_autocast_casts_mixed_operands_before_they_are_compared() -> None:
    """Norms of queries and keys stay in float32, and linear layers return bfloat16."""
    q, k, v = torch.randn(3, 1, 2, 8, 16).unbind()
    grid, encoding = Grid.of(Layout.sequence(8)), create("nope")
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(q, k, v.bfloat16(), grid, encoding)
    expected = attend(*(x.bfloat16() for x in (q, k, v)), grid, encoding)
    torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError, match=r"v: .*float64"):
        attend(q, k, v.double(), grid, encoding)


@pytest.mark.parametrize(("start", "band"), [(30, (-6, 0)), (20, (-3, 4)), (38, (-40, -2))])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_few_queries_see_all_of_their_window(
    start: int, band: tuple[int, int], backend: str
) -> None:
    """Keys that no query sees are left out before any backend: the reference is PyTorch's."""
    q, k, v = torch.randn(3, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0)).unbind()
    q = q[:, :, :5]
    grid = Grid(Layout.sequence(5, start=start), Layout.sequence(40), window=band)
    offset = torch.arange(40) - torch.arange(start, start + 5).unsqueeze(1)
    visible = (offset >= band[0]) & (offset <= band[1])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(attend(q, k, v, grid, Encoding(), backend=backend), expected)
