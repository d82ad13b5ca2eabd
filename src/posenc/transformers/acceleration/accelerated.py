"""Modules, their families and configs under which posenc's attention is put, reversibly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from posenc.attention import attend
from posenc.attention.backends.common.base import Backend
from posenc.encoding import StructuredScore
from posenc.encoding.prepared import Prepared, entering
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.registration import Registry
from posenc.runtime import is_exporting, is_scripted
from posenc.transformers.acceleration.terms import encoding_of
from posenc.transformers.calls import CACHE, bound, cache_name, names_of

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


SETTINGS, FASTER = "_posenc_settings", "_posenc_faster"
OF_REPLACING = (SETTINGS, FASTER)
"""Attributes of modules whose class was replaced, which their pickles lack."""


@dataclass(frozen=True)
class AccelerateSettings:
    """Settings of an accelerated module, or of a layer of a switched model.

    Args:
        backend: of ``posenc.attend``.
        shortest: number of keys below which the module's own attention runs.
        prepared: results that the calls of a model share.
    """

    backend: str | Backend = "auto"
    shortest: int = 0
    prepared: Prepared | nullcontext[None] = field(default_factory=nullcontext, compare=False)


SHORTEST = 256
"""Keys from which on windows were measured to be faster than PyTorch's attention with a mask."""

DEFAULT = AccelerateSettings(shortest=SHORTEST)
AS_IT_WAS = AccelerateSettings(shortest=2**31)


class Replacing(nn.Module):
    """Mixin of subclasses that take the places of the classes of modules, reversibly.

    A module becomes one by assignment to its ``__class__``: parameters, buffers, hooks and
    submodules stay where they are. It is pickled as an object of the class it had.
    """

    original: ClassVar[type[nn.Module]]
    """Class that the module had before, the first of the bases; a mixin of several families has
    none. Classes are named as theirs, since ``save_pretrained`` writes a model's."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        original: Any = next(kind for kind in cls.__mro__ if not issubclass(kind, Replacing))
        if original is not nn.Module and not hasattr(cls, "original"):
            cls.original, cls.__name__ = original, original.__name__

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name not in OF_REPLACING}
        return self.original.__new__, (self.original,), state

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied


class Accelerated(Replacing):
    """Mixin of subclasses of transformers' modules that compute attention with posenc.

    ``forward`` of a subclass gets its arguments by the names in the original's signature, but for a
    cache, which is ``cache`` in all of them.
    """

    parameters_of_forward: ClassVar[tuple[str, ...]] = ()
    """Names of the original's parameters, in order."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "original" in cls.__dict__:
            cls.parameters_of_forward = names_of(cls.original.forward)
        if "forward" in cls.__dict__:
            cls.forward = _by_name(cls.forward)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Attributes of transformers' classes, which have no types."""

    def original_forward(self, **arguments: Any) -> Any:
        """The original forward pass, with ``cache`` under the name that it has there."""
        name = cache_name(self.parameters_of_forward)
        if name is not None and CACHE in arguments:
            arguments[name] = arguments.pop(CACHE)
        return self.original.forward(self, **arguments)

    @property
    def shortest(self) -> int:
        """Number of keys below which the module's own attention runs."""
        return settings_of(self).shortest

    @property
    def prepared(self) -> AbstractContextManager[object]:
        """A context in which calls share results with others of the model."""
        return entering(settings_of(self).prepared)

    @staticmethod
    def in_heads(
        x: Float[Tensor, "B L C"], heads: int, *projections: nn.Module
    ) -> Iterator[Float[Tensor, "B H L D"]]:
        """Projections of tokens, by head."""
        return (layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer in projections)

    def attend(
        self,
        q: Float[Tensor, "B H Q D"],
        k: Float[Tensor, "B G K D"],
        v: Float[Tensor, "B G K E"],
        grid: Grid,
        *terms: StructuredScore,
        dropout: float,
        scale: float | None = None,
    ) -> Float[Tensor, "B H Q E"]:
        """``posenc.attend`` with score terms; drops nothing in evaluation mode."""
        encoding, backend = encoding_of(*terms), settings_of(self).backend
        dropped = dropout if self.training else 0.0
        return attend(q, k, v, grid, encoding, backend=backend, dropout=dropped, scale=scale)


def _by_name(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is called with the arguments of the original's, bound by its signature."""

    @wraps(forward)
    def called(self: Accelerated, *arguments: Any, **options: Any) -> Any:
        with self.prepared:
            return forward(self, **bound(self.parameters_of_forward, arguments, options))

    return called


def settings_of(module: nn.Module) -> AccelerateSettings:
    """Settings of an accelerated module or of a layer of a switched model; the defaults for others.

    While ``torch.jit`` traces, as the older ONNX exporter does, models run as they did: the graph
    holds PyTorch's operators alone, and lengths are tensors. Programs of ``torch.export`` compute
    with posenc at every length: a number of tokens to begin from would be the bound of theirs.
    """
    if is_scripted():
        return AS_IT_WAS
    settings = cast(AccelerateSettings, module.__dict__.get(SETTINGS, DEFAULT))
    return replace(settings, shortest=0) if is_exporting() else settings


def wants_weights(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """True if a call asks for attention weights: by options, config or the model's call."""
    if options.get("output_attentions"):
        return True
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    return not torch.compiler.is_compiling() and "attentions" in (_active_collector.get() or ())


def parameter_of(module: nn.Module, name: str) -> Tensor:
    """A parameter of a submodule that is not called, also where a hook of accelerate fetches it."""
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is None:
        return cast(Tensor, getattr(module, name))
    hook.pre_forward(module)
    try:
        return cast(Tensor, getattr(module, name))
    finally:
        hook.post_forward(module, None)


def take_over(module: nn.Module, kind: type[Accelerated], settings: AccelerateSettings) -> None:
    """Make a module an accelerated one.

    Raises:
        ArgumentError: if something else runs in place of a method that ``kind`` has of its own.
    """
    method = _replaced(module, kind)
    if method is not None:
        raise ArgumentError(
            "model",
            expected=f"modules that run {method} of their class, or hooks of accelerate around it",
            got=f"a {type(module).__name__} whose {method} was replaced",
            remedy="Call accelerate(model) before it is wrapped.",
        )
    module.__dict__[SETTINGS] = settings
    change_class(module, kind)


def require_untouched(module: Accelerated) -> None:
    """Require a module as ``take_over`` left it, but for hooks of accelerate.

    Raises:
        ArgumentError: if its class or a method was changed since, as FSDP does.
    """
    kind = type(module).__name__
    if "original" in type(module).__dict__:
        method = _replaced(module, module.original)
        if method is None:
            return
        kind += f" whose {method} was replaced"
    raise ArgumentError(
        "model",
        expected="modules as accelerate left them",
        got=f"a {kind}",
        remedy="Call restore before the model is wrapped or sharded.",
    )


def put_back(module: Replacing) -> None:
    """Give a module its own class again."""
    change_class(module, module.original)
    for name in OF_REPLACING:
        module.__dict__.pop(name, None)


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module another class, and that class's methods where it holds its own, bound.

    The hooks of accelerate (``dispatch_model``) keep ``forward`` so, and call what they keep.
    """
    for name, value in module.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:
            method = value.__func__.__name__
            if value.__func__ is getattr(type(module), method, None):
                module.__dict__[name] = MethodType(getattr(kind, method), module)
    module.__class__ = kind


def _replaced(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """A method of ``kind`` that the module would not run, having another in its place; or None."""
    held = module.__dict__
    for name in held:
        class_value = getattr(type(module), name, None)
        if not callable(class_value) or getattr(kind, name, None) is class_value:
            continue
        hooked = name == "forward" and "_hf_hook" in held
        method = held.get("_old_forward") if hooked else held[name]
        if getattr(method, "__func__", None) is not class_value:
            return name
    return None


@dataclass(frozen=True)
class AcceleratedFamily:
    """Modules of one modeling file of transformers, and the classes that take their places.

    Args:
        title: name of the models, as their users say it.
        classes: the accelerated class for each class of transformers, or a mixin that makes one.
        configured: classes that get a config that names posenc's attention, since they make the
            masks; so do the classes above where there are any.
        masks: the attention implementation whose masks they make: ``views.NAME``, those that
            ``attention`` takes, for models on transformers' interface alone; ``views.KEYS`` or
            ``CAUSAL_KEYS``, of keys, for modules that see all keys or are causal by themselves.
        shortest: number of keys below which the modules' own attention was measured to be as fast.
        refusal: the reason why a module of either stays as it is, or None.
        unserved: reasons by class, for classes that always stay as they are.
        inputs: makes random inputs for a model, on a CPU in float32, from the model, a number of
            rows and one of tokens in each at most; None: they follow from its config.
        limits: calls that posenc computes, in words; "" for all.
    """

    title: str
    classes: Mapping[type[nn.Module], type[Accelerated]]
    configured: tuple[type[nn.Module], ...] = ()
    masks: str = NAME
    shortest: int = 384
    refusal: Callable[[nn.Module], str | None] = lambda module: None
    unserved: Mapping[type[nn.Module], str] = field(default_factory=dict)
    inputs: Callable[[nn.Module, int, int], Mapping[str, Tensor]] | None = None
    limits: str = ""

    def __post_init__(self) -> None:
        made = {
            original: kind
            if issubclass(kind, original)
            else type(original.__name__, (kind, original), {"__doc__": kind.__doc__})
            for original, kind in self.classes.items()
        }
        object.__setattr__(self, "classes", made)

    def reason(self, module: nn.Module) -> str | None:
        """The reason why a module stays as it is, or None."""
        return self.unserved.get(type(module)) or self.refusal(module)


FAMILIES: Registry[AcceleratedFamily] = Registry(
    AcceleratedFamily,
    "accelerated family",
    "posenc.transformers.acceleration.families",
    group="posenc.accelerated_families",
)
"""Families by the name of a package or file of their classes; those of transformers by the package
in ``transformers.models``."""


def family_of(kind: type[nn.Module]) -> AcceleratedFamily | None:
    """The family of a class, by the packages and the file it is in; None if there is none."""
    names = (name for name in kind.__module__.split(".") if name in FAMILIES)
    return next((FAMILIES[name] for name in names), None)
