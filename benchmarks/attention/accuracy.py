"""Error of a contender relative to the definition in float64, with gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from benchmarks.attention.contenders import Contender, Plain
from torch import Tensor

from posenc.attention import attend
from posenc.encoding import Encoding
from posenc.grid import Grid
from posenc.lab.bench.passes import Pass, TimedCall, parse_name
from posenc.registry import ENCODINGS

ROWS = 64
"""Queries in the middle that are compared. Only they have a gradient, so that the definition needs
no Q×K matrix."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Largest differences, relative to the largest expected value.

    Args:
        output: of the compared rows.
        gradient: of the worst gradient; None without a backward pass.
    """

    output: float
    gradient: float | None


@dataclass(frozen=True, eq=False)
class Expected:
    """Output and gradients of the definition in float64 for some queries.

    Args:
        rows: the queries.
        output: ``[1, H, R, D]``.
        gradients: of q, k, v and parameters, if only these rows have a gradient.
    """

    rows: slice
    output: Tensor
    gradients: Sequence[Tensor | None]

    def compare(self, prepared: Pass) -> Errors:
        """Run a pass once and compare."""
        backward = bool(prepared.wanted)
        weight = torch.zeros_like(prepared.weight)
        weight[:, :, self.rows] = prepared.weight[:, :, self.rows]
        with torch.set_grad_enabled(backward):
            output = prepared.run()
        far = _distance(output.detach()[:, :, self.rows], self.output)
        if not backward:
            return Errors(output=far, gradient=None)
        gradients = torch.autograd.grad(output, prepared.wanted, weight, allow_unused=True)
        pairs = zip(gradients, self.gradients, strict=True)
        return Errors(output=far, gradient=max(_distance(a, b) for a, b in pairs))


def expect(contender: Contender, call: TimedCall) -> Expected | None:
    """Expected values of a contender; None if a pair of tokens depends on the number of others."""
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
        rows, output.detach(), torch.autograd.grad(output, wanted, weight, allow_unused=True)
    )


def _distance(got: Tensor | None, expected: Tensor | None) -> float:
    if got is None or expected is None:
        return 0.0 if got is expected or (_silent(got) and _silent(expected)) else float("nan")
    size = float(expected.abs().max())
    far = float((got.double() - expected).abs().max())
    return far / size if size else far


def _silent(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(gradient.any())
