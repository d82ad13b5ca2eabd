"""Jobs of ``tests.distributed.pool``: models of transformers that are sharded, then accelerated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from posenc.transformers import restore, stretch
from posenc.transformers.acceleration import accelerate
from tests.testing.tiny_models import inputs_of, tiny_config


class Holder(nn.Module):
    """A module around a model, as training code has it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Tensor) -> Any:
        return self.inner(**inputs)


def accelerated(group: ProcessGroup, *, kind: str, held: bool) -> tuple[str, float, float]:
    """The report; the largest error of logits as accelerated, and as restored.

    Args:
        held: a module around the model is sharded too.
    """
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    inputs = inputs_of(model)
    expected = model(**inputs).logits.detach()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in [x for x in model.modules() if type(x).__name__.endswith(("Layer", "Block"))]:
        fully_shard(layer, mesh=mesh)
    whole: Any = Holder(model) if held else model
    fully_shard(whole, mesh=mesh)
    report = accelerate(whole, shortest=0)
    errors = []
    for way_back in (lambda: None, lambda: restore(whole)):
        way_back()
        logits = whole(**inputs).logits
        logits.square().mean().backward()
        errors.append(float((logits.detach() - expected).abs().max()))
    return str(report), *errors


def stretched(group: ProcessGroup, *, kind: str, method: str) -> float:
    """The largest difference of logits from those of the stretched model of one process."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    inputs = inputs_of(model)
    stretch(model, method, factor=2)
    expected = model(**inputs).logits.detach()
    restore(model)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    stretch(model, method, factor=2)
    return float((model(**inputs).logits - expected).abs().max())
