"""Switching live models of transformers to another attention implementation, and back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from posenc.transformers.acceleration.accelerated import (
    NAME,
    SETTINGS,
    STRETCHED,
    Accelerated,
    AccelerateSettings,
    config_behind,
    is_on_interface,
)
from posenc.transformers.acceleration.family import family_of
from posenc.transformers.acceleration.growing import grow, settle

BEFORE = "_posenc_before"
"""Attribute of a model: the implementations that its config and those in it named before, by the
path of the attribute. Plain, so that copies and pickles of the model have it."""

INTERNAL = "_attn_implementation_internal"
"""Attribute of a config, which transformers does not save; its setter refuses other models."""


def on_interface(model: nn.Module) -> list[PreTrainedModel]:
    """Models in a model whose attention goes through transformers' interface.

    Those of accelerated families are left out: these replace more than attention.
    """
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    others = [part for part in models if family_of(type(part)) is None]
    able = {id(part.config) for part in others if is_on_interface(type(part))}
    return [part for part in others if id(part.config) in able]


def is_switched(model: nn.Module) -> bool:
    """True if ``switch`` changed a model in this model, and ``switch_back`` did not since."""
    return any(BEFORE in part.__dict__ for part in model.modules())


def is_left(model: nn.Module) -> bool:
    """True if a model that ``switch`` changed was given another implementation since."""
    switched = [part for part in model.modules() if BEFORE in part.__dict__]
    names = {getattr(config_behind(part.config), INTERNAL, None) for part in switched}
    return not names <= {NAME, STRETCHED}


def switch(model: nn.Module, settings: AccelerateSettings) -> None:
    """Name posenc's attention in the configs of models on the interface.

    Stretched models keep theirs, which is posenc's too.
    """
    models = on_interface(model)
    owned = {id(part.config) for part in model.modules() if isinstance(part, PreTrainedModel)}
    configs = {id(part.config) for part in models}
    for part in models:
        before = {}
        for path, config in _configs(part.config):
            mine = id(config) in configs or id(config) not in owned
            if mine and getattr(config, INTERNAL, None) not in (NAME, STRETCHED):
                before[path] = getattr(config, INTERNAL, None)
                setattr(config, INTERNAL, NAME)
        part.__dict__[BEFORE] = before
        part.register_forward_pre_hook(grow, with_kwargs=True)
        part.register_forward_hook(settle, with_kwargs=True, always_call=True)
    switch_settings(model, settings)


def switch_settings(model: nn.Module, settings: AccelerateSettings) -> None:
    """Set the settings of layers in switched models."""
    for part in model.modules():
        if BEFORE in part.__dict__:
            for layer in _unfamiliar(part):
                layer.__dict__[SETTINGS] = settings


def switch_back(model: nn.Module) -> None:
    """Undo ``switch``, but for implementations that were chosen since."""
    for layer in _unfamiliar(model):
        layer.__dict__.pop(SETTINGS, None)
    for part in model.modules():
        for path, implementation in part.__dict__.pop(BEFORE, {}).items():
            config = _config_at(part, path)
            if getattr(config, INTERNAL, None) == NAME:
                setattr(config, INTERNAL, implementation)
        # Hooks are found by themselves: copies of a model have no handle of theirs.
        for key, hook in list(part._forward_pre_hooks.items()):
            if hook is grow:
                del part._forward_pre_hooks[key]
                del part._forward_pre_hooks_with_kwargs[key]
        for key, hook in list(part._forward_hooks.items()):
            if hook is settle:
                del part._forward_hooks[key]
                del part._forward_hooks_with_kwargs[key]
                del part._forward_hooks_always_called[key]


def implementations_before(model: nn.Module) -> dict[int, str | None]:
    """The implementations that configs named before ``switch``, by the identity of the config."""
    return {
        id(_config_at(part, path)): implementation
        for part in model.modules()
        for path, implementation in part.__dict__.get(BEFORE, {}).items()
    }


def _config_at(part: Any, path: str) -> Any:
    """The config of a model, or one in it by the path of its attribute."""
    return reduce(getattr, filter(None, path.split(".")), config_behind(part.config))


def _unfamiliar(model: nn.Module) -> Iterator[nn.Module]:
    """Modules but those of accelerated families, which have settings of their own."""
    return (part for part in model.modules() if not isinstance(part, Accelerated))


def _configs(config: Any, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """A config and those in it, by the paths of their attributes."""
    yield path, config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _configs(part, f"{path}.{name}")
