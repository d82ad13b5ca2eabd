"""Grids from the mask functions of transformers: of windows, chunks, prefixes and documents.

Those that transformers composes masks of are read; all others are evaluated, a block of queries at
a time, and served if each query sees one interval of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import prepare_padding_mask, sdpa_mask

from posenc.grid import FARTHEST, Grid
from posenc.layout import Layout
from posenc.runtime import has_values
from posenc.transformers.versions import remap_positions_for_packed_sequence

MaskFunction = Callable[..., Any]
"""Function of batch row, head, query and key index; True if the query may attend to the key."""

Documents = tuple[Int[Tensor, "b Q"], Int[Tensor, "b K"]]
"""Numbers of the documents of queries and keys."""

BLOCK = 2**20
"""Pairs of a batch row for which a function is evaluated at once."""

MOST_CACHED = 64
"""Intervals of functions that depend on nothing but numbers, kept for later calls."""


@dataclass(frozen=True)
class Place:
    """Numbers of batch rows, queries and keys, and the indices of the first of each.

    Args:
        device: of the mask.
    """

    batch: int
    queries: int
    keys: int
    first: int
    start: int
    device: torch.device

    @property
    def index(self) -> Int[Tensor, "1 Q"]:
        """Indices of the queries."""
        return torch.arange(self.first, self.first + self.queries, device=self.device)[None]

    @property
    def key_index(self) -> Int[Tensor, "1 K"]:
        """Indices of the keys."""
        return torch.arange(self.start, self.start + self.keys, device=self.device)[None]


@dataclass(frozen=True, eq=False)
class Pattern:
    """Pairs that a mask function lets through; all conditions hold together.

    Args:
        low, high: least and greatest key index - query index.
        intervals: ``[b, Q, 2]``, from and to (exclusive) among the indices of keys.
        documents: ``[b, Q]`` and ``[b, K]``, equal where they may see each other.
        valid: ``[b, K]``, False for keys that nothing sees.
    """

    low: int = -FARTHEST
    high: int = FARTHEST
    intervals: Int[Tensor, "b Q 2"] | None = None
    documents: Documents | None = None
    valid: Bool[Tensor, "b K"] | None = None

    def __and__(self, other: Pattern) -> Pattern:
        intervals = self.intervals if other.intervals is None else other.intervals
        if self.intervals is not None and other.intervals is not None:
            (begin, stop), (first, end) = self.intervals.unbind(-1), other.intervals.unbind(-1)
            intervals = torch.stack([begin.maximum(first), stop.minimum(end)], dim=-1)
        documents = self.documents if other.documents is None else other.documents
        if self.documents is not None and other.documents is not None:
            documents = _paired(self.documents, other.documents)
        valid = self.valid if other.valid is None else other.valid
        if self.valid is not None and other.valid is not None:
            valid = self.valid & other.valid
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Pattern(low, high, intervals, documents, valid)

    def grid(self, place: Place) -> Grid:
        """The pattern as a grid, with indices as positions."""
        query = Layout.sequence(place.queries, place.first, device=place.device)
        key = query
        if (place.queries, place.first) != (place.keys, place.start):
            key = Layout.sequence(place.keys, place.start, device=place.device)
        if self.documents is not None:
            query, key = (
                replace(side, document=document)
                for side, document in zip((query, key), self.documents, strict=True)
            )
        valid = self._visible_padding(place)
        if valid is not None:
            key = replace(key, valid=valid)
        if self.low > self.high:  # Qwen2-MoE without windows makes a mask of 0 keys, unread
            nothing = torch.zeros(1, place.queries, 2, dtype=torch.int64, device=place.device)
            return Grid(query, key, intervals=nothing)
        if self.high == 0 and self.low == -FARTHEST:
            return Grid(query, key, causal=True, intervals=self.intervals)
        return Grid(query, key, window=(self.low, self.high), intervals=self.intervals)

    def _visible_padding(self, place: Place) -> Bool[Tensor, "b K"] | None:
        """``valid``, if it hides a key that a query would see."""
        if self.valid is None:
            return None
        if not has_values(self.valid):
            return self.valid
        first = max(0, place.first + self.low - place.start)
        end = place.first + place.queries + self.high - place.start
        return None if bool(self.valid[:, first : max(0, end)].all()) else self.valid


def grid_of_function(
    function: MaskFunction,
    place: Place,
    attended: Bool[Tensor, "B L"] | None,
    *,
    use_vmap: bool = False,
) -> Grid | None:
    """The grid of the pairs that a mask function lets through; None if no grid is known.

    Args:
        attended: False for padding, by the indices of keys.
        use_vmap: as of transformers: whether the function takes single indices only.
    """
    pattern = _read(function, place) or _evaluated(function, place, use_vmap=use_vmap)
    return None if pattern is None else padded(pattern, place, attended).grid(place)


def padded(pattern: Pattern, place: Place, attended: Bool[Tensor, "B L"] | None) -> Pattern:
    """A pattern that hides padding too."""
    padding = prepare_padding_mask(attended, place.keys, place.start)
    if padding is None:
        return pattern
    return pattern & Pattern(valid=padding[:, place.start : place.start + place.keys].bool())


Cells = Mapping[str, Any]
"""Variables that a function has from where it was made."""

Reader = Callable[[Cells, Place], Pattern | None]


def _read(function: MaskFunction, place: Place) -> Pattern | None:
    """The pattern of a function that transformers composes masks of; None for all others."""
    reader = READERS.get(_code(function))
    return None if reader is None else reader(_cells(function), place)


def _code(function: MaskFunction) -> CodeType | None:
    return getattr(function, "__code__", None)


def _cells(function: Any) -> dict[str, Any]:
    contents = [cell.cell_contents for cell in function.__closure__ or ()]
    return dict(zip(function.__code__.co_freevars, contents, strict=True))


def _chunks(cells: Cells, place: Place) -> Pattern:
    size, padding = cells["chunk_size"], cells["left_padding"][:, None]
    first = place.index - (place.index - padding).remainder(size)
    return Pattern(intervals=torch.stack([first, first + size], dim=-1))


def _packed(cells: Cells, place: Place) -> Pattern:
    ids = cells["packed_sequence_mask"]
    return Pattern(documents=(ids[:, place.index[0]], ids[:, place.key_index[0]]))


def _padding(cells: Cells, place: Place) -> Pattern:
    return Pattern(valid=cells["padding_mask"][:, place.key_index[0]].bool())


def _two_sided_window(cells: Cells, place: Place) -> Pattern:
    return Pattern(-cells["sliding_window"], cells["sliding_window"])


LEAVES: Mapping[str, tuple[Reader, tuple[Any, ...] | None]] = {
    "causal_mask_function": (lambda cells, place: Pattern(high=0), None),
    "bidirectional_mask_function": (lambda cells, place: Pattern(), None),
    "sliding_window_overlay": (lambda cells, place: Pattern(1 - cells["sliding_window"]), (3,)),
    "sliding_window_bidirectional_overlay": (_two_sided_window, (2,)),
    "chunked_overlay": (_chunks, (4, torch.tensor([0, 3]))),
    "packed_sequence_mask_function": (_packed, (torch.arange(18).view(2, 9) // 4,)),
    "padding_mask_function": (_padding, (torch.arange(18).view(2, 9) > 10,)),
}
"""Readers of the functions of ``masking_utils``, and arguments to try them with; None for
those that are mask functions themselves."""


def _checked_readers() -> Mapping[CodeType | None, Reader]:
    """Readers by the code of functions, of those that compute what the reader makes of them."""
    composed: dict[str, Reader] = {"and_masks": _all_of, "or_masks": _any_of}
    readers = {_code(getattr(masking_utils, name)(_nothing)): composed[name] for name in composed}
    place = Place(2, 9, 9, 0, 0, torch.device("cpu"))
    for name, (reader, arguments) in LEAVES.items():
        function = getattr(masking_utils, name, None)
        if function is None:
            continue
        function = function if arguments is None else function(*arguments)
        pattern = reader(_cells(function), place)
        if pattern is not None and torch.equal(
            pattern.grid(place).visible.expand(2, 1, 9, 9), _evaluate(function, place)
        ):
            readers[_code(function)] = reader
    return readers


def _nothing(*indices: Any) -> Any:
    """A mask function, of which others are made to know their code."""


def _evaluate(function: MaskFunction, place: Place, **options: Any) -> Bool[Tensor, "B 1 Q K"]:
    visible: Any = sdpa_mask(
        *(place.batch, place.queries, place.keys, place.first, place.start),
        mask_function=function,
        allow_is_causal_skip=False,
        device=place.device,
        **options,
    )
    return cast(Tensor, visible)


def _all_of(cells: Cells, place: Place) -> Pattern | None:
    """Conjunction of patterns; within packed documents a band of positions is one of indices."""
    functions, patterns, bands = cells["mask_functions"], [], []
    positions: Tensor | None = None
    for function in functions:
        if _code(function) is REMAPPED:
            inner = _cells(function)
            function, positions = inner["mask_function"], inner["position_ids"]
            bands.append(function)
        pattern = _read(function, place)
        if pattern is None or (function in bands and _conditions(pattern)):
            return None
        patterns.append(pattern)
    pattern = reduce(Pattern.__and__, patterns, Pattern())
    if positions is not None and not _steady(positions, pattern):
        return None
    return pattern


def _steady(positions: Int[Tensor, "b Q"], pattern: Pattern) -> bool:
    """True if positions rise with the indices in each document, and documents are in one piece."""
    if pattern.documents is None or pattern.documents[0].shape[1] != positions.shape[1]:
        return False
    if not has_values(positions):
        return False
    steps = pattern.documents[0].diff()
    return bool(((steps > 0) | ((steps == 0) & (positions.diff() == 1))).all())


def _any_of(cells: Cells, place: Place) -> Pattern | None:
    """A band about the query, or that and the query's block."""
    low, high, extents = 1, -1, []
    for function in cells["mask_functions"]:
        if _code(function) is OF_BLOCKS:
            extents.append(_extent(_cells(function)["block_sequence_ids"], place))
            continue
        pattern = _read(function, place)
        if pattern is None or _conditions(pattern) or pattern.low > 0 or pattern.high < 0:
            return None
        low, high = min(low, pattern.low), max(high, pattern.high)
    if not extents and low <= 0 <= high:
        return Pattern(low, high)
    if len(extents) != 1 or extents[0] is None or low > high:
        return None
    first, end = extents[0]
    ends = (place.index + low).minimum(first), (place.index + high + 1).maximum(end)
    return Pattern(intervals=torch.stack(ends, dim=-1))


def _conditions(pattern: Pattern) -> bool:
    """True if a pattern is more than a band."""
    return any(x is not None for x in (pattern.intervals, pattern.documents, pattern.valid))


def _extent(blocks: Int[Tensor, "b L"], place: Place) -> tuple[Tensor, Tensor] | None:
    """The first index of each query's block and the last plus one; of a token of none, its own.

    None where a block is in pieces.
    """
    begins = torch.ones_like(blocks, dtype=torch.bool)
    begins[:, 1:] = (blocks.diff() != 0) | (blocks[:, 1:] < 0)
    for row, marks in zip(blocks, begins, strict=True):
        numbers = row[marks & (row >= 0)]
        if len(numbers.unique()) < len(numbers):
            return None
    run, index = begins.cumsum(1) - 1, torch.arange(blocks.shape[1], device=blocks.device)
    index = index.expand_as(run)
    first = index.scatter_reduce(1, run, index, "amin", include_self=False).gather(1, run)
    last = index.scatter_reduce(1, run, index, "amax", include_self=False).gather(1, run)
    queries = slice(place.first, place.first + place.queries)
    return first[:, queries], last[:, queries] + 1


def _paired(first: Documents, second: Documents) -> Documents:
    """Documents whose numbers, of queries and keys together, are equal where both are."""
    sides = (torch.cat(documents, dim=1) for documents in (first, second))
    both = torch.stack(torch.broadcast_tensors(*sides), dim=-1)  # type: ignore[no-untyped-call]
    numbers: Tensor = torch.unique(both.flatten(0, 1), dim=0, return_inverse=True)[1]
    numbers, queries = numbers.view(both.shape[:2]), first[0].shape[1]
    return numbers[:, :queries], numbers[:, queries:]


_PATTERNS: dict[Hashable, Pattern | None] = {}


def _evaluated(function: MaskFunction, place: Place, *, use_vmap: bool) -> Pattern | None:
    """The intervals that a function shows, found at all pairs; None where it shows others.

    Kept if the function follows from numbers alone.
    """
    signature = _signature(function)
    if signature is None:
        return _intervals(function, place, use_vmap=use_vmap)
    kind = (signature, place)
    if kind not in _PATTERNS:
        while len(_PATTERNS) >= MOST_CACHED:
            _PATTERNS.pop(next(iter(_PATTERNS)))
        _PATTERNS[kind] = _intervals(function, place, use_vmap=use_vmap)
    return _PATTERNS[kind]


def _signature(function: Any, readers: tuple[FunctionType, ...] = ()) -> Hashable:
    """The code of a function and all else that it reads; None if some of that has no value of its
    own, as tensors have none.

    Args:
        readers: functions that read this one, each the next.
    """
    if not isinstance(function, FunctionType) or function in readers:
        return None
    parts: list[Hashable] = [function.__code__]
    found = function.__globals__
    names = sorted(_names(function.__code__) & found.keys())
    read = (*(function.__kwdefaults__ or {}).items(), *((name, found[name]) for name in names))
    for value in (*_cells(function).values(), *(function.__defaults__ or ()), *read):
        several = value if isinstance(value, tuple) else (value,)
        for x in several:
            known = isinstance(x, (bool, int, float, str)) or x is torch
            part = x if known else _signature(x, (*readers, function))
            if part is None:
                return None
            parts.append(part)
    return tuple(parts)


def _names(code: CodeType) -> set[str]:
    """Names of global variables and attributes that code reads, in functions within it too."""
    inner = (_names(x) for x in code.co_consts if isinstance(x, CodeType))
    return set(code.co_names).union(*inner)


def _intervals(function: MaskFunction, place: Place, *, use_vmap: bool) -> Pattern | None:
    """The intervals that a function shows, as a band where they are one."""
    ends, size = [], max(1, BLOCK // place.keys)
    for begin in range(0, place.queries, size):
        count = min(size, place.queries - begin)
        part = replace(place, queries=count, first=place.first + begin)
        visible = _evaluate(function, part, use_vmap=use_vmap)[:, 0]
        if not has_values(visible):
            return None
        shown = visible.sum(-1)
        first = visible.to(torch.uint8).argmax(-1)
        end = first + shown
        index = torch.arange(place.keys, device=place.device)
        if not torch.equal(visible, (index >= first[..., None]) & (index < end[..., None])):
            return None
        ends.append(torch.stack([first, end], dim=-1))
    intervals = torch.cat(ends, dim=1)
    return _as_band(intervals, place) or Pattern(intervals=intervals + place.start)


def _as_band(intervals: Int[Tensor, "b Q 2"], place: Place) -> Pattern | None:
    """The band that shows the same; None where there is none.

    Args:
        intervals: counted from the first key.
    """
    lag, shown = place.start - place.index, intervals[..., 0] < intervals[..., 1]
    cut = shown & (intervals[..., 0] > 0)
    ended = shown & (intervals[..., 1] < place.keys)
    first, end = (intervals + lag.unsqueeze(-1)).unbind(-1)
    low = int(first[cut][0]) if bool(cut.any()) else -FARTHEST
    high = int(end[ended][0]) - 1 if bool(ended.any()) else FARTHEST
    ends = [(x - lag).clamp(0, place.keys) for x in (low, high + 1)]
    empty = (ends[0] >= ends[1]).unsqueeze(-1)
    band = torch.stack(ends, dim=-1).masked_fill(empty, 0)
    same = torch.equal(band.expand_as(intervals), intervals.masked_fill(~shown.unsqueeze(-1), 0))
    return Pattern(low, high) if same else None


REMAPPED = _code(remap_positions_for_packed_sequence(_nothing, torch.empty(0)))
OF_BLOCKS = _code(masking_utils.blockwise_overlay(torch.empty(0)))
"""Code of functions that are read together with others."""

READERS = _checked_readers()
