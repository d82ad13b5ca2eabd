"""Ownership of encodings that several layers of a model share."""

from __future__ import annotations

from collections import Counter

from torch import Tensor, nn

from posenc.attention import Attention
from posenc.encoding import Encoding
from posenc.models.complex_layers import ComplexAttention


def share_encodings(model: nn.Module) -> nn.ModuleList:
    """Encodings owned by ``model`` itself, to which its attention layers then refer.

    These have parameters that several layers use, or an embedding part that enters before the
    first block. All others belong to their layer. A block can therefore be sharded, offloaded or
    saved alone.
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
    """The state dict, with a shared encoding under the name of the first layer that uses it.

    Names in files then do not depend on sharing.
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
