"""Few queries after many keys: keys are read once for all heads that share them, in windows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create, explain
from posenc.attention import LayerCache
from posenc.attention.backends import native, sdpa
from posenc.attention.backends.common import fused
from posenc.attention.call import Call
from posenc.attention.decoding import attend_last
from posenc.attention.dispatch import BACKENDS, query_kernel
from posenc.attention.problem.lowering import GivenTerms, GivenValues
from posenc.encoding import BucketedTerms, ScoreTerm, TokenTableProduct
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms
from posenc.encodings.common.buckets import clipped_bucket
from posenc.extension import extend
from tests.attention.comparing import built

KEYS = 90


def operands(queries: int, *, heads: int = 6, groups: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, heads, queries, 16), (2, groups, KEYS, 16), (2, groups, KEYS, 16))
    return tuple(
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in sizes
    )


def last(queries: int, *, window: int | tuple[int, int] | None = None) -> Grid:
    return Grid(Layout.sequence(queries, KEYS - queries), Layout.sequence(KEYS), True, window)


def called(
    shapes: list[tuple[int, ...]], real: Any, q: Tensor, *others: Any, **options: Any
) -> Any:
    """Call ``real`` and remember the shape of its queries."""
    shapes.append(tuple(q.shape))
    return real(q, *others, **options)


def test_heads_that_share_keys_are_queries_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []
    real = fused.scaled_dot_product_attention
    monkeypatch.setattr(fused, "scaled_dot_product_attention", partial(called, shapes, real))
    alibi = create("alibi", heads=6)
    for queries in (1, 2, 21, 22):
        attend(*operands(queries), last(queries), Encoding(), backend="sdpa")
        attend(*operands(queries), last(queries), alibi, backend="sdpa")
    attend(*operands(KEYS), last(KEYS), Encoding(), backend="sdpa")
    with torch.no_grad():
        q, k, v = (x.float() for x in operands(2))
        monkeypatch.setattr(sdpa, "flash_forward", partial(called, shapes, sdpa.flash_forward))
        attend(q, k, v, last(2), alibi, backend="sdpa", return_lse=True)
    assert shapes.pop() == (2, 2, 6, 16)
    folded = [(2, 2, 3 * queries, 16) for queries in (1, 1, 2, 2, 21, 21)]
    assert shapes == [*folded, (2, 6, 22, 16), (2, 6, 22, 16), (2, 6, KEYS, 16)]


class Watched(ScoreTerm):
    """Remembers the heads of the keys that it is lowered with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return torch.zeros_like(grid.offset[..., 0]).unsqueeze(1)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        self.seen.append(k.shape[1])
        return (BucketedTerms(lambda offset: offset[..., 0].long() * 0, table=q.new_zeros(6, 1)),)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "native", "blockwise"])
def test_keys_are_not_copied_for_parts_that_do_not_read_them(backend: str) -> None:
    score = Watched()
    attend(*operands(3), last(3), Encoding(score=score), backend=backend)
    assert set(score.seen) == {2}


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [9, (-20, -4), (-5, 1)])
def test_a_window_reads_its_slice_of_the_keys(window: int | tuple[int, int], queries: int) -> None:
    """Whatever hidden keys hold, no number of theirs is read."""
    q, k, v = operands(queries)
    grid, alibi = last(queries, window=window), create("alibi", heads=6)
    expected = attend(q, k, v, grid, alibi, backend="reference")
    hidden = ~grid.visible[0, 0].any(0)
    assert int(hidden.sum()) > KEYS // 2
    holes = [x.detach().masked_fill(hidden[:, None], float("nan")) for x in (k, v)]
    got = attend(q, *holes, grid, alibi)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert "native" in str(explain(q, k, v, grid, alibi, backend="native"))


def test_parts_that_read_all_keys_get_them() -> None:
    """Log-n scaling reads the last position of all keys, hidden ones too."""
    rope = Encoding.of(create("rope", head_dim=16).query_key)
    scaled = extend(rope, "log_n", length=16)
    q, k, v = operands(KEYS)
    whole = Layout.sequence(KEYS)
    expected = attend(q, k, v, Grid(whole, whole, window=2), scaled, backend="reference")
    few = Grid(whole.slice(40, 41), whole, window=2)
    torch.testing.assert_close(attend(q[:, :, 40:41], k, v, few, scaled), expected[:, :, 40:41])


PRECISION = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make(name: str, width: int = 16) -> Encoding:
    torch.manual_seed(1)
    encoding = create(name.removesuffix(" keys"), heads=8, head_dim=width, causal=True).double()
    return Encoding(score=encoding.score) if name == "shaw keys" else encoding


def tensors(
    queries: int, keys: int, groups: int, *, values: int = 16, width: int = 16
) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((2, 8, queries, width), (2, groups, keys, width), (2, groups, keys, values))
    return [torch.randn(size, dtype=torch.float64) for size in sizes]


def check(given: list[Tensor], grid: Grid, name: str, stored: list[Tensor]) -> None:
    """Compare the kernel, with the operands as they are ``stored``, with the definition."""
    encoding = make(name, given[0].shape[3])
    with torch.no_grad():
        expected = attend(*given, grid, encoding, backend="reference", return_lse=True)  # type: ignore[misc, call-overload]
        found = attend(*stored, grid, encoding, backend="native", return_lse=True)  # type: ignore[misc, call-overload]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


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
    given = tensors(1, 48, 4, width=width, values=width)
    holes = [x.clone().index_fill_(2, torch.arange(32, 48), float("nan")) for x in given[1:]]
    check(given, grid, name, [given[0], *holes])


@pytest.mark.parametrize("name", ["nope", "alibi", "shaw", "shaw keys"])
def test_rows_of_a_batch_are_behind_pasts_of_other_lengths(name: str) -> None:
    """The same keys are near the query of one row and far from that of another."""
    order = torch.tensor([[600], [530], [4]])
    query = Layout(order.unsqueeze(-1).float(), order)
    grid = Grid(query, Layout.padded([600, 530, 4]), causal=True)
    given = [torch.cat([x, x[:1]]) for x in tensors(1, 600, 2)]
    check(given, grid, name, given)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_rows_by_head_beside_shared_keys(groups: int) -> None:
    given = tensors(3, 70, groups)
    rows, values = torch.randn(2, 8, 9, 16, dtype=torch.float64)
    bucket = partial(clipped_bucket, limit=4)
    encoding = Encoding(
        score=GivenTerms(BucketedTerms(bucket, left=TokenTableProduct(given[0], rows))),
        value=GivenValues(BucketedTerms(bucket, value=values)),
    )
    layout = Layout.sequence(70)
    grid = Grid(layout.slice(60, 63), layout, causal=True)
    found, expected = (
        attend(*given, grid, encoding, backend=backend)  # type: ignore[misc]
        for backend in ("native", "reference")
    )
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


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
    given, encoding, threads = tensors(1, 3000, 1), make("t5"), torch.get_num_threads()
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
@pytest.mark.parametrize("name", ["nope", "alibi", "t5", "shaw keys"])
def test_the_last_token_of_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms that a cache keeps are the kernel's bias, in half precision too."""
    seen = []

    def watching(*operands: Any, **options: Any) -> Tensor:
        seen.append(operands[3])
        return native.attend_query(*operands, **options)

    monkeypatch.setattr(BACKENDS["native"], "query_kernel", lambda *_, **__: watching)
    encoding = make(name).float()
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
