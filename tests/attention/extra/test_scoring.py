"""Scoring functions by hand and in loops, and the softmax that hidden keys get nothing from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc.attention.extra import (
    Additive,
    Bilinear,
    Dot,
    MultiHeadScoring,
    ScaledDot,
    ScoringFunction,
    masked_softmax,
    within_lengths,
)
from posenc.errors import ArgumentError


def test_hidden_keys_get_nothing_and_the_rest_sums_to_one() -> None:
    logits = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    visible = torch.rand(2, 1, 4, 5) > 0.4
    weights = masked_softmax(logits, visible)
    assert (weights.masked_select(~visible) == 0).all()
    seen = visible.any(-1).expand(2, 3, 4)
    torch.testing.assert_close(weights.sum(-1), seen.double())


def test_empty_rows_are_zero_with_zero_gradients() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    visible = torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])
    weights = masked_softmax(logits, visible)
    (weights * torch.arange(4)).sum().backward()
    assert (weights[1] == 0).all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[1] == 0).all()
    assert (logits.grad[0] != 0).any()


def test_large_logits_do_not_overflow() -> None:
    weights = masked_softmax(torch.tensor([[1e30, -1e30, 1e30]]), torch.ones(1, 3).bool())
    assert weights.tolist() == [[0.5, 0.0, 0.5]]


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers).view(1, -1, 1)


def test_the_worked_example() -> None:
    """METHODS: one number a word; without positions 我·爱 is 爱·我."""
    words = column(0.5, 0.6, 0.7)
    plain = Dot()(words, words)[0]
    torch.testing.assert_close(plain, plain.mT)
    assert plain[0, 1].item() == pytest.approx(0.30)
    placed = Dot()(words, words + column(0.0, 1.0, 2.0))[0]
    rows = [[0.25, 0.80, 1.35], [0.30, 0.96, 1.62], [0.35, 1.12, 1.89]]
    torch.testing.assert_close(placed, torch.tensor(rows))


def test_dot_and_scaled_dot_by_hand() -> None:
    query = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    key = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, -2.0, 1.0, 0.0]])
    assert Dot()(query, key).tolist() == [[7.0, -1.0]]
    assert ScaledDot()(query, key).tolist() == [[3.5, -0.5]]


def test_weights_begin_within_what_their_inputs_say() -> None:
    additive = Additive(query_dim=40, key_dim=10, hidden=90, heads=9)
    weights = {40: additive.query, 10: additive.key, 90: additive.weight}
    weights[8] = Bilinear(query_dim=50, key_dim=8).weight
    for inputs, weight in weights.items():
        assert 0.95 < weight.abs().max() * inputs**0.5 <= 1


def test_bilinear_by_hand() -> None:
    # [1, 2] W = [1·1 + 2·3, 1·0 + 2·1, 0 + 2·2] = [7, 2, 4]; times [1, 10, 100]: 427.
    score = Bilinear(query_dim=2, key_dim=3)
    with torch.no_grad():
        score.weight.copy_(torch.tensor([[[1.0, 0.0, 0.0], [3.0, 1.0, 2.0]]]))
    assert score(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 10.0, 100.0]])).item() == 427.0


def test_additive_by_hand() -> None:
    # Hidden 0: tanh(1·2 - 1·2) = 0; hidden 1: tanh(0·2 + 1/2·2) = tanh 1; w = [5, 2].
    score = Additive(query_dim=1, key_dim=1, hidden=2)
    with torch.no_grad():
        score.query.copy_(torch.tensor([[[1.0, 0.0]]]))
        score.key.copy_(torch.tensor([[[-1.0, 0.5]]]))
        score.weight.copy_(torch.tensor([[5.0, 2.0]]))
    logit = score(torch.tensor([[2.0]]), torch.tensor([[2.0]]))
    assert logit.item() == pytest.approx(2 * math.tanh(1))


@pytest.mark.parametrize("heads", [1, 3])
def test_bilinear_and_additive_equal_loops(heads: int) -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(2, heads, 4, 5, generator=generator, dtype=torch.float64)
    key = torch.randn(2, heads, 6, 3, generator=generator, dtype=torch.float64)
    bilinear = Bilinear(query_dim=5, key_dim=3, heads=heads).double()
    additive = Additive(query_dim=5, key_dim=3, hidden=7, heads=heads).double()
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (2, heads, 4, 6))).tolist():
        q, k = query[b, h, i], key[b, h, j]
        product = sum(q[d] * bilinear.weight[h, d, e] * k[e] for d in range(5) for e in range(3))
        torch.testing.assert_close(bilinear(query, key)[b, h, i, j], product)
        inner = torch.tanh(additive.query[h].T @ q + additive.key[h].T @ k)
        torch.testing.assert_close(additive(query, key)[b, h, i, j], inner @ additive.weight[h])


def test_one_head_needs_no_axis_of_heads() -> None:
    query, key = torch.randn(2, 4, 5), torch.randn(2, 6, 5)
    for score in (
        Bilinear(query_dim=5, key_dim=5),
        Additive(query_dim=5, key_dim=5, hidden=3),
        Dot(),
    ):
        assert score(query, key).shape == (2, 4, 6)
        assert score(query[0], key[0]).shape == (4, 6)


def test_valid_lengths_by_row_and_by_query() -> None:
    row = within_lengths(torch.tensor([2, 0]), 3)
    assert row.tolist() == [[[True, True, False]], [[False] * 3]]
    query = within_lengths(torch.tensor([[1, 3]]), 3)
    assert query.tolist() == [[[True, False, False], [True] * 3]]
    weights = masked_softmax(torch.zeros(1, 2, 3), query)
    torch.testing.assert_close(weights, torch.tensor([[[1.0, 0.0, 0.0], [1 / 3] * 3]]))


def make(score: type[ScoringFunction], **options: Any) -> MultiHeadScoring:
    def of_head(width: int, heads: int) -> ScoringFunction:
        if score in (Dot, ScaledDot):
            return score()
        extra = {"hidden": 6} if score is Additive else {}
        return score(query_dim=width, key_dim=width, heads=heads, **extra)

    torch.manual_seed(3)
    return MultiHeadScoring(dim=12, heads=3, score=of_head, **options).double()


@pytest.mark.parametrize("score", [Dot, ScaledDot, Bilinear, Additive])
def test_multi_head_equals_one_head_at_a_time(score: type[ScoringFunction]) -> None:
    layer = make(score, key_dim=7, value_dim=5)
    generator = torch.Generator().manual_seed(4)
    queries, keys, values = (
        torch.randn(2, length, width, generator=generator, dtype=torch.float64)
        for length, width in ((4, 12), (6, 7), (6, 5))
    )
    lengths = torch.tensor([6, 2])
    heads = []
    for h in range(3):
        part = slice(4 * h, 4 * h + 4)
        q, k, v = (
            x @ projection.weight[part].T
            for x, projection in zip(
                (queries, keys, values), (layer.query, layer.key, layer.value), strict=True
            )
        )
        alone = layer.score
        if score in (Bilinear, Additive):
            alone = make(score).score
            for one, all_heads in zip(alone.parameters(), layer.score.parameters(), strict=True):
                one.data = all_heads.data[h : h + 1]
        rows = []
        for b in range(2):
            seen = int(lengths[b])
            rows.append(torch.softmax(alone(q[b], k[b, :seen]), dim=-1) @ v[b, :seen])
        heads.append(torch.stack(rows))
    expected = torch.cat(heads, dim=-1) @ layer.output.weight.T
    torch.testing.assert_close(layer(queries, keys, values, lengths=lengths), expected)


@pytest.mark.parametrize("score", [Dot, ScaledDot, Bilinear, Additive])
def test_what_sees_nothing_is_zero_and_has_zero_gradients(score: type[ScoringFunction]) -> None:
    layer = make(score)
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    output = layer(x, x, x, lengths=torch.tensor([3, 0]))
    assert (output[1] == 0).all()
    (gradient,) = torch.autograd.grad(output.sin().sum(), [x])
    assert gradient.isfinite().all()
    assert (gradient[1] == 0).all()
    assert (gradient[0] != 0).any()


@pytest.mark.parametrize("by", ["lengths", "visible"])
def test_keys_that_no_query_sees_may_hold_anything(by: str) -> None:
    layer, x = make(ScaledDot), torch.randn(1, 4, 12, dtype=torch.float64)
    hidden = x.masked_fill(torch.arange(4).view(1, 4, 1) >= 2, torch.nan)
    options = {"lengths": torch.tensor([2]), "visible": (torch.arange(4) < 2).expand(1, 4, 4)}
    got = layer(x, hidden, hidden, **{by: options[by]})
    torch.testing.assert_close(got, layer(x, x[:, :2], x[:, :2]))


def test_lengths_and_a_mask_both_hide() -> None:
    layer = make(ScaledDot)
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    causal = torch.ones(4, 4).bool().tril()
    both = layer(x, x, x, lengths=torch.tensor([2]), visible=causal)
    torch.testing.assert_close(both[:, :2], layer(x, x, x, visible=causal)[:, :2])
    torch.testing.assert_close(both[:, 2:], layer(x, x, x, lengths=torch.tensor([2]))[:, 2:])


def test_dropout_drops_in_training_only() -> None:
    layer = make(ScaledDot, dropout=0.5)
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    assert not torch.equal(layer(x, x, x), layer(x, x, x))
    layer.eval()
    assert torch.equal(layer(x, x, x), layer(x, x, x))


@pytest.mark.parametrize(
    ("name", "make_it"),
    [
        ("query_dim", lambda: Bilinear(query_dim=0, key_dim=1)),
        ("hidden", lambda: Additive(query_dim=1, key_dim=1, hidden=0)),
        ("heads", lambda: Bilinear(query_dim=1, key_dim=1, heads=0)),
        ("dim", lambda: MultiHeadScoring(dim=5, heads=2, score=lambda w, h: Dot())),
        ("dropout", lambda: MultiHeadScoring(dim=4, heads=2, score=lambda w, h: Dot(), dropout=1)),
        ("lengths", lambda: within_lengths(torch.tensor([1.0]), 3)),
        ("lengths", lambda: within_lengths(torch.zeros(1, 1, 1).long(), 3)),
        ("key", lambda: Dot()(torch.zeros(1, 2), torch.zeros(1, 3))),
        ("key", lambda: ScaledDot()(torch.zeros(1, 2), torch.zeros(1, 3))),
        ("query", lambda: Bilinear(query_dim=2, key_dim=3)(torch.zeros(1, 3), torch.zeros(1, 3))),
    ],
)
def test_bad_arguments(name: str, make_it: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        make_it()
