"""Interface of backends: ``plan`` turns a problem into a plan, or a reason against it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.dropout import KeyedDropout
from posenc.derivatives import differentiable_once
from posenc.encoding import Encoding, Rotation, StructuredScore
from posenc.grid import Grid

kernel_gradients = differentiable_once(
    "dropout by kernels, and of parts of the keys",
    'Use attend(…, backend="reference"), or no dropout.',
)
"""Decorator of the backward pass of a kernel; without dropout ``attend`` has second derivatives."""


class Whole(NamedTuple):
    """Output and LSE of queries over more keys than those of a problem.

    Args:
        output: ``[B, H, Q, E]``.
        lse: ``[B, H, Q]`` in float32 or better.
    """

    output: Float[Tensor, "B H Q E"]
    lse: Float[Tensor, "B H Q"]


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
        whole: output and LSE over more keys than these, where what is wanted is the gradient of
            that output through these keys. The output computed is then any that has it.
        keyed: dropout by the tokens' numbers, in place of ``dropout``.
        sinks: ``[H]``, logits that only the sum of the softmax sees; included in the LSE.
        softcap: c of ``c · tanh(s / c)``, which whole logits become before they are masked. Neither
            for scores that replace the softmax.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K E"]
    grid: Grid
    encoding: Encoding
    scale: float
    dropout: float
    lowered: tuple[StructuredScore, ...] | None
    rotation: Rotation | None = None
    whole: Whole | None = None
    keyed: KeyedDropout | None = None
    sinks: Float[Tensor, " H"] | None = None
    softcap: float | None = None

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


class Compute(Protocol):
    """A computation whose only open choice is whether to return the LSE."""

    def __call__(self, *, lse: bool) -> Result: ...


@dataclass(frozen=True, eq=False)
class Plan:
    """One way to compute one problem, decided on but not yet run.

    Args:
        description: how it is computed, in a sentence without a full stop.
        compute: the computation, with the problem bound to it.
        kernels: a name in ``trial.KERNELS``, of kernels that are tried on a device by themselves.
        differentiable_twice: whether autograd differentiates its gradients; where not, those of
            the definition are.
    """

    description: str
    compute: Compute
    kernels: str = ""
    differentiable_twice: bool = False

    def describe(self) -> str:
        """Description of the computation, in a sentence without a full stop."""
        return self.description

    def run(self, *, lse: bool = False) -> Result:
        """Compute attention.

        Args:
            lse: also return each query's LSE, of the whole logits: constants a query, which no
                output depends on, included.
        """
        return self.compute(lse=lse)


@dataclass(frozen=True)
class Unsupported:
    """A problem that a backend cannot compute.

    Args:
        reason: the end of a sentence that begins with "because".
    """

    reason: str


class Backend(ABC):
    """A way to compute attention. It never falls back: it supports a problem or gives a reason.

    A backend is an object without state: its options are arguments of its constructor.
    """

    name: str

    lse_has_gradient: bool = False
    """True if the LSE can be differentiated."""

    fuse_rotations: bool = False
    """True if the backend rotates queries and keys itself."""

    rotates_compiled: bool = False
    """True if queries and keys may be rotated for it by the compiled kernel of CPUs."""

    keyed_dropout: bool = False
    """True if the backend computes problems with ``keyed``."""

    on_trial: bool = False
    """True if ``auto`` first compares it with the definition on the user's device."""

    differentiates_parts: bool = False
    """True if the backend computes problems with ``whole``."""

    sinks_and_caps: bool = False
    """True if the backend computes problems with ``sinks`` or ``softcap``."""

    def untuned(self) -> Backend:
        """The same without measurements of its own before the first call, as for a trial."""
        return self

    def unavailable(self, device: torch.device) -> Unsupported | None:
        """The reason why this machine cannot run it on ``device``; None if it can.

        Only facts of the machine and its installation; those of the problem belong to ``plan``.
        """
        return None

    @abstractmethod
    def plan(self, problem: Problem) -> Plan | Unsupported:
        """Plan the computation of a problem, or give the reason why this backend cannot.

        Reads shapes, dtypes and other facts known on the host; of tensors, the values of a layout
        at most, once. Computes no attention.
        """
