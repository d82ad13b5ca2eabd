"""Laws of inputs: dtype and size of positions, and padding, which has no effect."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from posenc.attention import BACKENDS, LayerCache, attend
from posenc.encoding import Encoding
from posenc.errors import BackendRefusal, LengthError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.testing.backend_laws import serving
from posenc.testing.subject import (
    LENGTH,
    LawBroken,
    Layer,
    Subject,
    agree,
    fold,
    inputs,
    law,
    learned,
    observed,
    operands,
    tokens_of,
)

FAR = (2**20, 2**24 - 5, 2**24 + 1, 2**40)
"""Starts of sequences; the second crosses 2^24, the limit of exact float32 integers."""

FARTHEST = 2**53 - 32
"""Start near 2^53, for encodings with exact angles there."""


@law
def default_positions_are_exact_in_double(subject: Subject) -> None:
    """With float64 features, float32 positions give what float64 ones do, on every backend."""
    _same_in_double(subject, torch.float64, _layouts(subject), tolerance=1e-12)


@law
def double_positions_serve_any_features(subject: Subject) -> None:
    """float64 and float32 positions give the same, in the features' dtype, on every backend."""
    _same_in_double(subject, torch.float32, _layouts(subject), tolerance=2e-5)
    _same_in_double(subject, torch.bfloat16, _layouts(subject)[:1], tolerance=0.06)


def _same_in_double(
    subject: Subject, dtype: torch.dtype, layouts: Sequence[Layout], *, tolerance: float
) -> None:
    """Require the same output for float32 and float64 positions, in the features' dtype."""
    layer, x, tokens = subject.layer(dtype=dtype), inputs().to(dtype), tokens_of()
    for layout in layouts:
        double = replace(layout, positions=layout.positions.double())
        for backend in BACKENDS:
            layer.attention.backend = backend
            with contextlib.suppress(BackendRefusal):
                expected = layer(x, double, tokens=tokens)
                got = layer(x, layout, tokens=tokens)
                if got.dtype != dtype or expected.dtype != dtype:
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


POISON = (torch.nan, torch.inf, -torch.inf)


@law
def invalid_tokens_hold_anything(subject: Subject) -> None:
    """NaN and infinity at invalid tokens reach no other value and no gradient.

    In the layer's input, with and without a cache, and in q, k and v with every backend. Gradients
    at the invalid tokens are zero.
    """
    layer = subject.layer()
    layout = subject.place(Layout.padded([LENGTH, 8], side="left"))
    _compare(
        "a cached layer", partial(_cached, layer, layout, 8), [inputs()], [layout], learned(layer)
    )
    encoding = subject.layer().encoding
    key = observed(subject, encoding, Layout.padded([LENGTH, 8], side="left"))
    if key.signal is not None:
        key = replace(key, signal=_filled(key.signal.detach(), key, POISON))
    query = key.slice(LENGTH - 9, LENGTH)
    q, k, v = operands(9, LENGTH)
    sides, grid = [query, key, key], Grid(query, key, causal=True)
    inputs_by_side = [x.transpose(1, 2) for x in (q, k, v)]
    for backend in serving(q, k, v, grid, encoding):
        compute = partial(_attended, grid, encoding, backend)
        _compare(f"q, k and v of {backend}", compute, inputs_by_side, sides, learned(encoding))


def _cached(layer: Layer, layout: Layout, first: int, x: Tensor) -> Tensor:
    """The layer's outputs ``[B, L, C]`` in two calls: the ``first`` tokens, then the others."""
    tokens = tokens_of(*x.shape[:2])
    cache, outputs = LayerCache(), []
    for part in (slice(0, first), slice(first, layout.length)):
        where = layout.slice(part.start, part.stop)
        outputs.append(layer(x[:, part], where, tokens=tokens[:, part], cache=cache))
    return torch.cat(outputs, dim=1)


def _attended(
    grid: Grid, encoding: Encoding, backend: str, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """The output ``[B, Q, H, E]`` of queries, keys and values ``[B, L, H, D]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, grid, encoding, backend=backend).transpose(1, 2)


def _compare(
    label: str,
    compute: Callable[..., Tensor],
    inputs_by_side: Sequence[Tensor],
    layouts: Sequence[Layout],
    parameters: Sequence[Tensor],
) -> None:
    """Require the same result with zeros and with NaN and infinity at invalid tokens.

    Args:
        compute: from tensors ``[B, L, …]`` to an output with the first of the ``layouts``.
        given: inputs of ``compute``, one per layout.
        parameters: those whose gradients are compared too.
    """
    results = []
    for fill in ((0.0,), POISON):
        pairs = zip(inputs_by_side, layouts, strict=True)
        taken = [_filled(x, at, fill).requires_grad_() for x, at in pairs]
        output = _filled(compute(*taken), layouts[0], (0.0,))
        gradients = torch.autograd.grad(
            output.sin().sum(), [*taken, *parameters], allow_unused=True
        )
        results.append([output, *gradients])
        for gradient, at in zip(gradients[: len(layouts)], layouts, strict=True):
            if gradient is not None:
                outside = gradient - _filled(gradient, at, (0.0,))
                agree(f"the gradient of padding ({label})", outside, torch.zeros_like(outside))
    for plain, poisoned in zip(*results, strict=True):
        if plain is not None and poisoned is not None:
            agree(f"a value or gradient ({label})", poisoned, plain)


def _filled(x: Tensor, layout: Layout, fill: Sequence[float]) -> Tensor:
    """``x`` with the numbers of ``fill``, repeated, at invalid tokens."""
    assert layout.valid is not None
    valid = layout.valid.view(*layout.valid.shape, *(1 for _ in x.shape[2:]))
    numbers = (list(fill) * x.shape[-1])[: x.shape[-1]]
    return torch.where(valid, x, torch.tensor(numbers, dtype=x.dtype))
