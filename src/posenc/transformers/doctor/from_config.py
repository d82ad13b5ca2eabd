"""Layers of a model as its config describes them, where its code cannot be run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from posenc.transformers.checkpoints.rope import scaling_of
from posenc.transformers.doctor.config_findings import Finding, has_rope, rope_dicts
from posenc.transformers.doctor.facts import UNKNOWN, AttentionFacts, LayerReading, Layers, Maybe
from posenc.transformers.doctor.from_values import RotationFacts
from posenc.transformers.engines.config import LAYERS, WINDOWS, head_dim

Config = Mapping[str, Any]
FULL = ("full_attention", "attention")
SLIDING = ("sliding_attention", "hybrid_sliding")
ATTENTION = frozenset(
    {*FULL, *SLIDING, "chunked_attention", "window_attention", "reference_sliding_attention"}
    | {"indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"}
    | {"compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse", "hybrid"}
)
"""Types of layers with attention; of the others than ``FULL``, windows and chunks it is not known
what they see."""

NO_ATTENTION = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "moe", "mlp"})
"""Types of layers without softmax attention."""


def read_config(config: Config, reason: str) -> LayerReading:
    """The layers that a config describes, and why there is no better source.

    Args:
        config: of the text model.
        reason: why the model's code could not be run.
    """
    types = _layer_types(config)
    layers = [
        Layers(
            numbers=tuple(n for n, other in enumerate(types) if other == kind),
            attention=_attention(config, kind),
        )
        for kind in dict.fromkeys(types)
    ]
    return LayerReading(layers=tuple(layers), by="config", reason=reason)


def _layer_types(config: Config) -> list[str]:
    """The type of every layer, "" where it is unknown; types beyond the layers are left out."""
    count = next((config[name] for name in LAYERS if isinstance(config.get(name), int)), 0)
    types = list(config.get("layer_types") or ())
    return [*types[:count], *[""] * (count - len(types))] if count else types


def unknown_types(config: Config, reading: LayerReading) -> list[Finding]:
    """A finding on unknown types of layers, if only the config was read."""
    types = _layer_types(config) if reading.by == "config" else []
    counts = Counter(kind for kind in types if kind and kind not in (*ATTENTION, *NO_ATTENTION))
    if not counts:
        return []
    names = ", ".join(
        f"{kind!r} ({count} layer{'s' * (count > 1)})" for kind, count in counts.items()
    )
    problem = f"has {names}, which posenc does not know: how these attend is not known"
    change = f"one of {', '.join(sorted(ATTENTION | NO_ATTENTION))}, if it is meant"
    return [Finding("layer_types", problem, change, unread=True)]


def window_size(config: Config) -> int | None:
    """Tokens of a window or chunk; None where the config has none."""
    sizes = (config.get(name) for name in WINDOWS)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _attention(config: Config, kind: str) -> AttentionFacts:
    module = kind or "layers"
    if kind in NO_ATTENTION:
        return AttentionFacts(
            module=module, kind="none", instead=(kind,), sources={"kind": "config"}
        )
    window = window_size(config)
    back = chunk = None
    if kind in SLIDING:
        back = UNKNOWN if window is None else window - 1
    elif kind == "chunked_attention":
        chunk = UNKNOWN if window is None else window
    elif kind and kind not in FULL:
        back = UNKNOWN
    elif not kind and window is not None and config.get("use_sliding_window", True):
        back = UNKNOWN  # of all layers, of some or of none
    heads = config.get("num_attention_heads") or config.get("n_head")
    dim = head_dim(config)
    return AttentionFacts(
        module=module,
        kind="self" if kind in ATTENTION else UNKNOWN,
        heads=heads,
        key_heads=config.get("num_key_value_heads") or heads,
        head_dim=dim,
        rotation=_rotation(config, kind, dim),
        absolute=UNKNOWN,
        back=back,
        ahead=UNKNOWN,
        chunk=chunk,
        sinks=UNKNOWN,
        cap=config.get("attn_logit_softcapping", UNKNOWN),
        temperature=UNKNOWN,
        sources=dict.fromkeys(("heads", "rotation", "back", "chunk", "cap"), "config"),
    )


def _rotation(config: Config, kind: str, dim: int | None) -> RotationFacts | Maybe:
    """The rotation of a layer type, which the config does not say each layer has."""
    if not has_rope(config) or (kind and kind not in ATTENTION):
        return UNKNOWN
    dicts = rope_dicts(config)
    rope = dicts.get(kind) or dicts.get("") or {}
    base = rope.get("rope_theta") or config.get("rope_theta")
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    scaled = scaling_of(rope) != "default"
    features = None if dim is None else 2 * (int(dim * share) // 2)
    if not base or not features or scaled:
        return RotationFacts(features=features)
    frequencies = (float(f"{base ** (-2 * i / features):.6g}") for i in range(features // 2))
    return RotationFacts(features=features, frequencies=tuple(frequencies))
