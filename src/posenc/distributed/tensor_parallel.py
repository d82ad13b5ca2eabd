"""Layers whose heads are spread over ranks (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from posenc.attention import Attention, attend
from posenc.attention.api import attend_block
from posenc.attention.call import AttentionCall
from posenc.attention.module import LayerProjection
from posenc.attention.problem.dropout import KeyedDropout, token_numbers
from posenc.distributed.collectives import replicated
from posenc.distributed.group import Group
from posenc.distributed.session import Session
from posenc.encoding.heads import HeadRange
from posenc.encoding.parts import Part
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout


def shard_heads(
    model: nn.Module, mesh: DeviceMesh, *, axis: str | int | None = None
) -> nn.ModuleList:
    """Let each rank compute some heads of every ``posenc.Attention`` of a model, in place.

    Rank r of R has query heads ``r H/R`` to ``(r + 1) H/R`` with their key heads. The weights of
    its projections become shards (``DTensor``), in state dicts too; slopes, tables and buckets of
    encodings are read for its heads alone, and their parameters stay whole. All ranks pass the same
    tokens and get the same outputs. Signals of the tokens are computed on all ranks, and encodings
    that use the layer's projections use this rank's shards.

    Gradients of the model are then those of one process, but for the attention parts of encodings,
    which have those of this rank's heads. The mask of dropped weights is that of ``attend`` over
    any number of ranks; features are dropped alike if the ranks' random states are. No KV cache.

    Args:
        model: of posenc, or any module with ``posenc.Attention`` in it.
        mesh: the ranks; axis: which axis of a mesh of several.

    Returns:
        The attention parts, for ``sum_gradients(parts, mesh)`` after each backward pass.

    Raises:
        ArgumentError: for a model without ``Attention``, with heads that the ranks do not divide or
            that are merged in one projection, or with an encoding whose heads cannot be told apart
            (DAPE mixes them).
    """
    group = Group.of(mesh, axis)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    reasons = [refusal(layer, group.size) for layer in layers] or ["no posenc.Attention is in it"]
    if reason := next((reason for reason in reasons if reason is not None), None):
        raise ArgumentError(
            "model",
            expected=f"layers whose heads {group.size} ranks can share",
            got=f"one where {reason}",
            remedy="Use another number of ranks or encoding, or spread the sequence (parallelize).",
        )
    shared = mesh if mesh.ndim == 1 else mesh[axis]  # type: ignore[index]
    plan = {name: ColwiseParallel() for name in ("query", "key", "value")}
    for layer in layers:
        parallelize_module(layer, shared, plan | {"output": RowwiseParallel()})
        layer.heads, layer.queries, layer.kv_heads = (
            number // group.size for number in (layer.heads, layer.queries, layer.kv_heads)
        )
        if layer.sinks is not None:
            layer.sinks = nn.Parameter(distribute_tensor(layer.sinks, shared, [Shard(0)]))
        layer.attend = SomeHeads(layer.attend, group, group.rank * layer.heads)
        for part in attention_parts(layer):
            part.attach(
                HeadsProjection(layer, "query", group, part.heads is not None),
                HeadsProjection(layer, "key", group, part.heads is not None),
            )
    parts = dict.fromkeys(part for layer in layers for part in attention_parts(layer))
    for part in parts:
        part.register_forward_pre_hook(ReplicatedInput(group), with_kwargs=True)
    return nn.ModuleList(parts)


def attention_parts(layer: Attention) -> list[Part]:
    """The parts of its encoding that a layer's heads read."""
    encoding = layer.encoding
    sites = (encoding.query_key, encoding.score, encoding.value)
    return [part for part in sites if part is not None]


def refusal(layer: Attention, ranks: int) -> str | None:
    """The reason why ranks cannot share the heads of a layer; None if they can."""
    if layer.merged is not None:
        return "one matrix makes queries, keys and values"
    if layer.heads % ranks or layer.kv_heads % ranks:
        return f"there are {layer.heads} heads and {layer.kv_heads} key heads"
    if layer.queries % ranks:
        return f"{layer.heads} heads share {layer.queries} queries"
    for part in attention_parts(layer):
        name = type(part).__name__
        if part.mixes_heads:
            return f"{name} mixes heads"
    return None


@dataclass(frozen=True, eq=False)
class SomeHeads:
    """Attention by this rank's heads of an encoding, called as ``posenc.attend`` is.

    Args:
        attend: attention of these heads.
        group: the ranks.
        first: the first of this rank's query heads.
    """

    attend: Callable[..., Tensor]
    group: Group
    first: int

    def __call__(
        self,
        q: Float[Tensor, "B h Q D"],
        k: Float[Tensor, "B g K D"],
        v: Float[Tensor, "B g K E"],
        grid: Grid,
        encoding: Any,
        *,
        dropout: float = 0.0,
        **options: Any,
    ) -> Float[Tensor, "B h Q E"]:
        encoding = encoding.heads(self.first, self.first + q.shape[1])
        query = self._replicated(grid.query)
        key = query if grid.key is grid.query else self._replicated(grid.key)
        grid = replace(grid, query=query, key=key)
        if "sinks" in options:
            options["sinks"] = options["sinks"].to_local()
        if not dropout or self.attend is not attend:
            return self.attend(q, k, v, grid, encoding, dropout=dropout, **options)
        seed = Session(self.group).seed(q.device)
        keyed = KeyedDropout(dropout, seed, token_numbers(query), token_numbers(key), self.first)
        backend = options.pop("backend", "auto")
        call = AttentionCall(q, k, v, grid, encoding, keyed=keyed, **options)
        return attend_block(call, backend)[0]

    def _replicated(self, layout: Layout) -> Layout:
        """The layout; gradients of its positions are those of all heads."""
        if not layout.positions.requires_grad:
            return layout
        return replace(layout, positions=replicated(self.group, layout.positions))


@dataclass(frozen=True, eq=False)
class ReplicatedInput:
    """Hook by which gradients of a part's signals reach the layer's input from all heads."""

    group: Group

    def __call__(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        method = kwargs.get("method")
        if method is None or method.__name__ != "observe":
            return None
        x, layout = args
        return (replicated(self.group, x), layout), kwargs


@dataclass(frozen=True, eq=False)
class HeadsProjection(LayerProjection):
    """A sharded layer's projection of queries or keys, for a part of its encoding.

    Gradients of its input are each rank's part of those of one process.

    Args:
        group: the ranks.
        filled: return the width of all heads, of which those of other ranks are copies.
    """

    group: Group
    filled: bool

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerProjection):
            return NotImplemented
        return (self.layer, self.name) == (other.layer, other.name)

    __hash__ = LayerProjection.__hash__

    def __call__(self, x: Float[Tensor, "*places C"], /) -> Float[Tensor, "*places HD"]:
        ranks, rank = self.group.size, self.group.rank
        if x.requires_grad:
            x = x.view_as(x)
            # Sharded layers sum the gradient over the ranks.
            x.register_hook(lambda gradient: gradient / ranks)  # type: ignore[no-untyped-call]
        own = super().__call__(x)
        if not self.filled:
            return own
        heads = own.reshape(-1, own.shape[-1] // self.layer.head_dim, self.layer.head_dim)
        count = heads.shape[1]
        every = HeadRange(rank * count, (rank + 1) * count, ranks * count).fill(heads)
        return every.reshape(*own.shape[:-1], -1)
