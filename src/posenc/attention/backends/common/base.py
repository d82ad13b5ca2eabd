"""Interface of backends: ``plan`` turns a problem into a plan or a refusal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.problem.problem import Problem
from posenc.encoding import Rotation
from posenc.encoding.derivatives import differentiable_once

kernel_gradients = differentiable_once(
    "dropout by kernels, and of parts of the keys",
    'Use attend(…, backend="reference"), or no dropout.',
)
"""Decorator of the backward pass of a kernel; without dropout ``attend`` has second derivatives."""


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
    """Attention of all queries, from attention of consecutive ranges of queries."""
    if len(results) == 1:
        return results[0]
    sums = [result.lse for result in results if result.lse is not None]
    output = torch.cat([result.output for result in results], dim=2)
    return Result(output, torch.cat(sums, dim=2) if sums else None)


Attend = Callable[[Tensor, Tensor, Tensor], Result]
"""Attention of queries, keys and values of known shapes, strides and dtypes."""


class Compute(Protocol):
    """A computation whose only open choice is whether to return the LSE."""

    def __call__(self, *, lse: bool) -> Result: ...


@dataclass(frozen=True, eq=False)
class Plan:
    """One way to compute one problem, decided on but not yet run.

    Args:
        description: how it is computed, in a sentence without a full stop.
        compute: the computation, with the problem bound to it.
        trial: kernels that ``auto`` first compares with the definition on the user's device: a name
            in ``trial.KERNELS``, or "" for those of the formula. None: none.
        by_definition: whether plain operations of PyTorch compute it, so that the LSE has gradients
            and gradients have gradients; where not, those of the definition are computed.
        prepare: makes attention of other queries, keys and values like the problem's, of the same
            terms and geometry; its result is None where more than a call's own would be computed.
    """

    description: str
    compute: Compute
    trial: str | None = None
    by_definition: bool = False
    prepare: Callable[[], Attend | None] = lambda: None

    def run(self, *, lse: bool = False) -> Result:
        """Compute attention.

        Args:
            lse: also return each query's LSE, of the whole logits: constants a query, which no
                output depends on, included.
        """
        return self.compute(lse=lse)


@dataclass(frozen=True)
class Refusal:
    """A problem that a backend cannot compute.

    Args:
        reason: the end of a sentence that begins with "because".
        avoidable: the user loses speed by it and can change that: it is logged once.
    """

    reason: str
    avoidable: bool = False


KEYS_ONCE = "few queries, for which keys are read once"
SLOW_MKL = "no terms by offset, on a processor that MKL is slow on"
ROTATION_ALONE = "nothing but a rotation"
BFLOAT16 = "no terms by offset, in bfloat16"

ADVANTAGES = (KEYS_ONCE, SLOW_MKL, ROTATION_ALONE, BFLOAT16)
"""Reasons for which compiled kernels are faster than PyTorch's fused attention."""


class QueryKernel(Protocol):
    """Attention of one query a head to all keys."""

    def __call__(
        self,
        q: Float[Tensor, "B H 1 D"],
        k: Float[Tensor, "B G K D"],
        v: Float[Tensor, "B G K E"],
        bias: Float[Tensor, "b h 1 K"] | None,
        /,
        *,
        scale: float,
        sinks: Float[Tensor, " H"] | None,
        softcap: float | None,
    ) -> Float[Tensor, "B H 1 E"]:
        """Bias is added to the logits before the cap; sinks and softcap as of ``attend``."""


class Backend(ABC):
    """A way to compute attention. It never falls back: it supports a problem or gives a reason.

    A backend is an object without state: its options are arguments of its constructor.
    """

    name: str

    def has_advantage(self, reason: str, problem: Problem, *, prepared: bool = False) -> bool:
        """True if it is faster than PyTorch's fused attention for one of ``ADVANTAGES``.

        As measured on machines like this, planned anew or ``prepared``.
        """
        return False

    def build(self) -> str | None:
        """The build of its kernels that this machine runs; None where they are none of posenc's."""
        return None

    def rotate(self, rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys rotated, for calls without a plan."""
        return rotation.apply(q, k)

    def query_kernel(self, q: Tensor, k: Tensor, v: Tensor, *, plain: bool) -> QueryKernel | None:
        """Attention of one query a head to all keys, without gradients, for calls without a plan.

        None where PyTorch's operations are as fast.

        Args:
            plain: without sinks and without a cap of the logits.
        """
        return None

    def untuned(self) -> Backend:
        """The backend without autotuning before the first call, for use in a trial."""
        return self

    def unavailable(self, device: torch.device) -> Refusal | None:
        """The reason why this machine cannot run it on ``device``; None if it can.

        Only facts of the machine and its installation; those of the problem belong to ``plan``.
        """
        return None

    @abstractmethod
    def plan(self, problem: Problem) -> Plan | Refusal:
        """Plan the computation of a problem, or give the reason why this backend cannot.

        Reads shapes, dtypes and other facts known on the host; of tensors, the values of a layout
        at most, once. Computes no attention. A problem may ask for what few backends compute, see
        ``refuse_rare``; its queries and keys may have yet to be rotated, see ``Problem.rotated``.
        """


RARE = {
    "global_softmax": "it does not compute gradients through a part of the keys",
    "counter_dropout": "its dropout does not depend on the tokens' numbers",
    "sinks": "it has no sinks",
    "softcap": "it does not cap logits",
}
"""Fields of problems that most backends do not compute, and their reasons."""


def refuse_rare(problem: Problem, *served: str) -> Refusal | None:
    """The refusal of a problem with a field of ``RARE`` that is not ``served``, else None."""
    for name, reason in RARE.items():
        if name not in served and getattr(problem, name) is not None:
            return Refusal(reason)
    return None
