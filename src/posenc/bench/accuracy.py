"""Error of a contender against the definition in float64, at full length, with gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posenc.attention import attend
from posenc.bench.case import Call, parse_name
from posenc.bench.contenders import Contender, Plain, Prepared
from posenc.encoding import Encoding
from posenc.grid import Grid
from posenc.registry import ENCODINGS

__all__ = ["Errors", "Expected", "expect"]

ROWS = 64
"""Queries that are compared, in the middle. Only they are given a gradient, so that theirs is all
of the keys', values' and parameters' gradients, and the definition need not hold a Q×K matrix."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Largest differences, each as a share of the largest expected value.

    Args:
        output: of the output's rows.
        gradient: of the worst gradient; None without a backward pass.
    """

    output: float
    gradient: float | None


@dataclass(frozen=True, eq=False)
class Expected:
    """Output and gradients of the definition in float64 for some queries.

    Args:
        rows: which.
        output: ``[1, H, R, D]``.
        gradients: of q, k, v and the encoding's parameters, when only these rows get one.
    """

    rows: slice
    output: Tensor
    gradients: Sequence[Tensor | None]

    def compare(self, prepared: Prepared, *, backward: bool) -> Errors:
        """Run a contender once and see."""
        weight = torch.zeros_like(prepared.weight)
        weight[:, :, self.rows] = prepared.weight[:, :, self.rows]
        with torch.set_grad_enabled(backward):
            output = prepared.run()
        far = _distance(output.detach()[:, :, self.rows], self.output)
        if not backward:
            return Errors(output=far, gradient=None)
        found = torch.autograd.grad(output, prepared.wanted, weight, allow_unused=True)
        pairs = zip(found, self.gradients, strict=True)
        return Errors(output=far, gradient=max(_distance(a, b) for a, b in pairs))


def expect(contender: Contender, call: Call) -> Expected | None:
    """Expected values of a contender; None where some queries alone cannot tell.

    That is so where what happens between two tokens depends on how many others there are.
    """
    names = parse_name(call.case.encoding)[0].split("+")
    encoding: Encoding
    if isinstance(contender, Plain):
        encoding = Encoding()
    elif any(ENCODINGS[name].claims.length_dependent for name in names):
        return None
    else:
        encoding = copy.deepcopy(call.encoding).double()
        projections = [copy.deepcopy(projection).double() for projection in call.projections]
        for part in encoding.parts():
            part.attach(*projections)
    begin = max(0, (call.case.length - ROWS) // 2)
    rows = slice(begin, min(begin + ROWS, call.case.length))
    q, k, v = (x.detach().double().requires_grad_() for x in call.inputs)
    layout = encoding.observe(call.x.double(), call.layout)
    grid = Grid(layout.slice(rows.start, rows.stop), layout, call.case.causal)
    output = attend(q[:, :, rows], k, v, grid, encoding, backend="reference")
    wanted = [q, k, v, *(p for p in encoding.parameters() if p.requires_grad)]
    weight = call.weight[:, :, rows].double()
    return Expected(
        rows,
        output.detach(),
        torch.autograd.grad(output, wanted, weight, allow_unused=True),
    )


def _distance(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected or (_silent(found) and _silent(expected)) else float("nan")
    size = float(expected.abs().max())
    far = float((found.double() - expected).abs().max())
    return far / size if size else far


def _silent(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(gradient.any())
