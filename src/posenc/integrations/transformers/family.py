"""A family of checkpoints: what its configuration and its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from posenc.errors import ArgumentError
from posenc.integrations.transformers.fields import Fields
from posenc.integrations.transformers.table import Table

__all__ = ["Family", "Written", "require_config"]


@dataclass(frozen=True)
class Written:
    """What of a model goes into a checkpoint.

    Args:
        fields: of ``config.json``.
        tensors: the model's, by our names, changed where the family computes otherwise.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to read and write one ``model_type``.

    Args:
        architecture: the class in transformers, for ``config.json``.
        make: the model that a configuration describes, with weights yet to be filled in.
        table: our tensors from theirs.
        prefix: of their names; checkpoints of the bare model lack it.
        aliases: other names under which their tensors are found.
        ignored: patterns of their tensors that our model can do without: buffers, and an output
            layer beside the embedding that it is tied to.
        write: what of a model goes into a checkpoint; None: this family is only read.
    """

    architecture: str
    make: Callable[[Fields], nn.Module]
    table: Table
    prefix: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    write: Callable[[nn.Module], Written] | None = None

    def spellings(self, name: str) -> tuple[str, ...]:
        """The names under which their tensor ``name`` may be found."""
        names = [name]
        if name in self.aliases:
            names.append(self.aliases[name])
        if self.prefix and name.startswith(self.prefix):
            names.append(name.removeprefix(self.prefix))
        return tuple(names)


def require_config(config: object, **wanted: object) -> None:
    """Refuse a model that a family's configuration cannot describe.

    Raises:
        ArgumentError: naming the first field of its configuration that is not as wanted.
    """
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ArgumentError(
                "model",
                expected=f"{name}={value!r}, as this family has it",
                got=f"{name}={getattr(config, name)!r}",
                remedy="Save it by model.save(folder), or choose another family.",
            )
