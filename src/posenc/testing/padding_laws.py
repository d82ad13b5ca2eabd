"""Laws of padding: features of invalid tokens, including NaN and infinity, have no effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from posenc.attention import LayerCache, attend
from posenc.encoding import Encoding
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.testing.backend_laws import serving
from posenc.testing.subject import (
    LENGTH,
    Layer,
    Subject,
    agree,
    inputs,
    law,
    learned,
    observed,
    operands,
    tokens_of,
)

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
