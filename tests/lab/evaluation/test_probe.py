"""Position leaks from convolutions through their padding, and only through it."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from posenc.errors import ArgumentError, UnknownNameError
from posenc.lab.evaluation.probe import ConvFeatures, Padding, position_maps, probe_positions

SIDE = 12


def noise(count: int, seed: int) -> Tensor:
    return torch.rand(count, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def recovered(padding: Padding, *, margin: int = 0, layers: int = 5) -> dict[str, float]:
    torch.manual_seed(0)
    features = ConvFeatures(channels=1, width=24, layers=layers, padding=padding)
    found = probe_positions(features, noise(150, 1), noise(30, 2), margin=margin)
    return {one.target: one.spearman for one in found}


def test_zeros_give_position_away() -> None:
    found = recovered("zeros")
    assert min(found.values()) > 0.6


@pytest.mark.parametrize("padding", ["circular", "none"])
def test_without_a_border_there_is_no_position(padding: Padding) -> None:
    layers = 3 if padding == "none" else 5
    assert max(abs(value) for value in recovered(padding, layers=layers).values()) < 0.15


def test_the_mirror_image_gives_away_less_than_zeros() -> None:
    mirror, zeros = recovered("reflect"), recovered("zeros")
    assert all(mirror[target] < zeros[target] for target in zeros)


def test_deeper_layers_see_zeros_from_farther_away() -> None:
    shallow, deep = (recovered("zeros", margin=3, layers=layers) for layers in (2, 5))
    assert abs(shallow["horizontal"]) < 0.15
    assert deep["horizontal"] > 0.3


@pytest.mark.parametrize("padding", get_args(Padding))
def test_features_are_those_of_torch(padding: Padding) -> None:
    features = ConvFeatures(channels=1, width=4, layers=1, padding=padding)
    (given,) = features.convolutions
    shape = (0, "zeros") if padding == "none" else (1, padding)
    theirs = torch.nn.Conv2d(1, 4, 3, padding=shape[0], padding_mode=shape[1])
    theirs.load_state_dict(given.state_dict())
    expected = torch.relu(theirs(noise(2, 0)))
    torch.testing.assert_close(features(noise(2, 0)), expected)
    side = SIDE - 2 * features.margin if padding == "none" else SIDE
    assert features(noise(2, 0)).shape == (2, 4, side, side)


def test_circular_features_move_with_the_image() -> None:
    features = ConvFeatures(channels=1, padding="circular")
    x = noise(1, 0)
    moved = features(x.roll((3, 5), dims=(2, 3)))
    torch.testing.assert_close(moved, features(x).roll((3, 5), dims=(2, 3)))


def test_features_that_are_constant_give_nothing_away() -> None:
    images = torch.ones(3, 1, 6, 6)
    for found in probe_positions(torch.nn.Identity(), images, images):
        assert found.spearman == 0.0


def test_a_readout_of_the_maps_themselves_is_perfect() -> None:
    maps = position_maps(6, 9)
    features = torch.nn.Identity()
    images = maps.expand(4, -1, -1, -1)
    for found in probe_positions(features, images, images, ridge=1e-9):
        assert found.spearman > 0.999
        assert found.error < 1e-3


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="reflect"):
        ConvFeatures(padding="mirror")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="odd"):
        ConvFeatures(kernel=2)
    with pytest.raises(ArgumentError, match="layers"):
        ConvFeatures(layers=0)
    with pytest.raises(ArgumentError, match="more than 12 cells"):
        ConvFeatures(channels=1, layers=6, padding="none")(noise(1, 0))
    with pytest.raises(ArgumentError, match="margin"):
        probe_positions(ConvFeatures(channels=1), noise(1, 0), noise(1, 0), margin=6)
