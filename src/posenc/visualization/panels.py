"""The panels that a picture of an encoding is drawn from: maps, curves and trails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

__all__ = ["Curves", "Heat", "Panel", "Profile", "Trail"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Heat:
    """One map or several, of the same size and on the same scale.

    Args:
        title: what is shown; note: how to read it.
        maps: ``[N, R, K]``; NaN where there is nothing.
        names: of the maps.
        rows, columns: what the axes are.
        values: what the maps hold: amounts, or angles from -π to π.
    """

    title: str
    note: str
    maps: Float[Tensor, "N R K"]
    names: tuple[str, ...]
    rows: str
    columns: str
    values: Literal["amounts", "angles"] = "amounts"


@dataclass(frozen=True, eq=False, kw_only=True)
class Curves:
    """One curve or several over the same axis.

    Args:
        title: what is shown; note: how to read it.
        x: ``[X]``, where the values are; x_label: what it is.
        values: ``[N, X]``; y_label: what they are.
        low, high: ``[N, X]``, the band around each; None where there is none.
        names: of the curves.
        steps: whether values stay as they are up to the next.
    """

    title: str
    note: str
    x: Float[Tensor, " X"]
    x_label: str
    values: Float[Tensor, "N X"]
    y_label: str
    names: tuple[str, ...]
    low: Float[Tensor, "N X"] | None = None
    high: Float[Tensor, "N X"] | None = None
    steps: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Trail:
    """The way that a vector takes from position to position, seen in a plane.

    Args:
        title: what is shown; note: how to read it.
        points: ``[L, 2]``, in the order of the positions.
        x_label, y_label: what the two directions are.
    """

    title: str
    note: str
    points: Float[Tensor, "L 2"]
    x_label: str
    y_label: str


Panel = Heat | Curves | Trail


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Panels of an encoding, from which a picture is drawn.

    Args:
        name: of the encoding.
        panels: in the order to be drawn.
        parameters: what those it has are while it is drawn: their initial values, or random ones
            where it starts as the identity and there would be nothing to see.
    """

    name: str
    panels: tuple[Panel, ...]
    parameters: Literal["none", "initial", "random"]
