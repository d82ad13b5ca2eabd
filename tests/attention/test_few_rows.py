"""The kernel that reads keys once for the few queries of all heads that share them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create
from posenc.attention import LayerCache
from posenc.attention.backends import native
from posenc.attention.call import Call
from posenc.attention.decoding import attend_last
from posenc.attention.dispatch import BACKENDS, query_kernel
from tests.attention.comparing import built
from tests.support.exhaustive import in_turn

NAMES = ("nope", "rope", "xpos", "alibi", "t5", "shaw", "shaw_keys")
PRECISION = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make(name: str, *, width: int, heads: int = 8) -> Encoding:
    options: dict[str, Any] = {
        "rope": {"head_dim": width},
        "xpos": {"head_dim": width},
        "shaw": {"head_dim": width, "max_distance": 40},
        "t5": {"heads": heads, "causal": True},
        "alibi": {"heads": heads},
    }.get(name, {})
    torch.manual_seed(1)
    if name == "shaw_keys":
        return Encoding(score=make("shaw", width=width).score)
    return create(name, **options).double()


def tensors(
    queries: int, keys: int, groups: int, *, width: int = 16, values: int | None = None
) -> list[Tensor]:
    torch.manual_seed(0)
    wide = width if values is None else values
    sizes = ((2, 8, queries, width), (2, groups, keys, width), (2, groups, keys, wide))
    return [torch.randn(size, dtype=torch.float64) for size in sizes]


def close(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        wanted = PRECISION[dtype]
        torch.testing.assert_close(mine.double(), theirs.double(), atol=wanted, rtol=wanted)


def check(
    given: list[Tensor], grid: Grid, name: str, stored: list[Tensor] | None = None, **options: Any
) -> None:
    """Compare the kernel, with the operands as they are ``stored``, with the definition."""
    encoding = make(name, width=given[0].shape[3])
    options = {**options, "return_lse": True}
    with torch.no_grad():
        expected = attend(*given, grid, encoding, backend="reference", **options)
        found = attend(*(stored or given), grid, encoding, backend="native", **options)
    close(found, expected, torch.float64)


@pytest.mark.parametrize(
    ("queries", "keys", "groups", "width", "name", "dtype"),
    in_turn(
        4,
        [
            (1, 1030, 8, 16),  # three chunks of keys, whole vectors of features
            (1, 70, 2, 20),
            (2, 513, 1, 16),  # packed
            (3, 64, 8, 12),
            (5, 5, 4, 16),
            (16, 90, 2, 16),
        ],
        NAMES,
        list(PRECISION),
    ),
)
def test_it_is_the_definition(
    queries: int, keys: int, groups: int, width: int, name: str, dtype: torch.dtype
) -> None:
    encoding, given = make(name, width=width), tensors(queries, keys, groups, width=width)
    layout = Layout.sequence(keys)
    grid = Grid(layout.slice(keys - queries, keys), layout, causal=True)
    q, k, v = (x.to(dtype) for x in given)
    with torch.no_grad():
        expected = attend(*(x.double() for x in (q, k, v)), grid, encoding, return_lse=True)
        reference = attend(
            *(x.double() for x in (q, k, v)), grid, encoding, backend="reference", return_lse=True
        )
        encoding = encoding if dtype == torch.float64 else encoding.float()
        found = attend(q, k, v, grid, encoding, backend="native", return_lse=True)
    close(expected, reference, torch.float64)
    close(found, reference, dtype)


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("name", ["nope", "rope", "shaw"])
@pytest.mark.parametrize("extra", ["sinks", "softcap", "both"])
def test_sinks_and_a_cap(extra: str, name: str, groups: int) -> None:
    options: dict[str, Any] = {}
    if extra != "softcap":
        options["sinks"] = torch.linspace(-2, 5, 8, dtype=torch.float64)
    if extra != "sinks":
        options["softcap"] = 0.7
    layout = Layout.sequence(600)
    grid = Grid(layout.slice(597, 600), layout, causal=True)
    check(tensors(3, 600, groups), grid, name, **options)


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "shaw"])
@pytest.mark.parametrize("window", [(-900, -700), (-1029, -1000), (3, 9), (1, None)])
def test_hidden_keys_are_not_read(window: tuple[int, int | None], name: str) -> None:
    """Whole chunks may be hidden, from all queries or from some, which may see nothing."""
    layout = Layout.sequence(1030)
    grid = Grid(layout.slice(1020, 1025), layout, window=window)
    given, hidden = tensors(5, 1030, 2), ~grid.visible[0, 0].any(0)
    holes = [x.masked_fill(hidden[:, None], float("nan")) for x in given[1:]]
    check(given, grid, name, [given[0], *holes])


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "shaw"])
@pytest.mark.parametrize("width", [4, 8, 24, 40])
def test_heads_of_no_whole_vectors_end_before_the_next_key(width: int, name: str) -> None:
    """Whose features, of a key that is hidden, may be anything."""
    layout = Layout.sequence(48)
    grid = Grid(layout.slice(47, 48), layout, window=(None, -16))
    given = tensors(1, 48, 4, width=width)
    holes = [x.clone().index_fill_(2, torch.arange(32, 48), float("nan")) for x in given[1:]]
    check(given, grid, name, [given[0], *holes])


def test_rows_of_a_batch_see_different_keys() -> None:
    valid = torch.arange(600).expand(2, -1) >= torch.tensor([[0], [530]])
    layout = Layout.sequence(600)
    grid = Grid(layout.slice(597, 600), replace(layout, valid=valid), causal=True)
    for name in ("nope", "alibi", "shaw"):
        check(tensors(3, 600, 2), grid, name)


def test_values_of_another_width_and_operands_as_models_have_them() -> None:
    """Features of all heads side by side, and keys in a longer cache."""
    layout = Layout.sequence(70)
    grid = Grid(layout.slice(69, 70), layout, causal=True)
    q, k, v = tensors(1, 70, 2, values=24)
    room = [torch.full((2, 2, 99, x.shape[3]), float("nan"), dtype=x.dtype) for x in (k, v)]
    for place, x in zip(room, (k, v), strict=True):
        place[:, :, :70] = x
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)
    check([q, k, v], grid, "nope", [apart, *(x[:, :, :70] for x in room)])


def test_results_do_not_depend_on_the_threads() -> None:
    layout = Layout.sequence(3000)
    grid = Grid(layout.slice(2999, 3000), layout, causal=True)
    given, encoding, threads = tensors(1, 3000, 1), make("t5", width=16), torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            with torch.no_grad():
                found.append(attend(*given, grid, encoding, backend="native"))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@built
@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("bias", [None, (1, 1), (1, 8), (2, 8)])
@pytest.mark.parametrize("extra", [{}, {"softcap": 0.7}, {"sinks": True}])
def test_one_query_with_a_bias_written_out(
    extra: dict[str, Any], bias: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    q, k, v = (x.to(dtype) for x in tensors(1, 700, 2, values=24))
    added = None if bias is None else torch.randn(*bias, 1, 700, dtype=torch.float64)
    sinks = torch.linspace(-2, 2, 8, dtype=torch.float64) if "sinks" in extra else None
    kernel = query_kernel(q, k, v, plain=not extra)
    if kernel is None:  # in few numbers, PyTorch's is as fast
        assert dtype.itemsize >= 4
        assert not extra
        kernel = native.attend_query
    options = {"sinks": sinks, "softcap": extra.get("softcap")}
    found = kernel(q, k, v, added, scale=0.3, **options)
    wide = [x.double().repeat_interleave(4, dim=1) for x in (k, v)]
    logits = 0.3 * q.double() @ wide[0].mT + (0 if added is None else added)
    if "softcap" in extra:
        logits = 0.7 * (logits / 0.7).tanh()
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, 8, 1, 1).expand(2, 8, 1, 1)], dim=-1)
    expected = logits.softmax(-1)[..., :700] @ wide[1]
    wanted = PRECISION[dtype]
    torch.testing.assert_close(found.double(), expected, atol=wanted, rtol=wanted)


@built
@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({}, True),
        ({"keys": 64, "plain": False}, True),
        ({"keys": 64, "dtype": torch.bfloat16}, True),
        ({"keys": 64}, False),
        ({"heads": 65, "groups": 1}, False),
        ({"mixed": True}, False),
    ],
)
def test_one_query_goes_to_the_kernel_where_that_is_faster(
    change: dict[str, Any], serves: bool
) -> None:
    heads, groups = change.get("heads", 8), change.get("groups", 8)
    dtype, keys = change.get("dtype", torch.float32), change.get("keys", 2**12)
    one = torch.zeros((), dtype=dtype)
    q, k = (one.expand(1, n, length, 32) for n, length in ((heads, 1), (groups, keys)))
    v = k.double() if "mixed" in change else k
    assert (query_kernel(q, k, v, plain=change.get("plain", True)) is not None) == serves


@built
@pytest.mark.parametrize("name", ["nope", "alibi", "t5", "shaw_keys"])
def test_the_last_token_of_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms that a cache keeps are the kernel's bias, in half precision too."""
    seen = []

    def watching(*operands: Any, **options: Any) -> Tensor:
        seen.append(operands[3])
        return native.attend_query(*operands, **options)

    monkeypatch.setattr(BACKENDS["native"].kernels, "query_kernel", lambda *_, **__: watching)
    encoding = make(name, width=16).float()
    q, k, v = (x.bfloat16() for x in tensors(1, 300, 2))
    layout, cache = Layout.sequence(300), LayerCache()
    cache.append(k, v, layout)
    grid = Grid(layout.slice(299, 300), layout, causal=True)
    with torch.no_grad():
        found = attend_last(Call(q, k, v, grid, encoding))
        expected = attend(q, k, v, grid, encoding, backend="reference")
    assert found is not None
    assert len(seen) == 1
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
