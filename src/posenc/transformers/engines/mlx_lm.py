"""Rules of mlx-lm, which reads ``config.json`` as it is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posenc.transformers.checkpoints import TRAINED
from posenc.transformers.engines.config import (
    FULL,
    Engine,
    Fields,
    ModelConfig,
    NotServedError,
    UnreadError,
)
from posenc.transformers.engines.rotation import (
    ALPHA,
    EngineRotation,
    RopeParameters,
    Rule,
    latent_yarn,
    linear,
    llama3,
    ntk_alpha,
    plain,
    without_mscale,
)

INSIDE = "rope_parameters.rope_theta"
"""Place of the base that transformers 5 writes; others are beside it."""

ALL, NONE = frozenset({"every rope_type"}), frozenset[str]()
LINEAR = frozenset({"linear"})
SU, SU_SCALED, SU_LATENT = "su_scaled", "su_scaled by long_mscale", "su_scaled of latent attention"
"""LongRoPE of files that have their own."""

STEP = "step3p5"
"""File that reads base and rotated share of each layer."""


@dataclass(frozen=True, kw_only=True)
class Reads:
    """How a file reads RoPE's fields; of names with a dot, the part after it is in the one before.

    Args:
        base: default of the base; None: it does not start without one.
        bases: fields of the base, in the order of preference; empty: it is always ``base``.
        scaling: fields of the scaling, in the order of preference; empty: it reads none.
        kinds: scalings that it applies, others are left out.
        starts: scalings that it starts with.
        keys: those that a scaling must have.
        named: scalings by the names that it takes them for; "" stands for any.
        trained_outside: the trained length is outside of the scaling.
        by_layer: base, share and scaling are in ``rope_parameters`` by layer type.
        default: ``rope_parameters`` of a config without any.
        widths: fields of the rotated features of a head, before those of their share.
        shares: fields of the rotated share of a head; empty: it is always ``share``.
        share: its default; None: it does not start without one.
        needs: fields without which it does not start, null or not.
        windows: field of the base of windows, which are not scaled; "": the same base.
        local: its default; None: it does not start without one.
    """

    base: float | None = None
    bases: tuple[str, ...] = ("rope_theta",)
    scaling: tuple[str, ...] = ("rope_scaling",)
    kinds: frozenset[str] = ALL
    starts: frozenset[str] = ALL
    keys: frozenset[str] = NONE
    named: Mapping[str, str] = field(default_factory=dict)
    trained_outside: bool = False
    by_layer: bool = False
    default: Mapping[str, Any] = field(default_factory=dict)
    widths: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    share: float | None = 1.0
    needs: tuple[str, ...] = ()
    windows: str = ""
    local: float | None = None


def _all(names: str, reads: Reads) -> dict[str, Reads]:
    return dict.fromkeys(names.split(), reads)


def _bare(base: float | None = None, *bases: str) -> Reads:
    """A base and no scaling."""
    return Reads(base=base, bases=bases or ("rope_theta",), scaling=())


TEMPERATURE = (
    "rope_parameters.llama_4_scaling_beta",
    "rope_parameters.original_max_position_embeddings",
)
PARTIAL = ("partial_rotary_factor",)
WIDTH = ("rotary_dim",)
TYPED = frozenset({"factor", "type"})
DYNAMIC_TOO = frozenset({"linear", "dynamic"})
BY_FACTOR = frozenset({"default", "linear", "llama3", "mrope", "proportional", "yarn"})
"""Scalings that do not need the longest text, which some files do not pass on."""

FILES: dict[str, Reads] = {
    **_all("llama smollm3 seed_oss bitnet olmo2 olmoe afmoe mimo nanbeige", Reads(base=1e4)),
    **_all("deepseek_v3 deepseek_v32", Reads(base=1e4)),
    **_all("qwen2 minicpm glm4_moe_lite", Reads(base=1e6)),
    **_all("apertus dots1 granite granitemoe telechat3", Reads()),
    **_all("longcat_flash longcat_flash_ngram bailing_hybrid", Reads()),
    **_all("exaone4 llama4", Reads(needs=("rope_scaling",))),
    "bailing_moe": Reads(widths=WIDTH, shares=PARTIAL),
    "bailing_moe_linear": Reads(shares=PARTIAL),
    "bailing_moe_v3": Reads(base=6e6),
    "deepseek": Reads(base=1e4, kinds=LINEAR, keys=frozenset({"type"})),
    "deepseek_v2": Reads(base=1e4, named={"": "yarn"}, needs=("rope_scaling",)),
    "exaone": Reads(needs=("num_layers", "layer_norm_epsilon")),
    "exaone_moe": Reads(base=1e6, bases=(INSIDE, "rope_theta")),
    "falcon_h1": Reads(base=1e11),
    "gemma3_text": Reads(base=1e6, windows="rope_local_base_freq", local=1e4),
    "gpt_oss": Reads(base=150000.0, starts=BY_FACTOR),
    "hunyuan": Reads(named={"": ALPHA}, keys=TYPED | {"alpha"}, needs=("rope_scaling",)),
    "hunyuan_v1_dense": Reads(base=1e4, named={"": ALPHA}, keys=TYPED | {"alpha"}),
    "internlm2": Reads(base=1e4, starts=DYNAMIC_TOO, keys=TYPED),
    "internlm3": Reads(base=1e4, starts=DYNAMIC_TOO, keys=frozenset({"factor", "rope_type"})),
    "iquestloopcoder": Reads(base=5e5),
    "minicpm3": Reads(base=1e6, named={"": SU_LATENT}, needs=("rope_scaling",)),
    "nemotron": Reads(base=1e4, starts=LINEAR, keys=TYPED, shares=PARTIAL, share=0.5),
    "nemotron-nas": Reads(base=5e5, keys=frozenset({"factor", "rope_type"})),
    "olmo3": Reads(windows="rope_theta"),
    "phi3": Reads(
        base=1e4,
        kinds=frozenset({"longrope", "su", "linear"}),
        keys=frozenset({"long_factor", "type"}),
        named={"longrope": SU, "su": SU},
        trained_outside=True,
        shares=PARTIAL,
    ),
    "phimoe": Reads(
        base=1e4,
        named={"": SU_SCALED},
        trained_outside=True,
        keys=frozenset({"short_factor", "long_factor", "short_mscale", "long_mscale"}),
    ),
    "qwen2_moe": Reads(base=1e6, kinds=NONE, starts=LINEAR, keys=TYPED),
    "qwen3": Reads(bases=("rope_theta", INSIDE), scaling=("rope_scaling", "rope_parameters")),
    "qwen3_next": Reads(shares=PARTIAL, share=None),
    "youtu_llm": Reads(base=1.6e6),
    # a base and no scaling
    **_all("gemma gemma2 glm nanochat plamo", _bare(1e4)),
    **_all("ernie4_5 ernie4_5_moe helium Klear baichuan_m1 lille-130m llama4_text", _bare()),
    "qwen3_moe": Reads(scaling=(), needs=("num_experts",)),
    **_all("lfm2 lfm2_moe", _bare(1e6, INSIDE, "rope_theta")),
    **_all("mixtral talkie", _bare(1e6)),
    "cohere": _bare(8e6),
    "cohere2": _bare(5e4),
    "dbrx": _bare(None, "attn_config.rope_theta"),
    "gemma3n": Reads(scaling=(), windows="rope_local_base_freq", needs=("rope_local_base_freq",)),
    "glm4": Reads(scaling=(), shares=PARTIAL, share=None),
    "glm4_moe": Reads(scaling=(), shares=PARTIAL, share=None, needs=("rope_scaling",)),
    "solar_open": Reads(scaling=(), shares=PARTIAL, share=None),
    "gpt_neox": Reads(bases=("rotary_emb_base",), scaling=(), shares=("rotary_pct",), share=None),
    "granitemoehybrid": _bare(1e4, INSIDE, "rope_theta"),
    "mimo_v2_flash": Reads(
        scaling=(), shares=PARTIAL, share=None, windows="swa_rope_theta", needs=("swa_rope_theta",)
    ),
    "minimax": Reads(scaling=(), widths=WIDTH, shares=WIDTH, share=None),
    "muse_glimmer": _bare(5e5, INSIDE, "rope_theta"),
    "muse_spark": _bare(None, INSIDE),
    "olmo_hybrid": _bare(1e4, INSIDE, "rope_theta"),
    "phi": Reads(base=1e4, scaling=(), shares=PARTIAL, share=0.4),
    "stablelm": Reads(scaling=(), shares=PARTIAL, share=None),
    "starcoder2": _bare(1e5),
    # always the usual base
    **_all("qwen plamo2", Reads(base=1e4, bases=(), scaling=())),
    "recurrent_gemma": Reads(base=1e4, bases=(), scaling=(), share=0.5, needs=("rope_theta",)),
    # all in rope_parameters
    "glm_moe_dsa": Reads(bases=(INSIDE,), scaling=("rope_parameters",)),
    "ministral3": Reads(bases=(INSIDE,), scaling=("rope_parameters",), needs=TEMPERATURE),
    "mistral4": Reads(bases=(INSIDE,), base=1e5, scaling=("rope_parameters",), needs=TEMPERATURE),
    "minimax_m3_vl": Reads(
        base=5e6,
        bases=(INSIDE, "rope_theta"),
        scaling=("rope_parameters",),
        widths=WIDTH,
        shares=("rope_parameters.partial_rotary_factor", *PARTIAL),
        share=0.5,
    ),
    "qwen3_5": Reads(
        base=1e5,
        bases=(INSIDE,),
        scaling=("rope_parameters",),
        shares=("rope_parameters.partial_rotary_factor",),
        share=0.25,
    ),
    "gemma4_text": Reads(
        base=1e4,
        by_layer=True,
        default={
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            }
        },
    ),
    "laguna": Reads(base=1e4, by_layer=True, shares=PARTIAL),
    "mellum": Reads(by_layer=True, named={"linear": "default"}, needs=("num_experts",)),
    "spark2_5": Reads(
        base=1e4,
        by_layer=True,
        shares=PARTIAL,
        kinds=NONE,
        needs=("rope_parameters.full_attention",),
    ),
}
"""Rules by the name of the file, which is the ``model_type`` but for the tables below."""

NAMED = {
    **dict.fromkeys(("mistral", "iquestcoder", "xverse"), "llama"),
    **dict.fromkeys(("kimi_k2", "joyai_llm_flash"), "deepseek_v3"),
    "deepseek_v41_text": "deepseek_v41",
    "falcon_mamba": "mamba",
    "gemma4_unified": "gemma4",
    "llava": "mistral3",
    "minimax_m2": "minimax",
    "phi-msft": "phixtral",
    "qwen2_5_vl": "qwen2_vl",
}
"""Files by ``model_type``, where they are named otherwise."""

NAMED_BY_CLASS = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}
"""Files by ``model_type`` and one of ``architectures``."""

PARTS: dict[str, dict[str, str]] = {
    "gemma3": {"": "gemma3_text"},
    "gemma3n": {"": "gemma3n"},
    "gemma4": {"": "gemma4_text"},
    "kimi_k25": {"": "deepseek_v3"},
    "kimi_vl": {"": "deepseek_v3"},
    "lfm2-vl": {"": "lfm2"},
    "llama4": {"": "llama4"},
    "minimax_m3_vl": {"": "minimax_m3_vl"},
    "mistral3": {"": "llama", "ministral3": "ministral3", "mistral4": "mistral4"},
    "muse_glimmer": {"": "muse_glimmer"},
    "muse_spark": {"": "muse_spark"},
    "pixtral": {"": "llama"},
    "qwen2_vl": {"": "qwen2"},
    "qwen3_5": {"": "qwen3_5"},
    "qwen3_5_moe": {"": "qwen3_5"},
    "qwen3_vl": {"": "qwen3"},
    "qwen3_vl_moe": {"": "qwen3_moe"},
}
"""Files of models of text by the file of the whole, whose ``text_config`` they read, and by
``model_type`` in it."""

FLAT = frozenset({"qwen2_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "muse_glimmer"})
"""Files in ``PARTS`` that take configs without a ``text_config`` too."""

REFUSED = {"olmo": "it reads the configs of ai2-olmo alone"}
"""Files that take no config of transformers."""

SIZES = "its config names the sizes of a head otherwise"
STILL = "its layers do not rotate"
UNREAD = {
    **dict.fromkeys(("afm7", "gptj", "openelm", "phi3small", "phixtral"), SIZES),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "jamba", "kimi_k3", "kimi_linear"), STILL),
    **dict.fromkeys(("mamba", "mamba2", "nemotron_h", "rwkv7"), STILL),
    "deepseek_v41": "its layers rotate by how they compress keys",
    "plamo3": "its config does not state which layers have the base of windows",
    "prism_hadamard_qwen35": "its config is that of a packed file",
}
"""Files without a rule here, and why."""

YARNS = ("yarn", "deepseek_yarn", "telechat3-yarn")
DEFAULT_LENGTHS = dict.fromkeys((SU, SU_SCALED, SU_LATENT, *YARNS), 4096) | {"llama3": 8192}
"""Trained lengths where it finds none."""

PARAMETERS, SHARE = "rope_parameters", "partial_rotary_factor"


def has_model(family: str) -> bool:
    """True if MLX LM has a model of this ``model_type``."""
    name = NAMED.get(family, family)
    return name == STEP or any(name in table for table in (FILES, PARTS, REFUSED, UNREAD))


def _file(config: ModelConfig) -> str:
    """The name of the file that reads a config.

    Raises:
        NotServedError: if there is none.
    """
    kind = config.outer
    by_class = (NAMED_BY_CLASS.get((kind, one)) for one in config.root.get("architectures") or ())
    name = next(filter(None, by_class), NAMED.get(kind, kind))
    if name in PARTS:
        if not config.nested and name not in FLAT:
            raise NotServedError("config.json has no text_config")
        name = PARTS[name].get(config.family, PARTS[name][""])
    if name in REFUSED:
        raise NotServedError(REFUSED[name])
    if name in UNREAD:
        raise UnreadError(UNREAD[name])
    if name != STEP and name not in FILES:
        raise NotServedError(f"it has no model {kind}")
    return name


def _ropes(config: ModelConfig) -> dict[str, RopeParameters]:
    name, standard, written = _file(config), config.ropes(), config.written
    if name == STEP:
        ropes = _of_step(config, standard)
        return {kind: _with_trained_length(rope) for kind, rope in ropes.items()}
    reads = FILES[name]
    for needed in reads.needs:
        outer, _, name = needed.rpartition(".")
        if name not in ((written.get(outer) or {}) if outer else written):
            raise NotServedError(f"config.json has no {name}" + (f" in {outer}" if outer else ""))
    if reads.by_layer:
        return {kind: _of_layer(reads, written, kind, rope) for kind, rope in standard.items()}
    base = float(_first_field(written, reads.bases, reads.base))
    scalings = (_at(written, place) for place in reads.scaling)
    scaling = next((one for one in scalings if isinstance(one, Mapping)), {})
    parameters = _scaling(reads, scaling)
    return {
        kind: _rope(config, reads, kind, replace(rope, base=base), parameters)
        for kind, rope in standard.items()
    }


def _rope(
    config: ModelConfig,
    reads: Reads,
    kind: str,
    rope: RopeParameters,
    parameters: Mapping[str, Any],
) -> RopeParameters:
    written, base = config.written, rope.base
    if reads.windows and kind not in ("", FULL):
        base, parameters = float(_first_field(written, (reads.windows,), reads.local)), {}
    width: int = rope.width
    if config.completed.get("qk_rope_head_dim"):
        if parameters["rope_type"] == "longrope":
            raise UnreadError("its LongRoPE pairs other features than this model does")
        if parameters["rope_type"] == "default":
            parameters = without_mscale(rope)
    else:
        stated_width = next((written[name] for name in reads.widths if written.get(name)), None)
        width = stated_width or int(rope.head * _first_field(written, reads.shares, reads.share))
    if width % 2:
        raise NotServedError(f"it cannot rotate {width} features of a head, an odd number")
    trained = (written if reads.trained_outside else parameters).get(TRAINED)
    return _with_trained_length(
        replace(rope, base=base, width=width, parameters=parameters, trained=trained)
    )


def _of_layer(reads: Reads, written: Fields, kind: str, rope: RopeParameters) -> RopeParameters:
    """RoPE as read by a file with base, share and scaling of each layer type."""
    by_type = written.get(PARAMETERS)
    every = by_type if isinstance(by_type, Mapping) else reads.default
    parameters = every.get(kind or FULL) or {}
    base = float(_first_field(parameters, ("rope_theta",), reads.base))
    scaling = _scaling(reads, parameters)
    share: Any = 1.0
    if reads.shares or scaling["rope_type"] == "proportional":
        share = parameters.get(SHARE, written.get(SHARE) or 1.0)
    of_layer = replace(rope, base=base, width=int(rope.head * share), parameters=scaling)
    return _with_trained_length(replace(of_layer, trained=scaling.get(TRAINED)))


def _scaling(reads: Reads, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a scaling as a file takes them, its kind by ``rope_type``.

    Raises:
        NotServedError: if it does not start with them.
    """
    if not parameters:
        if reads.named and reads.needs:
            raise NotServedError("config.json has no rope_scaling")
        return {"rope_type": "default"}
    if not reads.keys <= parameters.keys():
        names = _listed(reads.keys)
        raise NotServedError(f"it takes a scaling of this model with {names}")
    kind = parameters.get("type") or parameters.get("rope_type") or "default"  # in this order
    if reads.starts is not ALL and kind not in reads.starts:
        raise NotServedError(f"it knows {_listed(reads.starts)} scaling of this model alone")
    if reads.kinds is not ALL and kind not in reads.kinds:
        return {"rope_type": "default"}
    scaling = {name: value for name, value in parameters.items() if name != "type"}
    if reads.trained_outside:
        scaling.pop(TRAINED, None)
    return scaling | {"rope_type": reads.named.get("", reads.named.get(kind, kind))}


def _of_step(
    config: ModelConfig, standard: Mapping[str, RopeParameters]
) -> dict[str, RopeParameters]:
    """The scaling is that of the layer types in ``yarn_only_types``, or of all without them."""
    written = config.written
    scaling = written.get("rope_scaling") or {}
    scaled = written.get("yarn_only_types") or standard
    ropes = {}
    for kind, rope in standard.items():
        named = {"rope_type": "default", **(scaling if kind in scaled else {})}
        base = rope.base if "rope_theta" in written else 1e4
        width = rope.width if written.get("partial_rotary_factors") else rope.head
        of_layer = replace(rope, base=base, width=width, parameters=named)
        ropes[kind] = replace(of_layer, trained=named.get(TRAINED))
    return ropes


def _at(fields: Fields, place: str) -> Any:
    """A field, or one in another; None if there is none."""
    outer, _, inner = place.rpartition(".")
    part = fields.get(outer) if outer else fields
    return part.get(inner) if isinstance(part, Mapping) else None


def _first_field(fields: Fields, places: tuple[str, ...], default: float | None) -> Any:
    """The first of some fields.

    Raises:
        NotServedError: if there is none, and no default.
    """
    values = (_at(fields, place) for place in places)
    value = next((value for value in values if value is not None), default)
    if value is None:
        outer, _, name = places[0].rpartition(".")
        where = f"in {outer}" if outer else "beside the parameters"
        raise NotServedError(f"config.json has no {name} {where}")
    return value


def _listed(names: Iterable[str]) -> str:
    *first, last = sorted(names)
    return f"{', '.join(first)} and {last}" if first else last


def _with_trained_length(rope: RopeParameters) -> RopeParameters:
    return rope if rope.trained else replace(rope, trained=DEFAULT_LENGTHS.get(rope.kind))


def _by_factor(rule: Rule) -> Rule:
    """A scaling whose factor is not derived from lengths."""

    def rotation(rope: RopeParameters, length: int) -> EngineRotation:
        factor = float(rope.parameters["factor"])
        return rule(replace(rope, parameters={**rope.parameters, "factor": factor}), length)

    return rotation


def _longrope(rope: RopeParameters, length: int) -> EngineRotation:
    """Long factors for all texts; the trained length is required, a gain is not read."""
    trained = int(rope.parameters[TRAINED])
    return _su(replace(rope, trained=trained), length)


def _su(rope: RopeParameters, length: int) -> EngineRotation:
    usual: dict[str, Any] = {"long_factor": [1.0] * len(rope.frequencies())}
    whole = replace(rope, parameters=usual | dict(rope.parameters))
    return whole.longrope("long", rope.length_gain())


def _su_latent(rope: RopeParameters, length: int) -> EngineRotation:
    """LongRoPE without the scale of logits by ``mscale_all_dim``, which transformers has."""
    every = rope.number("mscale_all_dim", 0.0)
    scale = 1 / rope.usual_gain(every) ** 2 if every else 1.0
    return replace(_su(rope, length), scale=scale)


def _su_scaled(rope: RopeParameters, length: int) -> EngineRotation:
    return rope.longrope("long", float(rope.parameters["long_mscale"] or rope.length_gain()))


MLX_LM = Engine(
    name="mlx-lm",
    option="mlx",
    release="0.32.2",
    files="utils.py, models/rope_utils.py and the files of the models",
    read="2026-11",
    packages=("mlx-lm",),
    kinds={
        "default": plain,
        "mrope": plain,
        "linear": _by_factor(linear),
        "dynamic": _by_factor(RopeParameters.dynamic),
        "llama3": _by_factor(llama3),
        ALPHA: ntk_alpha,
        "longrope": _longrope,
        SU: _su,
        SU_SCALED: _su_scaled,
        SU_LATENT: _su_latent,
        "proportional": lambda rope, length: rope.proportional(rope.number("factor", 1.0)),
        **dict.fromkeys(YARNS, _by_factor(latent_yarn)),  # ``attention_factor`` is not read
    },
    ropes=_ropes,
    longest=lambda config: None,
)
