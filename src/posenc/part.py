"""What all parts of an encoding have in common."""

from __future__ import annotations

from typing import ClassVar, Protocol

from jaxtyping import Float
from torch import Tensor, nn

from posenc.layout import Layout

__all__ = ["Part", "Projection"]


class Projection(Protocol):
    """A map from token vectors to the queries, or the keys, of all heads; ``nn.Linear`` is one."""

    @property
    def in_features(self) -> int:
        """Width C of token vectors."""

    @property
    def out_features(self) -> int:
        """Width of all heads together."""

    def __call__(self, x: Float[Tensor, "*places C"], /) -> Float[Tensor, "*places HD"]:
        """The projected vectors."""


class Part(nn.Module):
    """What all four kinds of part have in common."""

    causal_only: ClassVar[bool] = False
    """Meaningless unless queries see the past only."""

    axes: ClassVar[tuple[int, ...] | None] = (1,)
    """Numbers of position axes the part can read; None: any."""

    def observe(self, x: Float[Tensor, "B L C"], layout: Layout) -> Layout:
        """Read the layer's input ``[B, L, C]`` and note a small signal a token in the layout.

        Most parts read nothing. The signal reaches ``forward`` in ``grid.query.signal`` and
        ``grid.key.signal``, and is cached beside the keys.
        """
        return layout

    def attach(self, query: Projection, key: Projection) -> None:
        """Take the projections of the layer that the part is put in.

        Most parts have no use for them; DeBERTa projects its relative embeddings by them.
        """
