"""One call of ``posenc.distributed.attend``."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import Backend
from posenc.distributed.session import Session
from posenc.distributed.shards import Shards
from posenc.encoding import Encoding
from posenc.grid import Grid


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """The arguments of ``attend``.

    Args:
        q, k, v: of this rank's tokens.
        grid: of this rank's queries and this rank's keys.
        encoding, backend, dropout, scale: as of ``attend``.
        session: of the group.
    """

    q: Float[Tensor, "B H L D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K E"]
    grid: Grid
    encoding: Encoding
    backend: str | Backend
    dropout: float
    scale: float | None
    session: Session

    def shards(self) -> Shards:
        """The key layouts of all ranks."""
        return self.session.shards(self.grid.key)
