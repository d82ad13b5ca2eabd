"""Bands of pairs with rotations of their own, in the compiled kernels, against their definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create, explain
from posenc.attention.api import attend_block_backward
from posenc.attention.call import Call
from posenc.attention.problem.problem import GlobalSoftmax
from posenc.errors import BackendRefusal
from posenc.extension import extend
from tests.attention.comparing import agree, built, compare, draw_for, results
from tests.support.exhaustive import in_turn

LENGTH = 70
OPTIONS: dict[str, dict[str, Any]] = {
    "dual_chunk": {"reach": 21, "local": 4},
    "leaky_rerope": {"window": 13, "factor": 3},
    "rerope": {"window": 12.5},
    "self_extend": {"window": 14, "group": 3},
    "string": {"shift": 40, "local": 6, "factor": 1.2},
}
TWO_SIDED = ("leaky_rerope", "rerope", "self_extend")
PADDED = Layout.padded([LENGTH, 31], side="left")
WHOLE = Grid.of(Layout.sequence(LENGTH), causal=True)
GRIDS = {
    "whole": WHOLE,
    "later": Grid.of(Layout.sequence(LENGTH, start=9), causal=True),
    "chunk": Grid(Layout.sequence(6, start=64), Layout.sequence(LENGTH), causal=True),
    "last": Grid(Layout.sequence(1, start=69), Layout.sequence(LENGTH), causal=True),
    "packed": Grid.of(Layout.packed([29, 41]), causal=True),
    "padded": Grid.of(PADDED, causal=True),
    "last padded": Grid(PADDED.slice(69, 70), PADDED, causal=True),
    "window": Grid.of(Layout.sequence(LENGTH), causal=True, window=30),
    "chunked": WHOLE.chunked(33),
}


def encoding_of(method: str, **rope: Any) -> Encoding:
    original = create("rope", head_dim=16, **rope)
    return extend(original, method, **{"factor": 2, "length": LENGTH} | OPTIONS[method])


def draw(grid: Grid) -> list[Tensor]:
    return draw_for(grid, width=16)


@pytest.mark.parametrize(("method", "kind"), in_turn(3, list(OPTIONS), list(GRIDS)))
def test_values_and_gradients(method: str, kind: str) -> None:
    grid, encoding = GRIDS[kind], encoding_of(method, fraction=0.5, gain=1.1)
    compare(draw(grid), grid, encoding, of_lse=True)


@pytest.mark.parametrize("method", TWO_SIDED)
def test_keys_ahead(method: str) -> None:
    for grid in (replace(WHOLE, causal=False), replace(WHOLE, causal=False, window=(-25, 17))):
        compare(draw(grid), grid, encoding_of(method, pairing="adjacent"), of_lse=True)


@pytest.mark.parametrize("method", OPTIONS)
def test_sinks_and_caps(method: str) -> None:
    sinks = torch.linspace(-1, 3, 4).requires_grad_()
    extras: dict[str, Any] = {"sinks": sinks, "softcap": 2.0, "wanted": [sinks], "of_lse": True}
    compare(draw(WHOLE), WHOLE, encoding_of(method), **extras)


def test_queries_that_see_no_key_but_a_sink() -> None:
    grid = Grid(Layout.sequence(LENGTH), Layout.sequence(LENGTH, start=LENGTH), causal=True)
    sinks = torch.ones(4).requires_grad_()
    compare(draw(grid), grid, encoding_of("rerope"), of_lse=True)
    compare(draw(grid), grid, encoding_of("rerope"), sinks=sinks, wanted=[sinks], of_lse=True)


def test_a_temperature_beside_them() -> None:
    encoding = extend(encoding_of("rerope"), "log_n", length=20)
    assert "each band" in explain(*draw(WHOLE), WHOLE, encoding, backend="native").how
    compare(draw(WHOLE), WHOLE, encoding, of_lse=True)


def test_gradients_of_parts_of_the_keys() -> None:
    encoding, inputs = encoding_of("self_extend"), draw(WHOLE)
    output, lse = attend(*inputs, WHOLE, encoding, return_lse=True)
    expected = torch.autograd.grad(output.sum(), inputs)
    whole = GlobalSoftmax(output.detach(), lse.detach())
    part = attend_block_backward(Call(*inputs, WHOLE, encoding, global_softmax=whole), "native")
    agree(list(torch.autograd.grad(part.sum(), inputs)), list(expected))


def test_dropout_drops_in_every_band() -> None:
    encoding, (q, k, _) = encoding_of("rerope"), draw(WHOLE)
    weights = torch.eye(LENGTH).expand(2, 2, -1, -1)
    kept = attend(q, k, weights, WHOLE, encoding, backend="native", dropout=0.5).detach()
    share = (kept == 0).double() * WHOLE.visible
    far = WHOLE.offset[..., 0] <= -12.5
    for pairs in (far & WHOLE.visible[:, 0], ~far & WHOLE.visible[:, 0]):
        assert 0.45 < share.masked_select(pairs).mean() < 0.55


@built
@pytest.mark.parametrize("method", OPTIONS)
def test_other_positions_are_left_to_the_definition(method: str) -> None:
    places = torch.arange(LENGTH) + 4.0 * (torch.arange(LENGTH) > 30)
    grid = Grid.of(Layout.at(places), causal=True)
    encoding, inputs = encoding_of(method), draw(grid)
    with pytest.raises(BackendRefusal, match="consecutive positions"):
        attend(*inputs, grid, encoding, backend="native")
    compare(inputs, grid, encoding, "auto", of_lse=True)


@built
def test_chunks_of_broken_tokens_are_left_to_the_definition() -> None:
    encoding = extend(create("rope", head_dim=16), "dual_chunk", length=70, reach=21.5, local=4)
    with pytest.raises(BackendRefusal, match="no form"):
        attend(*draw(WHOLE), WHOLE, encoding, backend="native")


@built
def test_frequencies_that_are_trained_get_gradients() -> None:
    encoding = encoding_of("rerope", learned=True)
    with pytest.raises(BackendRefusal, match="gradients of frequencies"):
        attend(*draw(WHOLE), WHOLE, encoding, backend="native")
    attend(*draw(WHOLE), WHOLE, encoding).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in encoding.parameters())


@built
@pytest.mark.parametrize("learned", ["query", "key", "both"])
@pytest.mark.parametrize("method", ["rerope", "string"])
def test_positions_that_are_learned_get_gradients(method: str, learned: str) -> None:
    positions = WHOLE.query.positions.clone().requires_grad_()
    moved, encoding = WHOLE.query.with_positions(positions), encoding_of(method)
    sides = (moved if learned in (side, "both") else WHOLE.query for side in ("query", "key"))
    grid = Grid(*sides, causal=True)
    with pytest.raises(BackendRefusal, match="no form"):
        attend(*draw(grid), grid, encoding, backend="native")
    compare(draw(grid), grid, encoding, "auto", wanted=[positions])
    assert results(draw(grid), grid, encoding, "auto", wanted=[positions])[-1].any()


def test_second_derivatives() -> None:
    encoding, inputs = encoding_of("rerope"), draw(WHOLE)
    found = []
    for backend in ("native", "reference"):
        output = attend(*inputs, WHOLE, encoding, backend=backend)
        (first,) = torch.autograd.grad(output.sin().sum(), inputs[0], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), inputs))
    agree(list(found[0]), list(found[1]))
