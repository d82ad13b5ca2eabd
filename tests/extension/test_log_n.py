"""Logits that grow with the logarithm of the length."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create
from posenc.attention.problem.lowering import lower
from posenc.errors import ArgumentError
from posenc.extension import NotApplicable, extend
from posenc.testing.oracles import attention_by_loops

L = 6


def draw(length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4, length, 8)
    return tuple(torch.randn(shape, generator=generator).double() for _ in range(3))  # type: ignore[return-value]


def scaled(encoding: Encoding) -> Encoding:
    return extend(encoding, "log_n", length=L)


def test_the_factor_is_that_of_the_query() -> None:
    q, k, v = draw(15)
    grid = Grid.of(Layout.sequence(15), causal=True)

    def logit(a: Tensor, b: Tensor, _: int, at: float, __: float) -> Tensor:
        return max(1.0, math.log(at + 1) / math.log(L)) * (a @ b) * 8**-0.5

    expected = attention_by_loops(q, k, v, grid, logit=logit)
    got = attend(q, k, v, grid, scaled(Encoding()))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_by_hand() -> None:
    # The 36th token among L = 6: ln 36 / ln 6 = 2.
    q = torch.ones(1, 1, 1, 8)
    part = scaled(Encoding()).query_key
    assert part is not None
    turned, kept = part(q, q, Grid.of(Layout.sequence(1, start=35), causal=True))
    torch.testing.assert_close(turned, 2 * q)
    torch.testing.assert_close(kept, q)


def test_biases_are_scaled_too() -> None:
    """The whole logit, as if the scale of attention were larger for that query."""
    q, k, v = draw(15)
    for name in ("alibi", "deberta", "rope", "t5", "transformer_xl"):
        encoding = create(name, heads=4, head_dim=8, dim=32, max_length=20, causal=True)
        for parameter in encoding.parameters():
            torch.nn.init.normal_(parameter)
        longer = scaled(encoding.double())
        for n in (3, 11, 15):
            here, all_so_far = Layout.sequence(1, start=n - 1), Layout.sequence(n)
            grid = Grid(here, all_so_far, causal=True)
            part = (q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n])
            got = attend(*part, grid, longer, backend="reference")
            factor = max(1.0, math.log(n) / math.log(L))
            logits = logits_of(encoding, part[0], part[1], grid)
            expected = (logits * factor).softmax(-1) @ part[2]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def logits_of(encoding: Encoding, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    scale = encoding.default_scale(8)
    if encoding.query_key is not None:
        q, k = encoding.query_key(q, k, grid)
    logits = q @ k.mT * scale
    if encoding.score is not None:
        logits = logits + encoding.score(q, k, grid, scale=scale)
    return logits


def test_two_sided_attention_counts_the_row() -> None:
    q, k, v = draw(15)
    layout = Layout.padded([15, 9])
    got = attend(q, k, v, Grid.of(layout), scaled(Encoding()))
    for row, n in enumerate((15, 9)):
        part = [x[row : row + 1, :, :n] for x in (q, k, v)]
        expected = attend(
            part[0],
            part[1],
            part[2],
            Grid.of(Layout.sequence(n)),
            Encoding(),
            scale=8**-0.5 * math.log(n) / math.log(L),
        )
        torch.testing.assert_close(got[row : row + 1, :, :n], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["alibi", "shaw", "tupe", "forgetting", "xlnet"])
def test_structured_terms_stay_structured(name: str) -> None:
    encoding = create(name, heads=4, head_dim=8, dim=32, max_length=20, causal=True).double()
    layout = encoding.observe(torch.randn(2, 15, 32).double(), Layout.sequence(15))
    grid = Grid.of(layout, causal=True)
    q, k, v = draw(15)
    assert lower(scaled(encoding), q, k, grid, scale=1.0) is not None
    # The LSE tells constants of a query too.
    expected, got = (
        attend(q, k, v, grid, scaled(encoding), backend=backend, return_lse=True)
        for backend in ("reference", "blockwise")
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_joined_to_rerope_the_factor_counts_once() -> None:
    q, k, _ = draw(15)
    grid = Grid.of(Layout.sequence(15), causal=True)
    rope = create("rope", head_dim=8)
    plain = extend(rope, "rerope", length=L, window=3).score
    both = extend(rope, "rerope+log_n", length=L, window=3)
    assert both.query_key is not None
    assert plain is not None
    assert both.score is not None
    factor = (torch.arange(1.0, 16.0).clamp(min=L).log() / math.log(L)).view(1, 1, -1, 1)
    scores = both.score(*both.query_key(q, k, grid), grid, scale=1.0)
    torch.testing.assert_close(scores, plain(q, k, grid, scale=1.0) * factor)


def test_weights_without_a_softmax_are_refused() -> None:
    with pytest.raises(NotApplicable, match="softmax"):
        scaled(create("stick_breaking"))


def test_bad_length() -> None:
    with pytest.raises(ArgumentError, match="length"):
        extend(Encoding(), "log_n", length=1)
