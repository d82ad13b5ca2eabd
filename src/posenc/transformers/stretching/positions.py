"""Positions of queries and of cached keys in passes through a stretched model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from posenc.encoding.prepared import Prepared
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values, is_exporting
from posenc.transformers.acceleration.trials import layer_type_of
from posenc.transformers.calls import bound, caches_in, is_cache

PLACED = "_posenc_placement"
"""Attribute of rotary modules' outputs: the positions they are of."""


@dataclass(eq=False)
class Switch:
    """State of a model, on while it is stretched; caches with unrotated keys refer to it."""

    on: bool = True


class Positions(CacheLayerMixin):
    """Positions ``[B|1, 1, T, 1]`` of all tokens in a cache, beside the keys of a layer."""

    keys: Any
    values: Any
    switch: Switch

    @staticmethod
    def of(cache: Cache, switch: Switch) -> Positions:
        """Positions of an empty cache; of a fixed size if the cache is."""
        capacities = [x.max_cache_len for x in cache.layers if isinstance(x, StaticLayer)]
        windows = [x.max_cache_len for x in cache.layers if isinstance(x, StaticSlidingWindowLayer)]
        if len(capacities) == len(windows):  # windows do not say how many tokens there will be
            return GrowingPositions(switch)
        return FixedPositions(switch, max(capacities))

    def get_mask_sizes(self, *arguments: Any) -> tuple[int, int]:
        """Lengths of the mask, which every pass reads; see ``CacheLayerMixin``.

        Raises:
            ArgumentError: if the model was restored since: the cache has unrotated keys.
        """
        if not self.switch.on:
            raise _foreign_cache("one that a stretched model filled, which was restored since")
        sizes: tuple[int, int] = super().get_mask_sizes(*arguments)
        return sizes

    def append(self, ids: Int[Tensor, "b Q"]) -> None:
        """Keep the positions of a pass."""
        rows = len(ids)
        if self.is_initialized:
            rows = max(rows, len(self.keys))
            if len(self.keys) < rows:
                tensors = (self.keys, self.values)
                self.keys, self.values = (x.expand(rows, -1, -1, -1).clone() for x in tensors)
        new = ids.expand(rows, -1)[:, None, :, None]
        self.update(new, new)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self._of_rows():
            super().reorder_cache(beam_idx)

    def _of_rows(self) -> bool:
        """False where one row of positions is that of all."""
        return self.is_initialized and len(self.keys) > 1


class GrowingPositions(Positions, DynamicLayer):
    """Positions in a cache that grows."""

    def __init__(self, switch: Switch) -> None:
        DynamicLayer.__init__(self)
        self.switch = switch

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._of_rows():
            super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._of_rows():
            super().batch_repeat_interleave(repeats)

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowingPositions:
        copied = GrowingPositions(self.switch)
        if self.is_initialized:
            copied.update(self.keys, self.values)
        return copied


class FixedPositions(Positions, StaticLayer):
    """Positions in a cache of a fixed size, free room after the last.

    Compiled decoding reads no length: that would break the graph, or wait for the device.
    """

    def __init__(self, switch: Switch, capacity: int) -> None:
        StaticLayer.__init__(self, capacity)
        self.switch = switch

    def before(self, ids: Int[Tensor, "b Q"]) -> Placement:
        """The placement of tokens that follow those in the cache, however many these are."""
        rows, length = max(len(self.keys), len(ids)), ids.shape[1]
        index = self.cumulative_length + torch.arange(length, device=ids.device)
        earlier = self.keys[:, 0, :, 0].expand(rows, -1)
        tokens = earlier.index_copy(1, index, ids.expand(rows, -1).to(earlier.dtype))
        return Placement(ids, tokens, self.cumulative_length + length)

    def __deepcopy__(self, memo: dict[int, Any]) -> FixedPositions:
        copied = FixedPositions(self.switch, self.max_cache_len)
        if self.is_initialized:
            copied.lazy_initialization(self.keys, self.values)
            copied.keys.copy_(self.keys)
            copied.cumulative_length.copy_(self.cumulative_length)
        return copied


@dataclass(eq=False)
class Placement:
    """Positions in one pass.

    Args:
        queries: of this pass's tokens.
        tokens: of all tokens so far, cached ones first; perhaps more numbers after them.
        count: number of these tokens; a tensor where a graph is made for any.
    """

    queries: Int[Tensor, "B Q"]
    tokens: Int[Tensor, "B T"]
    count: int | Int[Tensor, ""]
    grids: list[tuple[Grid | None, int, Grid]] = field(default_factory=list)

    def grid(self, grid: Grid | None, queries: int, keys: int, *, causal: bool) -> Grid:
        """The grid at these positions.

        Args:
            grid: by indices; None if no grid is known of the mask.
            queries, keys: numbers of tokens.
            causal: without a grid, whether keys after a query are masked.

        Raises:
            ArgumentError: for an attention over some of the queries.
        """
        if queries != self.queries.shape[1]:
            raise ArgumentError(
                "query",
                expected=f"all {self.queries.shape[1]} tokens of the pass",
                got=queries,
                remedy="Call restore(model) before passes over some of the queries.",
            )
        for source, count, cached in self.grids:
            if source is grid and count == keys:
                return cached
        made = self._grid(grid, keys, causal)
        self.grids.append((grid, keys, made))
        return made

    def _grid(self, grid: Grid | None, keys: int, causal: bool) -> Grid:
        device, capacity = self.tokens.device, self.tokens.shape[1]
        # windows keep the last keys; caches of fixed size have free room after the last
        first = _not_negative(self.count - keys)
        places = self.tokens
        if keys > capacity:
            places = nn.functional.pad(places, (0, keys - capacity))
        elif isinstance(first, int):
            places = places[:, first : first + keys]
        elif keys < capacity:
            places = places.index_select(1, first + torch.arange(keys, device=device))
        if grid is None:
            queries = self.queries.shape[1]
            query = _sequence(queries, self.count - queries, device)
            grid = Grid(query, _sequence(keys, first, device), causal)
        elif _equal(self.queries, grid.query.order) and _equal(places, grid.key.order):
            return grid
        query, key = (
            side.with_positions(positions.float().unsqueeze(-1))
            for side, positions in ((grid.query, self.queries), (grid.key, places))
        )
        return replace(grid, query=query, key=key)


def _not_negative(number: int | Tensor) -> int | Tensor:
    return max(0, number) if isinstance(number, int) else number.clamp(min=0)


def _sequence(length: int, start: int | Tensor, device: torch.device) -> Layout:
    """The layout of tokens in sequence."""
    if isinstance(start, int):
        return Layout.sequence(length, start, device=device)
    order = (start + torch.arange(length, device=device)).unsqueeze(0)
    return Layout(order.float().unsqueeze(-1), order)


def _equal(positions: Tensor, order: Tensor) -> bool:
    """True if positions are known to be the indices."""
    readable = positions.device.type == "cpu" and has_values(positions)
    return readable and bool((positions == order).all())


@dataclass(eq=False)
class Adoption:
    """Hooks by which a model's attention learns the positions of a pass.

    The rotary modules' outputs, which neither rotate nor scale, carry the positions to the layers:
    a layer that is computed again, as under gradient checkpointing, gets those of its own pass.

    Args:
        switch: off once the model is restored.
        attention: name of the attention implementation that the model has to have.
        factors: of rotary modules' outputs by module and type of layers, for probing.
        prepared: results that the calls of the model share.
    """

    switch: Switch
    attention: str
    factors: dict[tuple[nn.Module, str], float] = field(default_factory=dict)
    cache: Cache | None = None
    latest: Placement | None = None
    prepared: Prepared = field(default_factory=Prepared)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"cache": None, "latest": None}

    def begin(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Pre-forward hook: keep the cache of the pass."""
        if module.config._attn_implementation != self.attention:
            raise ArgumentError(
                "attn_implementation",
                expected="that of the stretched model",
                got=module.config._attn_implementation,
                remedy="Call restore(model) first; choose an implementation before stretching.",
            )
        self.cache, self.latest = next(caches_in([*arguments, *options.values()]), None), None

    def end(self, module: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
        """Forward hook: append the positions of the pass to the cache."""
        outputs = output.values() if isinstance(output, dict) else output
        cache = next(caches_in(outputs if not isinstance(outputs, Tensor) else ()), self.cache)
        if cache is not None and self.latest is not None and any(_attention_layers(cache)):
            held = _positions_in(cache)
            if held is None:
                held = Positions.of(cache, self.switch)
                add_companions(next(_attention_layers(cache)), held)
            held.append(self.latest.queries)
        self.cache = None

    def rotated(
        self,
        names: Sequence[str],
        sine_first: bool,
        module: nn.Module,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        output: Any,
    ) -> Any:
        """Replacement of a rotary module's output, which leaves features unrotated.

        Args:
            names: parameters of the module's ``forward``.
            sine_first: the module answers sines before cosines.
        """
        inputs = bound(names, arguments, options)
        ids = inputs.get("position_ids")
        if ids is None:
            ids = torch.arange(inputs["x"].shape[1], device=inputs["x"].device).unsqueeze(0)
        pair = isinstance(output, tuple) and len(output) == 2
        supported = pair or (isinstance(output, Tensor) and output.is_complex())
        if ids.is_floating_point() or not supported:
            raise ArgumentError(
                "model",
                expected="rotary modules that make cosines and sines of position_ids",
                got=type(module).__name__,
                remedy="Methods that only divide frequencies may serve it.",
            )
        self.latest = self.placement(ids)
        factor = self.factors.get((module, layer_type_of(arguments, options)), 1.0)
        still = torch.full_like(output[0] if pair else output, factor)
        setattr(still, PLACED, self.latest)
        if not pair:
            return still
        sine = torch.zeros_like(still)
        return (sine, still) if sine_first else (still, sine)

    def still(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pre-forward hook of modules that rotate by themselves: all tokens at position 0."""
        ids = options["position_ids"]
        self.latest = self.placement(ids)
        return arguments, options | {"position_ids": torch.zeros_like(ids)}

    def placement(self, ids: Int[Tensor, "*axes b Q"]) -> Placement:
        """Positions of this pass, and of the tokens in its cache.

        Raises:
            ArgumentError: for positions that differ between axes, or a cache with rotated keys.
        """
        if ids.dim() == 3:
            if not bool((ids == ids[:1]).all()):
                raise ArgumentError(
                    "position_ids",
                    expected="a text's, which are equal on all axes",
                    got="those of images",
                    remedy="Methods that only divide frequencies serve images too.",
                )
            ids = ids[0]
        if self.latest is not None and self.latest.queries is ids:
            return self.latest
        held = _positions_in(self.cache)
        fixed = isinstance(held, FixedPositions) and held.is_initialized
        if fixed and torch.compiler.is_compiling():
            return cast(FixedPositions, held).before(ids)
        past = 0 if self.cache is None else self.cache.get_seq_length()
        if not is_exporting():
            past = int(past)
        if not past:
            return Placement(ids, ids, ids.shape[1])
        if held is not None and held.get_seq_length() == past:
            before = held.keys[:, 0, :past, 0]
        elif is_exporting():  # what enters a graph is a cache's keys and values alone
            before = (ids[:, :1] - past + torch.arange(past, device=ids.device)).clamp(min=0)
        else:
            raise _foreign_cache("one that was filled before, or otherwise")
        rows = max(len(before), len(ids))
        tokens = torch.cat([before.expand(rows, -1), ids.expand(rows, -1)], 1)
        return Placement(ids, tokens, tokens.shape[1])


def placement_in(values: Any) -> Placement | None:
    """The positions that come with a layer's arguments."""
    for leaf in tree_leaves(values, is_leaf=is_cache):
        placement: Placement | None = getattr(leaf, PLACED, None)
        if placement is not None:
            return placement
    return None


def _attention_layers(cache: Cache | None) -> Iterator[CacheLayerMixin]:
    layers = [] if cache is None else cache.layers
    return (layer for layer in layers if isinstance(layer, CacheLayerMixin))


def _positions_in(cache: Cache | None) -> Positions | None:
    layers = (x for layer in _attention_layers(cache) for x in companions(layer))
    return next((x for x in layers if isinstance(x, Positions)), None)


def _foreign_cache(got: str) -> ArgumentError:
    return ArgumentError(
        "cache",
        expected="a cache that this model filled as it is now",
        got=got,
        remedy="Begin with an empty cache.",
    )


COMPANIONS = "_posenc_companions"
"""Attribute of layers that holds their companions."""

FOLLOWED = (
    "reorder_cache",
    "crop",
    "batch_repeat_interleave",
    "batch_select_indices",
    "reset",
    "get_mask_sizes",
)
"""Methods of layers that are called on their companions too."""


def companions(layer: object) -> tuple[CacheLayerMixin, ...]:
    """Companions of a layer of a cache."""
    layers: tuple[CacheLayerMixin, ...] = getattr(layer, COMPANIONS, ())
    return layers


def add_companions(layer: CacheLayerMixin, *layers: CacheLayerMixin) -> None:
    """Add companions, which are reordered, repeated, cropped and reset as the layer's keys are.

    They are no layers of the cache, and the layer keeps its class: transformers counts the layers,
    and exports those of its own classes alone.
    """
    setattr(layer, COMPANIONS, (*companions(layer), *layers))
    for name in FOLLOWED:
        setattr(layer, name, _CompanionMethod(layer, name))


class _CompanionMethod:
    """A method of a layer, called on its companions first."""

    def __init__(self, layer: CacheLayerMixin, name: str) -> None:
        self.layer = weakref.ref(layer)  # a cycle would hold on to the memory of caches
        self.name = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        layer = self.layer()
        for companion in companions(layer):
            getattr(companion, self.name)(*arguments, **options)
        return getattr(type(layer), self.name)(layer, *arguments, **options)

    def __reduce__(self) -> Any:
        return _CompanionMethod, (self.layer(), self.name)
