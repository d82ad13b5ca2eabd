"""Biases by residue and chain against loops, and encoders of ESMFold2 and Boltz."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import EsmFold2Config
from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2RelativePositionEncoding

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.residue_offset import ResidueOffset
from tests.encodings.grids import inputs
from tests.encodings.image_grids import IMAGES


def complex_of(*chains: int) -> Layout:
    """Chains of so many residues, one after the other."""
    places = [(float(r), float(c)) for c, size in enumerate(chains) for r in range(size)]
    return Layout.at(torch.tensor([places]))


def make(limit: int, heads: int = 6) -> ResidueOffset:
    torch.manual_seed(1)
    part = posenc.create("residue_offset", heads=heads, max_distance=limit).score
    assert isinstance(part, ResidueOffset)
    return part.double().requires_grad_(False)


@pytest.mark.parametrize("limit", [0, 2, 32])
@pytest.mark.parametrize("grid", [*IMAGES.values(), Grid.of(complex_of(4, 1, 3))])
def test_equals_loops(grid: Grid, limit: int) -> None:
    q, k, v = inputs(grid)
    part = make(limit)
    special = [
        torch.zeros_like(side.order, dtype=torch.bool) if side.special is None else side.special
        for side in (grid.query, grid.key)
    ]
    expected = torch.zeros(*grid.visible.shape[:1], 6, grid.query.length, grid.key.length).double()
    for b, i, j in torch.cartesian_prod(*map(torch.arange, (len(expected), *expected.shape[2:]))):
        query = grid.query.positions[b % len(grid.query.positions), i].tolist()
        key = grid.key.positions[b % len(grid.key.positions), j].tolist()
        offset = max(-limit, min(limit, round(query[0] - key[0])))
        index = offset + limit if query[1] == key[1] else 2 * limit + 1
        if not (special[0][0, i] or special[1][0, j]):
            expected[b, :, i, j] = part.table[:, index]
    part_scores = part(q, k, grid, scale=1.0)
    torch.testing.assert_close(part_scores, expected.expand_as(part_scores))
    by_definition, *others = (
        attend(q, k, v, grid, Encoding(score=part), backend=backend)
        for backend in ("reference", "blockwise", "auto")
    )
    for other in others:
        torch.testing.assert_close(other, by_definition)


def test_classes_by_hand() -> None:
    """Chains of three and two residues, k = 1: query less key, clipped, from 0; 3 across chains."""
    index = make(1).bucket(Grid.of(complex_of(3, 2)).offset)[0].tolist()
    assert index == [
        [1, 0, 0, 3, 3],
        [2, 1, 0, 3, 3],
        [2, 2, 1, 3, 3],
        [3, 3, 3, 1, 0],
        [3, 3, 3, 2, 1],
    ]


def features_of(layout: Layout) -> dict[str, Tensor]:
    residue, chain = layout.positions.long().unbind(-1)
    features = {"residue_index": residue, "asym_id": chain, "entity_id": chain}
    return features | {"token_index": residue, "sym_id": torch.zeros_like(chain)}


def equals(weight: Tensor, theirs: Callable[[], Tensor], layout: Layout) -> None:
    """Their first 66 features are of residues; the others count nothing."""
    part = posenc.create("residue_offset", heads=5).score
    part.table.data.copy_(weight[:, :66])
    weight[:, 66:] = 0.0
    q = torch.zeros(1, 5, layout.length, 2)
    got: Tensor = part(q, q, Grid.of(layout), scale=1.0)
    torch.testing.assert_close(got.movedim(1, -1), theirs())


def test_equals_esmfold() -> None:
    layout = complex_of(40, 2, 7)
    config = EsmFold2Config(pairwise_hidden_size=5)
    theirs = EsmFold2RelativePositionEncoding(config).requires_grad_(False)
    equals(theirs.embed.weight, lambda: theirs(**features_of(layout)), layout)


def test_equals_boltz() -> None:
    encoders = pytest.importorskip("boltz.model.modules.encodersv2", reason="needs boltz")
    layout = complex_of(40, 2, 7)
    theirs = encoders.RelativePositionEncoder(5).requires_grad_(False)
    features = features_of(layout)
    features |= {"cyclic_period": torch.zeros_like(features["asym_id"])}
    equals(theirs.linear_layer.weight, lambda: theirs(features), layout)
