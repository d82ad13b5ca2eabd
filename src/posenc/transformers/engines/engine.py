"""Engines by their rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from posenc.transformers.engines.config import ModelConfig
from posenc.transformers.engines.rotation import EngineRotation, RopeParameters, Rule


class NotServedError(Exception):
    """The engine does not start with this config; the message is the reason."""


class UnreadError(NotServedError):
    """There is no rule for this model; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Rules of an engine, transcribed from its sources.

    Args:
        name: as it is called.
        option: of ``posenc extend --for``.
        source: files that the rules are from.
        read: month in which they were read.
        kinds: by ``rope_type``; others are unknown to it.
        ropes: parameters by layer type, as it reads them.
        longest: tokens of the longest text that it serves by default; None: no limit.
        with_options: a config with all that options of the command that serves it can add.
    """

    name: str
    option: str
    source: str
    read: str
    kinds: Mapping[str, Rule]
    ropes: Callable[[ModelConfig], Mapping[str, RopeParameters]] = ModelConfig.ropes
    longest: Callable[[ModelConfig], int | None]
    with_options: Callable[[ModelConfig], ModelConfig] = lambda config: config

    def rotations(self, config: ModelConfig, length: int) -> dict[str, EngineRotation]:
        """Rotations in a text of ``length`` tokens, by layer type; ``""`` stands for all layers.

        Raises:
            NotServedError: if the engine does not start.
        """
        rotations = {}
        for layer_type, rope in self.ropes(config).items():
            if rope.kind not in self.kinds:
                raise NotServedError(f"it knows no rope_type {rope.kind!r}")
            try:
                rotations[layer_type] = self.kinds[rope.kind](rope, length)
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                raise NotServedError(f"{rope.kind} scaling is incomplete: {error}") from error
        return rotations
