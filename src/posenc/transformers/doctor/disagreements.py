"""Settings of a config that its layers contradicted when they ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from posenc.transformers.doctor.config_findings import Finding, has_rope, rope_dicts
from posenc.transformers.doctor.facts import UNKNOWN, AttentionFacts, LayerReading
from posenc.transformers.doctor.rotation import RotationFacts
from posenc.transformers.engines.config import WINDOWS

Config = Mapping[str, Any]


def disagreements(config: Config, reading: LayerReading) -> Iterator[Finding]:
    """Findings where the measured layers contradict the config."""
    facts = [layers.attention for layers in reading.layers if layers.attention.kind == "self"]
    if reading.by != "run" or not facts:
        return
    yield from _windows(config, facts)
    yield from _layer_types(config, reading)
    rotations = [fact.rotation for fact in facts if isinstance(fact.rotation, RotationFacts)]
    if has_rope(config) and not rotations and UNKNOWN not in {fact.rotation for fact in facts}:
        yield Finding("rope_parameters", "no layer rotates", '"rope_parameters": null')
    yield from _bases(config, rotations)


def _windows(config: Config, facts: list[AttentionFacts]) -> Iterator[Finding]:
    if any(UNKNOWN in (fact.back, fact.chunk) for fact in facts):
        return
    limits = {limit for fact in facts for limit in (fact.back, fact.chunk)}
    for name in WINDOWS:
        size = config.get(name)
        if not isinstance(size, int) or size < 2 or config.get("use_sliding_window") is False:
            continue
        if limits.isdisjoint({size - 1, size, size // 2 - 1, size // 2}):
            yield Finding(name, f"{size:,} does not limit what any layer sees", f'"{name}": null')


def _layer_types(config: Config, reading: LayerReading) -> Iterator[Finding]:
    types = config.get("layer_types") or []
    for kind, limited in (("sliding_attention", True), ("full_attention", False)):
        wrong = [
            number
            for layers in reading.layers
            if layers.attention.kind == "self" and layers.attention.back != UNKNOWN
            for number in layers.numbers
            if number < len(types) and types[number] == kind
            if layers.attention.windowed is not limited
        ]
        if wrong:
            sees = "see all tokens" if limited else "see a window only"
            yield Finding(
                "layer_types",
                f"{len(wrong)} layers of {kind} {sees}",
                '"layer_types" as the layers are',
            )


def _bases(config: Config, rotations: list[RotationFacts]) -> Iterator[Finding]:
    ropes = rope_dicts(config).values()
    values = {rope.get("rope_theta") or config.get("rope_theta") for rope in ropes}
    values |= {config.get("rope_local_base_freq"), *(config.get("layer_rope_theta") or ())}
    stated = {float(base) for base in values if isinstance(base, int | float)}
    bases = {rotation.base for rotation in rotations if rotation.base}
    matches = any(abs(base - other) < 1e-2 * other for base in bases for other in stated)
    if stated and bases and not matches:
        says, does = (
            ", ".join(f"{float(f'{b:.4g}'):,.0f}" for b in sorted(x)) for x in (stated, bases)
        )
        yield Finding(
            "rope_theta",
            f"is {says}, but layers rotate by a base of {does}",
            f'"rope_theta": {float(f"{max(bases):.4g}")}',
        )
