"""A term by key, which may be a long sum or hide keys, in the compiled kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc.attention import attend
from posenc.encoding import BucketedTerms, Encoding, ScoreTerm
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores
from posenc.grid import Grid
from posenc.layout import Layout
from tests.attention.comparing import built, compare, draw, results

pytestmark = [built, pytest.mark.usefixtures("poisoned")]


class ByKey(ScoreTerm):
    """A number for each key."""

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        self.numbers = nn.Parameter(numbers)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return self.numbers.expand(1, q.shape[1], q.shape[2], -1)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> tuple[BucketedTerms, ...]:
        column = self.numbers.expand(1, q.shape[1], -1)
        return (BucketedTerms(_one_bucket, table=q.new_zeros(q.shape[1], 1), column=column),)


def _one_bucket(offset: Offsets) -> BucketIndex:
    return torch.zeros_like(offset[..., 0], dtype=torch.int64)


GRIDS = {
    "full": Grid.of(Layout.sequence(600)),
    "causal": Grid.of(Layout.sequence(600), causal=True),
    "window": Grid.of(Layout.sequence(600), window=20),
    "packed": Grid.of(Layout.packed([200, 400]), causal=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lowest", [-1e4, -1e10, torch.finfo(torch.float32).min, -math.inf])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_keys_far_below_the_others(grid: Grid, lowest: float, dtype: torch.dtype) -> None:
    """Also where a row's last key is one of them, or the first of those that are added at once."""
    torch.manual_seed(1)
    numbers = torch.randn(600, dtype=dtype)
    numbers[300:312], numbers[-3:] = lowest, lowest
    encoding = Encoding(score=ByKey(numbers))
    inputs = draw(600, 600, rows=1, dtype=dtype)
    compare(inputs, grid, encoding, tolerance=2e-5 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("of_lse", [False, True])
@pytest.mark.parametrize("extra", [{}, {"sinks": True}, {"softcap": 1.5}])
@pytest.mark.parametrize("where", ["causal", "window"])
def test_gradients_of_the_softmax_and_what_joins_it(
    where: str, extra: dict[str, Any], *, of_lse: bool
) -> None:
    """Those of a row's logits sum to what a sink, a cap and the LSE leave, and only else to 0."""
    torch.manual_seed(2)
    encoding = Encoding(score=ByKey(torch.randn(600).double()))
    inputs, options = draw(600, 600, rows=1, dtype=torch.float64), dict(extra)
    if "sinks" in extra:
        options["sinks"] = torch.randn(inputs[0].shape[1]).double().requires_grad_()
        options["wanted"] = [options["sinks"]]
    compare(inputs, GRIDS[where], encoding, tolerance=1e-10, of_lse=of_lse, **options)


@pytest.mark.parametrize("backend", ["native", "blockwise", "reference"])
def test_rows_of_hidden_keys_alone(backend: str) -> None:
    """Nothing comes of keys of -inf, in values, LSE and gradients."""
    numbers = torch.zeros(600).double()
    numbers[200:207] = -math.inf
    encoding = Encoding(score=ByKey(numbers))
    inputs = draw(600, 600, rows=1, dtype=torch.float64)
    output, lse, *gradients = results(inputs, GRIDS["packed"], encoding, backend)
    assert output[:, :, 200:207].eq(0).all()
    assert lse[:, :, 200:207].isneginf().all()
    assert lse[:, :, :200].isfinite().all()
    assert gradients[0][:, :, 200:207].eq(0).all()
    assert all(x.isfinite().all() for x in gradients)


def test_long_sums_are_exact_near_the_greatest() -> None:
    """Sums of gates over a million tokens: logits are right where keys have weight."""
    numbers = torch.linspace(-1e6, 0, 600).double() - 3e7
    encoding, inputs = Encoding(score=ByKey(numbers)), draw(600, 600, rows=1)
    outputs = []
    for dtype, backend in ((torch.float32, "native"), (torch.float64, "reference")):
        q, k, v = (x.detach().to(dtype) for x in inputs)
        outputs.append(attend(q, k, v, GRIDS["causal"], encoding, backend=backend).double())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)
