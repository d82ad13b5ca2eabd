"""The processes that share a sequence, an axis of a mesh or a group, and their collectives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from posenc.encoding.derivatives import differentiable_once
from posenc.errors import ArgumentError, RankError

ROLL_CALL = timedelta(seconds=5)
"""Time that ranks have to report after their own collective has failed or timed out."""

LONGEST_WAIT = timedelta(minutes=1)
"""Longest time for which ranks are waited for whose collective has not timed out yet."""

POLL = 0.1
"""Polling interval of the store in seconds."""


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that share a sequence, and the collectives between them.

    Tensors have tokens in their first dimension; the numbers of tokens may differ between ranks.
    """

    handle: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh | dist.ProcessGroup, axis: str | int | None = None) -> Group:
        """The group of ``axis`` of a mesh; a process group is taken as it is.

        Raises:
            ArgumentError: for a mesh of several axes without ``axis``, another type, or a group
                that this process is not in.
        """
        handle = mesh
        if isinstance(mesh, DeviceMesh):
            if axis is None and mesh.ndim != 1:
                raise ArgumentError(
                    "axis",
                    expected=f"one of the mesh's {mesh.ndim} axes, {mesh.mesh_dim_names}",
                    got=axis,
                    remedy="Name the axis that the sequence is spread over, or pass mesh[name].",
                )
            handle = mesh.get_group(axis)
        if not isinstance(handle, dist.ProcessGroup):
            raise ArgumentError(
                "mesh",
                expected="a DeviceMesh or a ProcessGroup that this process is in",
                got=type(handle).__name__,
                remedy="Use torch.distributed.device_mesh.init_device_mesh(device, (ranks,)).",
            )
        return cls(handle, dist.get_rank(handle), dist.get_world_size(handle))

    def gather(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """``x`` ``[L, …]`` of all ranks, one after the other; rank r has ``lengths[r]`` tokens."""
        if self.size == 1:
            return x
        most = max(lengths)
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: len(x)] = x
        parts = x.new_empty(self.size, most, *x.shape[1:])
        with self.failures_named():
            dist.all_gather(list(parts.unbind(0)), padded, group=self.handle)
        if min(lengths) == most:
            return parts.flatten(0, 1)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """This rank's tokens of the sum of all ranks' ``x``, summed in float32 or better."""
        if self.size == 1:
            return x
        count = lengths[self.rank]
        parts = self.exchange(x, lengths, [count] * self.size).view(self.size, count, *x.shape[1:])
        wide = torch.promote_types(x.dtype, torch.float32)
        return parts.sum(0, dtype=wide).to(x.dtype)

    def exchange(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send consecutive rows of ``x`` to the ranks in order, and return those received."""
        if self.size == 1:
            return x
        received = x.new_empty(sum(receives), *x.shape[1:])
        with self.failures_named():
            dist.all_to_all_single(
                received, x.contiguous(), list(receives), list(sends), group=self.handle
            )
        return received

    def shift(self, sends: Sequence[Tensor], receives: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Start to send tensors to the next rank, and to receive those of the previous one.

        Returns:
            a function that waits for both, and returns what was received.
        """
        if self.size == 1:
            return lambda: list(sends)
        ranks = dist.get_process_group_ranks(self.handle)
        following, previous = (ranks[(self.rank + step) % self.size] for step in (1, -1))
        sent = [x.contiguous() for x in sends]
        operations = [dist.P2POp(dist.isend, x, following, self.handle) for x in sent]
        operations += [dist.P2POp(dist.irecv, x, previous, self.handle) for x in receives]
        with self.failures_named():
            works = dist.batch_isend_irecv(operations)

        def wait() -> list[Tensor]:
            with self.failures_named():
                for work in works:
                    work.wait()
            received = list(receives)
            for done in (works, sent, receives):  # the function may be kept
                done.clear()
            return received

        return wait

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        with self.failures_named():
            dist.all_reduce(x, group=self.handle)
        return x

    def differing(self, text: str, device: torch.device | str) -> list[int]:
        """Ranks whose text is not that of the first."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        digest_tensor = torch.tensor([digest], dtype=torch.int64, device=device)
        digests = self.gather(digest_tensor, [1] * self.size).tolist()
        return [rank for rank, other in enumerate(digests) if other != digests[0]]

    @contextmanager
    def failures_named(self) -> Iterator[None]:
        """Name the ranks that do not answer when a collective fails.

        Raises:
            RankError: in place of the backend's error.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise self.unanswered(error) from error

    def unanswered(self, error: Exception) -> RankError:
        """The error that names the ranks that do not answer after a collective has failed."""
        seconds = self._patience().total_seconds()
        missing = self._missing(seconds)
        names = ", ".join(map(str, missing))
        got = f"{names} for {seconds:g} s" if missing else "none, but its connection failed"
        return RankError(
            "mesh",
            expected=f"an answer of all {self.size} ranks",
            got=f"no answer of rank {got}",
            remedy=f"See that rank's own output. The backend's error: {error}",
        )

    def _patience(self) -> timedelta:
        """Time in which all ranks that live report: some collectives end by the timeout alone."""
        backends = [self.handle._get_backend(device) for device in self.handle._device_types]
        timeout = max(backend.options._timeout for backend in backends)
        return min(timeout, LONGEST_WAIT) + ROLL_CALL

    def _missing(self, seconds: float) -> list[int]:
        """Ranks of the group that do not report in the store within a time of the first report."""
        end = monotonic() + seconds
        missing = [0]  # the process that holds the store, if it does not answer
        with suppress(RuntimeError):
            ranks = dist.get_process_group_ranks(self.handle)
            store = dist.distributed_c10d._get_default_store()
            key = f"posenc/failed/{self.handle.group_name}"
            store.set(f"{key}/{ranks[self.rank]}", "1")
            over = False
            while not over:
                over = monotonic() > end or store.check([f"{key}/over"])
                missing = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
                if not missing:
                    return missing
                sleep(POLL)
            store.set(f"{key}/over", "1")  # the others then name the same ranks
        return missing


first_derivative = differentiable_once(
    "collectives", "Attend in one process, by posenc.attend, for second derivatives."
)
"""Decorator of backward passes, whose collectives autograd does not record."""

Tensors = tuple[Tensor, ...]


def gather(
    group: Group,
    lengths: Sequence[int],
    tensors: Sequence[Tensor],
    arrangement: Int[Tensor, " K"] | None = None,
) -> Tensors:
    """Tensors ``[L, …]`` of all ranks, concatenated; their gradients are summed and scattered.

    All go through one node of the graph, so that every rank calls the collectives of the backward
    pass in the same order.

    Args:
        arrangement: index by which the rows of all ranks are reordered.
    """
    inverse = None if arrangement is None else arrangement.argsort()

    def forward(*tensors: Tensor) -> Tensors:
        return tuple(_arranged(group.gather(x, lengths), arrangement) for x in tensors)

    def transpose(*gradients: Tensor) -> Tensors:  # one at a time
        return tuple(group.reduce_scatter(_arranged(g, inverse), lengths) for g in gradients)

    return _linear(forward, transpose, *tensors)


def beginnings(x: Float[Tensor, "B H K D"], lengths: Sequence[int]) -> Tensors:
    """The first tokens of ``x``, in several lengths, of which the last is all of them.

    Their gradients are summed in that of the last, without a copy of ``x`` for each.
    """

    def transpose(*gradients: Tensor) -> Tensors:
        *parts, total = gradients
        if total.untyped_storage().nbytes() < total.nbytes:  # expanded
            total = total.clone()
        for part in parts:
            total[:, :, : part.shape[2]].add_(part)
        return (total,)

    return _linear(lambda x: tuple(x[:, :, :length] for length in lengths), transpose, x)


def exchange(group: Group, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
    """``Group.exchange``, whose gradient goes back where the rows came from."""
    (received,) = _linear(
        lambda x: (group.exchange(x, sends, receives),),
        lambda gradient: (group.exchange(gradient, receives, sends),),
        x,
    )
    return received


def _linear(
    forward: Callable[..., Tensors], transpose: Callable[..., Tensors], *tensors: Tensor
) -> Tensors:
    """A linear function of tensors, whose gradients are those of its transpose."""
    outputs: Tensors = _Linear.apply(forward, transpose, *tensors)
    return outputs


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Tensors], transpose: Callable[..., Tensors], *x: Tensor
    ) -> Any:
        ctx.transpose = transpose
        return forward(*x)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.transpose(*gradients)


def _arranged(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[index]
