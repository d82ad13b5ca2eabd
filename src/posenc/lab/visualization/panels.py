"""Panels of a picture of an encoding: maps, curves and trails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Heat:
    """One or several maps of the same size, on the same scale.

    Args:
        title, note: subject, and how to read it.
        maps: ``[N, R, K]``; NaN where there is nothing.
        names: of the maps.
        rows, columns: labels of the axes.
        values: amounts, or angles from -π to π.
    """

    title: str
    note: str = ""
    maps: Float[Tensor, "N R K"]
    names: tuple[str, ...] = ("",)
    rows: str
    columns: str
    values: Literal["amounts", "angles"] = "amounts"


@dataclass(frozen=True, eq=False, kw_only=True)
class Curves:
    """One or several curves over the same axis.

    Args:
        title, note: subject, and how to read it.
        x, x_label: ``[X]``, and its label.
        values, y_label: ``[N, X]``, and their label.
        names: of the curves.
        low, high: ``[N, X]``, a band around each curve, or None.
        steps: values hold up to the next.
    """

    title: str
    note: str = ""
    x: Float[Tensor, " X"]
    x_label: str
    values: Float[Tensor, "N X"]
    y_label: str
    names: tuple[str, ...] = ("",)
    low: Float[Tensor, "N X"] | None = None
    high: Float[Tensor, "N X"] | None = None
    steps: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Trail:
    """The path of a vector from position to position, projected onto a plane.

    Args:
        title, note: subject, and how to read it.
        points: ``[L, 2]``, in the order of the positions.
        x_label, y_label: the two directions.
    """

    title: str
    note: str = ""
    points: Float[Tensor, "L 2"]
    x_label: str
    y_label: str


Panel = Heat | Curves | Trail


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Panels of an encoding, from which a picture is drawn.

    Args:
        name: of the encoding.
        panels: in drawing order.
        parameters: their values while it is drawn: initial ones, or random ones if the encoding
            starts as the identity.
    """

    name: str
    panels: tuple[Panel, ...]
    parameters: Literal["none", "initial", "random"]
