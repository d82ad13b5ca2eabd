"""Modules of transformers under which posenc's attention is put, in place and reversibly."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import nn

from posenc.attention.backends.common.base import Backend
from posenc.errors import ArgumentError

SETTINGS = "_posenc_settings"


@dataclass(frozen=True)
class Settings:
    """Settings of an accelerated module.

    Args:
        backend: of ``posenc.attend``.
        shortest: number of keys below which the module's own attention runs.
    """

    backend: str | Backend = "auto"
    shortest: int = 0


DEFAULT = Settings()


class Accelerated(nn.Module):
    """Mixin of subclasses of transformers' modules that compute attention with posenc.

    A module becomes one by assignment to its ``__class__``: parameters, buffers, hooks and
    submodules stay where they are. It is pickled as an object of the class it had.
    """

    original: ClassVar[type[nn.Module]]
    """Class of transformers that the module had before; classes are named as theirs, since
    ``save_pretrained`` writes a model's."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "original" in cls.__dict__:
            cls.__name__ = cls.original.__name__

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Attributes of transformers' classes, which have no types."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != SETTINGS}
        return self.original.__new__, (self.original,), state

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied


def settings_of(module: nn.Module) -> Settings:
    """Settings of an accelerated module; the defaults for others."""
    return cast(Settings, module.__dict__.get(SETTINGS, DEFAULT))


def take_over(module: nn.Module, kind: type[Accelerated], settings: Settings) -> None:
    """Make a module an accelerated one."""
    module.__dict__[SETTINGS] = settings
    module.__class__ = kind


def put_back(module: Accelerated) -> None:
    """Give a module its own class again.

    Raises:
        ArgumentError: if its class was changed again since, as FSDP does.
    """
    if "original" not in type(module).__dict__:
        raise ArgumentError(
            "model",
            expected="modules as accelerate left them",
            got=f"a {type(module).__name__}",
            remedy="Call restore before the model is wrapped or sharded.",
        )
    module.__class__ = module.original  # type: ignore[assignment]
    del module.__dict__[SETTINGS]
