"""Facts about attention, and engines that would serve a folder, in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from posenc.lab.reporting.numbers import counted, listed
from posenc.transformers.checkpoints import Fields
from posenc.transformers.doctor.advice import REFUSED
from posenc.transformers.doctor.config_values import ROTATION, readable
from posenc.transformers.doctor.facts import UNKNOWN, AttentionFacts, LayerReading, RotationFacts
from posenc.transformers.engines import (
    AS_LONGER,
    ENGINES,
    ConfigRemedy,
    EngineRotation,
    Served,
    compare,
    differs,
    engine_named,
    no_engine_has,
    right_in_all,
)
from posenc.transformers.engines.config import ModelConfig, refusal
from posenc.transformers.engines.rotation import differing_pairs
from posenc.transformers.engines.transformers import TRANSFORMERS
from posenc.transformers.hub import model_folder

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


ALL = "all"
ENGINE_COLUMNS = ("engine", "slowest pair", "gain", "longest text", "pairs that differ")


@dataclass(frozen=True)
class Engines:
    """A config in the requested engines.

    Args:
        served: transformers first; empty for models without RoPE.
        remedy: lines by which more engines rotate as transformers does; None: none needed or known.
        why_none: none were compared; "" where the config states no rotation.
    """

    served: tuple[Served, ...]
    remedy: ConfigRemedy | None
    why_none: str = ""

    @classmethod
    def of(cls, folder: Path, engine: str) -> Engines:
        """The config of a folder, or of a name on the hub, in one engine or ``all``.

        Raises:
            CheckpointError: if there is no such file, or it is not a JSON object.
        """
        fields, unread = readable(Fields.read(model_folder(folder, weights=False)))
        if any(one.field.rpartition(".")[2] in ROTATION for one in unread):
            return cls(
                (), None, "the config states its rotation in a form that posenc does not read"
            )
        if refusal(fields):
            return cls((), None, REFUSED)
        if no_engine_has(ModelConfig.of(fields).family):
            kind = json.dumps(fields.get("model_type"))
            return cls((), None, f"no model of type {kind} of transformers or an engine is known")
        served = compare(fields)
        if engine != ALL:
            names = {TRANSFORMERS.name, engine_named(engine).name}
            served = tuple(one for one in served if one.engine in names)
        differ = any(differs(one.difference) for one in served)
        return cls(served, right_in_all(fields) if differ else None)

    @property
    def unlike(self) -> list[str]:
        """Engines that do not rotate as transformers does."""
        return [one.engine for one in self.served if differs(one.difference)]

    @property
    def alone(self) -> str:
        """The option of ``posenc extend --for`` for a single other engine; "" for more, or none."""
        others = [ENGINES[one.engine].option for one in self.served[1:]]
        return others[0] if len(others) == 1 else ""

    def words(self) -> dict[str, tuple[str, str]]:
        """A word on texts up to the trained length and one on longer ones, by engine."""
        return {
            one.engine: ("differs", "same")
            if one.difference.startswith(AS_LONGER)
            else (_word(one), _word(one))
            for one in self.served[1:]
        }

    def facts(self, reading: LayerReading) -> Iterator[tuple[str, str]]:
        """Names of engines, each with its difference from transformers or why none is known."""
        if not self.served:
            yield ALL, f"not compared, {self.why_none or 'the config states no rotation'}"
        unlike = _unlike_layers(self.served[0], reading) if self.served else 0
        if unlike:
            layers = counted(unlike, "layer")
            yield ALL, f"not compared for {layers}, whose code rotates otherwise than stated"
        for one in self.served[1:]:
            if one.difference:
                yield one.engine, difference_of(one)
            if one.newer:
                yield one.engine, f"{one.newer} is installed here, newer than its rules"
        if self.unlike and self.remedy is None:
            yield ALL, "no line of config.json makes more of them rotate as transformers does"
        if self.remedy is not None:
            yield from ((name, f"still {why}") for name, why in self.remedy.left.items())

    def origin(self) -> str:
        """When the rules were read and run, in a sentence."""
        ran = [f"{one.engine} {one.run.release}" for one in self.served if one.run]
        dates = [one.run.date for one in self.served if one.run]
        run = f", and run with {listed(ran)} by {max(dates)}" if ran else ""
        return f"By the rules of the engines, as read in {self.served[0].read}{run}."

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """``ENGINE_COLUMNS`` and a row for each rotation; the last one only if pairs differ."""
        rows = list(self._rows())
        end = len(ENGINE_COLUMNS) - (not any(row[-1] for row in rows))
        return ENGINE_COLUMNS[:end], [row[:end] for row in rows]

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for place, one in enumerate(self.served):
            longest = "no limit" if one.longest is None else f"{one.longest:,}"
            if not one.rotations:
                yield one.engine, "—", "—", "—", ""
            elif place and not one.difference:
                yield one.engine, "as transformers", "", longest, ""
            else:
                differing = self._differing(one)
                for kind, rotation in one.rotations.items():
                    name = f"{one.engine}, {kind}" if kind else one.engine
                    gain, unlike = f"{rotation.gain:.5g}", differing[kind]
                    yield name, _period(rotation), gain, longest, unlike

    def _differing(self, served: Served) -> dict[str, str]:
        """Pairs by layer type that differ from transformers; there, from its first type."""
        rotations = self.served[0].rotations
        first = next(iter(rotations), "")
        pairs_by_type = {}
        for kind, rotation in served.rotations.items():
            is_transformers = served is self.served[0]
            right = rotations.get(first if is_transformers else kind)
            unlike = differing_pairs(rotation.frequencies, right.frequencies) if right else ""
            pairs_by_type[kind] = f"{unlike} from {first}" if is_transformers and unlike else unlike
        return pairs_by_type

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "engines": [
                asdict(one) | {"differing_pairs": self._differing(one)} for one in self.served
            ],
            "right_in_all": None if self.remedy is None else asdict(self.remedy),
        }


def difference_of(served: Served) -> str:
    """Difference of an engine from transformers, and its effect; "" where there is none."""
    return ": ".join(filter(None, (served.difference, served.effect)))


def _period(rotation: EngineRotation) -> str:
    """Tokens in which the slowest pair turns once."""
    slowest = min((theta for theta in rotation.frequencies if theta), default=0.0)
    return f"{2 * math.pi / slowest:,.0f} tokens" if slowest else "at rest"


def _word(served: Served) -> str:
    if not differs(served.difference):
        return "unknown" if served.difference else "same"
    return "differs" if served.rotations else "refuses"


def _unlike_layers(served: Served, reading: LayerReading) -> int:
    """Number of layers that rotate by none of the rotations of a config, as their code ran.

    Args:
        served: the config in transformers.
        reading: of the layers; nothing is known of layers that were not run, of rotations that
            change with the length, and of those without frequencies.
    """
    if reading.by != "run" or not served.rotations:
        return 0
    return sum(
        len(layers.numbers)
        for layers in reading.layers
        if isinstance(layers.attention.rotation, RotationFacts)
        if not any(
            _alike(layers.attention.rotation, rotation) for rotation in served.rotations.values()
        )
    )


def _alike(read: RotationFacts, stated: EngineRotation) -> bool:
    if read.frequencies is None or read.varies is not False:
        return True
    moving = [theta for theta in stated.frequencies if theta]
    if len(moving) != len(read.frequencies):
        return False
    same = all(
        math.isclose(a, b, rel_tol=1e-3) for a, b in zip(read.frequencies, moving, strict=True)
    )
    return same and (read.gain is None or math.isclose(read.gain, stated.gain, rel_tol=1e-3))
