"""Profile of an encoding: the panels of its picture.

They follow from the encoding's parts alone:

- an embedding part: its vectors (phases if complex), their similarity by pair and by distance, and
  their trail in a plane;
- attention parts: terms added to the logits, by pair and by distance;
- a part with fewer buckets than distances: its buckets;
- a value part: the length of the vectors added to values;
- on several axes, maps over the cells of an image for chosen queries instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from posenc.encoding import Encoding
from posenc.errors import ArgumentError, LengthError
from posenc.lab.visualization.panels import Heat, Panel, Profile, Trail
from posenc.lab.visualization.probe import EncodingProbe
from posenc.layout import Layout
from posenc.registry import ENCODINGS, create

SIDES = (15, 8, 7, 4)
"""Cells a side of the image for methods on several axes: the first that they serve."""

SPREAD = 0.3
"""Standard deviation of the values given to parameters that all start as the identity."""


@torch.no_grad()
def make_profile(
    name: str,
    *,
    length: int = 48,
    heads: int = 4,
    head_dim: int = 32,
    causal: bool = True,
    options: Mapping[str, object] | None = None,
) -> Profile:
    """The profile of an encoding of the registry; deterministic.

    Args:
        name: one name, or several joined by ``+``.
        length: tokens.
        heads, head_dim: shape of the attention it is put in.
        causal: whether queries see the past only; images are always seen whole.
        options: the method's own.

    Raises:
        UnknownNameError, ArgumentError: as ``posenc.create``; also ArgumentError for a length
            below 2, or a method that is made for causal attention and is not to be in it.
    """
    if length < 2:
        raise ArgumentError("length", expected="2 or more", got=length, remedy="48 is usual.")
    shape = {"dim": heads * head_dim, "heads": heads, "head_dim": head_dim, "max_length": length}
    chosen: dict[str, Any] = dict(options or {})

    def make(axes: int) -> Encoding:
        sided = causal and axes == 1
        extra: dict[str, Any] = {"axes": axes} if _has_axes(name) and "axes" not in chosen else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            encoding = create(name, causal=sided, **shape, **chosen, **extra)
        _attach(encoding, heads * head_dim)
        return encoding

    made = [(axes, make(axes)) for axes in _axes(name, chosen, make)]
    if not causal and any(encoding.causal_only for _, encoding in made):
        raise ArgumentError(
            "causal",
            expected=f"causal attention, the only kind that {name} is made for",
            got="attention to both sides",
            remedy="Leave out --bidirectional.",
        )

    def look() -> tuple[Panel, ...]:
        panels: list[Panel] = []
        for axes, encoding in made:
            if axes == 1:
                layout = Layout.sequence(length)
                panels += EncodingProbe(encoding, layout, heads, head_dim, causal=causal).panels()
            else:
                images = _image_panels(encoding, axes, heads, head_dim)
                panels += [panel for panel in images if not panels or isinstance(panel, Heat)]
        return tuple(panels)

    parameters = [p for _, encoding in made for p in encoding.parameters()]
    panels = look()
    if not parameters:
        return Profile(name=name, panels=panels, parameters="none")
    if not all(_blank(panel) for panel in panels):
        return Profile(name=name, panels=panels, parameters="initial")
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.add_(SPREAD * torch.randn(parameter.shape, generator=generator))
    return Profile(name=name, panels=look(), parameters="random")


def _has_axes(name: str) -> bool:
    """True if the number of axes is an option of the method."""
    return name in ENCODINGS and "axes" in ENCODINGS[name].options()


def _axes(
    name: str, options: Mapping[str, object], make: Callable[[int], Encoding]
) -> tuple[int, ...]:
    """Numbers of position axes to plot: 1 for a sequence, 2 for an image where it serves both."""
    if _has_axes(name):
        axes = options.get("axes")
        served = [n for n in (1, 2) if ENCODINGS[name].claims.serves(n)]
        return (axes,) if isinstance(axes, int) else tuple(served)
    parts = make(1).parts()
    served = [n for n in (1, 2, 3) if all(part.axes is None or n in part.axes for part in parts)]
    if any(part.axes is not None for part in parts) and served[:2] == [1, 2]:
        return (1, 2)
    return tuple(served[:1])


def _attach(encoding: Encoding, dim: int) -> None:
    """Attach identity projections to the parts."""
    projection = nn.Linear(dim, dim, bias=False)
    nn.init.eye_(projection.weight)
    for part in encoding.parts():
        part.attach(projection, projection)


def _image_panels(encoding: Encoding, axes: int, heads: int, head_dim: int) -> list[Panel]:
    """Panels on the largest image that the encoding serves."""
    for side in SIDES:
        try:
            return list(EncodingProbe(encoding, _image(side, axes), heads, head_dim).panels())
        except LengthError:
            if side == SIDES[-1]:
                raise
    return []


def _image(side: int, axes: int) -> Layout:
    """The cells of an image; with more axes than two, of the first of many."""
    cells = Layout.image(side, side)
    if axes == cells.axes:
        return cells
    return Layout.at(nn.functional.pad(cells.positions, (axes - cells.axes, 0)))


def _blank(panel: Panel) -> bool:
    """True if a panel has one value everywhere."""
    if isinstance(panel, Trail):
        values = panel.points - panel.points[:1]
    else:
        values = panel.maps if isinstance(panel, Heat) else panel.values
    numbers = values[~values.isnan()]
    return bool((numbers.amax() - numbers.amin()) < 1e-6)
