"""Bands of pairs with rotations of their own: what the compiled kernels take, and what they do not.

``attention_fuzz`` holds them to the definition.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create, explain
from posenc.errors import BackendRefusal
from posenc.extension import extend
from tests.attention.comparing import built, compare, draw_for, results

LENGTH = 70
OPTIONS: dict[str, dict[str, Any]] = {
    "dual_chunk": {"reach": 21, "local": 4},
    "leaky_rerope": {"window": 13, "factor": 3},
    "rerope": {"window": 12.5},
    "self_extend": {"window": 14, "group": 3},
    "string": {"shift": 40, "local": 6, "factor": 1.2},
}
WHOLE = Grid.of(Layout.sequence(LENGTH), causal=True)


def encoding_of(method: str, **rope: Any) -> Encoding:
    original = create("rope", head_dim=16, **rope)
    return extend(original, method, **{"factor": 2, "length": LENGTH} | OPTIONS[method])


def draw(grid: Grid) -> list[Tensor]:
    return draw_for(grid, width=16)


def test_a_temperature_beside_them() -> None:
    encoding = extend(encoding_of("rerope"), "log_n", length=20)
    assert "each band" in explain(*draw(WHOLE), WHOLE, encoding, backend="native").how
    compare(draw(WHOLE), WHOLE, encoding, of_lse=True)


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
