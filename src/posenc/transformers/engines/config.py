"""Engines by their rules, and a ``config.json`` as it is written and as they complete it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

from posenc.transformers.checkpoints import TRAINED, parameters_in
from posenc.transformers.engines.rotation import EngineRotation, RopeParameters, Rule

Fields = Mapping[str, Any]

PARTS = ("text_config", "llm_config", "language_config")
"""Names of a model of text in the config of a larger one."""

FULL = "full_attention"
"""Layer type whose heads ``global_head_dim`` describes."""

BASES = ("rope_theta", "rotary_emb_base", "global_rope_theta")
SHARES = ("partial_rotary_factor", "rotary_pct", "rope_pct")
HUNYUAN = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe"})
"""Families whose dynamic scaling is by ``alpha``."""

PLACE = re.compile(r"^(Class v|V)alidation error .*?: \w+Error: ")
"""The start of an error of transformers that says by which rule it was found."""

LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names of a base, of the rotated share of a head, and of the longest text."""

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")
"""Names of the number of layers, and of a number of tokens that limits what a layer sees."""


@dataclass(frozen=True)
class ModelConfig:
    """RoPE's fields of a model of text.

    Args:
        written: fields of its part of ``config.json``.
        completed: the same with transformers' defaults; as written without transformers.
        nested: the part's name in ``config.json``; "" if it is all of it.
        root: all of ``config.json`` as it is written.
        served: tokens of the longest text that a server takes; None: as the config says.
    """

    written: Fields
    completed: Fields
    nested: str = ""
    root: Fields = field(default_factory=dict)
    served: int | None = None

    @classmethod
    def of(cls, fields: Fields) -> ModelConfig:
        """The model of text that ``config.json`` describes."""
        completed_fields = completed(fields)
        for name in PARTS:
            if isinstance(fields.get(name), Mapping) and completed_fields.get(name):
                return cls(fields[name], completed_fields.get(name) or fields[name], name, fields)
        return cls(fields, text_part(completed_fields), root=fields)

    @property
    def family(self) -> str:
        """``model_type``."""
        return str(self.written.get("model_type") or self.completed.get("model_type"))

    @property
    def outer(self) -> str:
        """``model_type`` at the top of ``config.json``."""
        return str(self.root.get("model_type") or self.family)

    @property
    def longest(self) -> int | None:
        """``max_position_embeddings``, by any of its names."""
        length = first(self.completed, LONGEST) or first(self.written, LONGEST)
        return length if isinstance(length, int) else None

    @property
    def head_dim(self) -> int | None:
        """Features of a head."""
        return head_dim(self.completed)

    def ropes(self) -> dict[str, RopeParameters]:
        """Parameters as transformers reads them, by layer type; ``""`` stands for all layers.

        Empty without RoPE, and where a head's size or the longest text is not told.
        """
        config, longest = self.completed, self.longest
        if longest is None or self.head_dim is None:
            return {}
        parameters = parameters_in(config)
        if not isinstance(parameters, Mapping) or not (parameters or first(config, BASES)):
            return {}
        # of the types of layers, None for those that do not rotate
        nested = {k: v for k, v in parameters.items() if isinstance(v, Mapping)}
        parts = nested or {"": parameters}
        return {kind: self._rope(kind, rope, longest) for kind, rope in parts.items()}

    def _rope(self, kind: str, parameters: Fields, longest: int) -> RopeParameters:
        config = self.completed
        head = self.head_dim or 0
        if kind == FULL:
            wide = self.written.get("global_head_dim") or config.get("global_head_dim")
            head = wide or head
        share = parameters.get("partial_rotary_factor", first(config, SHARES))
        width = int(head * (1.0 if share is None else share))
        if config.get("qk_rope_head_dim"):
            head = width = config["qk_rope_head_dim"]
        trained = (
            parameters.get(TRAINED) if kind else config.get(TRAINED) or parameters.get(TRAINED)
        )
        return RopeParameters(
            base=float(parameters.get("rope_theta") or first(config, BASES) or 10000.0),
            width=width,
            parameters=parameters,
            trained=trained,
            longest=longest,
            head=head,
            served=self.served,
        )


def first(fields: Fields, names: tuple[str, ...]) -> Any:
    """The value of the first of some names; None if there is none."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def head_dim(config: Fields) -> int | None:
    """Features of a head; None if the config does not state them."""
    heads = first(config, ("num_attention_heads", "n_head"))
    width = first(config, ("hidden_size", "n_embd"))
    sizes = isinstance(width, int) and isinstance(heads, int) and heads
    return config.get("head_dim") or (width // heads if sizes else None)


def text_part(config: Fields) -> Fields:
    """The part of a config that describes the language model."""
    text = config.get("text_config")
    return text if text and isinstance(text, dict) else config


def is_known(kind: object) -> bool:
    """True if transformers has a class of this ``model_type``; False without transformers.

    Raises:
        VersionError: if it is too old.
    """
    try:
        from transformers import CONFIG_MAPPING

        from posenc.transformers import versions  # noqa: F401
    except ModuleNotFoundError:
        return False
    return isinstance(kind, str) and kind in CONFIG_MAPPING


def completed(fields: Fields) -> Fields:
    """The fields with transformers' defaults, such as the type of each layer, if it has them."""
    return _read(fields)[0]


def refusal(fields: Fields) -> str:
    """The reason for which transformers refuses a config of a kind that it has; "" if it does not.

    Also "" without transformers, or another package that the kind needs.
    """
    return _read(fields)[1]


def _read(fields: Fields) -> tuple[Fields, str]:
    """The fields as transformers completes them; as they are with the reason if it does not."""
    kind = fields.get("model_type")
    if not is_known(kind):
        return fields, ""
    from transformers import CONFIG_MAPPING

    library = logging.getLogger("transformers")
    level = library.level
    library.setLevel(logging.CRITICAL)  # findings say in words what it warns of
    try:
        made = CONFIG_MAPPING[kind].from_dict(_decoded(dict(fields)))
        return _as_read(made), ""
    except ImportError:
        return fields, ""
    except Exception as error:  # an arbitrary file
        words = shorten(str(error), 200, placeholder=" …") or type(error).__name__
        return fields, PLACE.sub("", words)
    finally:
        library.setLevel(level)


def _as_read(config: Any) -> Fields:
    """The fields of a config of transformers, with the layers that its model makes.

    A class may write others into the file, such as Dory, whose layers count twice there.
    """
    fields = dict(config.to_dict())
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(fields.get(name), Mapping) and hasattr(part, "to_dict"):
            fields[name] = _as_read(part)
    return fields | {
        name: getattr(config, name) for name in (*LAYERS, "layer_types") if fields.get(name)
    }


def _decoded(value: Any) -> Any:
    """A copy, with numbers for the objects that transformers writes infinities as."""
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if list(value) == ["__float__"]:
        return float(value["__float__"])
    return {name: _decoded(item) for name, item in value.items()}


class NotServedError(Exception):
    """The engine does not start with this config; the message is the reason."""


class UnreadError(NotServedError):
    """There is no rule for this model; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Rules of an engine, transcribed from its sources.

    Args:
        name: as it is called.
        option: of ``posenc extend --for``.
        release: that the rules are from.
        files: of it that state them.
        read: month in which they were read.
        packages: that install it in Python, the first is looked for first.
        kinds: by ``rope_type``; others are unknown to it.
        ropes: parameters by layer type, as it reads them.
        longest: tokens of the longest text that it serves by default; None: no limit.
        with_options: a config with all that options of the command that serves it can add.
    """

    name: str
    option: str
    release: str
    files: str
    read: str
    packages: tuple[str, ...] = ()
    kinds: Mapping[str, Rule]
    ropes: Callable[[ModelConfig], Mapping[str, RopeParameters]] = ModelConfig.ropes
    longest: Callable[[ModelConfig], int | None]
    with_options: Callable[[ModelConfig], ModelConfig] = lambda config: config

    @property
    def source(self) -> str:
        """Name, release and files."""
        return f"{self.name} {self.release}, {self.files}"

    def rotations(self, config: ModelConfig, length: int) -> dict[str, EngineRotation]:
        """Rotations in a text of ``length`` tokens, by layer type; ``""`` stands for all layers.

        Raises:
            NotServedError: if the engine does not start.
        """
        return self.rotate(self.ropes(config), length)

    def rotate(self, ropes: Mapping[str, RopeParameters], length: int) -> dict[str, EngineRotation]:
        """Rotations by parameters as the engine reads them; as ``rotations``."""
        rotations = {}
        for layer_type, rope in ropes.items():
            if rope.kind not in self.kinds:
                raise NotServedError(f"it knows no rope_type {rope.kind!r}")
            try:
                rotations[layer_type] = self.kinds[rope.kind](rope, length)
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                raise NotServedError(f"{rope.kind} scaling is incomplete: {error}") from error
        return rotations
