"""Tables by offset where positions are far from one another; ``attention_fuzz`` has others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention.backends.native.posing import record_of
from posenc.attention.call import Call
from posenc.attention.problem.offsets import Offsets
from posenc.errors import BackendRefusal
from tests.attention.comparing import built, compare, draw_for


def _encoding(name: str) -> Encoding:
    torch.manual_seed(3)
    return posenc.create(name, heads=4, head_dim=8).double()


def _inputs(grid: Grid) -> list[Tensor]:
    return draw_for(grid, rows=1, width=8, dtype=torch.float64)


@built
def test_tables_are_of_the_offsets_that_occur() -> None:
    grid = Grid(Layout.sequence(30, 2**40), Layout.sequence(35))
    inputs, encoding = _inputs(grid), _encoding("fire")
    problem = Call(*inputs, grid, encoding).problem().rotated
    assert encoding.score is not None
    form = encoding.score.fuse(problem.q, problem.k, grid, scale=problem.scale)
    assert form is not None
    record = record_of(problem, Offsets.regular(grid), (), form)
    assert len(record.pairs.tensors[0]) <= 30 + 35
    assert explain(*inputs, grid, encoding, backend="native").backend == "native"


@built
@pytest.mark.parametrize("distance", [2**16, 2**32, 2**40])
def test_documents_far_from_one_another(distance: int) -> None:
    """Tables would hold all offsets between them."""
    packed = Layout.packed([20, 15])
    apart = packed.document * distance  # type: ignore[operator]
    query = Layout(packed.positions.double() + apart[..., None], packed.order + apart, apart)
    grid = Grid(query, Layout(packed.positions, packed.order, apart))
    encoding = _encoding("contextual")
    compare(_inputs(grid), grid, encoding, "auto", tolerance=1e-9)
    with pytest.raises(BackendRefusal, match="too far apart"):
        attend(*_inputs(grid), grid, encoding, backend="native")


@built
def test_rows_without_documents_are_as_far_as_the_others() -> None:
    """Nothing is visible in them, but kernels read the terms of hidden pairs too."""
    order = torch.arange(20).expand(2, -1) + 2**40
    valid = torch.tensor([[True], [False]]).expand(2, 20)
    query = Layout(order.double().unsqueeze(-1), order, valid=valid)
    grid = Grid(query, Layout.padded([20, 20]))
    torch.manual_seed(5)
    inputs = tuple(torch.randn(2, 4, 20, 8) for _ in range(3))
    encoding = _encoding("contextual").float()
    got, expected = (attend(*inputs, grid, encoding, backend=b) for b in ("native", "reference"))  # type: ignore[misc]
    torch.testing.assert_close(got, expected)
