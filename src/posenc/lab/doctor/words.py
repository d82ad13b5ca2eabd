"""Facts about attention in words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from posenc.lab.reporting.numbers import counted
from posenc.transformers.doctor.facts import UNKNOWN, AttentionFacts, LayerReading
from posenc.transformers.doctor.from_values import RotationFacts
from posenc.transformers.engines.rotation import differing_pairs

SHOWN = 6
"""Ranges of layers that are written out."""

SAME = 1e-3
"""Relative error of frequencies that were read from layers."""


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Numbers of layers, as ranges or as a progression."""
    if not numbers:
        return ""
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]} … {numbers[-1]}"
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    parts = [f"{r[0]}–{r[-1]}" if len(r) > 1 else str(r[0]) for r in ranges]
    if len(parts) > SHOWN:
        parts = [*parts[:2], f"… {parts[-1]}"]
    return ", ".join(parts).replace(", …", " …")


def titles(reading: LayerReading) -> list[str]:
    """Names of the kinds of layers: their numbers, and their modules where kinds are alike."""
    stacks = [layers.attention.module.partition(".*")[0] for layers in reading.layers]
    names = []
    for layers, stack in zip(reading.layers, stacks, strict=True):
        count, numbers = len(layers.numbers), numbers_in_words(layers.numbers)
        name = counted(count or 1, "layer") + (f": {numbers}" if numbers else "")
        if len(reading.layers) == 1:
            name = f"all {count} layers" if count > 1 else "the layer"
        names.append(name + (f" of {stack}" if len(set(stacks)) > 1 else ""))
    return names


def short_titles(reading: LayerReading) -> list[str]:
    """Names of the kinds of layers by what they see, or ``titles`` where kinds see the same.

    Those of a config that does not say whether layers are causal are named like causal ones.
    """
    names = []
    for layers in reading.layers:
        facts, count = layers.attention, counted(len(layers.numbers) or 1, "layer")
        plain = facts.kind == "self" and facts.causal in (True, UNKNOWN)
        plain = plain and not facts.chunk and not facts.exceptions
        if plain and isinstance(facts.back, int):
            names.append(f"window {facts.back + 1:,} ({count})")
        elif plain and facts.back is None:
            names.append(f"full ({count})")
    several = 1 < len(set(names)) == len(reading.layers)
    return names if several else titles(reading)


def descriptions(reading: LayerReading) -> list[list[str]]:
    """``described`` of each kind of layers, with the pairs by which kinds alike in it differ."""
    names, lines_by_group = (
        titles(reading),
        [described(layers.attention) for layers in reading.layers],
    )
    full = [list(lines) for lines in lines_by_group]
    for place, lines in enumerate(lines_by_group):
        like = lines_by_group.index(lines)
        rotations = (reading.layers[n].attention.rotation for n in (place, like))
        frequencies, other = (
            (isinstance(rotation, RotationFacts) and rotation.frequencies) or ()
            for rotation in rotations
        )
        unlike = differing_pairs(frequencies, other, tolerance=SAME)
        if unlike:
            full[place].append(f"{unlike} pairs rotate otherwise than those of {names[like]}")
    return full


def described(facts: AttentionFacts) -> list[str]:
    """Lines on what attention computes: heads, visible tokens, positions, and what is unknown."""
    if facts.kind == "none":
        return [f"no attention: {', '.join(facts.instead)}"]
    heads = ""
    if facts.heads:
        heads = f", {counted(facts.heads, 'head')} of {facts.head_dim} features"
        if facts.key_heads != facts.heads:
            heads += f", {counted(facts.key_heads or 0, 'key head')}"
    kind = "attention" if facts.kind == UNKNOWN else f"{facts.kind}-attention"
    lines = [f"{kind}{heads}", _visible(facts), _positions(facts)]
    extra = []
    if facts.sinks is True:
        extra.append("a sink in each head")
    if isinstance(facts.cap, int | float):
        extra.append(f"logits capped at {facts.cap:g}")
    if facts.temperature and facts.temperature != UNKNOWN:
        last, factor = list(facts.temperature.items())[-1]
        extra.append(f"queries × {factor:.4g} at position {int(last):,}")
    if facts.passes > 1:
        extra.append(f"run {facts.passes} times over a text")
    if facts.keys_of:
        extra.append(f"keys of {facts.keys_of}")
    names = ("rotation", "absolute", "causal", "back", "chunk", "sinks", "cap", "temperature")
    unknown = [name for name in names if getattr(facts, name) == UNKNOWN]
    if extra:
        lines.append(", ".join(extra))
    if unknown:
        lines.append(f"unknown: {', '.join(unknown)}")
    return [line for line in lines if line]


def _visible(facts: AttentionFacts) -> str:
    words = ""
    if facts.kind == "cross":
        words = "sees all tokens of the encoder" if facts.back is None else ""
    elif isinstance(facts.chunk, int):
        words = f"sees {'earlier ' * (facts.causal is True)}tokens of its chunk of {facts.chunk:,}"
    elif isinstance(facts.back, int) and isinstance(facts.ahead, int) and facts.ahead:
        words = f"sees {facts.back:,} tokens back and {facts.ahead:,} ahead"
    elif isinstance(facts.back, int):
        words = f"sees the last {facts.back + 1:,} tokens"
    elif facts.causal is True:
        words = "causal" if facts.back == UNKNOWN else "sees all earlier tokens"
    elif facts.causal is False:
        words = "sees all tokens"
    parts = ", ".join(part.partition(" ")[2] for part in facts.exceptions)
    return words + (f", changed by the input ({parts})" if parts else "")


def _positions(facts: AttentionFacts) -> str:
    if isinstance(facts.rotation, RotationFacts):
        return rotation_in_words(facts.rotation, facts.head_dim)
    bias = facts.bias and f"bias {facts.bias}"
    if facts.slopes:
        bias = f"ALiBi, slopes {facts.slopes[0]:g} … {facts.slopes[-1]:g}"
    if bias or facts.rotation == UNKNOWN:
        return bias or ""
    return (
        "no rotation; positions are in the input" if facts.absolute is True else "NoPE: no rotation"
    )


def rotation_in_words(rotation: RotationFacts, head_dim: int | None) -> str:
    """A rotation: features, base or frequencies, pairing, gain."""
    words = "RoPE"
    if rotation.features and head_dim and rotation.features != head_dim:
        words += f" on {rotation.features} of {head_dim} features"
    if rotation.frequencies:
        first, last, base = rotation.frequencies[0], rotation.frequencies[-1], rotation.base
        if base is None:
            words += f", uneven frequencies {first:.3g} to {last:.3g}"
        else:
            words += f", base {float(f'{base:.4g}'):,.0f}"
            words += f", angles ÷ {1 / first:.4g}" if abs(first - 1) > 1e-3 else ""
    if rotation.pairing:
        words += ", half-split pairs" if rotation.pairing == "half" else ", adjacent pairs"
    if rotation.gain and abs(rotation.gain - 1) > 1e-4:
        words += f", gain {rotation.gain:.4g}"
    return words + ", changes with the length" * (rotation.varies is True)
