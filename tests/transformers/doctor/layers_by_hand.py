"""The layers that ``layers_by_hand.toml`` tells of default configs, and a reading in its words."""

from __future__ import annotations

import tomllib
from pathlib import Path

from posenc.transformers.doctor.facts import AttentionFacts, LayerReading, RotationFacts

BY_HAND: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def summary(reading: LayerReading) -> list[str]:
    """The lines of a reading."""
    return [f"{len(layers.numbers)} {_summary(layers.attention)}" for layers in reading.layers]


def _summary(facts: AttentionFacts) -> str:
    if facts.kind == "none":
        return " ".join(facts.instead)
    sees = "causal" if facts.causal is True else "full" if facts.causal is False else "unknown"
    if facts.kind == "cross":
        sees = "cross"
    elif isinstance(facts.chunk, int):
        sees = f"chunk {facts.chunk}"
    elif facts.back is not None:
        sees = f"window {facts.back + 1}" if facts.ahead == 0 else f"{facts.back}|{facts.ahead}"
    words = [f"{sees}: {_positions(facts)}"]
    words += ["sinks"] * (facts.sinks is True)
    words += ["temperature"] * (facts.temperature not in ({}, "unknown"))
    return " ".join(words)


def _positions(facts: AttentionFacts) -> str:
    rotation = facts.rotation
    if isinstance(rotation, RotationFacts):
        base = "scaled" if rotation.base is None else f"{float(f'{rotation.base:.4g}'):.0f}"
        return f"{rotation.pairing} {rotation.features} {base}"
    if facts.bias is not None:
        return facts.bias
    return "input" if facts.absolute is True and facts.kind == "self" else "nope"
