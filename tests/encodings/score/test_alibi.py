"""ALiBi against loops, the Bloom and MPT models' biases, and numbers by hand."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import posenc
from posenc import Grid, Layout, attend
from posenc.encodings.score.alibi import Alibi, geometric_slopes
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid) -> None:
    q, k, v = inputs(grid)
    # By hand for six heads: those of four, 2^-2 … 2^-8, then 2^-1 and 2^-3 of eight.
    slopes = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    expected = attention_by_loops(
        q, k, v, grid, bias=lambda h, b, at, to: -slopes[h] * abs(to - at)
    )
    got = attend(q, k, v, grid, posenc.create("alibi", heads=6), backend="reference")
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20])
def test_slopes_are_blooms_in_bloom_order(heads: int) -> None:
    """Slope order when heads are no power of two (FIELD: ALiBi traps)."""
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(geometric_slopes(heads)), bloom)


def test_equals_mpts_bias_up_to_the_rows_constant() -> None:
    mpt = build_mpt_alibi_tensor(8, 5)
    bias = Alibi(heads=8).bias(torch.arange(-4.0, 1.0))
    torch.testing.assert_close(bias, mpt[:, 0])


def test_a_number_by_hand() -> None:
    # Eight heads: the third slope is 1/8; three tokens back cost 3/8.
    assert Alibi(heads=8).bias(torch.tensor([-3.0]))[2].item() == -0.375


def test_never_rewards_the_future() -> None:
    bias = Alibi(heads=6).bias(torch.arange(-50.0, 51.0))
    assert (bias <= 0).all()
    torch.testing.assert_close(bias, bias.flip(1))


def test_half_precision_tells_the_last_tokens_apart() -> None:
    """flash-attention #845: slopes cast to half; bf16 biases merge neighbours far out."""
    alibi = Alibi(heads=8, learned=True).bfloat16()
    far = alibi.bias(torch.arange(-2048.0, -1984.0))
    assert far.dtype == torch.float32
    assert len(far[0].unique()) == 64


def test_long_biases_do_not_overflow() -> None:
    """pytorch #107959: an ALiBi bias at 8192 overflows."""
    bias = Alibi(heads=4).half().bias(torch.arange(-100_000.0, 0.0, 1000.0))
    assert bias.isfinite().all()


def test_queries_after_the_keys_align_by_position() -> None:
    """FIELD: bottom-right alignment for q ≠ k lengths comes from positions, not from shapes."""
    alibi = Alibi(heads=2)
    grid = Grid(Layout.sequence(1, start=9), Layout.sequence(10))
    q, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 10, 4)
    row = alibi(q, k, grid, scale=1.0)[0, 0, 0]
    assert row.tolist() == [-geometric_slopes(2)[0] * (9 - j) for j in range(10)]


def test_learned_slopes_train_and_stay_positive() -> None:
    """flash-attention #1977: trainable slopes."""
    alibi = Alibi(heads=3, learned=True, asymmetric=True)
    assert alibi.log_slopes is not None
    offsets = torch.tensor([-2.0, 0.0, 2.0])
    torch.testing.assert_close(alibi.bias(offsets), Alibi(heads=3).bias(offsets))
    alibi.bias(offsets).sum().backward()
    assert alibi.log_slopes.grad is not None
    assert (alibi.log_slopes.grad != 0).all()
    with torch.no_grad():
        alibi.log_slopes[1] += 1.0
    past, _, ahead = alibi.requires_grad_(False).bias(offsets)[0].tolist()
    assert ahead == pytest.approx(past * 2.718281828, rel=1e-5)
