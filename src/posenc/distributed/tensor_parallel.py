"""Layers whose heads are spread over ranks (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from posenc.attention import Attention
from posenc.distributed.group import Group
from posenc.encoding.parts import Part
from posenc.errors import ArgumentError
from posenc.grid import Grid


def shard_heads(
    model: nn.Module, mesh: DeviceMesh, *, axis: str | int | None = None
) -> nn.ModuleList:
    """Let each rank compute some heads of every ``posenc.Attention`` of a model, in place.

    Rank r of R has query heads ``r H/R`` to ``(r + 1) H/R`` with their key heads. The weights of
    its projections become shards (``DTensor``), in state dicts too; slopes, tables and buckets of
    encodings are read for its heads alone, and their parameters stay whole. All ranks pass the same
    tokens and get the same outputs.

    Gradients of the model are then those of one process, but for the attention parts of encodings,
    which have those of this rank's heads. Dropped weights are other ones than those of one process.
    No KV cache.

    Args:
        model: of posenc, or any module with ``posenc.Attention`` in it.
        mesh: the ranks; axis: which axis of a mesh of several.

    Returns:
        The attention parts, for ``sum_gradients(parts, mesh)`` after each backward pass.

    Raises:
        ArgumentError: for a model without ``Attention``, with heads that the ranks do not divide or
            that are merged in one projection, or with an encoding whose heads cannot be told apart
            (DAPE mixes them), that has signals of the tokens or uses the layer's projections.
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
    part = mesh if mesh.ndim == 1 else mesh[axis]  # type: ignore[index]
    plan = {name: ColwiseParallel() for name in ("query", "key", "value")}
    for layer in layers:
        parallelize_module(layer, part, plan | {"output": RowwiseParallel()})
        first = group.rank * layer.heads // group.size
        layer.heads, layer.queries, layer.kv_heads = (
            number // group.size for number in (layer.heads, layer.queries, layer.kv_heads)
        )
        layer.attend = SomeHeads(layer.attend, first, first + layer.heads)
    return nn.ModuleList(dict.fromkeys(part for layer in layers for part in attention_parts(layer)))


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
    if layer.queries != layer.heads:
        return "heads share queries"
    for part in attention_parts(layer):
        name = type(part).__name__
        if part.mixes_heads:
            return f"{name} mixes heads"
        if any(getattr(module, "attached", None) is not None for module in part.modules()):
            return f"{name} uses the layer's projections"
        if type(part).observe is not Part.observe:
            return f"{name} has signals of the tokens"
    return None


@dataclass(frozen=True, eq=False)
class SomeHeads:
    """Attention by some heads of an encoding, called as ``posenc.attend`` is."""

    attend: Callable[..., Tensor]
    begin: int
    end: int

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, encoding: Any, **options: Any
    ) -> Tensor:
        return self.attend(q, k, v, grid, encoding.heads(self.begin, self.end), **options)
