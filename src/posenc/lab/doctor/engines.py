"""Engines that would serve a folder, in words: how each rotates, and the lines right in all."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posenc.lab.reporting.sentences import sentence
from posenc.transformers.checkpoints.folder import Fields
from posenc.transformers.doctor.advice import REFUSED
from posenc.transformers.doctor.config_values import ROTATION, readable
from posenc.transformers.doctor.facts import LayerReading
from posenc.transformers.doctor.from_values import RotationFacts
from posenc.transformers.engines import (
    ENGINES,
    ConfigRemedy,
    EngineRotation,
    Served,
    compare,
    right_in_all,
)
from posenc.transformers.engines.comparison import AS_LONGER, differs, engine_named, no_engine_has
from posenc.transformers.engines.config import ModelConfig, refusal
from posenc.transformers.engines.rotation import differing_pairs
from posenc.transformers.engines.transformers import TRANSFORMERS
from posenc.transformers.hub import model_folder

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

    def sentences(self, reading: LayerReading) -> Iterator[str]:
        """Sentences on how the engines rotate, beside transformers and the layers as they ran."""
        if not self.served:
            yield sentence("engines_not_compared", why=self.why_none)
            return
        unlike = _unlike_layers(self.served[0], reading)
        if unlike:
            yield sentence("engines_unlike_code", count=unlike)
        alike = [one.engine for one in self.served[1:] if not one.difference]
        if alike:
            yield sentence("engines_alike", names=alike)
        stated = self.served[0].longest
        for one in self.served[1:]:
            if one.difference:
                yield sentence("engine_differs", served=one)
        for one in self.served[1:]:
            if one.longest is not None and stated is not None and one.longest != stated:
                yield sentence("engine_shorter", served=one, stated=stated)
        if self.unlike and self.remedy is None:
            yield sentence("engines_beyond_remedy")

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
