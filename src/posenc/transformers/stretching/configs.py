"""Arguments of ``stretch``, and the configs of a model that the extension is written into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension import NotApplicable, extend
from posenc.transformers.checkpoints import (
    FIELD,
    SCALINGS,
    TRAINED,
    equal_factors,
    parameters_of,
    yarn_gain,
)
from posenc.transformers.settings import quiet_transformers
from posenc.transformers.stretching.changes import Change, undo
from posenc.transformers.stretching.frequencies import Frequencies, Of, made_of


@dataclass(frozen=True)
class Request:
    """Arguments of ``stretch``."""

    method: str
    factor: float | None
    length: int | None
    of: Of
    windows: bool
    options: dict[str, Any]

    @property
    def longest(self) -> int | None:
        """The new length, if it is known."""
        if self.factor is None or self.length is None:
            return None
        return round(self.factor * self.length)

    def extend(self, encoding: Encoding, length: int | None = None, **defaults: int) -> Encoding:
        """The encoding as the method stretches it.

        Args:
            length: of training, if none was given.
            defaults: of options.

        Raises:
            ArgumentError: as ``posenc.extension.extend``.
        """
        length = length if self.length is None else self.length
        options = {**defaults, **self.options}
        try:
            return extend(encoding, self.method, factor=self.factor, length=length, **options)
        except NotApplicable as error:
            if self.of == "theta" or "already" not in error.got:
                raise
            raise ArgumentError(
                "model",
                expected=error.expected,
                got=error.got,
                remedy="of='theta' begins from the frequencies before that extension.",
            ) from error

    def saved(self) -> dict[str, Any]:
        """The arguments for the config."""
        extra: dict[str, Any] = {"windows": True} if self.windows else {}
        extra |= {} if self.of == "frequencies" else {"of": self.of}
        context = {"method": self.method, "factor": self.factor, "length": self.length}
        return {**context, "options": self.options | extra}


SCALED = frozenset(
    {"rope_type", "type", "factor", "attention_factor", "attn_factor", TRAINED}
).union(
    *({theirs for theirs, _ in options.values()} for _, options in SCALINGS.values()),
    {"mscale", "mscale_all_dim", "long_mscale", "short_mscale"},
)
"""Rope parameters of an extension, which another one replaces."""

RAMP = {"alpha": "low", "beta": "high"}
"""Options of ``ntk_by_parts`` by their names in ``llama3``."""


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """The configs of a model and its parts, each once."""
    configs: dict[int, PreTrainedConfig] = {}
    left = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    while left:
        config = left.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            left += [getattr(config, name, None) for name in config.sub_configs]
    return list(configs.values())


def describe(
    model: nn.Module, stretched: Mapping[Frequencies, Encoding], request: Request
) -> list[Change]:
    """Write an extension into the configs of a model, if transformers can read it there.

    Args:
        stretched: frequencies with their new encodings; those of a method that transformers has
            may depend on the length.

    Returns:
        The changes; none if a model that transformers makes of the config has other frequencies.
    """
    changes: list[Change] = []
    for module in {id(f.module): f.module for f in stretched}.values():
        of_module = {f: encoding for f, encoding in stretched.items() if f.module is module}
        config: Any = getattr(module, "config", None)
        written = _written(config, module, of_module, request)
        if written is None:
            undo(changes)
            return []
        before = config.rope_parameters
        for other in configs_of(model):
            if type(other) is type(config) and other.rope_parameters == before:
                changes += _change(other, written, request)
        if config.rope_parameters == before:  # of the module alone
            changes += _change(config, written, request)
    return changes


BASES = "layer_rope_theta"
"""Field of the base of each layer, by which some models look up the rotation of the layer."""


def _written(
    config: Any, module: nn.Module, stretched: Mapping[Frequencies, Encoding], request: Request
) -> Any:
    """A copy of a config with the extension; None if transformers would read another."""
    if getattr(config, "rope_parameters", None) is None:
        return None
    for parameters in _candidates(stretched, request):
        written = deepcopy(config)
        written.rope_parameters = parameters
        if request.length is not None and getattr(written, TRAINED, None) is not None:
            setattr(written, TRAINED, request.length)
        if _same(module, written, stretched):
            return written
    return None


def _change(config: Any, written: Any, request: Request) -> list[Change]:
    old, new = (one.rope_parameters.get("rope_theta") for one in (config, written))
    changes = [Change.of(config, "rope_parameters", written.rope_parameters)]
    bases = getattr(config, BASES, None)
    if bases:
        changes.append(Change.of(config, BASES, [new if base == old else base for base in bases]))
    if getattr(config, TRAINED, None) != getattr(written, TRAINED, None):
        changes.append(Change.of(config, TRAINED, getattr(written, TRAINED)))
    if request.longest is None or request.method == "dynamic_ntk":
        return changes  # which begins at the trained length
    if getattr(config, "max_position_embeddings", None):
        changes.append(Change.of(config, "max_position_embeddings", request.longest))
    return changes


def _candidates(
    stretched: Mapping[Frequencies, Encoding], request: Request
) -> Iterator[dict[str, Any]]:
    """Rope parameters that may have these frequencies.

    They are in the method's words, in the simplest ones, or as LongRoPE, which some configs take
    alone.
    """
    simplest = partial(parameters_of, longest=request.longest)
    as_longrope = partial(equal_factors, longest=request.longest)
    for words_of in (partial(_by_name, request=request), simplest, as_longrope):
        config = next(iter(stretched)).module.config
        parameters = deepcopy(dict(getattr(config, "rope_parameters", {})))
        try:
            for frequencies, encoding in stretched.items():
                words = words_of(encoding)
                unscaled = {k: v for k, v in frequencies.parameters.items() if k not in SCALED}
                if "rope_theta" in words:
                    unscaled["rope_theta"] = words.pop("rope_theta")
                words.pop("partial_rotary_factor", None)  # of a head, which stays
                merged = words | unscaled
                if frequencies.layer_type in parameters:
                    parameters[frequencies.layer_type] = merged
                else:
                    parameters = merged
        except ArgumentError:
            continue
        yield parameters


def _by_name(encoding: Encoding, request: Request) -> dict[str, Any]:
    """Rope parameters of a method that transformers has.

    Raises:
        ArgumentError: if it has not.
    """
    kinds = {ours: kind for kind, (ours, _) in SCALINGS.items()}
    method, options = request.method, request.options
    if method == "ntk_by_parts":  # Llama 3's ramp with other ends
        options = {RAMP.get(name, name): value for name, value in options.items()}
        method, options = "llama3", {"low": 1.0, "high": 32.0, **options}
    kind = kinds.get(method)
    names = SCALINGS[kind][1] if kind else {}
    if kind is None or set(options) - set(names):
        raise ArgumentError("method", expected=", ".join(kinds), got=request.method, remedy="")
    words = {theirs: options.get(ours, default) for ours, (theirs, default) in names.items()}
    part: Any = encoding.query_key
    if kind == "longrope":
        words |= {"long_factor": list(part.long), "short_factor": list(part.short)}
    if kind == "yarn":
        has_gain = words.pop("attention_factor") is not None
        words |= yarn_gain(request.factor or 1.0, part.gain if has_gain else None)
    elif "attention_factor" in words:
        words["attention_factor"] = part.gain
    if kind not in ("linear", "dynamic"):
        words[TRAINED] = request.length
    return {"rope_type": kind, "factor": request.factor, **words}


def _same(
    module: nn.Module, config: PreTrainedConfig, stretched: Mapping[Frequencies, Encoding]
) -> bool:
    """True if transformers makes the same frequencies of a config, or has them at each length.

    Some families refuse, or read otherwise, what their modules would compute.
    """
    try:
        with quiet_transformers():
            made = made_of(module, type(config).from_dict(config.to_dict()))
    except Exception:  # of any class of transformers
        return False
    if made is None:
        return False
    for frequencies, encoding in stretched.items():
        new = Frequencies(frequencies.path, made, frequencies.buffer)
        part = encoding.query_key
        if not isinstance(part, Rope):
            if new.rope_type not in SCALINGS or new.gain != getattr(part, "gain", 1.0):
                return False
            continue
        theta, current = new.theta(), frequencies.theta().cpu()
        near = theta.shape == current.shape and torch.allclose(theta, current, rtol=1e-5)
        if not near or abs(new.gain - part.gain) > 1e-6:
            return False
    return True


def field(model: Any, request: Request) -> list[Change]:
    """Write an extension into the model's config for ``stretch(model)``."""
    return [Change.of(model.config, FIELD, request.saved())]
