"""A family of checkpoints: its configuration and the mapping of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from posenc.errors import ArgumentError
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import Table
from posenc.integrations.transformers.checkpoints.rope import RopeFields


@dataclass(frozen=True)
class Written:
    """Contents of a checkpoint to write.

    Args:
        fields: of ``config.json``.
        tensors: by the names of posenc, converted to the family's conventions.
        architecture: the class in transformers.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    architecture: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """Reading and writing of one ``model_type``.

    Args:
        make: creates the model of a configuration, without weights.
        table: rules from names of posenc to names of the family.
        gated: rules that replace others if the feed-forward layer is gated.
        prefix: of the family's names; checkpoints of the bare model lack it.
        aliases: endings of the family's names, with those of older checkpoints.
        ignored: patterns of unused tensors: buffers, and tied output layers.
        write: contents of a checkpoint for a model and initial fields; None: read-only.
        rope: names of RoPE's parameters; None: it has no RoPE.
    """

    make: Callable[[Fields], nn.Module]
    table: Table
    gated: Table = field(default_factory=dict)
    prefix: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    write: Callable[[nn.Module, Fields], Written] | None = None
    rope: RopeFields | None = None

    def rows(self, gated: bool) -> Table:
        """The table for a model with or without gated feed-forward layers."""
        return {**self.table, **self.gated} if gated else self.table

    def spellings(self, name: str) -> tuple[str, ...]:
        """Names that the tensor ``name`` may have in a checkpoint."""
        names = [name]
        names += [
            name.removesuffix(ending) + other
            for ending, other in self.aliases.items()
            if name.endswith(ending)
        ]
        bare = [n.removeprefix(self.prefix) for n in names if n.startswith(self.prefix)]
        return tuple(names + bare)


def family_name(model_type: str) -> str:
    """The name in ``FAMILIES`` of a ``model_type``: hyphens become underscores, as in files."""
    return model_type.replace("-", "_")


def require_config(config: object, **required: object) -> None:
    """Require a model that the family's configuration can describe.

    Raises:
        ArgumentError: for the first field with another value.
    """
    for name, value in required.items():
        if getattr(config, name) != value:
            raise ArgumentError(
                "model",
                expected=f"{name}={value!r} for this family",
                got=f"{name}={getattr(config, name)!r}",
                remedy="Use model.save(folder), or another family.",
            )
