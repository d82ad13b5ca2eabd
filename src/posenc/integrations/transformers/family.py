"""A family of checkpoints: what its configuration and its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from posenc.errors import ArgumentError
from posenc.integrations.transformers.config import Fields
from posenc.integrations.transformers.mapping import Table
from posenc.models.checkpoint import stored_tensors

__all__ = ["Family", "Written", "family_name", "require_config", "stored_tensors"]


@dataclass(frozen=True)
class Written:
    """What of a model goes into a checkpoint.

    Args:
        fields: of ``config.json``.
        tensors: the model's, by our names, changed where the family computes otherwise.
        architecture: the class in transformers.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    architecture: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to read and write one ``model_type``.

    Args:
        make: the model that a configuration describes, with weights yet to be filled in.
        table: our tensors from theirs.
        gated: rows that take the place of others where the feed-forward layer has gates.
        prefix: of their names; checkpoints of the bare model lack it.
        aliases: endings of their names, and what older checkpoints have instead.
        ignored: patterns of their tensors that our model can do without: buffers, and an output
            layer beside the embedding that it is tied to.
        write: what of a model goes into a checkpoint beside (and over) the given fields; None:
            this family is only read.
    """

    make: Callable[[Fields], nn.Module]
    table: Table
    gated: Table = field(default_factory=dict)
    prefix: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    write: Callable[[nn.Module, Fields], Written] | None = None

    def rows(self, gated: bool) -> Table:
        """The table for a model whose feed-forward layers have gates, or have none."""
        return {**self.table, **self.gated} if gated else self.table

    def spellings(self, name: str) -> tuple[str, ...]:
        """The names under which their tensor ``name`` may be found."""
        names = [name]
        names += [
            name.removesuffix(ending) + other
            for ending, other in self.aliases.items()
            if name.endswith(ending)
        ]
        bare = [each.removeprefix(self.prefix) for each in names if each.startswith(self.prefix)]
        return tuple(names + bare)


def family_name(model_type: str) -> str:
    """The name in ``FAMILIES`` of a ``model_type``: hyphens become underscores, as in files."""
    return model_type.replace("-", "_")


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
