"""Checks of the arguments of attention."""

from __future__ import annotations

import sys
from numbers import Real

from torch import Tensor

from posenc.attention.call import AttentionCall
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout.dense import require_dense

LARGEST = sys.float_info.max


def validate(call: AttentionCall) -> None:
    """Check ranks, shapes, dtypes, devices and options of one call of ``attend``.

    Raises:
        ArgumentError: naming the argument, what was expected, what came, and the remedy.
    """
    q, k, v, grid, encoding = call.q, call.k, call.v, call.grid, call.encoding
    dropout, scale = call.dropout, call.scale
    _check_tensors(q, k, v)
    _check_grid(q, k, grid)
    if not isinstance(encoding, Encoding):
        raise ArgumentError(
            "encoding",
            expected="an Encoding",
            got=type(encoding).__name__,
            remedy="Use posenc.create(name, …) or Encoding.of(part).",
        )
    require_fit(
        encoding, heads=q.shape[1], head_dim=q.shape[3], value_dim=v.shape[3], causal=grid.causal
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
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0.0 <= dropout < 1.0:
        raise ArgumentError(
            "dropout", expected="0 ≤ dropout < 1", got=dropout, remedy="Use 0.0 when evaluating."
        )
    for name, value in (("scale", scale), ("softcap", call.softcap)):
        if value is not None and (
            isinstance(value, bool) or not (isinstance(value, Real) and 0 < value <= LARGEST)
        ):
            raise ArgumentError(
                name, expected="a positive number", got=value, remedy="Use None for the default."
            )
    _check_sinks(call.sinks, q, encoding)
    if call.softcap is not None:
        require_softmax("softcap", "None", encoding)


def require_softmax(argument: str, expected: str, encoding: Encoding) -> None:
    """Refuse an argument that means nothing without a softmax.

    Raises:
        ArgumentError: for an encoding whose score replaces it.
    """
    if encoding.score is not None and encoding.score.replaces_softmax:
        raise ArgumentError(
            argument,
            expected=f"{expected} with {type(encoding.score).__name__}, which replaces the softmax",
            got="one",
            remedy="Leave it out: the weights have no logits, and no sum that they are divided by.",
        )


def _check_sinks(sinks: Tensor | None, q: Tensor, encoding: Encoding) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        raise ArgumentError(
            "sinks",
            expected="a tensor of a floating dtype",
            got=sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__,
            remedy="Give one logit a query head, such as torch.zeros(heads).",
        )
    require_dense("sinks", sinks)
    if sinks.shape != q.shape[1:2]:
        raise ArgumentError(
            "sinks",
            expected=f"shape [{q.shape[1]}], a logit a query head",
            got=list(sinks.shape),
            remedy="Sinks are the same for all batch rows and queries.",
        )
    if sinks.device != q.device:
        raise ArgumentError(
            "sinks", expected=f"{q.device} as q", got=sinks.device, remedy="Use sinks.to(q.device)."
        )
    require_softmax("sinks", "None", encoding)


def require_fit(
    encoding: Encoding,
    *,
    heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dim: int | None = None,
    causal: bool,
) -> None:
    """Compare what the parts of an encoding are made for with what they are used with.

    Args:
        encoding: its parts.
        heads: query heads H.
        head_dim: width D of queries and keys before any transform.
        value_dim: width of the values; that of the queries if None.
        dim: width C of the model; None: unknown.
        causal: whether queries see the past only.

    Raises:
        ArgumentError: naming the part, and how to create one that fits.
    """
    if encoding.causal_only and not causal:
        raise ArgumentError(
            "causal",
            expected="True, without which this encoding means nothing",
            got=causal,
            remedy="Use causal=True (Grid.of(layout, causal=True)), or another encoding.",
        )
    transform = encoding.query_key
    if transform is not None and heads % transform.views:
        raise ArgumentError(
            "heads",
            expected=f"a multiple of {transform.views}, the heads that share a query",
            got=heads,
            remedy="Change heads, or use another encoding.",
        )
    transformed = head_dim if transform is None else head_dim * transform.widening
    for part in encoding.parts():
        width = head_dim
        if part is encoding.score:
            width = transformed
        elif part is encoding.value and value_dim is not None:
            width = value_dim
        kind = type(part).__name__
        for name, made_for, used_with in (
            ("heads", part.heads, heads),
            ("head_dim", part.head_dim, width),
            ("dim", part.dim, part.dim if dim is None else dim),
        ):
            if made_for is not None and made_for != used_with:
                raise ArgumentError(
                    "encoding",
                    expected=f"{name}={used_with}, as it is used with",
                    got=f"{kind} with {name}={made_for}",
                    remedy=f"Create it with {name}={used_with}.",
                )
        if part.causal is not None and part.causal != causal:
            raise ArgumentError(
                "encoding",
                expected=f"one for causal={causal}, as it is used with",
                got=f"{kind} with causal={part.causal}",
                remedy=f"Create it with causal={causal}.",
            )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentError(
                name,
                expected="a tensor",
                got=type(x).__name__,
                remedy="Its shape is [B, heads, L, D].",
            )
        require_dense(name, x)
        if x.dim() != 4:
            raise ArgumentError(
                name,
                expected="shape [B, heads, L, D]",
                got=list(x.shape),
                remedy="Split the heads and move them before the tokens: "
                "x.unflatten(-1, (heads, -1)).transpose(1, 2).",
            )
        if not (x.shape[1] and x.shape[3]):
            raise ArgumentError(
                name,
                expected="at least one head and feature",
                got=list(x.shape),
                remedy="Its shape is [B, heads, L, D].",
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
    if not isinstance(grid, Grid):
        raise ArgumentError(
            "grid",
            expected="a Grid",
            got=type(grid).__name__,
            remedy="Use Grid.of(layout, causal=…).",
        )
    if grid.intervals is not None and grid.intervals.shape[0] not in (1, q.shape[0]):
        raise ArgumentError(
            "grid.intervals",
            expected=f"1 or {q.shape[0]} batch rows",
            got=grid.intervals.shape[0],
            remedy="Give the intervals one row for all, or one a batch row.",
        )
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
