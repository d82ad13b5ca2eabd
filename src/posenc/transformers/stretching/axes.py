"""Rotations on several axes in models of diffusers, identified by running them, and stretched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Natural, check
from posenc.encoding import Encoding, Pairing
from posenc.encodings.common.precision import wider
from posenc.encodings.query_key.axial_rope import AxialRope
from posenc.errors import ArgumentError
from posenc.extension import extend
from posenc.layout import Layout
from posenc.transformers.stretching.changes import Change, StretchedPart
from posenc.transformers.stretching.configs import Request
from posenc.transformers.stretching.frequencies import describe

Table = tuple[Float[Tensor, "L D"], Float[Tensor, "L D"]]
"""Cosines and sines of tokens, each twice."""

MOST_AXES, LARGEST_PATCH = 4, 8
"""Largest numbers of axes of ids, and of cells of latents a token, that are tried."""

TOLERANCE = 1e-4
"""Largest error of cosines in float32 at the small positions that are tried."""


@dataclass(eq=False)
class AxialModule:
    """A module that gives tokens on several axes their cosines and sines.

    Args:
        path: in the model.
        module: its ``forward`` takes latents ``[B, C, *sizes]`` or ids ``[L, A]``.
        patch: cells of latents a token along each axis; None: it takes ids.
        rope: the same rotation.
    """

    path: str
    module: nn.Module
    patch: tuple[int, ...] | None
    rope: AxialRope

    def stretch(self, request: Request, axis: int) -> tuple[Change, StretchedPart]:
        """Have the module rotate as a method makes it along an axis.

        Raises:
            ArgumentError: as ``posenc.extension.on_axis``.
        """
        options = "".join(f"@{name}={value}" for name, value in request.options.items())
        extended = extend(
            Encoding(query_key=self.rope),
            "on_axis",
            factor=request.factor,
            length=request.length,
            method=request.method + options,
            axis=axis,
        )
        after = extended.query_key
        assert isinstance(after, AxialRope)
        rotation = StretchedRotation(self.module.forward, self, after, axis)
        change = Change.of(self.module, "forward", rotation)
        kind = type(self.module).__name__
        return change, StretchedPart(self.path, kind, True, describe(extended))


@dataclass(eq=False)
class StretchedRotation:
    """The ``forward`` of a rotary module, with other cosines and sines of the pairs that changed.

    Args:
        forward: of the module.
        before: the module as it was.
        after: the stretched rotation.
        axis: along which it is stretched.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    before: AxialModule
    after: AxialRope
    axis: int

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cosine, sine = self.forward(x, *args, **kwargs)
        columns, positions = self._columns(), self._positions(x, cosine, sine)
        slowed = [t for t, divisor in enumerate(self.after.divisors or ()) if divisor != 1]
        theta = self.after.ladders(len(self.after.pairs or ()), like=positions)
        turned = positions.unsqueeze(1) * theta[slowed]
        own = [column for t in slowed for column in columns[t]]
        made = []
        for before, of_pairs in ((cosine, turned.cos()), (sine, turned.sin())):
            after = before.clone(memory_format=torch.contiguous_format)
            after.view(-1, after.shape[-1])[:, own] = of_pairs.repeat_interleave(2, 1).to(after)
            made.append(after if self.after.gain == 1 else after * self.after.gain)
        return made[0], made[1]

    def _columns(self) -> list[tuple[int, int]]:
        """The two features of each pair."""
        pairs = sum(self.after.pairs or ())
        if self.after.pairing == "half":
            return [(t, t + pairs) for t in range(pairs)]
        return [(2 * t, 2 * t + 1) for t in range(pairs)]

    def _positions(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Float[Tensor, " L"]:
        """Coordinates of tokens along the axis, in the units of this call (frames a second)."""
        if self.before.patch is None:
            return wider(x[:, self.axis])
        sizes = [n // size for n, size in zip(x.shape[2:], self.before.patch, strict=True)]
        cells = wider(Layout.cells(*sizes, device=x.device).positions[0, :, self.axis])
        if sizes[self.axis] == 1:
            return cells
        first = self._columns()[sum((self.after.pairs or ())[: self.axis])][0]
        second = math.prod(sizes[self.axis + 1 :])  # the next token along the axis
        angle = torch.atan2(
            *(y.reshape(len(cells), -1)[second, first].to(cells) for y in (sine, cosine))
        )
        return cells * (angle if (angle - 1).abs() > TOLERANCE else 1.0)


def stretch_axis(
    model: nn.Module, request: Request, axis: int, changes: list[Any]
) -> tuple[StretchedPart, ...]:
    """Stretch all rotations of a model along an axis.

    Raises:
        ArgumentError: if it has none that is known, or as ``posenc.extension.on_axis``.
    """
    axis = check("axis", Natural, axis)
    parts = []
    for found in axial_modules(model):
        change, part = found.stretch(request, axis)
        changes.append(change)
        parts.append(part)
    if not parts:
        raise ArgumentError(
            "model",
            expected="a rotary module of latents or ids with a ladder of frequencies an axis",
            got=type(model).__name__,
            remedy="Without axis=…, stretch takes models of transformers.",
        )
    return tuple(parts)


def axial_modules(model: nn.Module) -> Iterator[AxialModule]:
    """Modules that are axial RoPE of latents or ids, as calls of them show."""
    for path, module in model.named_modules():
        if any(True for _ in module.children()) or any(True for _ in module.parameters()):
            continue
        first = next(iter(signature(module.forward).parameters), "")
        if first == "hidden_states" and (patch := _patch(module)) is not None:
            rope = _read(module, patch, len(patch))
        elif first == "ids":
            tried = (_read(module, None, axes) for axes in range(MOST_AXES, 0, -1))
            patch, rope = None, next(filter(None, tried), None)
        else:
            continue
        if rope is not None:
            yield AxialModule(path, module, patch, rope)


def _table(module: nn.Module, patch: Sequence[int] | None, sizes: Sequence[int]) -> Table | None:
    """Cosines and sines of the cells of a box; None if the module gives none."""
    if patch is None:
        table = _call(module, Layout.cells(*sizes).positions[0])
    else:
        cells = (n * size for n, size in zip(sizes, patch, strict=True))
        table = _call(module, torch.zeros(1, 1, *cells))
    return table if table is not None and len(table[0]) == math.prod(sizes) else None


def _call(module: nn.Module, x: Tensor) -> Table | None:
    """The cosines and sines that a call gives; None if it gives other results, or fails."""
    try:
        found = module(x)
    except Exception:  # of any class of diffusers
        return None
    both = isinstance(found, tuple) and len(found) == 2 and all(map(torch.is_tensor, found))
    if not both or found[0].shape != found[1].shape or found[0].is_complex():
        return None
    cosine, sine = (x.detach().cpu().double().reshape(-1, x.shape[-1]) for x in found)
    return cosine, sine


def _patch(module: nn.Module) -> tuple[int, ...] | None:
    """Cells of video latents a token along each axis."""
    patch = []
    for axis in range(3):
        sizes = [LARGEST_PATCH] * 3
        for size in range(1, LARGEST_PATCH + 1):
            sizes[axis] = size
            if (table := _call(module, torch.zeros(1, 1, *sizes))) is not None and len(table[0]):
                patch.append(size)
                break
    return tuple(patch) if len(patch) == 3 else None


def _read(module: nn.Module, patch: tuple[int, ...] | None, axes: int) -> AxialRope | None:
    """The module's rotation; None if it is another than axial RoPE of indices."""
    steps = []
    for axis in range(axes):
        table = _table(module, patch, [2 if other == axis else 1 for other in range(axes)])
        if table is None:
            return None
        steps.append(torch.atan2(table[1][1], table[0][1]))
    features = torch.stack(steps)  # [A, D], radians a cell
    adjacent = torch.equal(features[:, 0::2], features[:, 1::2])
    pairing: Pairing = "adjacent" if adjacent else "half"
    theta = features[:, 0::2] if adjacent else features.chunk(2, 1)[0]
    own = theta.abs().argmax(0)
    pairs = tuple(own.bincount(minlength=axes).tolist())
    bases, first = [], 0
    for axis, count in enumerate(pairs):
        ladder = theta[axis, first : first + count].tolist()
        first += count
        base = (ladder[0] / ladder[1]) ** count if count > 1 and ladder[1] > 0 else 10000.0
        near = round(base)
        bases.append(float(near) if abs(base - near) < TOLERANCE * base else base)
    if min(bases) <= 1:
        return None
    width = features.shape[1]
    rope = AxialRope(head_dim=width, pairs=pairs, base=bases, pairing=pairing)
    sizes = (3, 4, 3, 4)[:axes]
    found = _table(module, patch, sizes)
    expected = Encoding(query_key=rope).cos_sin(Layout.cells(*sizes))
    if found is None or any(
        not torch.allclose(a, b[0].double(), atol=TOLERANCE)
        for a, b in zip(found, expected, strict=True)
    ):
        return None
    return rope
