"""The one place where the arguments of attention are checked."""

from __future__ import annotations

import math

from torch import Tensor

from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.grid import Grid

__all__ = ["validate"]


def validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    encoding: Encoding,
    *,
    dropout: float,
    scale: float | None,
) -> None:
    """Check ranks, shapes, dtypes, devices and options of one call of ``attend``.

    Raises:
        ArgumentError: naming the argument, what was expected, what came, and the remedy.
    """
    _check_tensors(q, k, v)
    _check_grid(q, k, grid)
    if not isinstance(encoding, Encoding):
        raise ArgumentError(
            "encoding",
            expected="an Encoding",
            got=type(encoding).__name__,
            remedy="Use posenc.create(name, …) or Encoding.of(part).",
        )
    for part in encoding.parts():
        if part.axes is not None and grid.query.axes not in part.axes:
            raise ArgumentError(
                "grid",
                expected=f"positions with {_any_of(part.axes)} axes, as "
                f"{type(part).__name__} reads",
                got=grid.query.axes,
                remedy="Use Layout.sequence or Layout.at for text, Layout.image for images.",
            )
    if encoding.causal_only and not grid.causal:
        raise ArgumentError(
            "grid",
            expected="causal=True, without which this encoding means nothing",
            got="causal=False",
            remedy="Use Grid.of(layout, causal=True), or another encoding.",
        )
    if not 0.0 <= dropout < 1.0:
        raise ArgumentError(
            "dropout", expected="0 ≤ dropout < 1", got=dropout, remedy="Use 0.0 when evaluating."
        )
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ArgumentError(
            "scale", expected="a positive number", got=scale, remedy="Use None for the default."
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ArgumentError(
                name,
                expected="shape [B, heads, L, D]",
                got=list(x.shape),
                remedy="Split the heads and move them before the tokens: "
                "x.unflatten(-1, (heads, -1)).transpose(1, 2).",
            )
        if not x.is_floating_point():
            raise ArgumentError(
                name, expected="a floating dtype", got=x.dtype, remedy="Convert it with .to()."
            )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ArgumentError(
                name, expected=f"{q.dtype} as q", got=x.dtype, remedy=f"Use {name}.to(q.dtype)."
            )
        if x.device != q.device:
            raise ArgumentError(
                name, expected=f"{q.device} as q", got=x.device, remedy=f"Use {name}.to(q.device)."
            )
        if x.shape[0] != q.shape[0]:
            raise ArgumentError(
                name,
                expected=f"{q.shape[0]} batch rows as q",
                got=x.shape[0],
                remedy="Expand it over the batch.",
            )
    if k.shape[-1] != q.shape[-1]:
        raise ArgumentError(
            "k", expected=f"head width {q.shape[-1]} as q", got=k.shape[-1], remedy="Project it."
        )
    if v.shape[1:3] != k.shape[1:3]:
        raise ArgumentError(
            "v",
            expected=f"{k.shape[1]} heads and {k.shape[2]} tokens as k",
            got=f"{v.shape[1]} and {v.shape[2]}",
            remedy="Keys and values come in pairs.",
        )
    if q.shape[1] % k.shape[1]:
        raise ArgumentError(
            "q",
            expected=f"a number of heads that k's {k.shape[1]} divide",
            got=q.shape[1],
            remedy="Grouped-query heads need H_q to be a multiple of H_kv.",
        )


def _check_grid(q: Tensor, k: Tensor, grid: Grid) -> None:
    for name, side, x in (("query", grid.query, q), ("key", grid.key, k)):
        if side.length != x.shape[2]:
            raise ArgumentError(
                f"grid.{name}",
                expected=f"{x.shape[2]} tokens as {name[0]}",
                got=side.length,
                remedy="Build the layout for these tokens (a cache's layout includes the past).",
            )
        if side.batch not in (1, x.shape[0]):
            raise ArgumentError(
                f"grid.{name}",
                expected=f"1 or {x.shape[0]} batch rows",
                got=side.batch,
                remedy="Give the layout one row for all, or one a batch row.",
            )
        if side.device != x.device:
            raise ArgumentError(
                f"grid.{name}",
                expected=f"{x.device} as {name[0]}",
                got=side.device,
                remedy="Use layout.to(device).",
            )


def _any_of(axes: tuple[int, ...]) -> str:
    return " or ".join(map(str, axes))
