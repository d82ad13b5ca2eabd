"""FlexAttention as posenc asks for it, on the CPU: not compiled, forward only.

What it does on a CUDA device is in ``test_gpu.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as attention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention.backends import flex
from posenc.attention.backends.common.base import Plan
from posenc.attention.backends.flex import Entries, Flex, score_mod
from posenc.attention.call import Call
from posenc.errors import BackendRefusal

HEADS, KEY_HEADS, WIDTH = 4, 2, 16

ENCODINGS = {
    "nope": Encoding(),
    "rope": posenc.create("rope", head_dim=WIDTH),
    "alibi": posenc.create("alibi", heads=HEADS),
    "shaw keys": Encoding(score=posenc.create("shaw", head_dim=WIDTH, max_distance=5).score),
    "transformer_xl": posenc.create("transformer_xl", dim=64, heads=HEADS, head_dim=WIDTH),
    "deberta": posenc.create("deberta", dim=64, heads=HEADS, head_dim=WIDTH, max_distance=6),
    "few rows": posenc.create(
        "deberta", dim=64, heads=HEADS, head_dim=WIDTH, max_distance=30, buckets=4
    ),
}

T5 = {
    causal: posenc.create("t5", heads=HEADS, max_distance=12, buckets=8, causal=causal)
    for causal in (False, True)
}

IMAGE_ENCODINGS = {
    "swin": posenc.create("swin", heads=HEADS, window=(5, 6)),
    "irpe keys": Encoding(score=posenc.create("irpe", heads=HEADS, head_dim=WIDTH).score),
}

PADDED = Layout.padded([33, 9, 0], side="left")

GRIDS = {
    "dense": Grid.of(Layout.sequence(33)),
    "causal": Grid.of(Layout.sequence(33), causal=True),
    "window": Grid.of(Layout.sequence(33), causal=True, window=5),
    "chunk": Grid(Layout.sequence(9, 24), Layout.sequence(33), causal=True),
    "nothing to see": Grid(Layout.sequence(9), Layout.sequence(7, 5), causal=True),
}

MARKED = {
    "padded": Grid.of(PADDED, causal=True),
    "packed": Grid.of(Layout.packed([20, 13]), window=7),
    "rows at times": Grid.of(Layout.at(torch.arange(33) + torch.tensor([[0], [7], [90]]))),
}


@pytest.fixture
def _not_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "DEVICE", "cpu")
    monkeypatch.setattr(flex, "_kernels", lambda: (flex_attention, create_block_mask))
    # It would be traced for each call, which takes most of the time.
    monkeypatch.setattr(attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.no_grad():
        yield


def inputs(grid: Grid) -> list[Tensor]:
    rows = max(grid.query.batch, 2)
    sizes = ((HEADS, grid.query.length), *[(KEY_HEADS, grid.key.length)] * 2)
    return [torch.randn(rows, *size, WIDTH) for size in sizes]


def check(encoding: Encoding, grid: Grid, **extras: Any) -> None:
    for parameter in encoding.parameters():
        if not parameter.any():  # what starts at zero would hide mistakes
            torch.nn.init.normal_(parameter)
    given = inputs(grid)
    problem = Call(*given, grid, encoding, **extras).problem().rotated
    plan = Flex().plan(problem)
    assert isinstance(plan, Plan), plan
    got, lse = plan.run(lse=True)
    assert lse is not None
    wide = [x.double() for x in given]
    options: dict[str, Any] = {"backend": "reference", "return_lse": True}
    expected, sums = attend(*wide, grid, encoding, **options, **extras)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), sums, atol=2e-5, rtol=2e-5)
    assert plan.run().lse is None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("_not_compiled")
@pytest.mark.parametrize(
    ("name", "grid"), [("t5", grid) for grid in GRIDS] + [(name, "chunk") for name in ENCODINGS]
)
def test_equals_reference(name: str, grid: str) -> None:
    where = GRIDS[grid]
    check(T5[where.causal] if name == "t5" else ENCODINGS[name], where)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("_not_compiled")
@pytest.mark.parametrize("grid", MARKED)
@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "shaw keys", "deberta"])
def test_documents_padding_and_rows_that_see_nothing(name: str, grid: str) -> None:
    where = MARKED[grid]
    check(T5[where.causal] if name == "t5" else ENCODINGS[name], where)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("_not_compiled")
@pytest.mark.parametrize("name", ["rope", "alibi", "deberta"])
def test_sinks_and_caps(name: str) -> None:
    sinks = torch.linspace(-1, 2, HEADS)
    for where in (GRIDS["nothing to see"], MARKED["packed"]):
        check(ENCODINGS[name], where, sinks=sinks)
        check(ENCODINGS[name], where, sinks=sinks, softcap=0.8)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("_not_compiled")
def test_documents_in_one_graph() -> None:
    grid = Grid.of(Layout.packed([20, 13]), causal=True)
    given = inputs(grid)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, grid, ENCODINGS["alibi"], backend="flex")

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), run(*given))


@pytest.mark.parametrize("name", ["shaw keys", "deberta"])
def test_rows_are_read_at_offsets_before_their_products(name: str) -> None:
    """Pairs then find their product by arithmetic alone."""
    grid = GRIDS["chunk"]
    problem = Call(*inputs(grid), grid, ENCODINGS[name]).problem().rotated
    mod = score_mod(problem)
    assert mod is not None
    traced = make_fx(mod)(torch.zeros(1), *[torch.tensor([0]) for _ in range(4)]).graph
    # A tensor of one index a head or a pair: none of an index that was itself looked up.
    looked_up = [node for node in traced.nodes if node.target == torch.ops.aten.index.Tensor]
    for node in looked_up:
        indices = [index for index in node.args[1] if index is not None]
        assert not set(indices) & set(looked_up)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("_not_compiled")
def test_kernel_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def noted(*tensors: Tensor, kernel_options: object, **options: Any) -> Any:
        given.append(kernel_options)
        return flex_attention(*tensors, **options)

    monkeypatch.setattr(flex, "_kernels", lambda: (noted, create_block_mask))
    grid = GRIDS["causal"]
    for options in (None, {"BLOCK_M": 32}, {"num_stages": 2}):
        for name in ("nope", "alibi"):
            backend = Flex(kernel_options=options)
            attend(*inputs(grid), grid, ENCODINGS[name], backend=backend)
    one = {"num_stages": 1}
    fewer = {"BLOCK_M": 32}
    assert given == [None, one, fewer, one | fewer, {"num_stages": 2}, {"num_stages": 2}]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("_not_compiled")
@pytest.mark.parametrize("name", IMAGE_ENCODINGS)
@pytest.mark.parametrize("keys", [Layout.image(5, 6), Layout.image(3, 4)], ids=["same", "smaller"])
def test_images(name: str, keys: Layout) -> None:
    check(IMAGE_ENCODINGS[name], Grid(Layout.image(5, 6), keys))


REFUSALS = [
    (Encoding(), GRIDS["dense"], "on CUDA devices, not on cpu"),
    (posenc.create("shaw", head_dim=WIDTH), GRIDS["dense"], "no place for a value part"),
    (posenc.create("cope", heads=HEADS, head_dim=WIDTH), GRIDS["causal"], "no structured form"),
    (T5[False], Grid.of(Layout.at(torch.linspace(0, 9, 33))), "one position apart"),
    (
        posenc.create("swin", heads=HEADS, window=(5, 6)),
        Grid.of(Layout.image(5, 6).slice(1, 9)),
        "those of a whole image",
    ),
    (
        posenc.create("transformer_xl", dim=64, heads=HEADS, head_dim=WIDTH),
        Grid.of(Layout.sequence(600)),
        "1199 rows, more than 1024",
    ),
]


@pytest.mark.parametrize(("encoding", "grid", "reason"), REFUSALS)
def test_refuses_with_the_reason(
    encoding: Encoding, grid: Grid, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "CUDA" not in reason:
        monkeypatch.setattr(flex, "DEVICE", "cpu")
    with pytest.raises(BackendRefusal, match=reason):
        attend(*inputs(grid), grid, encoding, backend="flex")


def test_refuses_gradients_in_no_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "DEVICE", "cpu")
    grid = GRIDS["dense"]
    problem = Call(*inputs(grid), grid, T5[False]).problem().rotated
    assert isinstance(Flex().plan(problem), Plan)
    torch.use_deterministic_algorithms(True)
    try:
        assert "no fixed order" in str(Flex().plan(problem))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("_not_compiled")
def test_padding_holds_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "DEVICE", "cpu")
    grid, outputs = MARKED["padded"], []
    torch.manual_seed(0)
    given = inputs(grid)
    assert PADDED.valid is not None
    for fill in (0.0, torch.nan):
        filled = [x.masked_fill(~PADDED.valid.view(3, 1, 33, 1), fill) for x in given]
        outputs.append(attend(*filled, grid, ENCODINGS["rope"], backend="flex"))
    assert torch.equal(*outputs)


def test_many_kinds_of_calls_may_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's limit of eight is reached by one encoding: dtypes, masks, lengths, with LSE or not.

    Beyond it a call in one graph fails.
    """
    given: dict[str, object] = {}

    def compile_nothing(function: object, **options: object) -> object:
        given.update(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    flex._kernels.__wrapped__()
    assert given["fullgraph"] is True
    assert given.get("recompile_limit", 0) >= 100 or "recompile_limit" not in flex._COMPILE


@pytest.mark.parametrize(
    ("start", "max_distance", "expected"),
    [(0, None, (0, 8)), (0, 2, (1, 5)), (2, 2, (3, 7)), (100, 2, (8, 8)), (-100, 2, (0, 0))],
)
def test_entries_that_vary(start: int, max_distance: int | None, expected: tuple[int, int]) -> None:
    """Among the nine of four queries and six keys, which may be far apart."""
    entries = Entries.of(Grid(Layout.sequence(4, start=start), Layout.sequence(6)))
    assert entries is not None
    assert entries.varying(max_distance) == expected
