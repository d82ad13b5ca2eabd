"""The positional encoding of a ``config.json``, and the length at which it breaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posenc.evaluation.doctor.config_findings import TRAINED, has_rope, longest_text, rope_dicts
from posenc.evaluation.doctor.layers import LayerKind, layer_count, layer_kinds, window_size


@dataclass(frozen=True)
class Positions:
    """The encoding of one kind of attention layers.

    Args:
        layers: of the model.
        encoding: name in posenc's registry; "" for one that it has not.
        described: the encoding in words.
        breaks_at: tokens from which on outputs are undefined or known to degrade; None: none known.
        why: the reason.
    """

    layers: str
    encoding: str
    described: str
    breaks_at: int | None
    why: str


LEARNED = (
    "bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "gpt2", "opt",
    "bart", "mbart", "clip", "clip_text_model", "layoutlm", "mpnet", "layoutlmv2", "layoutlmv3",
    "longformer", "biogpt", "gpt_bigcode", "vit", "deit", "beit", "whisper", "data2vec-text",
)  # fmt: skip
"""``model_type`` of models that add a table of absolute positions."""

PATCHES = ("swin", "a table by the offset of two patches")
DECOMPOSED = ("decomposed2d", "products of queries with a row for each offset along an axis")

RELATIVE: Mapping[str, tuple[str, str]] = {
    "mpnet": ("t5", "T5's buckets up to a distance of 128"),
    "layoutlmv2": ("t5", "buckets of token distances and of box distances"),
    "layoutlmv3": ("t5", "buckets of token distances and of box distances"),
    "beit": PATCHES,
    "data2vec-vision": PATCHES,
    "sam_vision_model": DECOMPOSED,
    "sam_hq_vision_model": DECOMPOSED,
    "vitdet": DECOMPOSED,
    "swin": ("swin", "a table by the offset of two patches of a window"),
    "swinv2": ("swin_v2", "a small network on log offsets of a window"),
    "wavlm": ("t5", "gated buckets of distances"),
    "speecht5": ("shaw", "Shaw's keys, clipped"),
    "xlnet": ("xlnet", "Transformer-XL's products with sinusoids"),
    "funnel": ("transformer_xl", "Transformer-XL's products with sinusoids, of pooled tokens too"),
    "transfo-xl": ("transformer_xl", "products with sinusoids"),
}
"""Relative encodings by ``model_type``."""

SWITCHES: Mapping[str, tuple[str, ...]] = {
    "beit": ("use_relative_position_bias", "use_shared_relative_position_bias"),
    "data2vec-vision": ("use_relative_position_bias", "use_shared_relative_position_bias"),
    "vitdet": ("use_relative_position_embeddings",),
}
"""Fields that are false by default, one of which has to be true for the relative encoding."""

SOUNDS: Mapping[str, str] = {
    "wav2vec2-bert": "relative_key",
    "wav2vec2-conformer": "relative",
    "seamless_m4t": "relative",
    "seamless_m4t_v2": "relative_key",
}
"""``position_embeddings_type`` of the encoders of sounds where the config has none."""

SOUND_TYPES: Mapping[str, tuple[str, str]] = {
    "relative": ("transformer_xl", "Transformer-XL's products with sinusoids"),
    "relative_key": ("shaw", "Shaw's keys, clipped"),
    "rotary": ("rope", "RoPE"),
}
"""Encodings by ``position_embeddings_type``."""

BUCKETED = ("t5", "mt5", "umt5", "switch_transformers", "longt5", "udop", "pix2struct", "pop2piano")
ALIBI = ("bloom", "mpt")


def positions_of(config: Mapping[str, Any]) -> list[Positions]:
    """The encodings of a model; empty where nothing in the config tells."""
    kind, where = str(config.get("model_type", "")), everywhere(config)
    found = []
    longest = longest_text(config)
    if kind in LEARNED and longest and not has_rope(config):
        found.append(
            Positions(
                "input", "learned", f"a table of {longest:,} absolute positions", longest + 1,
                "the table has no row for a further token",
            )
        )  # fmt: skip
    if kind in BUCKETED:
        reach = config.get("relative_attention_max_distance", 128)
        found.append(
            Positions(
                where, "t5", f"T5's buckets up to a distance of {reach:,}", None,
                "all farther tokens share a bucket: order among them is lost, nothing fails",
            )
        )  # fmt: skip
    elif kind in ALIBI or config.get("alibi"):
        found.append(
            Positions(
                where, "alibi", "ALiBi's slopes", None,
                "far tokens fade out: nothing fails, nothing far is found",
            )
        )  # fmt: skip
    elif kind in ("deberta", "deberta-v2"):
        found.extend(_deberta(config, where))
    elif relative := _relative(config, kind):
        found.append(Positions(where, *relative, None, "farther offsets share a row or go on"))
    elif has_rope(config):
        found.extend(_rope(config))
    return found


def everywhere(config: Mapping[str, Any]) -> str:
    """All layers of a model, in words."""
    layers = layer_count(config)
    return {None: "all layers", 1: "the layer"}.get(layers, f"all {layers} layers")


def _relative(config: Mapping[str, Any], kind: str) -> tuple[str, str] | None:
    """Name and description of a relative encoding; None for models without one."""
    if kind in SOUNDS:
        return SOUND_TYPES.get(config.get("position_embeddings_type", SOUNDS[kind]))
    switches = SWITCHES.get(kind, ())
    if switches and not any(config.get(name) for name in switches):
        return None
    return None if config.get("use_rel_pos") is False else RELATIVE.get(kind)


def _deberta(config: Mapping[str, Any], where: str) -> list[Positions]:
    if not config.get("relative_attention"):
        return []
    reach = config.get("max_relative_positions", -1)
    reach = reach if reach and reach > 0 else config.get("max_position_embeddings", 512)
    buckets = config.get("position_buckets", -1)
    rows = f"{buckets} log buckets" if buckets and buckets > 0 else "a row a distance"
    return [
        Positions(
            where, "deberta", f"disentangled attention, {rows} up to a distance of {reach:,}",
            None, f"tokens {reach:,} or more apart share a row",
        )
    ]  # fmt: skip


def _rope(config: Mapping[str, Any]) -> Iterator[Positions]:
    kinds = layer_kinds(config)
    total = kinds.total()
    for kind, count in kinds.items():
        where = f"{count} of {total} layers" if len(kinds) > 1 else everywhere(config)
        if kind.layer_type and len(kinds) > 1:
            where += f" ({kind.layer_type})"
        if kind.rotates:
            yield _rotating(config, kind, where)
        elif kind.other:
            why = "the order of tokens enters by it alone"
            yield Positions(where, "", f"{kind.other}, no positions", None, why)
        elif kind.rotates is False:
            why = "the order of tokens enters by the causal mask alone"
            yield Positions(where, "nope", "no positions (NoPE)", None, why)
        else:
            why = "which of them rotate or see windows only is not known of this model type"
            where = f"some or {where}"
            yield Positions(where, "rope", f"RoPE{_scaled(config, kind)}", None, why)


def _rotating(config: Mapping[str, Any], kind: LayerKind, where: str) -> Positions:
    longest, window = config.get("max_position_embeddings"), window_size(config)
    described = f"RoPE{_scaled(config, kind)}"
    if kind.windowed is None:
        why = "whether these layers see windows only is not known of this model type"
        return Positions(where, "rope", described, None, why)
    if kind.windowed:
        described += f", in windows of {window:,} tokens" if window else ", in windows"
        why = "no token sees beyond its window, however long the text"
        if window and longest and window > longest:
            why = f"a window is wider than the {longest:,} positions of the config"
        return Positions(where, "rope", described, None, why)
    rope = _parameters(config, kind)
    scaling, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    trained = config.get(TRAINED) or rope.get(TRAINED)
    if scaling == "dynamic" and longest and factor:
        longest = int(longest * factor)
    elif scaling == "linear" and trained and factor:
        longest = int(trained * factor)
    why = "angles of longer distances were never trained: outputs degrade at once"
    return Positions(where, "rope", described, longest + 1 if longest else None, why)


def _scaled(config: Mapping[str, Any], kind: LayerKind) -> str:
    """Base and scaling, in words."""
    rope = _parameters(config, kind)
    bases = {base for base in config.get("layer_rope_theta") or () if base}
    base = rope.get("rope_theta") or config.get("rope_theta")
    if bases:
        base = bases.pop() if len(bases) == 1 else None
    scaling, factor = rope.get("rope_type") or rope.get("type") or "default", rope.get("factor")
    words = f", base {base:,.0f}" if isinstance(base, int | float) else ""
    if scaling != "default":
        words += f", {scaling} scaling" + (f" by {factor:g}" if factor else "")
    return words


def _parameters(config: Mapping[str, Any], kind: LayerKind) -> Mapping[str, Any]:
    given = rope_dicts(config)
    return given.get(kind.layer_type) or given.get("") or {}
