"""One call of ``posenc.distributed.attend``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import Backend
from posenc.attention.problem.problem import CounterDropout, token_numbers
from posenc.distributed.session import Session
from posenc.distributed.shards import Shards
from posenc.encoding import Encoding
from posenc.grid import Grid
from posenc.layout import Layout


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """The arguments of ``attend``.

    Args:
        q, k, v: of this rank's tokens.
        grid: of this rank's queries and this rank's keys.
        encoding, backend, dropout, scale: as of ``attend``.
        session: of the group.
        sinks, softcap: as of ``attend``.
        seed: of the dropout, the same on all ranks.
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
    sinks: Float[Tensor, " H"] | None = None
    softcap: float | None = None
    seed: int = 0

    def logit_scale(self) -> float:
        """Factor of the logits: as given, or the encoding's default."""
        return self.encoding.default_scale(self.q.shape[3]) if self.scale is None else self.scale

    def counter_dropout(self, query: Layout, key: Layout) -> CounterDropout | None:
        """Dropout of these tokens; None where nothing is dropped."""
        if not self.dropout:
            return None
        return CounterDropout(self.dropout, self.seed, token_numbers(query), token_numbers(key))

    @cached_property
    def shards(self) -> Shards:
        """The key layouts of all ranks."""
        return self.session.shards(self.grid.key)
