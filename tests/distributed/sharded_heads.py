"""Jobs that compare layers whose heads are on several ranks with layers on one."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from posenc import Layout, distributed
from posenc.errors import PosencError
from posenc.models import DetrConfig, ImageEncoder
from posenc.registry import ENCODINGS
from posenc.testing.subject import LENGTH, Layer, Subject, inputs, spread, tokens_of

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Sample:
    """An encoding of a layer.

    Args:
        name: of a registry entry.
        options: of its factory.
        moving: positions require gradients.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    moving: bool = False


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Those of inputs and parameters, whole, zeros where there is none."""
    found = []
    for x in (*inputs, *model.parameters()):
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        found.append(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    return found


def computed(layer: Layer, sample: Sample, subject: Subject) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's output, its input and the positions, after the backward pass."""
    layout = subject.place(Layout.padded([LENGTH, LENGTH - 4], side="left"))
    positions = layout.positions.double().requires_grad_(sample.moving)
    x = inputs().requires_grad_()
    output = layer(x, layout.with_positions(positions), tokens=tokens_of())
    assert layout.valid is not None
    output = output * layout.valid.unsqueeze(-1)
    output.sin().sum().backward()
    return output.detach(), x, positions


def difference(group: dist.ProcessGroup, sample: Sample) -> str:
    """The place where a layer on several ranks differs from one, "" if nowhere, or its refusal."""
    subject = Subject.of_entry(sample.name, ENCODINGS[sample.name], **sample.options)
    alone, layer = subject.layer(), subject.layer()
    try:
        parts = distributed.shard_heads(layer, DeviceMesh.from_group(group, "cpu"))
    except PosencError as refusal:
        return str(refusal)
    expected, *wanted = computed(alone, sample, subject)
    output, *found = computed(layer, sample, subject)
    distributed.sum_gradients(parts, group)
    labels = ["output", "gradient of x", "gradient of positions"]
    labels += [f"gradient of {name}" for name, _ in alone.named_parameters()]
    pairs = zip(
        labels,
        [output, *gradients(layer, *found)],
        [expected, *gradients(alone, *wanted)],
        strict=True,
    )
    for label, got, want in pairs:
        largest = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        off = (got - want).abs().max().item() if want.numel() else 0.0
        if not off <= TOLERANCE * largest:
            return f"{sample}: {label} is off by {off:.3g} of {largest:.3g}"
    return ""


def differences(group: dist.ProcessGroup, samples: list[Sample]) -> list[str]:
    """The results of ``difference`` for each sample."""
    found = []
    for sample in samples:
        try:
            found.append(difference(group, sample))
        except Exception:
            found.append(f"{sample}: {traceback.format_exc(limit=-6)}")
    return found


def detr_difference(group: dist.ProcessGroup) -> float:
    """Largest difference of an image encoder that adds positions to queries and keys."""
    config = DetrConfig(size=(8, 8), patch=4, channels=1, dim=16, heads=4, layers=2)

    def made(encoding: str) -> ImageEncoder:
        torch.manual_seed(3)
        model = ImageEncoder(DetrConfig(**{**config.to_json(), "encoding": encoding})).double()
        for part in dict.fromkeys(block.attention.encoding for block in model.blocks):
            spread(part)  # type: ignore[arg-type]
        return model

    images = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    off = []
    for encoding in ("sine2d", "learned2d"):
        alone, model = made(encoding), made(encoding)
        parts = distributed.shard_heads(model, DeviceMesh.from_group(group, "cpu"))
        outputs = [each(images)[0] for each in (alone, model)]
        for output in outputs:
            output.sin().sum().backward()
        distributed.sum_gradients(parts, group)
        pairs = [outputs, *zip(gradients(alone), gradients(model), strict=True)]
        off += [(got - want).abs().max().item() for got, want in pairs if want.numel()]
    return max(off)


def dropped(group: dist.ProcessGroup, name: str) -> Tensor:
    """Output of a layer that drops attention weights."""
    subject = Subject.of_entry(name, ENCODINGS[name])
    layer = subject.layer().train()
    layer.attention.dropout = 0.4
    if dist.get_world_size(group) > 1:
        distributed.shard_heads(layer, DeviceMesh.from_group(group, "cpu"))
    else:
        distributed.parallelize(layer, group)
    torch.manual_seed(4)
    output: Tensor = layer(inputs(), subject.place(Layout.sequence(LENGTH)))
    return output.detach().clone()  # a copy waits for the sum over the ranks
