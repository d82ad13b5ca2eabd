"""Rules of CTranslate2, whose converter reads the configs that transformers 5 makes of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from posenc.transformers.engines.config import Engine, ModelConfig, NotServedError, head_dim
from posenc.transformers.engines.rotation import RopeParameters, linear, plain


@dataclass(frozen=True, kw_only=True)
class Loader:
    """RoPE's parameters as a loader of the converter reads them.

    Args:
        kinds: scalings that it converts; it refuses others.
        dropped: scalings that it takes and the program does not apply.
        bases: by layer type, "" for others: it reads neither base nor scaling.
        own_head_dim: features of a head are read; else they are width over number of heads.
    """

    kinds: frozenset[str] = frozenset({"linear"})
    dropped: frozenset[str] = frozenset()
    bases: Mapping[str, float] = field(default_factory=dict)
    own_head_dim: bool = True


WINDOWS = Loader(bases={"": 1e6, "sliding_attention": 1e4})
LOADERS: Mapping[str, Loader] = {
    "llama": Loader(dropped=frozenset({"llama3"}), own_head_dim=False),
    "qwen2": Loader(own_head_dim=False),
    "mistral": Loader(),
    "qwen3": Loader(),
    "falcon": Loader(bases={"": 1e4}),
    "gemma": Loader(bases={"": 1e4}),
    "gemma2": Loader(bases={"": 1e4}),
    "gemma3": WINDOWS,
    "gemma3_text": WINDOWS,
}
"""Loaders by ``model_type`` at the top of ``config.json``."""

OUTDATED = frozenset(
    {"gpt_neox", "phi", "phi3"} | {"gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"}
)
"""Families with a loader that looks for fields or layers which transformers 5 does not have."""


def _ropes(config: ModelConfig) -> dict[str, RopeParameters]:
    family = config.outer
    if family in OUTDATED:
        raise NotServedError("its converter does not read this model as transformers 5 has it")
    if family not in LOADERS:
        raise NotServedError(f"its converter has no model {family}")
    loader = LOADERS[family]
    divided = head_dim({**config.completed, "head_dim": None})
    if not loader.own_head_dim and divided != config.head_dim:
        raise NotServedError("it takes heads of hidden_size / num_attention_heads features alone")
    return {kind: _converted(loader, kind, rope) for kind, rope in config.ropes().items()}


def _converted(loader: Loader, layer_type: str, rope: RopeParameters) -> RopeParameters:
    unscaled = replace(rope, width=rope.head, parameters={})  # a rotated share is not read
    if loader.bases:
        return replace(unscaled, base=loader.bases.get(layer_type, loader.bases[""]))
    if rope.kind == "default" or rope.kind in loader.dropped:
        return unscaled
    if rope.kind not in loader.kinds:
        raise NotServedError(f"its converter knows no {rope.kind} scaling of this model")
    factor = rope.number("factor", 1.0)
    return replace(unscaled, parameters={"rope_type": rope.kind, "factor": factor})


CTRANSLATE2 = Engine(
    name="CTranslate2",
    option="ctranslate2",
    release="4.8.5",
    files="converters/transformers.py with transformers 5.24, src/layers/attention_layer.cc",
    read="2026-11",
    packages=("ctranslate2",),
    kinds={"default": plain, "linear": linear},
    ropes=_ropes,
    longest=lambda config: None,
)
