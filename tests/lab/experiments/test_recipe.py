"""Names of what is trained."""

from __future__ import annotations

import pytest

from posenc.errors import ArgumentError, UnknownNameError
from posenc.lab.experiments.recipe import Recipe


def test_changes_are_read() -> None:
    recipe = Recipe.parse("shaw+sinusoidal@max_distance=0@randomized")
    assert recipe.encoding == "shaw+sinusoidal"
    assert recipe.options == {"max_distance": 0}
    assert recipe.positions == "randomized"
    assert Recipe.parse("rope").positions == "plain"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sinusoidal@randomised", "Did you mean 'randomized'"),
        ("shaw@max_distanc=3", "Did you mean 'max_distance'"),
        ("ropa@randomized", "Did you mean 'rope'"),
        ("rope@", "option of rope"),
    ],
)
def test_unknown_changes_list_the_close_ones(name: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        Recipe.parse(name)


def test_axes_must_fit() -> None:
    assert Recipe.parse("sine2d", axes=2).encoding == "sine2d"
    with pytest.raises(ArgumentError, match="one for text"):
        Recipe.parse("sine2d")
    with pytest.raises(ArgumentError, match="positions of 2 axes"):
        Recipe.parse("sinusoidal", axes=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shaw@max_distance", "Write max_distance=…"),
        ("rope@base=abc", "base: expected a finite number"),
        ("alibi@learned=maybe", "learned: expected True or False"),
    ],
)
def test_options_out_of_their_domain_are_refused(name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Recipe.parse(name)


def test_options_are_read_by_their_type() -> None:
    assert Recipe.parse("alibi@learned=false").options == {"learned": False}
