"""Attention over a sequence that is spread over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from posenc.attention.api import Options
from posenc.attention.backends.common.base import Backend
from posenc.attention.call import Call, validate
from posenc.distributed.gathered import attend_by_heads, attend_gathered, heads_refusal
from posenc.distributed.group import Group
from posenc.distributed.ring import attend_in_ring, refusal
from posenc.distributed.shards import Session, ShardedCall
from posenc.encoding import Encoding
from posenc.encoding.prepared import entering
from posenc.errors import ArgumentError, BackendRefusal, UnknownNameError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import without_autocast


@dataclass(frozen=True)
class ParallelStrategy:
    """A strategy for context parallelism.

    Args:
        attend: computes it.
        refusal: the reason why it cannot serve a call, the end of a sentence that begins with
            "because"; None if it can.
        how: description, in a sentence without a full stop.
    """

    attend: Callable[[ShardedCall], Tensor]
    refusal: Callable[[ShardedCall], str | None]
    how: str


FORMS: dict[str, ParallelStrategy] = {
    "ring": ParallelStrategy(
        attend_in_ring,
        refusal,
        "blocks of keys and values travel from rank to rank, and outputs are joined",
    ),
    "heads": ParallelStrategy(
        attend_by_heads, heads_refusal, "every rank computes some heads of all tokens (Ulysses)"
    ),
    "gather": ParallelStrategy(
        attend_gathered,
        lambda call: None,
        "keys and values of all ranks are gathered, and queries stay",
    ),
}
"""All forms by name."""

AUTO = ("ring", "gather")
"""Forms that ``auto`` takes, in the order in which it tries them; the last serves everything."""


@dataclass(frozen=True)
class FormExplanation:
    """The form that ``attend`` takes, and the reasons against those tried before it.

    Args:
        form: its name.
        how: how it computes the call, in a sentence.
        refusals: reasons of the forms that cannot serve the call, by name.
    """

    form: str
    how: str
    refusals: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.form}: {self.how}."]
        lines += [f"Not {name}, because {reason}." for name, reason in self.refusals.items()]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """Attention over a sequence spread over ranks, called as ``posenc.attend`` is.

    ``posenc.Attention`` takes one as its ``attend``.

    Args:
        mesh, axis, form: see ``attend``.
    """

    mesh: DeviceMesh | dist.ProcessGroup
    axis: str | int | None = None
    form: str = "auto"

    def __post_init__(self) -> None:
        if self.form not in ("auto", *FORMS):
            raise UnknownNameError.of("form", str(self.form), ["auto", *FORMS])

    def __call__(
        self,
        q: Float[Tensor, "B H L D"],
        k: Float[Tensor, "B G K D"],
        v: Float[Tensor, "B G K E"],
        grid: Grid,
        encoding: Encoding,
        **options: Unpack[Options],
    ) -> Float[Tensor, "B H L E"]:
        """Attention of this rank's queries to the keys of all ranks.

        Args: as ``posenc.attend``; ``grid`` has the layouts of this rank's queries and keys.

        Raises: as ``attend``.
        """
        call = self._call(q, k, v, grid, encoding, **options)
        with entering(encoding.prepared), without_autocast(q.device):
            return FORMS[self._choose(call).form].attend(call)

    def explain(
        self,
        q: Float[Tensor, "B H L D"],
        k: Float[Tensor, "B G K D"],
        v: Float[Tensor, "B G K E"],
        grid: Grid,
        encoding: Encoding,
        **options: Unpack[Options],
    ) -> FormExplanation:
        """The form that is taken for the same arguments. All ranks have to call it.

        Raises: as ``attend``.
        """
        return self._choose(self._call(q, k, v, grid, encoding, **options))

    def _call(self, *operands: Any, backend: str | Backend = "auto", **options: Any) -> ShardedCall:
        call = Call(*operands, **options)
        validate(call)
        if call.grid.intervals is not None:
            raise ArgumentError(
                "grid",
                expected="no intervals, whose queries are on one rank",
                got=call.grid,
                remedy="Use Layout.packed, or a window, where one says the same.",
            )
        x = call.autocast()
        session = Session(Group.of(self.mesh, self.axis))
        settings = (self.form, x.grid.causal, x.grid.window, x.dropout, x.scale, x.softcap)
        shapes = (x.q.shape[:2], x.q.shape[3:], x.k.shape[1:2], x.v.shape[1:2], x.v.shape[3:])
        kinds = (x.grid.key.signal is None, x.sinks is None, x.q.dtype, backend)
        session.require_same(x.encoding, f"{settings} {shapes} {kinds}", x.q.device)
        return ShardedCall(x, backend, session, session.seed(x.q.device) if x.dropout else 0)

    def _choose(self, call: ShardedCall) -> FormExplanation:
        refusals: dict[str, str] = {}
        for name in AUTO if self.form == "auto" else [self.form]:
            reason = FORMS[name].refusal(call)
            if reason is None:
                return FormExplanation(name, FORMS[name].how, refusals)
            refusals[name] = reason
        raise BackendRefusal(
            "form",
            expected="one that can serve this call",
            got=f"{self.form!r}, which cannot, because {refusals[self.form]}",
            remedy="Use form='auto', and ContextParallel(mesh).explain(…) to see what it takes.",
        )


def attend(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    layout: Layout,
    encoding: Encoding,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    axis: str | int | None = None,
    causal: bool = False,
    window: int | None = None,
    form: str = "auto",
    key_layout: Layout | None = None,
    **options: Unpack[Options],
) -> Float[Tensor, "B H L E"]:
    """``posenc.attend`` of a sequence whose tokens are spread over the ranks of a group.

    Each rank passes its own tokens with their layout and gets the output of its own queries.
    Positions, order and documents come with the tokens, so shards may be any, also uneven or
    empty. All ranks have to call it, with the same encoding and options. Layouts are exchanged
    where one is new to the encoding's ``Prepared``, or to the one that is entered.

    Gradients of q, k, v and of the layouts' signals and positions are those of the sum of all
    ranks' losses. Those of the encoding's parameters and of sinks are this rank's part, as those of
    all other parameters of a model are: their sum over the ranks is the whole, see
    ``sum_gradients``.
    Whether tensors require gradients must be the same on all ranks.

    Args:
        q: ``[B, H, L, D]``, k: ``[B, G, K, D]``, v: ``[B, G, K, E]`` of this rank's tokens, as
            for ``posenc.attend``.
        layout: of this rank's tokens, with the signals that the encoding has observed; as ``take``
            cuts it out of a whole one, or any other.
        encoding: the same on all ranks.
        mesh: the ranks; axis: which axis of a mesh of several.
        causal, window: see ``Grid``.
        form: ``"gather"`` gathers keys and values, ``"ring"`` passes them from rank to rank, so
            that no rank ever has more than two ranks' keys, ``"heads"`` gives every rank some
            heads of all tokens (Ulysses); ``"auto"`` takes the ring where each pair depends on its
            two tokens alone, else gathers, as ``ContextParallel.explain`` tells.
        key_layout: of this rank's keys; ``layout`` by default.
        backend, scale: see ``posenc.attend``.
        dropout: probability of dropping an attention weight. The mask depends on the tokens' order
            and rank 0's random state alone, so that it is the same for any number of ranks; it is
            computed from the definition of attention.
        sinks, softcap: see ``posenc.attend``; the same on all ranks.

    Raises:
        ArgumentError: on arguments that do not fit together, on one rank or between ranks.
        BackendRefusal: when the form that was asked for cannot serve the call.
        RankError: when a rank dies, or does not answer within the group's timeout.
        UnknownNameError: when there is no form of that name.
    """
    grid = Grid(layout, layout if key_layout is None else key_layout, causal, window)
    return ContextParallel(mesh, axis, form)(q, k, v, grid, encoding, **options)


@torch.no_grad()
def sum_gradients(
    module: torch.nn.Module, mesh: DeviceMesh | dist.ProcessGroup, *, axis: str | int | None = None
) -> None:
    """Add up the gradients of a module's parameters over the ranks, in place.

    For training without ``DistributedDataParallel`` or FSDP over this axis. Those average
    gradients: with them multiply the loss by the number of ranks instead. A parameter without a
    gradient on a rank counts as zero there.

    Args:
        module: an encoding, or a whole model whose tokens are spread over the ranks.
        mesh, axis: see ``attend``.
    """
    group = Group.of(mesh, axis)
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            group.sum(parameter.grad)
