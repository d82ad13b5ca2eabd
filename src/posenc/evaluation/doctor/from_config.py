"""Layers of a model as its config describes them, where its code cannot be run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.evaluation.doctor.config_findings import has_rope, rope_dicts
from posenc.evaluation.doctor.facts import UNKNOWN, Attention, Layers, Maybe, Reading
from posenc.evaluation.doctor.rotation import Rotation

Config = Mapping[str, Any]
COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")
"""Fields with a number of tokens that limits what a layer sees."""


def read_config(config: Config, reason: str) -> Reading:
    """The layers that a config describes, and why there is no better source.

    Args:
        config: of the text model.
        reason: why the model's code could not be run.
    """
    count = next((config[name] for name in COUNTS if isinstance(config.get(name), int)), 0)
    types = config.get("layer_types") or [""] * count
    layers = [
        Layers(
            numbers=tuple(n for n, other in enumerate(types) if other == kind),
            attention=_attention(config, kind),
        )
        for kind in dict.fromkeys(types)
    ]
    return Reading(layers=tuple(layers), by="config", reason=reason)


def window_size(config: Config) -> int | None:
    """Tokens of a window or chunk; None where the config has none."""
    sizes = (config.get(name) for name in WINDOWS)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _attention(config: Config, kind: str) -> Attention:
    module = kind or "layers"
    if kind and ("attention" not in kind or "linear" in kind):
        return Attention(module=module, kind="none", instead=(kind,), sources={"kind": "config"})
    window = window_size(config)
    back = chunk = None
    if "sliding" in kind:
        back = UNKNOWN if window is None else window - 1
    elif "chunk" in kind:
        chunk = UNKNOWN if window is None else window
    elif "full" not in kind and window is not None and config.get("use_sliding_window", True):
        back = UNKNOWN  # of all layers, of some or of none
    heads = config.get("num_attention_heads") or config.get("n_head")
    width = config.get("hidden_size") or config.get("n_embd")
    dim = config.get("head_dim") or (
        width // heads if heads and width and isinstance(heads, int) else None
    )
    return Attention(
        module=module,
        kind=UNKNOWN if not kind else "self",
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


def _rotation(config: Config, kind: str, dim: int | None) -> Rotation | Maybe:
    """The rotation of a layer type, which the config does not say each layer has."""
    if not has_rope(config):
        return UNKNOWN
    given = rope_dicts(config)
    rope = given.get(kind) or given.get("") or {}
    base = rope.get("rope_theta") or config.get("rope_theta")
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    scaled = (rope.get("rope_type") or rope.get("type") or "default") != "default"
    features = None if dim is None else 2 * (int(dim * share) // 2)
    if not base or not features or scaled:
        return Rotation(features=features)
    frequencies = (float(f"{base ** (-2 * i / features):.6g}") for i in range(features // 2))
    return Rotation(features=features, frequencies=tuple(frequencies))
