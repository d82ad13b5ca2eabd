"""Settings of a ``config.json`` that are ignored, without effect, or contradicted by its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posenc.transformers.checkpoints import TRAINED, parameters_in, scaling_of
from posenc.transformers.doctor.facts import UNKNOWN, AttentionFacts, LayerReading, RotationFacts
from posenc.transformers.engines.config import WINDOWS, head_dim

SCALED = ("linear", "dynamic", "llama3", "longrope", "yarn")
"""Values of ``rope_type`` that change frequencies."""

ROPE_TYPES = ("default", "proportional", "axial", *SCALED)

SWITCH = "use_sliding_window"
"""Field that enables the window; its size has no effect otherwise."""

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """A setting that has another effect than it states, or that cannot be read.

    Args:
        field: its name.
        problem: what happens instead.
        change: the line to change.
        unread: it may be right, but posenc does not read it.
    """

    field: str
    problem: str
    change: str
    unread: bool = False


def findings(
    config: Config, tokenizer: Config, longest: int | None, *, switched: Config | None = None
) -> list[Finding]:
    """All findings in a config and in the ``tokenizer_config.json`` beside it (empty: none).

    Args:
        config: as it is written.
        tokenizer: its config.
        longest: tokens that the model's table of positions holds; None: no limit.
        switched: the config with the defaults of its class, of which ``SWITCH`` is read.
    """
    if switched is not None and switched.get(SWITCH) is not None:
        config = {SWITCH: switched[SWITCH], **config}
    by_rule = [finding for rule in RULES for finding in rule(config)]
    return [*by_rule, *_lengths(tokenizer, longest)]


def refused(reason: str, others: list[Finding]) -> list[Finding]:
    """A refusal by transformers as a finding; none without a reason, or if a finding names it."""
    if not reason or any(finding.field in reason for finding in others):
        return []
    problem = f"is refused by transformers: {reason.rstrip('.')}"
    return [Finding("config.json", problem, "a value that transformers takes")]


def rope_dicts(config: Config) -> dict[str, Mapping[str, Any]]:
    """RoPE's parameters, by the name of the layer type or ``""``, as transformers reads them."""
    values = parameters_in(config)
    if not isinstance(values, Mapping):
        return {}
    nested = {k: v for k, v in values.items() if k in (config.get("layer_types") or ())}
    return {k: v or {} for k, v in nested.items()} or {"": values}


def has_rope(config: Config) -> bool:
    return any(config.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling"))


def _base(config: Config) -> Iterator[Finding]:
    if not has_rope(config):
        return
    theta = config.get("rope_theta")
    for layer_type, rope in rope_dicts(config).items():
        inner = rope.get("rope_theta")
        where = f"rope_parameters.{layer_type}" if layer_type else "rope_parameters"
        if theta is not None and inner is not None and inner != theta:
            yield Finding(
                "rope_theta",
                f"{theta:,g} is ignored: {where} has {inner:,g}",
                f'"rope_theta": {inner} at the top, or {theta} in {where}',
            )
        if theta is None and inner is None:
            yield Finding(
                "rope_theta",
                "is given nowhere: the default of the model's class holds, mostly 10,000",
                f'"rope_theta" in {where}, with the value the model was trained with',
            )


def _two_dicts(config: Config) -> Iterator[Finding]:
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and old != new:
        yield Finding(
            "rope_parameters",
            "is ignored, because rope_scaling is there too",
            '"rope_scaling": null',
        )
    inner = [k for k, v in rope_dicts(config).get("", {}).items() if isinstance(v, Mapping)]
    if inner:
        why = "they are not in" if config.get("layer_types") else "there is no"
        yield Finding(
            "rope_parameters",
            f"its parts {', '.join(inner)} are ignored, because {why} layer_types",
            '"layer_types" with the type of every layer, or the parameters without parts',
        )


def _scaling(config: Config) -> Iterator[Finding]:
    longest = config.get("max_position_embeddings")
    for rope in rope_dicts(config).values():
        kind, old = rope.get("rope_type"), rope.get("type")
        if kind and old and kind != old:
            yield Finding("type", f"{old!r} is ignored: rope_type is {kind!r}", f'"type": "{kind}"')
        kind = scaling_of(rope)
        factor = rope.get("factor")
        if kind not in ROPE_TYPES:
            yield Finding(
                "rope_type", f"{kind!r} is unknown to transformers 5", f"one of {', '.join(SCALED)}"
            )
        if kind == "default" and factor not in (None, 1, 1.0):
            yield Finding(
                "factor",
                f"{factor:g} is ignored, because rope_type is missing or 'default'",
                '"rope_type": "linear", or the method the model was tuned with',
            )
        if kind in ("linear", "dynamic", "yarn", "llama3") and factor in (1, 1.0):
            yield Finding(
                "factor", f"{kind} scaling by 1 changes nothing", '"rope_type": "default"'
            )
        if kind in ("linear", "dynamic", "llama3") and factor is None:
            yield Finding("factor", f"{kind} scaling has none", '"factor" of the extension')
        if kind == "llama3":
            low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
            if low is None or high is None or low >= high:
                yield Finding(
                    "high_freq_factor",
                    f"is not above low_freq_factor ({high} and {low})",
                    '"low_freq_factor": 1.0, "high_freq_factor": 4.0',
                )
        fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
        if kind == "yarn" and fast < slow:
            yield Finding(
                "beta_fast",
                f"{fast:g} is below beta_slow, {slow:g}: engines rotate by different frequencies",
                '"beta_fast": 32, "beta_slow": 1, or those that the model was tuned with',
            )
        if kind == "dynamic" and longest:
            yield Finding(
                "max_position_embeddings",
                f"dynamic scaling begins beyond {longest:,}, which has to be the trained length",
                '"max_position_embeddings": the trained length',
            )
        if kind in ("llama3", "longrope", "yarn"):
            yield from _trained_length(config, rope, kind)
        if kind == "longrope":
            yield from _factors(config, rope)


def _trained_length(config: Config, rope: Config, kind: str) -> Iterator[Finding]:
    longest = config.get("max_position_embeddings")
    trained = config.get(TRAINED) or rope.get(TRAINED)
    factor = rope.get("factor")
    if trained is None:
        yield Finding(
            TRAINED,
            f"is missing: {kind} takes max_position_embeddings ({longest}) as the trained length",
            f'"{TRAINED}": the length before the extension',
        )
    elif longest and factor and abs(longest - factor * trained) > 0.01 * longest:
        yield Finding(
            "max_position_embeddings",
            f"is {longest:,}, but {factor:g} × {trained:,} = {factor * trained:,.0f}",
            f'"max_position_embeddings": {factor * trained:.0f}, or another factor',
        )


def _factors(config: Config, rope: Config) -> Iterator[Finding]:
    width = head_dim(config)
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name) or []
        if width and len(factors) != int(width * share) // 2:
            yield Finding(
                name,
                f"has {len(factors)} numbers for {int(width * share) // 2} pairs",
                f'"{name}" with one number a pair',
            )
    if rope.get("long_factor") and all(f == 1 for f in rope["long_factor"]):
        yield Finding(
            "long_factor", "is 1 everywhere and changes nothing", '"rope_type": "default"'
        )


def _heads(config: Config) -> Iterator[Finding]:
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(keys, int) and heads % keys:
        yield Finding(
            "num_key_value_heads",
            f"{keys} does not divide num_attention_heads {heads}: queries have no keys to share",
            '"num_key_value_heads": a divisor of num_attention_heads',
        )


def _windows(config: Config) -> Iterator[Finding]:
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if window and config.get(SWITCH) is False:
        yield Finding(
            "sliding_window",
            f"{window:,} is ignored, because use_sliding_window is false",
            '"use_sliding_window": true, or "sliding_window": null',
        )
    elif window and longest and window >= longest:
        yield Finding(
            "sliding_window",
            f"{window:,} never masks a token within {longest:,} positions",
            '"sliding_window": null',
        )


def _relative(config: Config) -> Iterator[Finding]:
    kind = config.get("position_embedding_type")
    if isinstance(kind, str) and kind.startswith("relative_key"):
        yield Finding(
            "position_embedding_type",
            f"{kind!r} is ignored by transformers 5, whose models of this kind add absolute "
            "positions only",
            "transformers below 5, or the score part of posenc's shaw with the same weights",
        )
    if config.get("pos_att_type") and not config.get("relative_attention"):
        yield Finding(
            "pos_att_type",
            "is ignored, because relative_attention is not true",
            '"relative_attention": true',
        )
    if config.get("relative_attention") and not config.get("pos_att_type"):
        yield Finding(
            "pos_att_type",
            "is empty: relative_attention adds nothing",
            '"pos_att_type": ["p2c", "c2p"]',
        )
    if config.get("alibi") and has_rope(config):
        yield Finding("alibi", "rules out RoPE: rope_theta is ignored", '"alibi": false')


def _lengths(tokenizer: Config, longest: int | None) -> Iterator[Finding]:
    cut = tokenizer.get("model_max_length")
    if isinstance(cut, int) and longest and longest < cut < 2**40:
        yield Finding(
            "model_max_length",
            f"the tokenizer lets {cut:,} tokens through, the model has positions for {longest:,}",
            f'"model_max_length": {longest} in tokenizer_config.json',
        )


RULES: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    _base,
    _two_dicts,
    _scaling,
    _heads,
    _windows,
    _relative,
)


def disagreements(config: Config, reading: LayerReading) -> Iterator[Finding]:
    """Findings where the measured layers contradict the config."""
    facts = [layers.attention for layers in reading.layers if layers.attention.kind == "self"]
    if reading.by != "run" or not facts:
        return
    yield from _contradicted_windows(config, facts)
    yield from _contradicted_types(config, reading)
    rotations = [fact.rotation for fact in facts if isinstance(fact.rotation, RotationFacts)]
    if has_rope(config) and not rotations and UNKNOWN not in {fact.rotation for fact in facts}:
        yield Finding("rope_parameters", "no layer rotates", '"rope_parameters": null')
    yield from _contradicted_bases(config, rotations)


def _contradicted_windows(config: Config, facts: list[AttentionFacts]) -> Iterator[Finding]:
    if any(UNKNOWN in (fact.back, fact.chunk) for fact in facts):
        return
    limits = {limit for fact in facts for limit in (fact.back, fact.chunk)}
    for name in WINDOWS:
        size = config.get(name)
        if not isinstance(size, int) or size < 2 or config.get("use_sliding_window") is False:
            continue
        if limits.isdisjoint({size - 1, size, size // 2 - 1, size // 2}):
            yield Finding(name, f"{size:,} does not limit what any layer sees", f'"{name}": null')


def _contradicted_types(config: Config, reading: LayerReading) -> Iterator[Finding]:
    types = config.get("layer_types") or []
    for kind, limited in (("sliding_attention", True), ("full_attention", False)):
        wrong = [
            number
            for layers in reading.layers
            if layers.attention.kind == "self" and layers.attention.back != UNKNOWN
            for number in layers.numbers
            if number < len(types) and types[number] == kind
            if layers.attention.windowed is not limited
        ]
        if wrong:
            sees = "see all tokens" if limited else "see a window only"
            yield Finding(
                "layer_types",
                f"{len(wrong)} layers of {kind} {sees}",
                '"layer_types" as the layers are',
            )


def _contradicted_bases(config: Config, rotations: list[RotationFacts]) -> Iterator[Finding]:
    ropes = rope_dicts(config).values()
    values = {rope.get("rope_theta") or config.get("rope_theta") for rope in ropes}
    values |= {config.get("rope_local_base_freq"), *(config.get("layer_rope_theta") or ())}
    stated = {float(base) for base in values if isinstance(base, int | float)}
    bases = {rotation.base for rotation in rotations if rotation.base}
    matches = any(abs(base - other) < 1e-2 * other for base in bases for other in stated)
    if stated and bases and not matches:
        says, does = (
            ", ".join(f"{float(f'{b:.4g}'):,.0f}" for b in sorted(x)) for x in (stated, bases)
        )
        yield Finding(
            "rope_theta",
            f"is {says}, but layers rotate by a base of {does}",
            f'"rope_theta": {float(f"{max(bases):.4g}")}',
        )
