"""Arithmetic of RoPE's scalings, which all engines share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from posenc.transformers.checkpoints import scaling_of


@dataclass(frozen=True)
class EngineRotation:
    """RoPE at one length of text.

    Args:
        frequencies: radians a token of each pair.
        gain: factor of rotated features.
        scale: factor of logits of all features, beside that of the model in transformers.
    """

    frequencies: tuple[float, ...]
    gain: float = 1.0
    scale: float = 1.0

    def like(self, other: EngineRotation) -> bool:
        """True if both rotate alike, up to the rounding of float32."""
        if len(self.frequencies) != len(other.frequencies) or not self.same_gain(other):
            return False
        pairs = zip(self.frequencies, other.frequencies, strict=True)
        return all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-20) for a, b in pairs)

    @property
    def logit_gain(self) -> float:
        """Factor of logits of rotated features."""
        return self.gain**2 * self.scale

    def same_gain(self, other: EngineRotation) -> bool:
        ours, others = (self.gain, self.scale), (other.gain, other.scale)
        return all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(ours, others, strict=True))

    def agreement(self, other: EngineRotation, distance: int) -> float:
        """Mean cosine of the error of angles between two tokens, 1 if there is none.

        It is the expected cosine of a key rotated by one and the other. Pairs that only one
        rotates count as unrotated by the other.
        """
        pairs = max(len(self.frequencies), len(other.frequencies))
        one, two = (
            (*rotation.frequencies, *[0.0] * (pairs - len(rotation.frequencies)))
            for rotation in (self, other)
        )
        if not pairs:
            return 1.0
        errors = (distance * (a - b) for a, b in zip(one, two, strict=True))
        return sum(map(math.cos, errors)) / pairs


def differing_pairs(
    ours: Sequence[float], others: Sequence[float], *, tolerance: float = 1e-5
) -> str:
    """Pairs whose frequencies differ, such as ``"12 of 64"``; "" if none does.

    Args:
        ours, others: radians a token of each pair; those that only one has differ.
        tolerance: relative error of frequencies that are the same.
    """
    pairs = list(zip_longest(ours, others, fillvalue=math.inf))
    same = (math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-20) for a, b in pairs)
    count = len(pairs) - sum(same)
    return f"{count} of {len(pairs)}" if count else ""


@dataclass(frozen=True)
class RopeParameters:
    """RoPE's parameters as an engine reads them.

    Args:
        base: of the frequencies.
        width: rotated features of a head.
        parameters: of the scaling.
        trained: the trained length; None where it finds none.
        longest: ``max_position_embeddings``.
        head: features of a head.
        served: tokens of the longest text that a server takes; None: ``longest``.
    """

    base: float
    width: int
    parameters: Mapping[str, Any]
    trained: int | None
    longest: int
    head: int
    served: int | None = None

    @property
    def kind(self) -> str:
        return scaling_of(self.parameters)

    @property
    def length(self) -> int:
        """The trained length, or the longest text where that is not known."""
        return self.trained or self.longest

    @property
    def factor(self) -> float:
        return float(self.parameters.get("factor") or self.longest / self.length)

    def number(self, name: str, default: float) -> float:
        """A parameter; the default where it is missing or null."""
        value = self.parameters.get(name)
        return default if value is None else float(value)

    def frequencies(self, *, stretch: float = 1.0) -> list[float]:
        """Frequencies in radians a token, of the base times ``stretch^(d/(d-2))``."""
        base = self.base
        if stretch != 1:
            base *= stretch ** (self.width / (self.width - 2))
        return [base ** (-2 * t / self.width) for t in range((self.width + 1) // 2)]

    def plain(self) -> EngineRotation:
        return EngineRotation(tuple(self.frequencies()))

    def ntk(self, stretch: float) -> EngineRotation:
        return EngineRotation(tuple(self.frequencies(stretch=stretch)))

    def dynamic(self, length: float) -> EngineRotation:
        return self.ntk(self.factor * max(length, self.longest) / self.longest - (self.factor - 1))

    def proportional(self, factor: float) -> EngineRotation:
        """Frequencies over all features of the head, of which only the first pairs rotate."""
        rotated = self.width // 2
        still = (0.0,) * (self.head // 2 - rotated)
        steps = (self.base ** (-2 * t / self.head) / factor for t in range(rotated))
        return EngineRotation((*steps, *still))

    def yarn(self, gain: float, *, truncate: bool) -> EngineRotation:
        start, end = (
            self.width * math.log(self.length / (2 * math.pi * turns)) / (2 * math.log(self.base))
            for turns in (
                float(self.parameters.get("beta_fast") or 32),
                float(self.parameters.get("beta_slow") or 1),
            )
        )
        if truncate:
            start, end = math.floor(start), math.ceil(end)
        start, end = max(start, 0), min(end, self.width - 1)
        span = end - start or 0.001
        rotated = []
        for t, theta in enumerate(self.frequencies()):
            share = 1 - min(1.0, max(0.0, (t - start) / span))
            rotated.append((1 - share) * theta / self.factor + share * theta)
        return EngineRotation(tuple(rotated), gain)

    def usual_gain(self, mscale: float = 1.0) -> float:
        """YaRN's: 0.1 · mscale · ln s + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def quotient_gain(self, one: float, every: float) -> float:
        """YaRN's of ``mscale`` and ``mscale_all_dim``."""
        return self.usual_gain(one) / self.usual_gain(every)

    def longrope(self, side: Literal["long", "short"], gain: float) -> EngineRotation:
        factors = self.parameters[f"{side}_factor"]
        thetas = zip(self.frequencies(), factors, strict=True)
        return EngineRotation(tuple(theta / by for theta, by in thetas), gain)

    def length_gain(self) -> float:
        """LongRoPE's: √(1 + ln s / ln L), s of the two lengths."""
        if self.longest <= self.length:
            return 1.0
        return math.sqrt(1 + math.log(self.longest / self.length) / math.log(self.length))

    def side(self, length: int) -> Literal["long", "short"]:
        """LongRoPE's factors for a text of so many tokens."""
        return "long" if length > self.length else "short"

    def side_of_all(self, length: int) -> Literal["long", "short"]:
        """LongRoPE's factors where those of the longest text that is served are for all texts."""
        return self.side(max(length, self.served or self.longest))


Rule = Callable[[RopeParameters, int], EngineRotation]
"""Rotation in a text of so many tokens."""


ALPHA = "ntk_alpha"
"""Hunyuan's scaling, which its configs call dynamic: a fixed base for all texts."""


def ntk_alpha(rope: RopeParameters, length: int) -> EngineRotation:
    """The base times ``alpha^(d/(d-2))``."""
    return rope.ntk(float(rope.parameters["alpha"]))


UNREAD = "unread_mscale_all_dim"
"""``mscale_all_dim`` of a model with latent attention whose engine does not read it."""


def without_mscale(rope: RopeParameters) -> dict[str, Any]:
    """Parameters of no scaling, nor that of logits that transformers has by ``mscale_all_dim``."""
    unread = {UNREAD: every} if (every := rope.parameters.get("mscale_all_dim")) else {}
    return {"rope_type": "default", "factor": rope.factor} | unread


def plain(rope: RopeParameters, length: int) -> EngineRotation:
    """No scaling."""
    every = rope.number(UNREAD, 0.0)
    scale = 1 / rope.usual_gain(every) ** 2 if every else 1.0
    return EngineRotation(tuple(rope.frequencies()), scale=scale)


def linear(rope: RopeParameters, length: int) -> EngineRotation:
    """Divided frequencies."""
    return EngineRotation(tuple(theta / rope.factor for theta in rope.frequencies()))


def llama3(rope: RopeParameters, length: int) -> EngineRotation:
    """Frequencies divided below a ramp."""
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    rotated = []
    for theta in rope.frequencies():
        turns = rope.length * theta / (2 * math.pi)
        share = float(turns >= low)  # of a ramp without width, as Llama 4's
        if high != low:
            share = min(1.0, max(0.0, (turns - low) / (high - low)))
        rotated.append((1 - share) * theta / rope.factor + share * theta)
    return EngineRotation(tuple(rotated))


USUAL: Mapping[str, Rule] = {"default": plain, "linear": linear, "llama3": llama3}
"""Rules that most engines share, by ``rope_type``."""


def latent_yarn(rope: RopeParameters, length: int) -> EngineRotation:
    """YaRN of models with latent attention, whose ``mscale`` is 1 and ``mscale_all_dim`` 0."""
    gain = rope.quotient_gain(rope.number("mscale", 1.0), rope.number("mscale_all_dim", 0.0))
    return rope.yarn(gain, truncate=True)
