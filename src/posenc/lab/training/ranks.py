"""The processes that train one model together, by DDP or FSDP2, or one alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from posenc.distributed.group import Group
from posenc.encoding import Encoding
from posenc.errors import ArgumentError, PosencError, UnknownNameError

Strategy = Literal["ddp", "fsdp"]

MicroBatch = tuple[dict[str, Any], Tensor | float]
"""Rows of a batch, and their share in its loss."""


class TrainingRanks:
    """This process among the ranks of a mesh of one axis; a process alone without a mesh.

    Raises:
        ArgumentError: for a mesh of several axes.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        if mesh is not None and mesh.ndim != 1:
            raise ArgumentError(
                "mesh",
                expected="a mesh of one axis",
                got=f"{mesh.ndim} axes, {mesh.mesh_dim_names}",
                remedy="Pass the axis that the batch is split over, mesh[name].",
            )
        self.mesh = mesh
        self.peers = None if mesh is None else Group.of(mesh)
        self.group = None if self.peers is None else self.peers.handle
        self.rank = 0 if self.peers is None else self.peers.rank
        self.size = 1 if self.peers is None else self.peers.size
        self.device = "cpu" if mesh is None else mesh.device_type

    def require_same(self, text: str) -> None:
        """Compare descriptions of the training between ranks.

        Raises:
            ArgumentError: on every rank, with the ranks that differ from rank 0.
        """
        others = [] if self.peers is None else self.peers.differing(text, self.device)
        if others:
            raise ArgumentError(
                "model, objective, plan",
                expected="the same on all ranks, but for the device",
                got=f"others on rank {', '.join(map(str, others))} than on rank 0; here {text}",
                remedy="Build them from one configuration, and run one program on all ranks.",
            )

    @contextmanager
    def failures_named(self) -> Iterator[None]:
        """Name the ranks that do not answer when a collective fails.

        Raises:
            RankError: in place of the backend's error; other errors propagate.
        """
        try:
            yield
        except RuntimeError as error:
            failed = isinstance(error, dist.DistError) or "gloo" in str(error)
            if self.peers is None or not failed or isinstance(error, PosencError):
                raise
            raise self.peers.unanswered(error) from error

    def spread(self, model: nn.Module, strategy: Strategy) -> nn.Module:
        """The model to call, which sums gradients over the ranks; itself for a process alone.

        All ranks start from the weights of the first. ``"fsdp"`` shards parameters in place: those
        of each linear map of a layer together, and all others together.

        Raises:
            UnknownNameError: for another strategy.
        """
        if strategy not in get_args(Strategy):
            raise UnknownNameError.of("strategy", strategy, get_args(Strategy))
        if self.mesh is None:
            return model
        for x in (*model.parameters(), *model.buffers()):
            dist.broadcast(x.detach(), group=self.group, group_src=0)
        if strategy == "ddp":
            return DistributedDataParallel(
                model, process_group=self.group, find_unused_parameters=True
            )
        # Not whole layers: parts of them are called by themselves, and some share encodings.
        encodings = [module for module in model.modules() if isinstance(module, Encoding)]
        in_encodings = {module for encoding in encodings for module in encoding.modules()}
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        for linear in dict.fromkeys(module for layers in lists for module in layers.modules()):
            if isinstance(linear, nn.Linear) and linear not in in_encodings:
                fully_shard(linear, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        return model

    def microbatches(
        self, batch: Mapping[str, Any], objective: object, accumulate: int
    ) -> list[MicroBatch]:
        """The rows of this rank, in ``accumulate`` microbatches.

        Args:
            batch: of all ranks; tensors and layouts with rows in their first dimension, or one row
                or none for all.
            objective: gives the share of a microbatch in the loss by its ``weight``; without one,
                rows count alike.
            accumulate: number of microbatches.

        Raises:
            ArgumentError: for fewer rows than microbatches, or one in which nothing counts.
        """
        count = self.size * accumulate
        if accumulate < 1:
            raise ArgumentError("accumulate", expected="1 or more", got=accumulate, remedy="Use 1.")
        if count == 1:
            return [(dict(batch), 1.0)]
        leaves, shape = tree_flatten(dict(batch))
        rows = max(len(x) for x in leaves if isinstance(x, Tensor) and x.ndim)
        if rows < count:
            raise ArgumentError(
                "batch",
                expected=f"at least {count} rows, for {self.size} ranks of {accumulate} parts",
                got=rows,
                remedy="Use larger batches, or fewer ranks or parts.",
            )
        split = torch.arange(rows).tensor_split(count)
        parts = []
        for chosen in split:
            rows_of_part = slice(int(chosen[0]), int(chosen[-1]) + 1)
            cut = [
                x[rows_of_part] if isinstance(x, Tensor) and x.ndim and len(x) == rows else x
                for x in leaves
            ]
            parts.append(tree_unflatten(cut, shape))
        weigh = getattr(objective, "weight", None)
        weights = [
            float(len(c)) if weigh is None else float(weigh(p))
            for c, p in zip(split, parts, strict=True)
        ]
        if not min(weights):
            raise ArgumentError(
                "batch",
                expected=f"something to learn in each of {count} parts",
                got=f"weights {weights}",
                remedy="Use larger batches, or fewer ranks or parts.",
            )
        total = sum(weights)
        of_rank = slice(self.rank * accumulate, (self.rank + 1) * accumulate)
        return [(p, w / total) for p, w in zip(parts[of_rank], weights[of_rank], strict=True)]

    @contextmanager
    def gradient_sync(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Context that sums gradients over the ranks in the ``last`` microbatch of a step alone."""
        if isinstance(model, DistributedDataParallel) and not last:
            with model.no_sync():
                yield
            return
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        yield

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, True if it is set on any rank."""
        return self.sum(torch.tensor(flags, dtype=torch.float32, device=self.device)).tolist()

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def wait(self) -> None:
        """Barrier: wait for all ranks."""
        self.any(True)


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights of a model that may be sharded, on the CPU; every rank must call it.

    Returns:
        a state dict on the first rank; an empty one on the others.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(model, options=options))
