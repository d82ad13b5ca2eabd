"""Calls that differ from earlier ones in queries, keys and values only: planned once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Attend
from posenc.attention.call import Call
from posenc.encoding import DistanceFunction, Encoding
from posenc.encoding.prepared import (
    active,
    are_known,
    reused_later,
    stored,
    tensors_of,
    wants_gradients,
)
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import is_exporting, is_transformed, needs_dispatch


def kind_of(call: Call) -> Hashable | None:
    """Shapes, strides and dtypes, layouts by value, and options of a call; None if not repeatable.

    Calls with gradients, dropout or sinks, in graphs or dispatch modes, and on other devices than
    CPUs are not. The call may be invalid; no tensor is read.
    """
    return None if active() is None else _key(call)


def prepared_attention(call: Call, kind: Hashable) -> Attend | None:
    """Attention that an earlier call of a kind prepared, or None.

    Such calls are valid but for their layouts.
    """
    attend: Attend | None = stored("attend", kind, layers=(call.encoding,))
    return attend


def prepare_repeated(
    call: Call, kind: Hashable, prepare: Callable[[Call], Attend | None]
) -> Attend | None:
    """Attention of a valid call's kind, prepared at its second call; None if it is to be planned.

    Args:
        prepare: attention of a kind, from a call of it; None where that is of no use.
    """
    compute = partial(_prepared, call, prepare)
    return reused_later(compute, "attend", kind, layers=(call.encoding,))


def repeatable(call: Call, prepare: Callable[[Call], Attend | None]) -> bool:
    """True if calls like this valid one are prepared from the second on, where something may be."""
    modules = list(call.encoding.modules())
    if not are_known(modules) or wants_gradients(tensors_of(modules)):
        return False
    return _key(call) is not None and _prepared(call, prepare) is not None


def _key(call: Call) -> Hashable | None:
    """The key of a call's kind; None if it has none. The call may be invalid. Reads no tensor."""
    q, k, v, grid, encoding = call.q, call.k, call.v, call.grid, call.encoding
    if not (type(grid) is Grid and isinstance(encoding, Encoding) and _is_plain_number(call)):
        return None
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    if call.dropout or call.sinks is not None or grid.intervals is not None:
        return None
    if call.global_softmax or call.counter_dropout or needs_dispatch(q, k, v) or is_transformed():
        return None
    if torch.is_autocast_enabled("cpu") or is_exporting():
        return None
    if wants_gradients((q, k, v)):
        return None
    side = _image if grid.query.start is None and grid.dense else _sequence
    query = side(grid.query)
    key = query if grid.key is grid.query else side(grid.key)
    if query is None or key is None:
        return None
    of_tensors = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype)
    of_values = (v.shape, v.stride(), v.dtype)
    return of_tensors, of_values, query, key, grid.band, call.scale, call.softcap


def _is_plain_number(call: Call) -> bool:
    """True if scale, cap and dropout are of the usual types: ``True == 1`` and finds its kind."""
    return {type(call.scale), type(call.softcap)} <= {float, int, type(None)} and (
        type(call.dropout) in (float, int)
    )


def _sequence(layout: Layout) -> Hashable | None:
    """A regular layout by value, None for others."""
    if layout.start is None or layout.special is not None or not _is_plain(layout):
        return None
    return layout.start, *_kind_of(layout)


def _image(layout: Layout) -> Hashable | None:
    """The layout of a whole image by value, whose order nothing reads; None for others.

    All tokens before its cells are special.
    """
    if layout.extent is None or not _is_plain(layout):
        return None
    return layout.extent, *_kind_of(layout)


def _kind_of(layout: Layout) -> tuple[Hashable, ...]:
    positions, order = layout.positions, layout.order
    return positions.shape, positions.dtype, positions.device, order.shape, order.device


def _is_plain(layout: Layout) -> bool:
    others = (layout.document, layout.valid, layout.signal)
    return all(x is None for x in others) and not layout.positions.requires_grad


def _prepared(call: Call, prepare: Callable[[Call], Attend | None]) -> Attend | None:
    if not (call.q.numel() and call.k.numel() and call.v.numel()):
        return None
    score = call.encoding.score
    if score is not None and not (score.by_position or score.rows_by_position):
        return None
    problem = call.problem()
    untransformed = problem.q is call.q and problem.k is call.k and problem.v is call.v
    structured = problem.lowered is not None or isinstance(problem.fused(), DistanceFunction)
    useful = untransformed and structured and call.without_hidden() is call
    return prepare(call) if useful else None
