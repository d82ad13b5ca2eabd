"""Selective RoPE against loops from its equations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention import LayerCache
from posenc.encodings.query_key.selective_rope import SelectiveRope
from posenc.errors import ArgumentError
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, agree_with_gradients, inputs

HEADS, WIDTH, DIM = 6, 8, 12


def make(**options: object) -> tuple[Encoding, SelectiveRope]:
    torch.manual_seed(0)
    context = {"dim": DIM, "heads": HEADS, "head_dim": WIDTH, "rank": 5, "base": 30.0}
    encoding = posenc.create("selective_rope", **context, **options)
    part = encoding.double().query_key
    assert isinstance(part, SelectiveRope)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_()
    return encoding, part


def normed(x: Tensor) -> Tensor:
    """Each head's share of a token's features, with length 1, but for what keeps it from 0 / 0."""
    shares = [share / (share @ share + 1e-6).sqrt() for share in x.split(DIM // HEADS)]
    return torch.cat(shares)


def angles(part: SelectiveRope, past: list[Tensor], head: int) -> Tensor:
    """Angles of the last of a document's tokens so far."""
    total = []
    for t in range(WIDTH // 2):
        row, phase = head * WIDTH // 2 + t, past[0].new_zeros(())
        for s in range(len(past)):
            frequency = past[0].new_zeros(())
            for lag in range(min(part.kernel, s + 1)):
                earlier = part.up.weight[row] @ (part.down.weight @ normed(past[s - lag]))
                frequency = frequency + part.taps[row, lag] * earlier
            if part.gates is not None:
                weight, bias = part.gates.weight[head], part.gates.bias[head]
                frequency = frequency * (weight @ normed(past[s]) + bias).sigmoid()
            phase = phase + frequency
        total.append(phase * 30.0 ** (-2 * t / WIDTH))
    return torch.stack(total)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2)
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine])


def entry(values: Tensor | None, b: int, i: int, default: int) -> int:
    return default if values is None else int(values[min(b, values.shape[0] - 1), i])


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("name", ["causal", "both ways", "more keys", "padded", "packed", "window"])
def test_equals_loops(name: str, gate: bool) -> None:
    """Outputs and the gradients of all weights; sums and convolutions within a document."""
    grid = GRIDS[name]
    q, k, v = inputs(grid, heads=HEADS, width=WIDTH)
    encoding, part = make(gate=gate)
    x = torch.randn(2, grid.key.length, DIM).double()
    key = grid.key

    def rotated(y: Tensor, layout: Layout) -> Tensor:
        rows = []
        for b in range(2):
            for h in range(HEADS):
                for i in range(y.shape[2]):
                    order = entry(layout.order, b, i, 0)
                    document = entry(layout.document, b, i, 0)
                    past = [
                        x[b, j]
                        for j in range(key.length)
                        if entry(key.valid, b, j, 1)
                        and entry(key.document, b, j, 0) == document
                        and entry(key.order, b, j, 0) <= order
                    ]
                    rows.append(turned(y[b, h, i], angles(part, past, h)) if past else y[b, h, i])
        return torch.stack(rows).view_as(y)

    keys = k.repeat_interleave(2, dim=1)
    expected = attention_by_loops(
        rotated(q, grid.query), rotated(keys, key), v.repeat_interleave(2, 1), grid
    )
    observed = encoding.observe(x, key)
    query = (
        observed
        if grid.query is key
        else grid.query.with_signal(observed.signal[:, -grid.query.length :])
    )
    got = attend(q, k, v, replace(grid, query=query, key=observed), encoding)
    agree_with_gradients(got, expected, list(part.parameters()), rtol=1e-4, atol=1e-5)


def test_by_hand() -> None:
    """Constant features with weights of 1: an angle of 4/4 a token, less where the past is short.

    The convolution's taps of a quarter see 1, 2, 3, 4 and 4 tokens: sums of ¼, ¾, 1½, 2½, 3½.
    """
    encoding = posenc.create("selective_rope", dim=1, heads=1, head_dim=2, rank=1)
    part = encoding.query_key
    with torch.no_grad():
        part.down.weight.fill_(1.0)
        part.up.weight.fill_(1.0)
        part.taps.fill_(0.25)
    grid = Grid.of(encoding.observe(torch.full((1, 5, 1), 7.0), Layout.sequence(5)), causal=True)
    for angle in part.angles(grid):
        assert angle.flatten().tolist() == pytest.approx([0.25, 0.75, 1.5, 2.5, 3.5], abs=1e-6)


def test_sums_go_on_behind_a_cache() -> None:
    """Beyond the taps too, in chunks."""
    encoding, _ = make(gate=True)
    layer = posenc.Attention(
        dim=DIM, heads=HEADS, head_dim=WIDTH, encoding=encoding, causal=True
    ).double()
    x, cache, parts = torch.randn(2, 17, DIM).double(), LayerCache(), []
    for begin, end in ((0, 6), (6, 7), (7, 8), (8, 15), (15, 17)):
        parts.append(layer(x[:, begin:end], Layout.sequence(end - begin, begin), cache=cache))
    expected = layer(x, Layout.sequence(17))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-9, atol=1e-10)


def test_keys_stored_in_another_order() -> None:
    encoding, part = make()
    x, shuffled = torch.randn(1, 9, DIM).double(), torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])
    plain = Grid.of(encoding.observe(x, Layout.sequence(9)), causal=True)
    stored = plain.query.with_signal(plain.query.signal)
    moved = replace(
        stored,
        positions=stored.positions[:, shuffled],
        order=stored.order[:, shuffled],
        signal=stored.signal[:, shuffled],
        start=None,
    )
    expected = part.angles(plain)[1][:, :, shuffled]
    torch.testing.assert_close(part.angles(Grid.of(moved, causal=True))[1], expected)


def test_heads_have_shares_of_the_features() -> None:
    with pytest.raises(ArgumentError, match="multiple of the 5 heads"):
        posenc.create("selective_rope", dim=12, heads=5, head_dim=8)
