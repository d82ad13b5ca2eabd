"""Facts about the attention layers of a model, and where each of them is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from posenc.transformers.doctor.from_values import RotationFacts

UNKNOWN: Literal["unknown"] = "unknown"
Maybe = Literal["unknown"]


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """One kind of attention call, or layers without any; ``"unknown"`` where a fact is.

    Args:
        module: name, with an asterisk for the number of the layer.
        kind: ``"none"`` for layers without attention.
        instead: classes of the modules of such layers.
        heads, key_heads, head_dim, value_dim: of the call; heads of equal keys count once.
        scale: factor of the logits.
        rotation: of queries; None: not rotated.
        key_rotation: of keys, where it is another one.
        absolute: queries of equal tokens differ by position before any rotation.
        causal: no query sees a later key.
        back, ahead: tokens to the farthest visible key before and after a query; None: no limit.
        chunk: tokens of a chunk, outside of which nothing is visible.
        exceptions: parts of the mask that depend on the input, by name.
        bias: shape of what is added to the logits; ``"by offset"`` depends on key − query alone.
        slopes: of a bias that is linear in the offset, for each head.
        sinks: each head has a logit that only the sum of its softmax includes.
        cap: c of logits c·tanh(s / c).
        temperature: factor of queries at positions at which it is not 1.
        keys_of: the module whose keys are read again.
        passes: calls of each module over a text; more than one in looped models.
        arguments: further ones of the call: numbers, or shapes of tensors.
        sources: where each fact is from.
    """

    module: str
    kind: Literal["self", "cross", "none"] | Maybe
    instead: tuple[str, ...] = ()
    heads: int | None = None
    key_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    scale: float | None = None
    rotation: RotationFacts | Maybe | None = None
    key_rotation: RotationFacts | Maybe | None = None
    absolute: bool | Maybe = False
    causal: bool | Maybe = UNKNOWN
    back: int | Maybe | None = None
    ahead: int | Maybe | None = None
    chunk: int | Maybe | None = None
    exceptions: tuple[str, ...] = ()
    bias: str | None = None
    slopes: tuple[float, ...] = ()
    sinks: bool | Maybe = False
    cap: float | Maybe | None = None
    temperature: Mapping[str, float] | Maybe = field(default_factory=dict)
    keys_of: str | None = None
    passes: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def windowed(self) -> bool:
        """True if the visible keys are known to be limited."""
        return any(isinstance(limit, int) and limit for limit in (self.back, self.chunk))

    @property
    def unlimited(self) -> bool | Maybe:
        """True if the largest visible distance grows with the text."""
        return UNKNOWN if UNKNOWN in (self.back, self.chunk) else not self.windowed


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers that do the same.

    Args:
        numbers: of the layers, from 0; empty where calls have none.
        attention: of each.
    """

    numbers: tuple[int, ...]
    attention: AttentionFacts


@dataclass(frozen=True, kw_only=True)
class PositionTable:
    """A table of positions.

    Args:
        module: name.
        rows: in the table.
        first: the row of the first token.
    """

    module: str
    rows: int
    first: int


@dataclass(frozen=True, kw_only=True)
class LayerReading:
    """Layers of a model.

    Args:
        layers: in their order, equal ones together.
        tables: of absolute positions.
        by: ``"run"``, or ``"config"`` where the model could not be run.
        reason: why it could not be run, or what had to be left out.
        far: the position of the second run; None if there was none.
        seconds: that it took.
    """

    layers: tuple[Layers, ...]
    tables: tuple[PositionTable, ...] = ()
    by: Literal["run", "config"] = "run"
    reason: str = ""
    far: int | None = None
    seconds: float = 0.0
