"""Which module of a model owns the encodings that several of its layers use."""

from __future__ import annotations

from collections import Counter

from torch import Tensor, nn

from posenc.attention import Attention
from posenc.encoding import Encoding
from posenc.models.complex_layers import ComplexAttention

__all__ = ["share_encodings", "state_by_layer"]


def share_encodings(model: nn.Module) -> nn.ModuleList:
    """The records that belong to ``model`` as a whole; its attention layers then refer to them.

    Those are records with parameters that several layers use, or that enter before the first
    block. All others belong to their layers. So the parameters of a block are its own, and blocks
    can be sharded, offloaded or saved one by one.
    """
    layers = _layers(model)
    records = list(dict.fromkeys(layer.encoding for layer in layers.values()))
    uses = Counter(layer.encoding for layer in layers.values())
    holders = Counter(id(tensor) for record in records for tensor in _tensors(record))

    def shared(record: Encoding) -> bool:
        tensors = _tensors(record)
        first = record.embedding is not None and not record.embedding.every_layer
        several = uses[record] > 1 or any(holders[id(tensor)] > 1 for tensor in tensors)
        return bool(tensors) and (first or several)

    owned = [record for record in records if shared(record)]
    for layer in layers.values():
        if layer.encoding in owned:
            layer.refer_to(layer.encoding)
    return nn.ModuleList(owned)


def state_by_layer(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """The state dict, in which a shared encoding is named as of the first layer that uses it.

    Files so have the same names whether or not layers share.
    """
    names: dict[str, str] = {}
    layers = _layers(model)
    for owner, module in model.named_modules():
        records = getattr(module, "shared_encodings", ())
        for index, record in enumerate(records):
            user = next(name for name, layer in layers.items() if layer.encoding is record)
            names[f"{owner}.shared_encodings.{index}.".lstrip(".")] = f"{user}.encoding."
    state = {}
    for name, tensor in model.state_dict(keep_vars=keep_vars).items():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), "")
        state[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return state


def _layers(model: nn.Module) -> dict[str, Attention | ComplexAttention]:
    modules = model.named_modules()
    return {n: m for n, m in modules if isinstance(m, Attention | ComplexAttention)}


def _tensors(record: Encoding) -> list[Tensor]:
    return [*record.parameters(), *record.buffers()]
