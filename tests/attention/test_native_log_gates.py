"""The compiled kernels' sums of gates' logarithms (GRAPE), against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posenc.encoding import Encoding, LogGateSums, ScoreTerm
from posenc.encoding.tensors import Keys, Queries, Scores
from posenc.encodings.common.prefix_sums import KeyRanks
from posenc.grid import Grid
from posenc.layout import Layout
from tests.attention.comparing import agree, built, cast, results
from tests.testing.tolerances import distance, tolerance

pytestmark = [built, pytest.mark.usefixtures("poisoned")]

GATES = 8


class Gated(ScoreTerm):
    """Sums of gates' logarithms by given vectors, ``[B|1, H, Q, E]`` and ``[B|1, H, K, E]``."""

    causal_only = True
    pairwise = False

    def __init__(self, query: Tensor, key: Tensor, slope: Tensor) -> None:
        super().__init__()
        self.query, self.key, self.slope = query, key, slope

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        logs = torch.nn.functional.logsigmoid(self.query @ self.key.mT)
        steps = self.slope.view(-1, 1, 1) * logs
        return KeyRanks.of(grid).after_key(steps.masked_fill(~grid.visible, 0.0))

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> LogGateSums:
        return LogGateSums(self.query, self.key, self.slope)


def _inputs(
    queries: int, keys: int, slopes: list[float], *, rows: int = 1, width: int = 16
) -> list[Tensor]:
    """q, k and v, then the gates' vectors of queries and keys, in float64."""
    torch.manual_seed(4)
    heads = len(slopes)
    sizes = [(rows, heads, n, width) for n in (queries, keys, keys)]
    sizes += [(1, heads, n, GATES) for n in (queries, keys)]
    return [torch.randn(size, dtype=torch.float64) for size in sizes]


def _results(
    inputs: list[Tensor],
    grid: Grid,
    slopes: list[float],
    backend: str,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> list[Tensor]:
    """Output, LSE and the gradients of all inputs."""
    given = cast(inputs, dtype)
    encoding = Encoding(score=Gated(*given[3:], torch.tensor(slopes, dtype=dtype)))
    return results(given[:3], grid, encoding, backend, wanted=given[3:], of_lse=True, **options)


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("length", [127, 128, 129, 511, 512, 513, 1100])
def test_gates_of_any_size_at_the_edges_of_tiles(length: int, size: float) -> None:
    slopes, grid = [0.5, 2**-6], Grid.of(Layout.sequence(length), causal=True)
    inputs = _inputs(length, length, slopes)
    inputs[3] *= size
    expected = _results(inputs, grid, slopes, "reference")
    agree(_results(inputs, grid, slopes, "native"), expected, 1e-9)
    single = _results(inputs, grid, slopes, "native", torch.float32)
    agree(single, expected, 1e-4)


@pytest.mark.parametrize("slope", [0.0, 2**-8, 0.5])
def test_sums_over_many_keys_are_as_exact_as_the_definition(slope: float) -> None:
    keys = Layout.sequence(16384)
    grid = Grid(keys.slice(16376, 16384), keys, causal=True)
    inputs = _inputs(8, 16384, [slope])
    inputs[3] *= 0.1
    found = [
        _results(inputs, grid, [slope], backend, dtype)
        for backend, dtype in (
            ("native", torch.float32),
            ("reference", torch.float32),
            ("reference", torch.float64),
        )
    ]
    for got, reference, exact in zip(*found, strict=True):
        assert distance(got, exact) <= tolerance(reference, exact)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -torch.inf])])
def test_sinks_and_softcap(softcap: float | None, sinks: Tensor | None) -> None:
    slopes, options = [0.5, 2**-6], {"softcap": softcap, "sinks": sinks}
    for grid in (
        Grid.of(Layout.sequence(600), causal=True),
        Grid.of(Layout.packed([20, 1, 44]), causal=True, window=30),
    ):
        inputs = _inputs(grid.query.length, grid.key.length, slopes, rows=2)
        expected = _results(inputs, grid, slopes, "reference", **options)
        agree(_results(inputs, grid, slopes, "native", **options), expected, 1e-9)


def test_no_tile_of_keys_is_left_out_under_a_cap() -> None:
    """However far sums of gates fall: the logits of all far keys are the cap's lowest."""
    keys, slopes = Layout.sequence(1100), [0.5]
    grid, inputs = Grid(keys.slice(1068, 1100), keys, causal=True), _inputs(32, 1100, slopes)
    expected = _results(inputs, grid, slopes, "reference", softcap=0.7)
    got = _results(inputs, grid, slopes, "native", torch.float32, softcap=0.7)
    agree(got, expected, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 40.0])
def test_keys_without_weight_and_far_ones_that_outweigh_their_sums(
    size: float, dtype: torch.dtype
) -> None:
    """Tiles of keys are left out where sums outweigh all products; at first, one key does not."""
    slopes, grid = [0.5, 2.0], Grid.of(Layout.sequence(1300), causal=True)
    inputs = _inputs(1300, 1300, slopes)
    inputs[1] *= size
    inputs[1][:, :, 3] = 60 * inputs[0][:, :, 1290]
    inputs = [x.to(dtype).double() for x in inputs]
    expected = _results(inputs, grid, slopes, "reference")
    got = _results(inputs, grid, slopes, "native", dtype)
    bound = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 0.04}[dtype]
    agree(got, expected, bound)


def test_a_key_of_nan_has_its_effect_at_any_distance() -> None:
    """Nothing outweighs its products."""
    slopes, grid = [0.5], Grid.of(Layout.sequence(600), causal=True)
    inputs = _inputs(600, 600, slopes)
    inputs[1][:, :, 0] = torch.nan
    output, *_ = _results(inputs, grid, slopes, "native", torch.float32)
    assert output.isnan().all()
