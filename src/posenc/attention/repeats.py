"""Reuse of the plan of an earlier call that differs in queries, keys and values only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Attend
from posenc.attention.call import Call
from posenc.attention.problem.problem import Problem
from posenc.encoding import DistanceFunction, Encoding, LowRank, StructuredScore, TokenTableProduct
from posenc.encoding.reuse import ModuleStates, wants_gradients
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import is_exporting, is_transformed, needs_dispatch

MOST = 8
"""Largest number of kinds of calls stored per encoding."""


@dataclass(eq=False)
class _CallKinds:
    """Kinds of calls of an encoding, the last used last.

    Args:
        states: the encoding's state when the kinds were recorded.
        kinds: by key, the prepared attention, None for a kind that cannot be prepared, and
            ``SEEN_ONCE`` for a kind that was called once.
    """

    states: ModuleStates
    kinds: dict[Hashable, Attend | Literal["seen once"] | None] = field(default_factory=dict)


SEEN_ONCE: Literal["seen once"] = "seen once"

_CALL_KINDS: WeakKeyDictionary[Encoding, _CallKinds] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class CallKind:
    """A kind of calls of an encoding whose settings and weights are unchanged, to the last bit.

    The key holds shapes, strides and dtypes, regular layouts or whole images, scale and softcap. A
    kind is prepared at its second call.
    """

    record: _CallKinds
    key: Hashable

    @classmethod
    def of(cls, call: Call) -> CallKind | None:
        """The kind of a call, which may be invalid; None if it has none.

        Calls with gradients, dropout or sinks, in graphs or dispatch modes, and on other devices
        than CPUs are of no kind.
        """
        key = _key(call)
        if key is None:
            return None
        record = _CALL_KINDS.get(call.encoding)
        if record is None or not record.states.hold():
            record = _CALL_KINDS[call.encoding] = _CallKinds(ModuleStates(call.encoding))
        return cls(record, key)

    def prepared(self) -> Attend | None:
        """Prepared attention of the kind, or None; its calls are valid except for their layouts."""
        kinds = self.record.kinds
        attend = kinds.get(self.key)
        if not callable(attend):
            return None
        kinds.pop(self.key, None)
        kinds[self.key] = attend  # the last used is the last to go
        return attend

    def prepare_if_repeated(
        self, call: Call, prepare: Callable[[Call], Attend | None]
    ) -> Attend | None:
        """Attention of the kind, prepared at its second call; None if the call has to be planned.

        Args:
            call: a valid one of the kind.
            prepare: attention of a kind, from a call of it; None where that is of no use.
        """
        kinds = self.record.kinds
        seen_before, attend = self.key in kinds, kinds.pop(self.key, SEEN_ONCE)
        if seen_before and attend == SEEN_ONCE:
            attend = _prepared(call, self.record.states, prepare)
        while len(kinds) >= MOST:
            kinds.pop(next(iter(kinds)), None)
        kinds[self.key] = attend
        return attend if callable(attend) else None


def repeatable(call: Call, prepare: Callable[[Call], Attend | None]) -> bool:
    """True if calls like this valid one are prepared from the second on."""
    if _key(call) is None:
        return False
    return _prepared(call, ModuleStates(call.encoding), prepare) is not None


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


def _prepared(
    call: Call, states: ModuleStates, prepare: Callable[[Call], Attend | None]
) -> Attend | None:
    if not (states.complete and call.q.numel() and call.k.numel() and call.v.numel()):
        return None
    problem = call.problem()
    untransformed = problem.q is call.q and problem.k is call.k and problem.v is call.v
    useful = untransformed and call.without_hidden() is call and _reads_rows_alone(call)
    return prepare(call) if useful else None


def _reads_rows_alone(call: Call) -> bool:
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
