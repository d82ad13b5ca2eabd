"""Calls with the cells of images are computed by what earlier ones prepared, and no others are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention.backends.native.build import missing
from posenc.registry import ENCODINGS
from posenc.testing.subject import spread
from tests.models.image_encodings import IMAGE_ENCODINGS

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason="needs the compiled kernels"),
    pytest.mark.usefixtures("entered"),
]

OF_CELLS: dict[str, dict[str, Any]] = {
    "swin": {"window": (9, 24)},
    "decomposed2d": {"size": (9, 24)},
    "irpe": {"on": "qkv"},
}
ROTATING: dict[str, dict[str, Any]] = {"rope2d": {}, "rope_mixed": {}, "comrope": {"block": 2}}
NAMES = [*OF_CELLS, *ROTATING]
IN_ATTENTION = [n for n in IMAGE_ENCODINGS if ENCODINGS[n].claims.sites != ("embedding",)]


def make(name: str) -> Encoding:
    torch.manual_seed(0)
    options = (OF_CELLS | ROTATING)[name]
    return posenc.create(name, heads=4, head_dim=8, **options).eval()


def tensors(tokens: int, seed: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (tokens, keys or tokens, keys or tokens)
    q, k, v = (torch.randn(2, 4, n, 8, generator=generator) for n in sizes)
    return q, k, v


def agree(encoding: Encoding, grid: Grid, seed: int) -> None:
    given = tensors(grid.query.length, seed, grid.key.length)
    output = attend(*given, grid, encoding, return_lse=True)
    expected = attend(*given, grid, encoding, return_lse=True, backend="reference")
    torch.testing.assert_close(output, expected, atol=3e-6, rtol=1e-5)


def count(planned: list[None], encoding: Encoding, grid: Grid, calls: int = 4) -> int:
    """How many of some calls are planned, those by the reference left out."""
    del planned[:]
    with torch.no_grad():
        for seed in range(calls):
            agree(encoding, grid, seed)
    return len(planned) - calls


WHOLE = Layout.image(8, 24)
HIDDEN = Layout.image(8, 24, valid=torch.arange(192).view(1, 8, 24) < 180)

CASES = [
    # A new layout is known by its extent.
    *((name, [WHOLE, Layout.image(8, 24)], [1, 0]) for name in NAMES),
    # Images of as many cells are told apart.
    *(
        (name, [Layout.image(8, 18), Layout.image(9, 16), Layout.image(6, 24)], [1, 1, 1])
        for name in NAMES
    ),
    # Class tokens are prepared where cells rotate, and planned beside terms.
    *(
        (name, [Layout.image(8, 24, prefix=1), Layout.image(8, 24, prefix=2)], [1, 1])
        for name in ROTATING
    ),
    *((name, [Layout.image(8, 24, prefix=1)], [4]) for name in OF_CELLS),
    *((name, [HIDDEN], [4]) for name in NAMES),
]


@pytest.mark.parametrize(("name", "layouts", "counts"), CASES)
def test_whole_images_are_prepared(
    name: str, layouts: list[Layout], counts: list[int], planned: list[None]
) -> None:
    encoding = make(name)
    assert [count(planned, encoding, Grid.of(layout)) for layout in layouts] == counts


@pytest.mark.parametrize("name", IN_ATTENTION)
def test_parts_of_other_images_are_told_apart(name: str) -> None:
    """What a layer keeps of one image is not taken for another, in whatever order they come."""
    encoding = posenc.create(name, dim=32, heads=4, head_dim=8, **ENCODINGS[name].sample).eval()
    spread(encoding)
    with torch.no_grad():
        for seed, extent in enumerate(3 * ((8, 14), (14, 8), (10, 11))):
            given, layout = tensors(extent[0] * extent[1], seed), Layout.image(*extent)
            layout = encoding.observe(torch.randn(2, layout.length, 32), layout)
            parts = (encoding, copy.deepcopy(encoding))
            output, expected = (attend(*given, Grid.of(layout), part) for part in parts)
            torch.testing.assert_close(output, expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("name", OF_CELLS)
def test_queries_of_another_image_are_prepared(name: str, planned: list[None]) -> None:
    """The image of the keys is smaller, as where keys are pooled; then larger, then smaller yet."""
    encoding = make(name)
    for extent in ((4, 12), (4, 24), (7, 24), (3, 24)):
        assert count(planned, encoding, Grid(WHOLE, Layout.image(*extent))) == 1


@pytest.mark.parametrize("name", NAMES)
def test_hidden_cells_and_tables_beside_a_rotation_are_planned(
    name: str, planned: list[None]
) -> None:
    for hiding in ({"causal": True}, {"window": 50}):
        assert count(planned, make(name), Grid.of(WHOLE, **hiding)) == 4
    both = Encoding(query_key=make("rope2d").query_key, score=make("swin").score).eval()
    assert count(planned, both, Grid.of(WHOLE)) == 4


@pytest.mark.parametrize("name", ["swin", "irpe", "rope_mixed", "comrope"])
def test_changed_weights_are_planned(name: str, planned: list[None]) -> None:
    encoding, grid = make(name), Grid.of(Layout.image(8, 24))
    assert count(planned, encoding, grid) == 1
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.mul_(1.5).add_(0.1)
    assert count(planned, encoding, grid) == 1
