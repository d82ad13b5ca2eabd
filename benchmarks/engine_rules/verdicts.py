"""Verdicts: an engine's logits beside those of transformers, rotated as the rules predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.engine_rules.checkpoints import Checkpoint
from jaxtyping import Float
from torch import Tensor

from posenc.transformers.engines import ENGINES, EngineRotation, ModelConfig, differences
from posenc.transformers.engines.config import NotServedError, UnreadError

TOLERANCE = 5e-3
"""Of log-probabilities in float32; other rotations change some by 0.1 and more."""

SYMBOLS = {
    "=": "equal",
    "s": "ignores the scaling",
    "b": "ignores base and scaling",
    "l": "rotates texts up to the trained length as longer ones",
    "f": "rotates by other frequencies",
    "g": "scales logits",
    "w": "rotates other features",
    "r": "refused",
    "u": "without a rule",
    "!": "not as predicted",
}
"""Verdicts by letter."""

SURPRISE = "!"


@dataclass(frozen=True)
class Verdict:
    """A checkpoint in an engine.

    Args:
        symbol: of ``SYMBOLS``.
        message: for a surprise: what was predicted and what was seen.
    """

    symbol: str
    message: str = ""


@dataclass(frozen=True)
class Result:
    """What a runner left of a checkpoint.

    Args:
        arrays: by length, and by name in it.
        refusal: the reason for which the engine did not run it; "" if it did.
    """

    arrays: Mapping[str, np.ndarray]
    refusal: str = ""

    @classmethod
    def read(cls, out: Path, name: str) -> Result:
        reason = out / f"{name}.txt"
        if reason.exists():
            return cls({}, reason.read_text().strip() or "no reason")
        with np.load(out / f"{name}.npz") as file:
            return cls({key: file[key] for key in file.files})


Logits = dict[int, Float[Tensor, "L V"]]


def verdict(checkpoint: Checkpoint, result: Result, engine: str, right: Logits) -> Verdict:
    """The verdict of a checkpoint in an engine.

    Args:
        checkpoint: that was run.
        result: of the engine's runner.
        engine: its name in posenc's rules.
        right: log-probabilities by transformers.
    """
    rules, config = ENGINES[engine], ModelConfig.of(checkpoint.fields)
    if checkpoint.saved == "extended":
        config = rules.with_options(config)
    try:
        predicted = {n: rules.rotations(config, n) for n in right}
    except UnreadError:
        return Verdict("u")
    except NotServedError as error:
        if result.refusal:
            return Verdict("r")
        return Verdict(SURPRISE, f"runs, but was to be refused: {error}")
    if result.refusal:
        longest = rules.longest(config)
        if longest is not None and max(right) > longest:
            return Verdict("r")
        return Verdict(SURPRISE, f"refuses: {result.refusal}")
    own = {n: ENGINES["transformers"].rotations(config, n) for n in right}
    alike = {n: _alike(predicted[n], own[n]) for n in right}
    if "/" in next(iter(result.arrays)):
        far = _far_rotations(result, predicted)
    else:
        same = all(alike.values()) and engine != "transformers"
        expected = right if same else checkpoint.log_probabilities(predicted)
        far = _far_logits(result, right, expected, alike)
    if far:
        return Verdict(SURPRISE, far)
    if all(alike.values()):
        return Verdict("=")
    return Verdict(_symbol(config, engine))


def _alike(one: Mapping[str, EngineRotation], other: Mapping[str, EngineRotation]) -> bool:
    return all(one[kind].like(other[kind]) for kind in other)


def _far_logits(
    result: Result, right: Logits, expected: Logits | None, alike: Mapping[int, bool]
) -> str:
    """How logits differ from those expected; "" if they do not.

    Without ``expected``, since transformers cannot rotate so, they must differ from the right ones.
    """
    for n, own in right.items():
        found = torch.from_numpy(result.arrays[str(n)]).float().log_softmax(-1)
        from_own = float((found - own).abs().max())
        if not np.isfinite(from_own):
            return f"numbers that are not finite at {n} tokens"
        if expected is None:
            if from_own <= TOLERANCE and not alike[n]:
                return f"as transformers at {n} tokens, but was to differ"
            continue
        away = float((found - expected[n]).abs().max())
        if away > TOLERANCE:
            told = "as transformers" if alike[n] else "otherwise than transformers, by the rules"
            return (
                f"{away:.3g} from the predicted logits at {n} tokens ({told}), "
                f"{from_own:.3g} from those of transformers"
            )
    return ""


def _far_rotations(result: Result, predicted: Mapping[int, Mapping[str, EngineRotation]]) -> str:
    """How cosines and sines differ from those predicted; "" if they do not."""
    for n, rotations in predicted.items():
        for kind, rotation in rotations.items():
            angles = np.outer(np.arange(n), rotation.frequencies)
            for name, function in (("cos", np.cos), ("sin", np.sin)):
                found = result.arrays["/".join(filter(None, (str(n), kind, name)))]
                expected = rotation.gain * function(angles)
                if found.shape != expected.shape:
                    return f"{found.shape[-1]} pairs instead of {expected.shape[-1]}"
                away = float(np.abs(found - expected).max())
                if not away <= TOLERANCE:
                    return f"{name} {away:.3g} from the predicted ones at {n} tokens {kind}"
    return ""


def _symbol(config: ModelConfig, engine: str) -> str:
    """The letter of a difference."""
    length = min(rope.length for rope in config.ropes().values())
    words = differences(config, length=length)[engine]
    return next((one for one, start in SYMBOLS.items() if words.startswith(start)), "w")


def rows(verdicts: Mapping[str, Verdict], methods: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Letters by family and way of saving, one a method; a space where a method does not fit."""
    table: dict[str, dict[str, Any]] = {}
    for name in verdicts:
        family, _, saved = name.split("/")
        table.setdefault(family, {})[saved] = "".join(
            verdicts[cell].symbol if (cell := f"{family}/{method}/{saved}") in verdicts else " "
            for method in methods
        )
    return table
