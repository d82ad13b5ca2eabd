"""Calls like earlier ones, which need no second plan: only queries, keys and values are new."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Attend, Result
from posenc.attention.call import AttentionCall
from posenc.attention.problem.problem import Problem
from posenc.encoding import DistanceFunction, Encoding, LowRank, StructuredScore, TokenTableProduct
from posenc.encoding.reuse import ModuleStates
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import is_exporting, is_transformed, needs_dispatch

MOST = 8
"""Kinds of calls that are remembered of one encoding."""


@dataclass(frozen=True, eq=False)
class _Kind:
    """Calls of one kind, met once or prepared.

    Args:
        states: of the encoding when it was prepared; None: met once.
        attend: None: not to be prepared.
    """

    states: ModuleStates | None = None
    attend: Attend | None = None


_KINDS: WeakKeyDictionary[Encoding, dict[Hashable, _Kind]] = WeakKeyDictionary()


def repeat(call: AttentionCall, prepare: Callable[[AttentionCall], Attend | None]) -> Result | None:
    """Attention by what was prepared for calls of the same kind; None: it has to be planned.

    A kind is prepared when it is met for the second time: shapes, strides and dtypes, regular
    layouts or whole images, scale and cap of the call, of an encoding whose settings and weights
    are as they were.
    Calls with gradients, dropout or sinks, in graphs or dispatch modes, and on other devices than
    CPUs are of no kind.

    Args:
        call: perhaps invalid, if no valid one of its kind was met before.
        prepare: attention of a kind, from a call of it; None where that is of no use.
    """
    key = _key(call)
    if key is None:
        return None
    kinds = _KINDS.setdefault(call.encoding, {})
    kind = kinds.pop(key, None)
    if kind is None or not (kind.states is None or kind.states.hold()):
        kind = _Kind()
    elif kind.states is None:
        kind = _prepared(call, prepare)
    while len(kinds) >= MOST:
        del kinds[next(iter(kinds))]
    kinds[key] = kind  # the last used is the last to go
    return None if kind.attend is None else kind.attend(call.q, call.k, call.v)


def repeatable(call: AttentionCall, prepare: Callable[[AttentionCall], Attend | None]) -> bool:
    """True if ``repeat`` would compute calls like this valid one from the second on."""
    return _key(call) is not None and _prepared(call, prepare).attend is not None


def _key(call: AttentionCall) -> Hashable | None:
    """The kind of a call, None if it is of none. Reads no tensor."""
    q, k, v, grid, encoding = call.q, call.k, call.v, call.grid, call.encoding
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    if not (isinstance(grid, Grid) and isinstance(encoding, Encoding)):
        return None
    if type(call.dropout) is not float or call.dropout or call.sinks is not None:
        return None
    if call.whole or call.keyed or needs_dispatch(q, k, v) or is_transformed():
        return None
    if torch.is_autocast_enabled("cpu") or is_exporting():
        return None
    graded = torch.is_grad_enabled()
    if graded and any(x.requires_grad for x in (q, k, v, *encoding.parameters())):
        return None
    side = _image if grid.query.start is None and grid.dense else _sequence
    query = side(grid.query)
    key = query if grid.key is grid.query else side(grid.key)
    if query is None or key is None or grid.intervals is not None:
        return None
    of_tensors = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype)
    of_values = (v.shape, v.stride(), v.dtype)
    scale, softcap = call.scale, call.softcap
    return of_tensors, of_values, query, key, grid.band, type(scale), scale, type(softcap), softcap


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


def _prepared(call: AttentionCall, prepare: Callable[[AttentionCall], Attend | None]) -> _Kind:
    if not (call.q.numel() and call.k.numel() and call.v.numel()):
        return _Kind(ModuleStates(call.encoding))
    states, problem = ModuleStates(call.encoding), call.problem()
    own = problem.q is call.q and problem.k is call.k and problem.v is call.v
    useful = states.complete and own and call.without_hidden() is call and _reads_rows_alone(call)
    return _Kind(states, prepare(call) if useful else None)


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
