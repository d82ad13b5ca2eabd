"""The compiled kernels in bfloat16, by AMX where the processor has it (or it is emulated)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc.attention import attend
from posenc.encoding import Encoding
from posenc.grid import Grid
from posenc.layout import Layout
from tests.attention.comparing import built

pytestmark = [built, pytest.mark.usefixtures("poisoned")]

HEADS = 2


def _encoding(name: str, width: int, *, causal: bool) -> Encoding:
    torch.manual_seed(3)
    options = {"max_distance": 5} if name == "shaw" else {}
    dim = HEADS * width
    encoding = posenc.create(name, dim=dim, heads=HEADS, head_dim=width, causal=causal, **options)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return encoding


def _tokens(queries: int, keys: int, width: int, rows: int = 2) -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randn(rows, HEADS, n, width).bfloat16() for n in (queries, keys, keys)]


def _both(encoding: Encoding, grid: Grid, tokens: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Output and LSE of the reference in float64, then of the kernels in bfloat16."""
    wide = (x.double() for x in tokens)
    with torch.no_grad():
        exact = attend(*wide, grid, encoding.double(), backend="reference", return_lse=True)
        found = attend(*tokens, grid, encoding.float(), backend="native", return_lse=True)
    return [exact, found]


def _off(got: Tensor, exact: Tensor) -> float:
    """The largest error, relative to the largest number."""
    return float((got - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("length", [160, 800])
@pytest.mark.parametrize("rise", [-300.0, 0.0, 15.0, 600.0])
@pytest.mark.parametrize(("name", "width"), [("nope", 64), ("t5", 48), ("shaw", 48)])
def test_logits_above_those_of_the_keys_before(
    name: str, width: int, rise: float, length: int
) -> None:
    """Logits of the last keys are ``rise`` above those of the first.

    Keys go by parts, relative to those before as far as weights have room for it.
    """
    sequence = Layout.sequence(length)
    full, causal = (Grid.of(sequence, causal=causal) for causal in (False, True))
    tokens = _tokens(length, length, width, rows=1)
    tokens[0][..., 0] = 1.0
    tokens[1][..., 0] = torch.linspace(0.0, rise * width**0.5, length)
    for grid in (full, causal, Grid.of(sequence, window=length // 2)):
        encoding = _encoding(name, width, causal=grid.causal)
        (exact, sums), (output, lse) = _both(encoding, grid, tokens)
        assert _off(output, exact) < 0.02
        assert _off(lse, sums) < 2e-6


def test_first_keys_without_weight() -> None:
    """The first logits that are finite are far below 0."""
    encoding, sequence = _encoding("t5", 64, causal=False), Layout.sequence(300)
    for table in encoding.parameters():
        table.data[:, 15] = -torch.inf  # of keys far before
    q, k, v = _tokens(300, 300, 64, rows=1)
    q[..., 0], k[..., 0] = 40.0, -40.0
    found = [
        attend(*(x.to(dtype) for x in (q, k, v)), Grid.of(sequence), encoding, backend=backend)
        for dtype, backend in ((torch.float32, "reference"), (torch.bfloat16, "native"))
    ]
    torch.testing.assert_close(found[1].float(), found[0], atol=0.02, rtol=0.02)


def test_biases_far_above_all_products() -> None:
    """Keys far before a query have a logit of 200 more, far beyond float32's exponents."""
    encoding = _encoding("shaw", 64, causal=False)
    for rows in encoding.parameters():
        rows.data[..., 0, 0] = 1600.0
    tokens = _tokens(800, 800, 64, rows=1)
    tokens[0][..., 0] = 1.0
    (exact, _), (output, _) = _both(encoding, Grid.of(Layout.sequence(800)), tokens)
    assert _off(output, exact) < 0.01


@pytest.mark.parametrize("width", [48, 64])
@pytest.mark.parametrize("name", ["nope", "t5"])
def test_errors_are_those_of_rounding(name: str, width: int) -> None:
    """Outputs err as much as weights and outputs rounded once; the LSE is float32's."""
    encoding, grid = _encoding(name, width, causal=False), Grid.of(Layout.sequence(512))
    (expected, expected_lse), (output, lse) = _both(encoding, grid, _tokens(512, 512, width))
    error = (output.double() - expected).square().mean().sqrt()
    assert error < 2.6e-3 * expected.square().mean().sqrt()
    assert (lse - expected_lse).abs().max() < 8e-7


@pytest.mark.parametrize("size", [1.0, 10.0])
@pytest.mark.parametrize("name", ["transformer_xl", "deberta"])
def test_rows_in_float32_are_not_rounded(name: str, size: float) -> None:
    """The LSE errs by a thousandth of what rows rounded to bfloat16 would change it by."""
    encoding, grid = _encoding(name, 48, causal=False), Grid.of(Layout.sequence(300))
    q, k, v = _tokens(300, 300, 48)
    (_, expected), (_, lse) = _both(encoding, grid, [q * size, k, v])
    assert _off(lse, expected) < 4e-6


def test_powers_are_as_precise_as_float32() -> None:
    """The LSE of logits 0 and -x, which bfloat16 holds as they are: log(1 + exp(-x))."""
    x = torch.arange(0.0, 8.0, 1 / 32)
    q, k = torch.zeros(1, 1, len(x), 32), torch.zeros(1, 1, 2, 32)
    q[..., 0], k[0, 0, 1, 0] = x, -1
    q, k = q.bfloat16(), k.bfloat16()
    grid = Grid(Layout.sequence(len(x)), Layout.sequence(2))
    _, lse = attend(
        q, k, k, grid, posenc.create("nope"), backend="native", scale=1.0, return_lse=True
    )
    assert (lse.flatten() - (-x.double()).exp().log1p()).abs().max() < 2e-7


@pytest.mark.parametrize("name", ["nope", "t5", "shaw", "stick_breaking"])
def test_dropout_is_that_of_float32(name: str) -> None:
    grid, encoding = Grid.of(Layout.sequence(600), causal=True), _encoding(name, 64, causal=True)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (x.to(dtype).requires_grad_() for x in _tokens(600, 600, 64))
        torch.manual_seed(7)
        output = attend(q, k, v, grid, encoding, backend="native", dropout=0.3)
        gradients = torch.autograd.grad(output.float().square().sum(), (q, k, v))
        found.append([x.detach().float() for x in (output, *gradients)])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 0.03 * one.abs().max()


def test_not_a_number_stays_in_its_row() -> None:
    q, k, v = _tokens(70, 70, 64)
    bits = q.view(torch.int16)
    bits[0, 0, 3] = 0x7FC1
    output = attend(q, k, v, Grid.of(Layout.sequence(70)), posenc.create("nope"), backend="native")
    rows = output.isnan().all(dim=-1)
    assert rows[0, 0, 3]
    assert rows.sum() == 1
    assert output.isnan().sum() == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_shared_heads_are_summed_before_they_are_rounded(dtype: torch.dtype) -> None:
    """Those of two heads, nearly of opposite sign, leave little of each."""
    torch.manual_seed(6)
    q, gradient = torch.randn(2, 1, 2, 40, 16).to(dtype).repeat(1, 1, 2, 1, 1)
    gradient = torch.cat([gradient[:, :2], -gradient[:, 2:] * 1.0078125], dim=1)
    k, v = torch.randn(2, 1, 1, 40, 16).to(dtype)
    grid, sums = Grid.of(Layout.sequence(40), causal=True), []
    for backend, wide in (("reference", torch.float64), ("native", dtype)):
        values = v.to(wide).requires_grad_()
        output = attend(q.to(wide), k.to(wide), values, grid, Encoding(), backend=backend)
        sums += torch.autograd.grad(output, values, gradient.to(wide))
    off = (sums[0] - sums[1]).abs().max() / sums[0].abs().max()
    assert off <= torch.finfo(dtype).eps
