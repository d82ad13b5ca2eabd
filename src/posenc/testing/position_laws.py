"""Laws of the dtype and size of positions."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

import torch
from torch import Tensor

from posenc.attention import BACKENDS
from posenc.errors import BackendRefusal, LengthError
from posenc.layout import Layout
from posenc.testing.subject import (
    LENGTH,
    LawBroken,
    Layer,
    Subject,
    agree,
    fold,
    inputs,
    law,
    tokens_of,
)

FAR = (2**20, 2**24 - 5, 2**24 + 1, 2**40)
"""Starts of sequences; the second crosses 2^24, the limit of exact float32 integers."""

FARTHEST = 2**53 - 32
"""Start near 2^53, for encodings with exact angles there."""


@law
def default_positions_are_exact_in_double(subject: Subject) -> None:
    """With float64 features, float32 positions give what float64 ones do, on every backend."""
    layer, x, tokens = subject.layer(), inputs(), tokens_of()
    for layout in _layouts(subject):
        double = replace(layout, positions=layout.positions.double())
        for backend in BACKENDS:
            layer.attention.backend = backend
            with contextlib.suppress(BackendRefusal):
                expected = layer(x, double, tokens=tokens)
                agree(backend, layer(x, layout, tokens=tokens), expected, tolerance=1e-12)


@law
def double_positions_serve_any_features(subject: Subject) -> None:
    """float64 and float32 positions give the same, in the features' dtype, on every backend."""
    tokens = tokens_of()
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 0.06)):
        layer, x = subject.layer(dtype=dtype), inputs().to(dtype)
        for layout in _layouts(subject)[: None if dtype == torch.float32 else 1]:
            double = replace(layout, positions=layout.positions.double())
            for backend in BACKENDS:
                layer.attention.backend = backend
                with contextlib.suppress(BackendRefusal):
                    expected = layer(x, layout, tokens=tokens)
                    got = layer(x, double, tokens=tokens)
                    if got.dtype != dtype:
                        raise LawBroken(f"{backend} returns {got.dtype} for {dtype}")
                    agree(f"{dtype} by {backend}", got, expected, tolerance=tolerance)


def _layouts(subject: Subject) -> list[Layout]:
    """Regular and padded layouts of small integers; for two axes also a whole image."""
    layouts = [Layout.sequence(LENGTH), Layout.padded([LENGTH, 8])]
    placed = [subject.place(layout) for layout in layouts]
    return [*placed, Layout.image(3, 4, prefix=1)] if subject.axes == 2 else placed


@law
def far_positions_are_exact(subject: Subject) -> None:
    """Up to 2^53, float32 and float64 features give the same.

    Relative encodings also give the same as near 0: positions stay distinct and angles exact. An
    encoding may raise ``LengthError`` instead.
    """
    if "positions" in subject.claims.exceptions:
        return
    wide, x, tokens = subject.layer(), inputs(), tokens_of()
    near = _at(wide, x, 0, subject, tokens)
    single = copy.deepcopy(wide).float()
    for start in FAR if "angles" in subject.claims.exceptions else (*FAR, FARTHEST):
        try:
            far = _at(wide, x, start, subject, tokens)
        except LengthError:
            return
        if subject.claims.relative:  # positions are float64 with float64 features
            agree(f"the output from {start} on", far, near, tolerance=2e-5)
        got = _at(single, x.float(), start, subject, tokens)
        agree(f"float32 features from {start} on", got, far, tolerance=2e-5)


def _at(layer: Layer, x: Tensor, start: int, subject: Subject, tokens: Tensor) -> Tensor:
    if subject.axes == 1:
        layout = Layout.sequence(LENGTH, start=start)
    else:
        cells = fold(Layout.sequence(LENGTH), subject.axes)
        layout = Layout.at(cells.positions.long() + start)
    layout = replace(
        layout, positions=layout.positions.to(torch.promote_types(layout.positions.dtype, x.dtype))
    )
    output: Tensor = layer(x, layout, tokens=tokens)
    return output
