"""Cache of FLOATER's solved states, valid while the parameters are unchanged."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.encodings.common.ode.flow import Flow, vectors_at
from posenc.encodings.common.ode.trajectory import SEGMENT
from posenc.encodings.common.opaque import opaque
from posenc.runtime import widest

LIMIT = 2**27
"""Largest size in bytes of the states stored without a graph: for one dynamics, and for all
compiled code together."""


Advance = Callable[[Tensor, int, int], Tensor]
"""From a state ``[S, C]``, its number of steps, and N more, the states ``[N+1, S, C]``."""


class Trajectory(Protocol):
    """A block with its own initial value and a dynamics shared with other blocks."""

    @property
    def flow(self) -> Flow:
        """Equation and solver."""

    @property
    def start(self) -> Tensor:
        """``p(0)``."""

    def weights(self) -> list[Tensor]:
        """Weight and bias of both layers."""


@dataclass(frozen=True)
class Solved:
    """States of the last call for all blocks, with or without autograd's graph.

    ``waiting`` holds the ids of the blocks that have not read them yet.
    """

    numbers: Int[Tensor, " N"]
    parameters: Sequence[Tensor]
    graph: bool
    states: Float[Tensor, "N S C"]
    waiting: set[int]


class Recent:
    """LRU cache of states by sign and segment, limited to ``LIMIT`` bytes."""

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self.bytes = 0

    def get(self, sign: int, segment: int) -> Tensor | None:
        """The entry, marked as most recently used, or None."""
        if (sign, segment) not in self.entries:
            return None
        self.entries.move_to_end((sign, segment))
        return self.entries[sign, segment]

    def put(self, sign: int, segment: int, states: Tensor) -> None:
        """Store an entry, evicting the least recently used ones past the limit."""
        replaced = self.entries.pop((sign, segment), None)
        self.entries[sign, segment] = states
        self.bytes += states.nbytes - (0 if replaced is None else replaced.nbytes)
        while self.bytes > LIMIT and len(self.entries) > 1:
            self.bytes -= self.entries.popitem(last=False)[1].nbytes

    def last(self, sign: int, segment: int) -> int:
        """The largest stored segment up to ``segment``; -1 if there is none."""
        if (sign, segment) in self.entries:
            return segment
        return max((n for s, n in self.entries if s == sign and n <= segment), default=-1)


class Solutions:
    """Solved states of all blocks that share a dynamics.

    Without a graph, states at whole steps are stored by segment for later calls, so decoding a
    token takes one step. With a graph, the states of the last call are stored until all blocks
    have read them or the backward pass runs: blocks that request the same times are solved as one
    batch. Parameters are compared at each call, and states dropped when they have changed; copies
    and pickles start empty.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._blocks: list[weakref.ref[Trajectory]] = []
        self._key: Tensor | None = None
        self._recent = Recent()
        self._last: Solved | None = None

    def __deepcopy__(self, memo: object) -> Solutions:
        return Solutions()

    def __reduce__(self) -> tuple[type[Solutions], tuple[()]]:
        return Solutions, ()

    @property
    def nbytes(self) -> int:
        """Size of what is stored, in bytes."""
        last = 0 if self._last is None else self._last.states.nbytes
        return self._recent.bytes + last + (0 if self._key is None else self._key.nbytes)

    def join(self, block: Trajectory) -> None:
        """Add ``block`` to the blocks that are solved together."""
        with self._lock:
            if not any(reference() is block for reference in self._blocks):
                self._blocks.append(weakref.ref(block))

    def reached(self, block: Trajectory, numbers: Int[Tensor, " N"]) -> Float[Tensor, "N C"]:
        """``z`` of one block after whole steps from 0, whose numbers are sorted and distinct."""
        with self._lock:
            self.join(block)
            blocks = list(self._together(block))
            parameters = [*(other.start for other in blocks), *block.weights()]
            graph = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
            self._renew(parameters)
            solved = self._last
            if solved is None or not _matches(solved, numbers, parameters, graph):
                states = self._solve(block.flow, numbers, parameters, graph)
                solved = Solved(numbers, parameters, graph, states, {id(b) for b in blocks})
                self._last = solved
            solved.waiting.discard(id(block))
            if not solved.waiting and (graph or solved.states.nbytes > LIMIT):
                self._last = None
            index = next(i for i, other in enumerate(blocks) if other is block)
            return solved.states[:, index]

    @contextmanager
    def bounds(self, block: Trajectory) -> Iterator[Recent]:
        """The store of an adaptive solver's states at segment boundaries."""
        with self._lock:
            self._renew([block.start, *block.weights()])
            yield self._recent

    def _together(self, block: Trajectory) -> Iterator[Trajectory]:
        """The blocks of the same dynamics, settings and kind of initial value."""
        start, weights = block.start, block.weights()
        self._blocks = [reference for reference in self._blocks if reference() is not None]
        for reference in self._blocks:
            other = reference()
            if other is block or (
                other is not None
                and other.flow == block.flow
                and all(a is b for a, b in zip(weights, other.weights(), strict=True))
                and type(other.start) is type(start)
                and (other.start.shape, other.start.dtype) == (start.shape, start.dtype)
                and other.start.device == start.device
                and other.start.untyped_storage().nbytes() > 0
            ):
                yield other

    def _renew(self, parameters: Sequence[Tensor]) -> None:
        """Drop all states if the parameters' values have changed."""
        wide = widest(parameters[0].device)
        key = torch.cat([p.detach().flatten().to(wide) for p in parameters])
        old = self._key
        same = old is not None and old.shape == key.shape and old.device == key.device
        if old is None or not (same and torch.equal(old, key)):
            self._key, self._recent, self._last = key, Recent(), None

    def _solve(
        self, flow: Flow, numbers: Tensor, parameters: Sequence[Tensor], graph: bool
    ) -> Float[Tensor, "N S C"]:
        wide = widest(numbers.device)
        *starts, first, first_bias, second, second_bias = (p.to(wide) for p in parameters)
        weights = [first, first_bias, second, second_bias]
        if graph:
            return flow.whole_steps(numbers, torch.stack(starts), weights, self._finisher())
        batch = torch.stack(starts).detach()

        field = flow.field(batch[0], [weight.detach() for weight in weights])

        def stored(sign: int, counts: Sequence[int]) -> Tensor:
            return self._stored(partial(flow.segment, field, sign), sign, counts, batch)

        return flow.each_way(numbers, stored)

    def _finisher(self) -> Callable[[], None]:
        """A function that drops the graph's states; holds a weak reference only."""
        this = weakref.ref(self)

        def finish() -> None:
            solutions = this()
            if solutions is not None:
                solutions._last = None

        return finish

    @torch.no_grad()
    def _stored(
        self, solve: Advance, sign: int, counts: Sequence[int], starts: Tensor
    ) -> Float[Tensor, "N S C"]:
        """States at ``counts`` steps, from stored segments or newly solved ones."""
        parts, row = [], 0
        if counts[0] == 0:
            parts, row = [starts.unsqueeze(0)], 1
        while row < len(counts):
            segment = (counts[row] - 1) // SEGMENT
            first = segment * SEGMENT
            until = row
            while until < len(counts) and counts[until] <= first + SEGMENT:
                until += 1
            states = self._segment(solve, sign, segment, counts[until - 1] - first, starts)
            parts.append(states[[count - first for count in counts[row:until]]])
            row = until
        return torch.cat(parts)

    def _segment(
        self, solve: Advance, sign: int, segment: int, length: int, starts: Tensor
    ) -> Float[Tensor, "M S C"]:
        """At least the states 0 … ``length`` of a segment."""
        number = self._recent.last(sign, segment)
        states = None if number < 0 else self._recent.get(sign, number)
        if states is None:
            number, states = 0, starts.unsqueeze(0)
        while True:
            end = length if number == segment else SEGMENT
            if len(states) <= end:
                done = len(states) - 1
                more = solve(states[-1], number * SEGMENT + done, end - done)
                states = torch.cat([states, more[1:]])
                self._recent.put(sign, number, states)
            if number == segment:
                return states
            number, states = number + 1, states[SEGMENT:]


def _matches(solved: Solved, numbers: Tensor, parameters: Sequence[Tensor], graph: bool) -> bool:
    """True if the stored states are those of these numbers, parameters and graph mode."""
    if solved.graph != graph or len(solved.parameters) != len(parameters):
        return False
    same = all(a is b for a, b in zip(solved.parameters, parameters, strict=True))
    return same and torch.equal(solved.numbers, numbers)


@dataclass(frozen=True, eq=False)
class Tensors:
    """A trajectory whose weights are given as tensors, as an operator gets them."""

    flow: Flow
    start: Tensor
    given: Sequence[Tensor]

    def weights(self) -> list[Tensor]:
        """Weight and bias of both layers."""
        return list(self.given)


class Compiled:
    """Solutions for compiled code, which has the values of weights only.

    By settings and initial value, least recently used ones dropped past ``LIMIT`` bytes; further
    weights are compared by ``Solutions``.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._solutions: OrderedDict[tuple[str, bytes], Solutions] = OrderedDict()

    def at(self, positions: Tensor, weights: Sequence[Tensor], settings: str) -> Tensor:
        """``p`` at any times, without a graph."""
        start, *learned = weights
        flow = Flow.of_text(settings)
        block = Tensors(flow, start, learned)
        key = (settings, start.cpu().numpy().tobytes())
        with self._lock:
            solutions = self._solutions.pop(key, None) or Solutions()
            self._solutions[key] = solutions
            if flow.method == "dopri5":
                with solutions.bounds(block) as bounds:
                    vectors = vectors_at(positions, start, learned, flow, bounds=bounds)
            else:
                reached = partial(solutions.reached, block)
                vectors = vectors_at(positions, start, learned, flow, reached)
            while len(self._solutions) > 1 and self._bytes() > LIMIT:
                self._solutions.popitem(last=False)
        return vectors

    def _bytes(self) -> int:
        return sum(solutions.nbytes for solutions in self._solutions.values())


def _compute(positions: Tensor, weights: Sequence[Tensor], settings: str) -> Tensor:
    start, *learned = weights
    return vectors_at(positions, start, learned, Flow.of_text(settings))


COMPILED = Compiled()

flow_at = opaque("flow", _compute, stored=COMPILED.at)
