"""What every backend is given, and what it must answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import Encoding, Lowered, Rotation
from posenc.grid import Grid

__all__ = ["Backend", "Problem", "Result", "join_queries"]


@dataclass(frozen=True, eq=False)
class Problem:
    """One validated call of ``attend``, its queries and keys already transformed, or to be rotated.

    Args:
        q: ``[B, H, Q, D]``; k: ``[B, G, K, D]``; v: ``[B, G, K, E]``. All of one dtype and device.
        grid: offsets and visibility.
        encoding: its score and value parts are what is left to do.
        scale: factor of the product q·k.
        dropout: probability of dropping an attention weight.
        lowered: score and value parts in structured form; None where one has none.
        rotation: what the backend has to do to queries and keys before their product. Only for
            backends that fuse, and where nothing of ``lowered`` reads queries or keys.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K E"]
    grid: Grid
    encoding: Encoding
    scale: float
    dropout: float
    lowered: tuple[Lowered, ...] | None
    rotation: Rotation | None = None

    @property
    def heads(self) -> int:
        return self.q.shape[1]


class Result(NamedTuple):
    """Attention of all queries.

    Args:
        output: ``[B, H, Q, E]``.
        lse: ``[B, H, Q]`` in float32 or better, the logarithm of the sum of each query's
            exponentiated logits, before dropout; -inf where no key is visible. None where it was
            not asked for.
    """

    output: Float[Tensor, "B H Q E"]
    lse: Float[Tensor, "B H Q"] | None


def join_queries(results: Sequence[Result]) -> Result:
    """Attention of all queries, from that of ranges of them in order."""
    if len(results) == 1:
        return results[0]
    sums = [result.lse for result in results if result.lse is not None]
    output = torch.cat([result.output for result in results], dim=2)
    return Result(output, torch.cat(sums, dim=2) if sums else None)


class Backend(ABC):
    """A way to compute attention. Never falls back: it does the job or says why it cannot."""

    name: str

    lse_has_gradient: bool = False
    """Whether the ``lse`` that it returns can be differentiated."""

    fuses: bool = False
    """Whether it takes queries and keys that are yet to be rotated."""

    def unavailable(self, device: torch.device) -> str | None:
        """Why this machine cannot run it on ``device``, as the end of "because …"; None if it can.

        What depends on the machine is here, what depends on the problem in ``refusal``.
        """
        return None

    @abstractmethod
    def refusal(self, problem: Problem) -> str | None:
        """Why this backend cannot do the job, as the end of "because …"; None if it can.

        Reads shapes, dtypes and other facts known on the host; of tensors, the values of a layout
        at most, once.
        """

    @abstractmethod
    def run(self, problem: Problem, *, lse: bool = False) -> Result:
        """Attention for a problem that was not refused.

        Args:
            lse: also return each query's LSE, of the whole logits: constants a query, which no
                output depends on, included.
        """

    @abstractmethod
    def describe(self, problem: Problem) -> str:
        """How it would do it, in a sentence."""
