"""Entry of a family of transformers models that posenc accelerates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from posenc.registration import Registry
from posenc.transformers.acceleration.accelerated import NAME, Accelerated


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
