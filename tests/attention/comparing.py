"""What a backend computes of a call, beside what the definition does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc.attention import attend
from posenc.attention.backends.native.build import COMMAND, missing
from posenc.encoding import Encoding
from posenc.grid import Grid
from posenc.testing.subject import learned
from tests.testing.tolerances import distance, size

built = pytest.mark.skipif(missing() is not None, reason=f"kernels are not built; {COMMAND}")
"""For tests of the compiled kernels."""


def draw(
    queries: int,
    keys: int,
    *,
    heads: int = 4,
    groups: int = 2,
    rows: int = 2,
    width: int = 24,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Queries, keys and values that require gradients, the same at every call."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(rows, count, length, width, generator=generator).to(dtype).requires_grad_()
        for count, length in ((heads, queries), (groups, keys), (groups, keys))
    ]


def draw_for(grid: Grid, **options: Any) -> list[Tensor]:
    """What ``draw`` gives for a grid's tokens and, if more than two, its rows."""
    options.setdefault("rows", max(2, grid.query.batch))
    return draw(grid.query.length, grid.key.length, **options)


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Leaves of the same numbers in another precision."""
    return [x.detach().to(dtype).requires_grad_() for x in tensors]


def results(
    inputs: Sequence[Tensor],
    grid: Grid,
    encoding: Encoding,
    backend: str,
    *,
    wanted: Sequence[Tensor] = (),
    lse: bool = True,
    of_lse: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Output, LSE if there is one, and all gradients; zeros where there is none.

    Args:
        inputs: queries, keys and values.
        wanted: what else has gradients, besides ``inputs`` and parameters.
        lse: ask for the LSE where the weights are a softmax.
        of_lse: gradients are of the LSE, too.
    """
    leaves = [*inputs, *wanted, *learned(encoding)]
    asked: Any = lse and (encoding.score is None or not encoding.score.replaces_softmax)
    made: Any = attend(*inputs, grid, encoding, backend=backend, return_lse=asked, **options)  # type: ignore[misc]
    output, *sums = made if asked else (made,)
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    loss = (output * weight).sum()
    if of_lse:
        loss = loss + sums[0].masked_fill(sums[0].isneginf(), 0.0).sin().sum()
    # The graph is kept, as backends share that of the signals.
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)
    return [output, *sums, *gradients]


def agree(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 2e-5) -> None:
    """Require equal results within a tolerance relative to their largest number, if above 1."""
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        off, allowed = distance(mine, theirs), tolerance * size(theirs)
        assert off <= allowed, f"result {index} is off by {off:.3g}, more than {allowed:.3g}"


def compare(
    inputs: Sequence[Tensor],
    grid: Grid,
    encoding: Encoding,
    backend: str = "native",
    *,
    tolerance: float = 2e-5,
    **options: Any,
) -> None:
    """Require a backend's ``results`` to be those of the reference in the same precision."""
    expected = results(inputs, grid, encoding, "reference", **options)
    agree(results(inputs, grid, encoding, backend, **options), expected, tolerance)


def compare_dropped(
    inputs: Sequence[Tensor],
    grid: Grid,
    encoding: Encoding,
    backend: str,
    *,
    share: float = 0.3,
    tolerance: float = 1e-6,
    **options: Any,
) -> None:
    """Require weights to be dropped, a share of them, and the same ones backward.

    With unit vectors for values the output shows the weights that were kept.
    """
    q, k, v = inputs
    scores = Encoding(query_key=encoding.query_key, score=encoding.score)
    units = torch.eye(grid.key.length, dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    weights = attend(q, k, units, grid, scores, backend="reference", **options)
    torch.manual_seed(2)
    dropped = attend(q, k, units, grid, scores, backend=backend, dropout=share, **options)
    kept = (dropped != 0).detach()
    assert abs(kept.sum() / (weights != 0).sum() - 1 + share) < 0.06
    weights = weights * kept / (1 - share)
    torch.testing.assert_close(dropped, weights, atol=tolerance, rtol=tolerance)
    torch.manual_seed(2)
    output = attend(q, k, v, grid, encoding, backend=backend, dropout=share, **options)
    expected = weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    if encoding.value is not None:
        expected = expected + encoding.value(weights, grid)
    wanted = [*inputs, *learned(encoding), *filter(torch.is_tensor, options.values())]
    found = [
        torch.autograd.grad(x.sin().sum(), wanted, retain_graph=True) for x in (output, expected)
    ]
    agree([output, *found[0]], [expected, *found[1]], tolerance)
