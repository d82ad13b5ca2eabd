"""Sinks and caps of the logits in problems, against loops over queries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, create
from posenc.attention.backends.blockwise import definition, offsets
from posenc.attention.backends.common.base import Plan, Result
from posenc.attention.call import AttentionCall
from posenc.attention.differentiation import differentiable_twice
from posenc.attention.dispatch import BACKENDS, refusals
from posenc.attention.problem.lowering import lower
from posenc.attention.problem.problem import Problem, Whole

HEADS, WIDTH, LENGTH = 4, 5, 11

GRIDS = {
    "causal": Grid.of(Layout.sequence(LENGTH), causal=True),
    "window": Grid.of(Layout.sequence(LENGTH), window=3),
    "unseeing": Grid(Layout.sequence(LENGTH), Layout.sequence(LENGTH, 4), causal=True),
    "padded": Grid.of(Layout.padded([LENGTH, 4], side="left"), causal=True),
}

ENCODINGS: dict[str, dict[str, Any]] = {
    "nope": {},
    "t5": {"heads": HEADS, "buckets": 4, "max_distance": 8},
    "shaw": {"head_dim": WIDTH, "max_distance": 2},
    "tupe": {"dim": 20, "heads": HEADS, "head_dim": WIDTH, "max_length": 20},
    "cope": {"head_dim": WIDTH, "max_length": 6},
}

EXTRAS = {"sinks": (True, None), "cap": (False, 0.7), "both": (True, 0.7)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "ROWS", 4)
    monkeypatch.setattr(definition, "BUDGET", 2 * HEADS * LENGTH * 4)


def posed(name: str, where: str, extras: str) -> tuple[Problem, list[Tensor]]:
    """The problem, and all that its output has gradients for."""
    generator, grid = torch.Generator().manual_seed(0), GRIDS[where]
    encoding = create(name, **ENCODINGS[name]).double()
    with torch.no_grad():
        for x in encoding.parameters():
            x.copy_(torch.randn(x.shape, generator=generator))
    q, k, v = (
        torch.randn(2, heads, LENGTH, WIDTH, generator=generator).double().requires_grad_()
        for heads in (HEADS, 2, 2)
    )
    sinks, cap = EXTRAS[extras]
    given = torch.tensor([-1.0, 0.0, 2.0, -math.inf], dtype=torch.float64) if sinks else None
    wanted = [q, k, v, *(x for x in encoding.parameters() if x.requires_grad)]
    if given is not None:
        wanted.append(given.requires_grad_())
    lowered = lower(encoding, q, k, grid, scale=0.4)
    problem = Problem(q, k, v, grid, encoding, 0.4, 0.0, lowered, sinks=given, softcap=cap)
    return problem, wanted


def by_loop(problem: Problem) -> Result:
    """Row by row, from the logits without a cap."""
    grid, encoding, heads = problem.grid, problem.encoding, problem.heads
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (problem.k, problem.v))
    logits = problem.scale * problem.q @ k.mT
    if encoding.score is not None:
        logits = logits + encoding.score(problem.q, k, grid, scale=problem.scale)
    visible = grid.visible.expand(len(k), heads, -1, -1)
    weights, sums = torch.zeros_like(logits), torch.zeros_like(logits[..., 0])
    for place in torch.cartesian_prod(*map(torch.arange, logits.shape[:3])).tolist():
        b, h, i = place
        seen = logits[b, h, i][visible[b, h, i]]
        if problem.softcap is not None:
            seen = problem.softcap * (seen / problem.softcap).tanh()
        total = seen.exp().sum()
        if problem.sinks is not None:
            total = total + problem.sinks[h].exp()
        if len(seen):
            index = (*map(torch.tensor, place), visible[b, h, i].nonzero().flatten())
            weights = weights.index_put(index, seen.exp() / total)
        sums[b, h, i] = total.detach().log()
    output = weights @ v
    if encoding.value is not None:
        output = output + encoding.value(weights, grid)
    return Result(output, sums)


def computed(problem: Problem, backend: str) -> Result:
    plan = BACKENDS[backend].plan(problem)
    assert isinstance(plan, Plan)
    result = plan.run(lse=True)
    if plan.by_definition:
        return result
    return result._replace(output=differentiable_twice(result.output, problem))


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("where", GRIDS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_values_and_gradients(name: str, where: str, extras: str) -> None:
    problem, wanted = posed(name, where, extras)
    found = []
    for result in (by_loop(problem), *(computed(problem, x) for x in ("reference", "blockwise"))):
        loss = result.output * torch.linspace(-1, 1, result.output.numel()).view_as(result.output)
        gradients = torch.autograd.grad(loss.sum(), wanted, materialize_grads=True)
        assert result.lse is not None
        found.append([result.output, result.lse, *gradients])
    for got in found[1:]:
        for mine, theirs in zip(got, found[0], strict=True):
            # Offsets, and what is found from them, are in float32.
            torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", ["t5", "cope"])
def test_second_derivatives(name: str) -> None:
    problem, wanted = posed(name, "causal", "both")
    found = []
    for way in ("reference", "blockwise"):
        output = computed(problem, way).output
        first = torch.autograd.grad(output.sin().sum(), wanted, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), wanted))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
        assert theirs.abs().max() > 0


@pytest.mark.parametrize("name", ["t5", "cope"])
def test_dropped_weights_keep_their_sum(name: str) -> None:
    """Dropout of weights beside sinks: on average the output without it."""
    problem, _ = posed(name, "causal", "both")
    torch.manual_seed(0)
    with torch.no_grad():
        plain = computed(problem, "blockwise").output
        some = replace(problem, dropout=0.2)
        mean = torch.stack([computed(some, "blockwise").output for _ in range(300)]).mean(0)
    assert (mean - plain).abs().mean() < 0.05 * plain.abs().mean() + 0.02


def test_gradients_through_parts_of_the_keys() -> None:
    problem, wanted = posed("t5", "causal", "both")
    whole = computed(problem, "reference")
    tensors = wanted[:3]
    expected = torch.autograd.grad(whole.output.sum(), tensors)
    assert whole.lse is not None
    sums = [torch.zeros_like(x) for x in tensors]
    for part in (slice(0, 6), slice(6, LENGTH)):
        key = problem.grid.key.slice(part.start, part.stop)
        grid = Grid(problem.grid.query, key, causal=True)
        k, v = (x[:, :, part] for x in (problem.k, problem.v))
        lowered = lower(problem.encoding, problem.q, k, grid, scale=0.4)
        given = Whole(whole.output.detach(), whole.lse.detach())
        piece = replace(problem, k=k, v=v, grid=grid, lowered=lowered, whole=given)
        plan = BACKENDS["blockwise"].plan(piece)
        assert isinstance(plan, Plan)
        for total, more in zip(
            sums, torch.autograd.grad(plan.run().output.sum(), tensors), strict=True
        ):
            total += more
    for mine, theirs in zip(sums, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("extras", EXTRAS)
def test_other_backends_refuse_them(extras: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = posed("nope", "causal", extras)
    call = AttentionCall(problem.q, problem.k, problem.v, problem.grid, Encoding())
    monkeypatch.setattr(AttentionCall, "problem", lambda *_: problem)
    found = refusals(call)
    assert set(found) == set(BACKENDS) - {"blockwise", "reference"}
    assert "sinks" in found["sdpa"]
