"""Rotations of cached keys, read from two short passes of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    StaticLayer,
)

from posenc.attention.backends.native.rotation import rotate_into
from posenc.encoding import Pairing
from posenc.encoding.rotation import Factors
from posenc.errors import ArgumentError
from posenc.transformers.acceleration.accelerated import is_on_interface
from posenc.transformers.acceleration.api import INTERNAL
from posenc.transformers.acceleration.trials import (
    cache_in,
    device_of,
    inputs_for,
    quiet,
    run,
    transformers_model,
)
from posenc.transformers.calls import caches_in, names_of
from posenc.transformers.stretching.adopting import RECORDING, turns
from posenc.transformers.stretching.api import STRETCHED
from posenc.transformers.stretching.changes import Change, undo
from posenc.transformers.stretching.configs import configs_of
from posenc.transformers.stretching.frequencies import (
    Frequencies,
    SineTable,
    frequencies_in,
    varies,
)
from posenc.transformers.stretching.positions import companions

TOKENS, SHIFT, PADDING = 6, 4096, 5
"""Tokens of the two passes in which rotations are read, the distance between them, and the padding
that moves tokens of models without ``position_ids``."""

TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest error of moved keys, as a share of their size, that rounding explains; 0.01 otherwise."""

READ = "_posenc_cached_rotations"
"""Attribute of models: the layers of their caches, once these were read."""


def _classes(*kinds: str) -> frozenset[type]:
    """Layers of caches for types of layers, as far as this version of transformers has them."""
    mappings = (DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING)
    return frozenset(layers[kind] for layers in mappings for kind in kinds if kind in layers)


RECURRENT = _classes("linear_attention", "conv", "hybrid", "hybrid_sliding")
KNOWN = RECURRENT | _classes("full_attention", "sliding_attention", "chunked_attention", "dummy")
"""Layers of caches whose positions are in keys and values alone, and those with further states."""

NAMES = ("keys", "values")
"""Tensors of a layer; latent attention keeps its rotated keys as values."""


@dataclass(frozen=True)
class CachedRotation:
    """The rotation of a tensor in a layer of a cache.

    Args:
        frequencies: of its pairs of features.
        start: the first rotated feature.
        back: pairs are turned the other way.
        pairing: of features.
    """

    frequencies: Frequencies
    start: int
    back: bool
    pairing: Pairing

    def factors(self, by: int, dtype: torch.dtype, device: torch.device) -> Factors:
        """Cosines and sines that move keys by so many tokens, of angles in float64."""
        angles = self.frequencies.angles(-by if self.back else by).cpu()
        wide = torch.promote_types(dtype, torch.float32)
        cosine, sine = (x.to(device, wide)[None, None, None] for x in (angles.cos(), angles.sin()))
        return cosine, sine

    def write(self, out: Float[Tensor, "B G T D"], keys: Tensor, factors: Factors) -> None:
        """Write moved keys, rounded once, into ``out``, which may be the keys themselves."""
        end = self.start + 2 * factors[0].shape[-1]
        if out is not keys:
            out[..., : self.start] = keys[..., : self.start]
            out[..., end:] = keys[..., end:]
        rotated = slice(self.start, end)
        rotate_into(out[..., rotated], keys[..., rotated], factors, self.pairing)

    def error(self, before: Float[Tensor, "1 G T D"], after: Tensor, by: int) -> float:
        """Error of ``before`` once moved, as a share of the size of ``after``."""
        out = torch.empty_like(before)
        self.write(out, before, self.factors(by, before.dtype, before.device))
        return _error(out, after)


@dataclass(frozen=True)
class CachedLayer:
    """A layer of a model's caches.

    Args:
        rotations: of its keys and values; None: they hold no positions.
        shapes: heads and features of each; empty for a layer without them.
    """

    rotations: tuple[CachedRotation | None, ...]
    shapes: tuple[tuple[int, int], ...]


def known(cache: Cache) -> Cache:
    """A cache whose layers hold nothing with positions but rotated keys.

    Raises:
        ArgumentError: for another.
    """
    remedy = "Pass a DynamicCache or StaticCache, such as the self_attention_cache of a decoder."
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise ArgumentError(
            "cache", expected="a cache of layers", got=type(cache).__name__, remedy=remedy
        )
    for number, layer in enumerate(cache.layers):
        if type(layer) not in KNOWN or companions(layer):
            unrotated = " with unrotated keys" if companions(layer) else ""
            raise ArgumentError(
                "cache",
                expected="layers of rotated keys and values",
                got=f"{type(layer).__name__}{unrotated} in layer {number}",
                remedy=remedy,
            )
    return cache


def is_empty(layer: Any) -> bool:
    """True for a layer that holds no keys."""
    keys = getattr(layer, "keys", None)
    return keys is None or not keys.numel()


def count_of(layer: Any) -> int:
    """Tokens whose keys a layer holds."""
    if is_empty(layer):
        return 0
    length: int = layer.keys.shape[2]
    return min(int(layer.get_seq_length()), length) if isinstance(layer, StaticLayer) else length


def length_of(cache: Cache) -> int:
    """Tokens that a cache was filled with."""
    lengths = (int(x.get_seq_length()) for x in cache.layers if not is_empty(x))
    return max(lengths, default=0)


def read_layers(
    model: nn.Module, caches: Sequence[Cache], bys: Sequence[int]
) -> tuple[CachedLayer, ...]:
    """The layers of caches that are to be moved by so many tokens.

    Raises:
        ArgumentError: if they cannot be.
    """
    inner = transformers_model(model)
    stretched = inner.__dict__.get(STRETCHED)
    if stretched is not None and stretched.report.place == "attention":
        raise ArgumentError(
            "model",
            expected="one that caches rotated keys",
            got=f"stretched by {stretched.report.method}, which caches them unrotated",
            remedy="Call restore(model), or stretch it by a method that divides frequencies.",
        )
    uses = [(length_of(known(cache)), by) for cache, by in zip(caches, bys, strict=True)]
    read: tuple[CachedLayer, ...] | None = inner.__dict__.get(READ)
    if read is None or not _is_held(inner, read):
        start, shift, fixed = _span(inner, uses)
        with quiet(inner), _blank_attention(inner):
            read = _layers(inner, start, shift)
        if fixed:
            inner.__dict__[READ] = read
    for cache in caches:
        for number, layer in enumerate(cache.layers):
            shapes = () if is_empty(layer) else _shapes(layer)
            if len(cache.layers) != len(read) or (shapes and shapes != read[number].shapes):
                raise ArgumentError(
                    "cache",
                    expected=f"one that {type(inner).__name__} fills",
                    got=f"{len(cache.layers)} layers, with heads and features {shapes} in {number}",
                    remedy="Pass the model that made it.",
                )
    return read


def _is_held(model: nn.Module, read: tuple[CachedLayer, ...]) -> bool:
    """True if the model still has the modules that its layers were read from, and none varies."""
    rotations = (one for layer in read for one in layer.rotations if one is not None)
    for frequencies in {one.frequencies for one in rotations}:
        held: Any = model
        for name in filter(None, frequencies.path.split(".")):
            held = getattr(held, name, None)
        if held is not frequencies.module or varies(frequencies.rope_type):
            return False
    return True


def _span(model: nn.Module, uses: list[tuple[int, int]]) -> tuple[int, int, bool]:
    """Position of a first pass, distance of a second, and if frequencies are always the same.

    Args:
        uses: length of each cache, and the tokens by which it is to be moved.

    Raises:
        ArgumentError: if frequencies change in between.
    """
    start, shift, fixed = 0, SHIFT, True
    for frequencies in frequencies_in(model):
        if isinstance(frequencies, SineTable):
            shift = min(shift, len(frequencies.value) - TOKENS)
        kind = frequencies.rope_type
        if not varies(kind):
            continue
        fixed = False
        limit = frequencies.trained("theta" if kind == "longrope" else "frequencies") or 0
        beyond = {end > limit for length, by in uses for end in (length, length + by)}
        if len(beyond) > 1 or (True in beyond and kind != "longrope"):
            longest = max(max(length, length + by) for length, by in uses)
            raise ArgumentError(
                "cache",
                expected=f"texts that end within {limit:,} tokens before and after, as {kind!r} "
                "frequencies change beyond",
                got=f"{longest:,}",
                remedy="Read the text again at its new positions.",
            )
        if True in beyond:
            start = limit
        else:
            shift = max(1, min(shift, limit - TOKENS))
    return start, shift, fixed


@contextmanager
def _blank_attention(model: nn.Module) -> Iterator[None]:
    """Attention answers zeros, where it is on the interface: deeper layers see no positions."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    blank = all(is_on_interface(type(part)) for part in parts)
    changes = [Change.of(x, INTERNAL, RECORDING) for x in configs_of(model)] if blank else []
    try:
        yield
    finally:
        undo(changes)


def _layers(model: PreTrainedModel, start: int, shift: int) -> tuple[CachedLayer, ...]:
    """The layers of a model's caches, by two passes at different positions."""
    names, device = names_of(model.forward), device_of(model)
    inputs = inputs_for(model, TOKENS)
    (*_, name) = inputs  # of a decoder, if there is an encoder
    options: dict[str, Any]
    if "position_ids" in names:
        places = torch.arange(TOKENS, device=device).unsqueeze(0) + start
        first, options = {"position_ids": places}, {"position_ids": places + shift}
    else:
        ids = inputs[name].to(device)
        padded = torch.cat([ids[:, :1].expand(-1, PADDING), ids], 1)
        attended = torch.ones_like(padded)
        attended[:, :PADDING] = 0
        mask = name.replace("input_ids", "attention_mask")
        first, options, shift = {}, {name: padded, mask: attended}, PADDING
    passes = partial(run, model, TOKENS, use_cache=True)
    outputs = [passes(**first)]
    try:
        outputs.append(passes(**options))
    except ArgumentError as error:
        raise _unmoved(model, f"no position {start + shift:,}") from error
    caches = list(caches_in(map(cache_in, outputs)))
    if len(caches) < 2:
        raise _unmoved(model, "no cache")
    before, after = map(known, caches)
    frequencies = list(frequencies_in(model))
    layers = []
    for number, pair in enumerate(zip(before.layers, after.layers, strict=True)):
        rotations = [_rotation(model, number, x, y, frequencies, shift) for x, y in _tensors(*pair)]
        shapes = _shapes(pair[0]) if rotations else ()
        layers.append(CachedLayer(tuple(rotations), shapes))
        for x, y in zip(*map(_states, pair), strict=True):
            if _error(x, y) > TOLERANCE.get(x.dtype, 0.01):
                raise _unmoved(model, f"recurrent states with positions in layer {number}")
    return tuple(layers)


def _tensors(before: Any, after: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys, and values, of the same tokens in both."""
    if is_empty(before):
        return
    count = min(count_of(before), count_of(after))
    for name in NAMES:
        yield tuple(
            getattr(x, name)[:, :, count_of(x) - count : count_of(x)] for x in (before, after)
        )


def _states(layer: Any) -> list[Tensor]:
    """Tensors of a layer that are neither keys nor values."""
    others = {name: x for name, x in vars(layer).items() if name not in NAMES}
    return [x for x in tree_leaves(others) if isinstance(x, Tensor) and x.is_floating_point()]


def _rotation(
    model: nn.Module,
    number: int,
    before: Tensor,
    after: Tensor,
    frequencies: list[Frequencies],
    shift: int,
) -> CachedRotation | None:
    """The rotation that moves a tensor; None if it holds no positions.

    Raises:
        ArgumentError: if none of the model's does.
    """
    tolerance = TOLERANCE.get(before.dtype, 0.01)
    before, after = before.cpu().double(), after.cpu().double()
    error, best = _error(before, after), None
    for one in frequencies:
        for start, back, pairing in turns(len(one.theta()), before.shape[-1]):
            rotation = CachedRotation(one, start, back, pairing)
            if (other := rotation.error(before, after, shift)) < error:
                error, best = other, rotation
    if not error <= tolerance:
        raise _unmoved(model, f"keys in layer {number} that change otherwise")
    return best


def _error(one: Tensor, other: Tensor) -> float:
    """Size of the difference as a share of the other's; 0 for nothing."""
    one, other = one.double(), other.double()
    return float((one - other).norm() / other.norm().clamp(min=1e-300))


def _shapes(layer: Any) -> tuple[tuple[int, int], ...]:
    """Heads and features of keys and of values."""
    tensors = (getattr(layer, name) for name in NAMES)
    return tuple((x.shape[1], x.shape[3]) for x in tensors)


def _unmoved(model: nn.Module, got: str) -> ArgumentError:
    return ArgumentError(
        "model",
        expected="one whose cached keys a rotation moves, or that hold no positions",
        got=f"{type(model).__name__} with {got}",
        remedy="Read the text again at its new positions.",
    )
