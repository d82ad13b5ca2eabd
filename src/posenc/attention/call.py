"""The record of one call of ``attend``: cast, validated, and lowered to a ``Problem``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.problem.lowering import lower, reads_tokens
from posenc.attention.problem.problem import (
    CounterDropout,
    GlobalSoftmax,
    Problem,
    Rotate,
    transformed,
)
from posenc.encoding import Encoding, Rotation, ValueTransform, repeat_heads
from posenc.encoding.parts import require_causal
from posenc.encoding.prepared import reused_of_grid
from posenc.errors import ArgumentError
from posenc.grid import Grid, usable_signals
from posenc.layout.checks import require_dense, require_unwritten
from posenc.layout.padding import zero_invalid
from posenc.runtime import autocast_dtype


@dataclass(eq=False)
class Call:
    """The arguments of one call of ``attend``; ``problem`` is made once, when first needed.

    Args: as ``attend``; ``global_softmax`` and ``counter_dropout`` as of ``Problem``.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K E"]
    grid: Grid
    encoding: Encoding
    dropout: float = 0.0
    scale: float | None = None
    global_softmax: GlobalSoftmax | None = None
    counter_dropout: CounterDropout | None = None
    sinks: Float[Tensor, " H"] | None = None
    softcap: float | None = None
    _problem: Problem | None = field(default=None, init=False, repr=False)

    def autocast(self) -> Call:
        """The call with operands cast by autocast, and with float64 positions for float64 operands.

        Otherwise positions are not cast, nor are biases.
        """
        if self.q.dtype == torch.float64:
            grid = self.grid.in_precision_of(self.q)
            return self if grid is self.grid else replace(self, grid=grid)
        dtype = autocast_dtype(self.q.device)
        if dtype is None:
            return self
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def with_values(self, transform: ValueTransform, inner: Encoding) -> Call:
        """The call inside a transform of values: values and any global output transformed.

        The transform's inverse is left to be applied to what it returns.
        """
        total = self.global_softmax
        if total is not None:
            total = total._replace(output=transform(total.output, self.grid.query))
        v = transform(zero_invalid(self.v, self.grid.key, dim=2), self.grid.key)
        return replace(self, v=v, encoding=inner, global_softmax=total)

    def without_padding(self) -> Call:
        """The call with zeros at invalid tokens, so that no backend reads what they hold."""
        query, key = self.grid.query, self.grid.key
        padded = query.valid is not None or key.valid is not None
        if not padded and query.signal is None and key.signal is None:
            return self
        q, k = zero_invalid(self.q, query, dim=2), zero_invalid(self.k, key, dim=2)
        v = zero_invalid(self.v, key, dim=2)
        return replace(self, q=q, k=k, v=v, grid=usable_signals(self.grid))

    def without_hidden(self) -> Call:
        """The call with the keys that a window shows, if few queries see a part of the keys.

        So that decoding reads a slice of a cache. With many queries kernels skip the others.
        """
        grid, (queries, keys) = self.grid, (self.q.shape[2], self.k.shape[2])
        if torch.compiler.is_compiling() or 4 * queries > keys:
            return self
        (lowest, highest), shift = grid.band, grid.shift
        if shift is None:
            return self
        parts = (self.encoding.query_key, self.encoding.score, self.encoding.value)
        if (
            self.global_softmax
            or self.counter_dropout
            or not all(part is None or part.pairwise for part in parts)
        ):
            return self
        begin = max(0, lowest - shift)
        end = min(keys, max(0, highest - shift + queries))
        if begin >= end or end - begin == keys:
            return self
        k, v, key = self.k[:, :, begin:end], self.v[:, :, begin:end], grid.key.slice(begin, end)
        return replace(self, k=k, v=v, grid=replace(grid, key=key))

    def logit_scale(self) -> float:
        """Factor of the logits: as given, or the encoding's default."""
        if self.scale is not None:
            return self.scale
        return self.encoding.default_scale(self.q.shape[-1])

    def problem(self, rotate: Rotate = Rotation.apply) -> Problem:
        """The problem; q and k stay unrotated if a rotation is all that they still need."""
        if self._problem is None:
            self._problem = self._lower(rotate)
        return self._problem

    def _lower(self, rotate: Rotate) -> Problem:
        if self.encoding.query_key is None:
            return self._with(self.q, self.k, self.v, rotate)
        rotation = self.rotation()
        if rotation is None:
            q, k = transformed(self.q, self.k, self.encoding, self.grid)
            v = repeat_heads(self.v, k.shape[1])  # keys may have come back with one a query head
            return self._with(q, k, v, rotate)
        problem = replace(self._with(self.q, self.k, self.v, rotate), rotation=rotation)
        if problem.lowered is not None and not any(map(reads_tokens, problem.lowered)):
            return problem
        rotated = problem.rotated
        return replace(self._with(rotated.q, rotated.k, self.v, rotate), source=(self.q, self.k))

    def rotation(self) -> Rotation | None:
        """The query_key part's rotation; None without one, or where its angles have gradients."""
        transform = self.encoding.query_key
        if transform is None:
            return None
        graded = torch.is_grad_enabled()
        if graded and any(parameter.requires_grad for parameter in transform.parameters()):
            return None
        kind = (self.q.dtype, self.q.device, self.q.shape, self.k.shape)
        lower = partial(transform.lower, self.q.detach(), self.k.detach())
        rotation = reused_of_grid(lower, "rotation", *kind, grid=self.grid, layers=(transform,))
        return None if rotation is None or (graded and rotation.has_gradient) else rotation

    def _with(self, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate) -> Problem:
        grid, encoding, scale = self.grid, self.encoding, self.logit_scale()
        lowered = lower(encoding, q, k, grid, scale=scale, value_dim=v.shape[3])
        return Problem(
            *(q, k, v, grid, encoding, scale, self.dropout, lowered),
            global_softmax=self.global_softmax,
            counter_dropout=self.counter_dropout,
            sinks=self.sinks,
            softcap=self.softcap,
            rotate=rotate,
        )


LARGEST = sys.float_info.max


Fault = tuple[str, str, object, str]
"""Name of an argument, what was expected, what came, and the remedy."""


def validate(call: Call) -> None:
    """Check ranks, shapes, dtypes, devices and options of one call of ``attend``.

    Raises:
        ArgumentError: naming the argument, what was expected, what came, and the remedy.
    """
    for faults in (_faults_of_tensors, _faults_of_grid, _faults_of_encoding, _faults_of_options):
        for name, expected, got, remedy in faults(call):  # later ones are not looked for
            raise ArgumentError(name, expected=expected, got=got, remedy=remedy)
    if call.sinks is not None:
        require_softmax("sinks", "None", call.encoding)
    if call.softcap is not None:
        require_softmax("softcap", "None", call.encoding)


def require_softmax(argument: str, expected: str, encoding: Encoding) -> None:
    """Refuse an argument that is undefined without a softmax.

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
    parts = encoding.parts()
    require_causal(parts, causal)
    transform, transformed = encoding.query_key, head_dim
    if transform is not None:
        encoding.queries(heads)  # which heads may share
        transformed = head_dim * transform.widening
    for part in parts:
        width = head_dim
        if part is encoding.score:
            width = transformed
        elif part is encoding.value and value_dim is not None:
            width = value_dim
        for name, made_for, used_with in (
            ("heads", part.heads, heads),
            ("head_dim", part.head_dim, width),
            ("dim", part.dim, part.dim if dim is None else dim),
        ):
            if made_for is not None and made_for != used_with:
                raise ArgumentError(
                    "encoding",
                    expected=f"one for {name}={used_with}, as it is used with",
                    got=f"{type(part).__name__} with {name}={made_for}",
                    remedy=f"Create it with {name}={used_with}.",
                )


def _faults_of_tensors(call: Call) -> Iterator[Fault]:
    q, k, v = call.q, call.k, call.v
    shape = "Its shape is [B, heads, L, D]."
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            yield name, "a tensor", type(x).__name__, shape
        if x.is_nested or x.layout is not torch.strided:
            require_dense(name, x)
        if x.dim() != 4:
            move = "x.unflatten(-1, (heads, -1)).transpose(1, 2)"
            remedy = f"Split the heads and move them before the tokens: {move}."
            yield name, "shape [B, heads, L, D]", list(x.shape), remedy
        if not (x.shape[1] and x.shape[3]):
            yield name, "at least one head and feature", list(x.shape), shape
        if not x.is_floating_point():
            yield name, "a floating dtype", x.dtype, "Convert it with .to()."
    for name, x in (("k", k), ("v", v)):
        # Autocast, which leaves float64 as it is, makes them one.
        if x.dtype != q.dtype and (
            torch.float64 in (x.dtype, q.dtype) or autocast_dtype(q.device) is None
        ):
            yield name, f"{q.dtype} as q", x.dtype, f"Use {name}.to(q.dtype)."
        if x.device != q.device:
            yield name, f"{q.device} as q", x.device, f"Use {name}.to(q.device)."
        if x.shape[0] != q.shape[0]:
            yield name, f"{q.shape[0]} batch rows as q", x.shape[0], "Expand it over the batch."
    if k.shape[-1] != q.shape[-1]:
        yield "k", f"head width {q.shape[-1]} as q", k.shape[-1], "Project it."
    if v.shape[1:3] != k.shape[1:3]:
        expected = f"{k.shape[1]} heads and {k.shape[2]} tokens as k"
        got = f"{v.shape[1]} and {v.shape[2]}"
        yield "v", expected, got, "Keys and values come in pairs."
    if q.shape[1] % k.shape[1]:
        expected = f"a number of heads that k's {k.shape[1]} divide"
        yield "q", expected, q.shape[1], "Grouped-query heads need H_q to be a multiple of H_kv."


def _faults_of_grid(call: Call) -> Iterator[Fault]:
    q, k, grid = call.q, call.k, call.grid
    if not isinstance(grid, Grid):
        yield "grid", "a Grid", type(grid).__name__, "Use Grid.of(layout, causal=…)."
    rows = q.shape[0]
    if grid.intervals is not None and grid.intervals.shape[0] not in (1, rows):
        remedy = "Give the intervals one row for all, or one a batch row."
        yield "grid.intervals", f"1 or {rows} batch rows", grid.intervals.shape[0], remedy
    for name, side, x in (("grid.query", grid.query, q), ("grid.key", grid.key, k)):
        of = "q" if x is q else "k"
        tokens, device = side.positions.shape[1], side.positions.device
        if tokens != x.shape[2]:
            remedy = "Build the layout for these tokens (a cache's layout includes the past)."
            yield name, f"{x.shape[2]} tokens as {of}", tokens, remedy
        if side.batch not in (1, rows):
            remedy = "Give the layout one row for all, or one a batch row."
            yield name, f"1 or {rows} batch rows", side.batch, remedy
        if device != x.device:
            yield name, f"{x.device} as {of}", device, "Use layout.to(device)."
    require_unwritten(grid.query)
    if grid.key is not grid.query:
        require_unwritten(grid.key)


def _faults_of_encoding(call: Call) -> Iterator[Fault]:
    q, grid, encoding = call.q, call.grid, call.encoding
    if not isinstance(encoding, Encoding):
        remedy = "Use posenc.create(name, …) or Encoding.of(part)."
        yield "encoding", "an Encoding", type(encoding).__name__, remedy
    heads, head_dim, value_dim = q.shape[1], q.shape[3], call.v.shape[3]
    require_fit(encoding, heads=heads, head_dim=head_dim, value_dim=value_dim, causal=grid.causal)
    axes = grid.query.positions.shape[2]
    for part in encoding.parts():
        if part.axes is not None and axes not in part.axes:
            any_of = " or ".join(map(str, part.axes))
            expected = f"positions with {any_of} axes, as {type(part).__name__} reads"
            remedy = "Use Layout.sequence or Layout.at for text, Layout.image for images."
            yield "grid", expected, axes, remedy


def _faults_of_options(call: Call) -> Iterator[Fault]:
    """Faults of dropout, scale, cap and sinks."""
    q, dropout, sinks = call.q, call.dropout, call.sinks
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0.0 <= dropout < 1.0:
        yield "dropout", "0 ≤ dropout < 1", dropout, "Use 0.0 when evaluating."
    for name, value in (("scale", call.scale), ("softcap", call.softcap)):
        if value is not None and (
            isinstance(value, bool) or not (isinstance(value, Real) and 0 < value <= LARGEST)
        ):
            yield name, "a positive number", value, "Use None for the default."
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        remedy = "Give one logit a query head, such as torch.zeros(heads)."
        yield "sinks", "a tensor of a floating dtype", got, remedy
    require_dense("sinks", sinks)
    if sinks.shape != q.shape[1:2]:
        expected = f"shape [{q.shape[1]}], a logit a query head"
        remedy = "Sinks are the same for all batch rows and queries."
        yield "sinks", expected, list(sinks.shape), remedy
    if sinks.device != q.device:
        yield "sinks", f"{q.device} as q", sinks.device, "Use sinks.to(q.device)."
