"""Calls like earlier ones, which need no second plan: only queries, keys and values are new."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Attend, Result
from posenc.attention.call import AttentionCall
from posenc.attention.problem.problem import Problem
from posenc.encoding import DistanceFunction, Encoding, LowRank, StructuredScore, TokenTableProduct
from posenc.encoding.reuse import ModuleStates, wants_gradients
from posenc.layout import Layout
from posenc.runtime import is_exporting, is_transformed, needs_dispatch

MOST = 8
"""Kinds of calls that are remembered of one encoding."""


@dataclass(eq=False)
class _Known:
    """Kinds of calls of an encoding, the last used last.

    Args:
        states: of the encoding.
        kinds: attention of those that were prepared, None for those that cannot be, ``MET`` for
            those met once.
    """

    states: ModuleStates
    kinds: dict[Hashable, Attend | Literal["met once"] | None] = field(default_factory=dict)


MET: Literal["met once"] = "met once"

_KNOWN: WeakKeyDictionary[Encoding, _Known] = WeakKeyDictionary()


def repeat(call: AttentionCall, prepare: Callable[[AttentionCall], Attend | None]) -> Result | None:
    """Attention by what was prepared for calls of the same kind; None: it has to be planned.

    A kind is prepared when it is met for the second time: shapes, strides and dtypes, regular
    layouts or whole images, scale and cap of the call, of an encoding whose settings and weights
    are as they were, to the last bit.
    Calls with gradients, dropout or sinks, in graphs or dispatch modes, and on other devices than
    CPUs are of no kind.

    Args:
        call: a valid one.
        prepare: attention of a kind, from a call of it; None where that is of no use.
    """
    key = _key(call)
    if key is None:
        return None
    known = _KNOWN.get(call.encoding)
    if known is None or not known.states.hold():
        known = _KNOWN[call.encoding] = _Known(ModuleStates(call.encoding))
    kinds = known.kinds
    met, attend = key in kinds, kinds.pop(key, MET)
    if met and attend == MET:
        attend = _prepared(call, known.states, prepare)
    while len(kinds) >= MOST:
        kinds.pop(next(iter(kinds)), None)
    kinds[key] = attend
    return attend(call.q, call.k, call.v) if callable(attend) else None


def repeatable(call: AttentionCall, prepare: Callable[[AttentionCall], Attend | None]) -> bool:
    """True if ``repeat`` would compute calls like this valid one from the second on."""
    if _key(call) is None:
        return False
    return _prepared(call, ModuleStates(call.encoding), prepare) is not None


def _key(call: AttentionCall) -> Hashable | None:
    """The kind of a call, None if it is of none. Reads no tensor."""
    q, k, v, grid, encoding = call.q, call.k, call.v, call.grid, call.encoding
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    if call.dropout or call.sinks is not None or grid.intervals is not None:
        return None
    if call.whole or call.keyed or needs_dispatch(q, k, v) or is_transformed():
        return None
    if torch.is_autocast_enabled("cpu") or is_exporting():
        return None
    if wants_gradients((q, k, v, *encoding.parameters(), *encoding.buffers())):
        return None
    side = _image if grid.query.start is None and grid.dense else _sequence
    query = side(grid.query)
    key = query if grid.key is grid.query else side(grid.key)
    if query is None or key is None:
        return None
    of_tensors = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype)
    of_values = (v.shape, v.stride(), v.dtype)
    return of_tensors, of_values, query, key, grid.band, call.scale, call.softcap


def _sequence(layout: Layout) -> Hashable | None:
    """A regular layout by value, None for others."""
    if layout.start is None or layout.special is not None or not _is_plain(layout):
        return None
    positions = layout.positions
    return layout.start, positions.shape[1], positions.dtype


def _image(layout: Layout) -> Hashable | None:
    """The layout of a whole image by value, whose order nothing reads; None for others.

    All tokens before its cells are special.
    """
    if layout.extent is None or not _is_plain(layout):
        return None
    return layout.extent, layout.positions.dtype


def _is_plain(layout: Layout) -> bool:
    others = (layout.document, layout.valid, layout.signal)
    return all(x is None for x in others) and not layout.positions.requires_grad


def _prepared(
    call: AttentionCall, states: ModuleStates, prepare: Callable[[AttentionCall], Attend | None]
) -> Attend | None:
    if not (states.complete and call.q.numel() and call.k.numel() and call.v.numel()):
        return None
    problem = call.problem()
    own = problem.q is call.q and problem.k is call.k and problem.v is call.v
    useful = own and call.without_hidden() is call and _reads_rows_alone(call)
    return prepare(call) if useful else None


def _reads_rows_alone(call: AttentionCall) -> bool:
    """True if terms depend on queries and keys in nothing but their products with rows.

    Those of queries and keys that are no numbers are then the same, factors of positions alone
    included.
    """
    q, k = (torch.full_like(x, torch.nan) for x in (call.q, call.k))
    terms, others = (_terms(x.problem()) for x in (call, replace(call, q=q, k=k)))
    if terms is None or others is None or len(terms) != len(others):
        return False
    return all(map(_same_rows, terms, others))


Term = StructuredScore | DistanceFunction


def _terms(problem: Problem) -> Sequence[Term] | None:
    """The score in structured form or as a function of the distance; None in others."""
    if problem.lowered is not None:
        return problem.lowered
    fused = problem.fused()
    return (fused,) if isinstance(fused, DistanceFunction) else None


def _same_rows(term: Term, other: Term) -> bool:
    if type(term) is not type(other):
        return False
    pairs = zip(_rows(term), _rows(other), strict=True)
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


def _rows(term: Term) -> list[Tensor | None]:
    if isinstance(term, LowRank):
        return [term.query, term.key]
    if isinstance(term, DistanceFunction):
        return [term.factor, term.knots, term.slope, term.intercept]
    products: list[TokenTableProduct | None] = [term.left, term.right]
    rows = [None if product is None else product.rows for product in products]
    return [*rows, term.table, term.value, term.row, term.column]
