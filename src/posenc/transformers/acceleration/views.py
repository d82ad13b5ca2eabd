"""Views of configs that name posenc's attention, while the configs stay as they are."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from copy import deepcopy
from functools import cache
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from posenc.errors import ArgumentError

NAME = "posenc"
"""Name of the attention implementation."""

STRETCHED = "posenc_stretched"
"""Name of the implementation in models whose positions ``stretch`` moves."""

KEYS, CAUSAL_KEYS = "posenc_keys", "posenc_causal_keys"
"""Names of the implementation in modules with masks of keys: see ``interface.keys_mask``."""


def with_posenc(config: PreTrainedConfig, name: str = NAME) -> PreTrainedConfig:
    """A view of a config, sharing all its attributes, with posenc as attention implementation.

    It is pickled as the config itself, so that a process without posenc can read it.

    Args:
        name: of the implementation.
    """
    view = object.__new__(_view_class(cast(Hashable, type(config)), name))
    object.__setattr__(view, "__dict__", config.__dict__)
    object.__setattr__(view, "config_behind", config)
    return cast(PreTrainedConfig, view)


def config_behind(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a view; any other config itself."""
    return cast(PreTrainedConfig, getattr(config, "config_behind", config))


@cache
def _view_class(kind: Hashable, name: str) -> type[PreTrainedConfig]:
    config = cast(type[PreTrainedConfig], kind)

    def new(view: type, *arguments: Any, **options: Any) -> PreTrainedConfig:
        return config(*arguments, **options)  # as transformers makes one of defaults to print

    def reduce(view: Any, protocol: Any) -> Any:
        return cast, (None, view.config_behind)  # a function of Python that returns its argument

    def copied(view: Any, memo: dict[int, Any]) -> Any:
        return with_posenc(deepcopy(view.config_behind, memo), name)

    def chosen(view: Any, implementation: Any) -> None:
        view.config_behind._attn_implementation = implementation

    def text_config(view: Any, *arguments: Any, **options: Any) -> PreTrainedConfig:
        return with_posenc(view.config_behind.get_text_config(*arguments, **options), name)

    members = {
        "__slots__": ("config_behind",),
        "__new__": new,
        "_attn_implementation": property(lambda view: name, chosen),
        "__reduce_ex__": reduce,
        "__deepcopy__": copied,
        "get_text_config": text_config,
    }
    return type(config.__name__, (config,), members)


def takes_added_masks(config: PreTrainedConfig | None) -> bool:
    """True if models with such a config take masks that are added to logits, and no bool ones.

    Raises:
        ArgumentError: if none of them computes attention through transformers' interface: it would
            take the name and run code of its own.
    """
    if config is None:
        return False
    on_interface, takes_bool = _traits(type(config_behind(config)))
    if not on_interface:
        raise ArgumentError(
            "attn_implementation",
            expected="'eager' for a model that is not on transformers' attention interface",
            got=f"{NAME!r} for {config.model_type}",
            remedy="Use 'eager', with accelerate(model) if its positions are a bias.",
        )
    return not takes_bool


def is_on_interface(kind: type[PreTrainedModel]) -> bool:
    """True if models of a class compute attention through transformers' interface.

    transformers reads it from the file of the class. A subclass made elsewhere (by a user, or by
    ``fully_shard``) has its attention from the classes that it is of.
    """
    # Not PreTrainedModel itself: it keeps the answer, and every class that was not asked inherits.
    bases = kind.__mro__[: kind.__mro__.index(PreTrainedModel)]
    models = cast(
        list[type[PreTrainedModel]], [base for base in bases if issubclass(base, PreTrainedModel)]
    )
    return all(model._can_set_attn_implementation() for model in models)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traits(kind: type[PreTrainedConfig]) -> tuple[bool, bool]:
    """True if loaded models with such a config are on the interface; True if all support sdpa."""
    if kind not in _TRAITS:
        models = [model for model in _subclasses(PreTrainedModel) if model.config_class is kind]
        _TRAITS[kind] = (
            not models or any(map(is_on_interface, models)),
            all(model._supports_sdpa for model in models),
        )
    return _TRAITS[kind]


_TRAITS: dict[type[PreTrainedConfig], tuple[bool, bool]] = {}


def _subclasses(kind: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    for model in kind.__subclasses__():
        yield model
        yield from _subclasses(model)
