"""RoPE of a ``config.json`` by the published rules of the engines that serve it.

Formulas of transformers 5.23 (``modeling_rope_utils.py``), vLLM of July 2026
(``model_executor/layers/rotary_embedding``), llama.cpp of August 2026 (``conversion``,
``llama-context.cpp``, ``rope_yarn`` of ggml) and mlx-lm of August 2026 (``models/rope_utils.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posenc.integrations.transformers.checkpoints.families import FAMILIES
from posenc.integrations.transformers.checkpoints.family import family_name
from posenc.integrations.transformers.checkpoints.rope import TRAINED, RopeFields

UNTOLD_TRAINED = {"llama3": 8192, "yarn": 4096}
"""Trained lengths that llama.cpp (of llama3) and mlx-lm assume where they read none."""

MLX_BASES = {"qwen2": 1e6}
"""mlx-lm's base where a config has none beside ``rope_parameters``, if not 10,000."""


@dataclass(frozen=True)
class Rotation:
    """RoPE at one length of text.

    Args:
        frequencies: radians a token of each pair.
        gain: factor of rotated features.
    """

    frequencies: tuple[float, ...]
    gain: float = 1.0

    def like(self, other: Rotation) -> bool:
        """True if both rotate alike, up to the rounding of float32."""
        pairs = zip(self.frequencies, other.frequencies, strict=True)
        return self.same_gain(other) and all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs)

    def same_gain(self, other: Rotation) -> bool:
        return math.isclose(self.gain, other.gain, rel_tol=1e-4)


@dataclass(frozen=True)
class RopeConfig:
    """RoPE's parameters as an engine reads them.

    Args:
        family: ``model_type``.
        base: of the frequencies.
        width: rotated features of a head.
        parameters: of the scaling.
        trained: the trained length; None where it finds none.
        longest: ``max_position_embeddings``.
    """

    family: str
    base: float
    width: int
    parameters: Mapping[str, Any]
    trained: int | None
    longest: int

    @property
    def kind(self) -> str:
        return str(self.parameters.get("rope_type") or self.parameters.get("type") or "default")

    @property
    def factor(self) -> float:
        return float(self.parameters.get("factor") or self.longest / (self.trained or self.longest))

    def frequencies(self, *, stretch: float = 1.0) -> list[float]:
        """Those of the base times ``stretch^(d/(d-2))``."""
        base = self.base
        if stretch != 1:
            base *= stretch ** (self.width / (self.width - 2))
        return [base ** (-2 * t / self.width) for t in range(self.width // 2)]

    def plain(self) -> Rotation:
        return Rotation(tuple(self.frequencies()))

    def linear(self) -> Rotation:
        return Rotation(tuple(theta / self.factor for theta in self.frequencies()))

    def dynamic(self, length: float) -> Rotation:
        stretch = self.factor * max(length, self.longest) / self.longest - (self.factor - 1)
        return Rotation(tuple(self.frequencies(stretch=stretch)))

    def llama3(self, trained: int) -> Rotation:
        low, high = (float(self.parameters[f"{end}_freq_factor"]) for end in ("low", "high"))
        rotated = []
        for theta in self.frequencies():
            turns = trained * theta / (2 * math.pi)
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            rotated.append((1 - kept) * theta / self.factor + kept * theta)
        return Rotation(tuple(rotated))

    def yarn(self, gain: float, *, truncate: bool) -> Rotation:
        trained = self.trained or self.longest
        start, end = (
            self.width * math.log(trained / (2 * math.pi * turns)) / (2 * math.log(self.base))
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
            kept = 1 - min(1.0, max(0.0, (t - start) / span))
            rotated.append((1 - kept) * theta / self.factor + kept * theta)
        return Rotation(tuple(rotated), gain)

    def rotated(
        self, length: int, *, yarn: Callable[[], Rotation], longrope: Callable[[], Rotation]
    ) -> Rotation:
        """RoPE in a text of ``length`` tokens, with an engine's own YaRN and LongRoPE."""
        match self.kind:
            case "linear":
                return self.linear()
            case "dynamic":
                return self.dynamic(length)
            case "llama3":
                return self.llama3(self.trained or self.longest)
            case "yarn":
                return yarn()
            case "longrope":
                return longrope()
        return self.plain()

    def usual_gain(self, mscale: float = 1.0) -> float:
        """YaRN's: 0.1 · mscale · ln s + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def longrope(self, side: str, gain: float) -> Rotation:
        factors = self.parameters[f"{side}_factor"]
        thetas = zip(self.frequencies(), factors, strict=True)
        return Rotation(tuple(theta / by for theta, by in thetas), gain)

    def length_gain(self) -> float:
        """LongRoPE's: √(1 + ln s / ln L), s of the two lengths."""
        trained = self.trained or self.longest
        if self.longest <= trained:
            return 1.0
        return math.sqrt(1 + math.log(self.longest / trained) / math.log(trained))


def by_transformers(config: Mapping[str, Any], length: int) -> Rotation:
    """As transformers rotates in a text of ``length`` tokens."""
    rope = _standard(config)
    given = rope.parameters

    def longrope() -> Rotation:
        trained, gain = rope.trained or rope.longest, given.get("attention_factor")
        if gain is None:
            gain = math.sqrt(1 + math.log(rope.factor) / math.log(trained))
        return rope.longrope("long" if length > trained else "short", gain)

    def yarn() -> Rotation:
        return rope.yarn(_yarn_gain(rope), truncate=given.get("truncate", True))

    return rope.rotated(length, yarn=yarn, longrope=longrope)


def by_vllm(config: Mapping[str, Any], length: int) -> Rotation:
    """As vLLM does, that serves texts of up to ``max_position_embeddings``."""
    rope = _standard(config)
    if rope.kind == "dynamic":  # one base for all texts: that of the longest
        return rope.dynamic(rope.longest)
    if rope.kind == "longrope":
        side = "long" if rope.longest > (rope.trained or rope.longest) else "short"
        gain = rope.parameters.get(f"{side}_mscale")
        return rope.longrope(side, rope.length_gain() if gain is None else gain)
    return by_transformers(config, length)


def by_llama_cpp(config: Mapping[str, Any], length: int) -> Rotation:
    """As llama.cpp does with a file of its converter, at any length."""
    rope = _standard(config)
    given = rope.parameters
    if rope.family == "gpt_neox":  # neither base nor scaling is converted
        return RopeConfig(rope.family, 10000.0, rope.width, {}, None, length).plain()
    if rope.kind == "linear":
        return rope.linear()
    if rope.kind == "yarn":
        relative = given.get("attention_factor", given.get("attn_factor", 1.0))
        return rope.yarn(relative * rope.usual_gain(), truncate=True)
    if rope.kind == "llama3" and rope.family != "qwen2":
        return rope.llama3(config.get(TRAINED) or UNTOLD_TRAINED["llama3"])
    return rope.plain()


def by_mlx_lm(config: Mapping[str, Any], length: int) -> Rotation:
    """As mlx-lm does in a text of ``length`` tokens."""
    standard, names = _standard(config), _names(config)
    family, longest = standard.family, standard.longest
    given = {} if family == "gpt_neox" else config.get("rope_scaling") or {}
    base = float(config.get(names.base) or MLX_BASES.get(family, 10000.0))
    trained = given.get(TRAINED, UNTOLD_TRAINED.get(str(given.get("rope_type"))))
    rope = RopeConfig(family, base, standard.width, given, trained, longest)

    def yarn() -> Rotation:
        gain = rope.usual_gain(given.get("mscale", 1.0))
        gain /= rope.usual_gain(given.get("mscale_all_dim", 0.0))
        return rope.yarn(gain, truncate=True)

    def longrope() -> Rotation:
        return rope.longrope("long", rope.length_gain())

    return rope.rotated(length, yarn=yarn, longrope=longrope)


ENGINES: dict[str, Callable[[Mapping[str, Any], int], Rotation]] = {
    "transformers": by_transformers,
    "vLLM": by_vllm,
    "llama.cpp": by_llama_cpp,
    "mlx-lm": by_mlx_lm,
}
"""Rotation of a config in a text of so many tokens, by engine."""


def differences(config: Mapping[str, Any], *, length: int) -> dict[str, str]:
    """How engines other than transformers serve a config, in words; "" where they do as it does.

    Empty for models without RoPE.

    Args:
        config: fields of ``config.json``.
        length: the trained length.
    """
    family = FAMILIES.get(family_name(str(config.get("model_type"))))
    if family is None or family.rope is None:
        return {}
    return {
        name: _difference(config, rule, length)
        for name, rule in ENGINES.items()
        if name != "transformers"
    }


def _difference(
    config: Mapping[str, Any], rule: Callable[[Mapping[str, Any], int], Rotation], length: int
) -> str:
    # LongRoPE changes past the trained length, dynamic NTK with every token past it
    lengths = length, length + 1, 2 * length
    right = [by_transformers(config, n) for n in lengths]
    served = [rule(config, n) for n in lengths]
    if all(map(Rotation.like, served, right)):
        return ""
    base = RopeConfig("", 10000.0, 2 * len(served[0].frequencies), {}, None, length).plain()
    if all(map(Rotation.like, served, [_standard(config).plain()] * 3)):
        return "ignores the scaling"
    if all(map(base.like, served)):
        return "ignores base and scaling"
    if all(map(Rotation.like, served[1:], right[1:])):
        return "rotates texts up to the trained length as longer ones"
    if not served[2].same_gain(right[2]):
        return f"scales logits by {served[2].gain ** 2:.3g} instead of {right[2].gain ** 2:.3g}"
    return "rotates by other frequencies"


def _names(config: Mapping[str, Any]) -> RopeFields:
    names = FAMILIES[family_name(str(config.get("model_type")))].rope
    assert names is not None  # of families with RoPE
    return names


def _standard(config: Mapping[str, Any]) -> RopeConfig:
    """RoPE as transformers completes a config."""
    names = _names(config)
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    share = given.get("partial_rotary_factor", config.get(names.fraction, names.rotated))
    return RopeConfig(
        family=str(config["model_type"]),
        base=float(given.get("rope_theta") or config.get(names.base) or 10000.0),
        width=int(width * share),
        parameters=given,
        trained=config.get(TRAINED) or given.get(TRAINED),
        longest=config["max_position_embeddings"],
    )


def _yarn_gain(rope: RopeConfig) -> float:
    """YaRN's gain in transformers and vLLM."""
    given = rope.parameters
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    one, every = (float(given.get(name) or 0) for name in ("mscale", "mscale_all_dim"))
    if one and every:
        return rope.usual_gain(one) / rope.usual_gain(every)
    return rope.usual_gain()
