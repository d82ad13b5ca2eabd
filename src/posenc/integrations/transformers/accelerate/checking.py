"""Comparison of a model with itself on random inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posenc.errors import ArgumentError
from posenc.integrations.transformers.accelerate.family import family_of

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference allowed by dtype, as a share of the largest value."""

ROWS, LENGTH, PADDING = 2, 48, 7


@torch.no_grad()
def outputs_of(model: nn.Module) -> list[Tensor]:
    """Floating-point outputs of the transformers model inside ``model``, on random inputs.

    The same inputs every time, in evaluation mode; training flags and random states are kept.

    Raises:
        ArgumentError: when there is no such model, or it does not take such inputs.
    """
    base = _base_model(model)
    with _evaluating(base), torch.random.fork_rng():
        torch.manual_seed(0)  # some models drop features in evaluation mode too
        try:
            output = base(**_inputs(base))
        except Exception as error:
            raise ArgumentError(
                "check",
                expected=f"False for a {type(base).__name__}, which random inputs do not fit",
                got=True,
                remedy=f"Compare outputs on your own inputs. It said: {error}",
            ) from error
    return [tensor.detach().clone() for tensor in tensors_in(output)]


def difference(expected: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """The largest difference between outputs, as a share of each one's largest value.

    In half precision root mean squares instead of largest values: rounding alone makes routers send
    single tokens to other experts.
    """
    pairs = [(a, b) for a, b in zip(expected, got, strict=True) if a.numel()]
    return max((_share(a, b) for a, b in pairs), default=0.0)


def _share(expected: Tensor, got: Tensor) -> float:
    half = expected.dtype.itemsize < 4
    off, size = got.double() - expected.double(), expected.double()
    off, size = (x.square().mean().sqrt() if half else x.abs().max() for x in (off, size))
    return float(off / size.clamp(min=1e-6))


def require_near(off: float, expected: Sequence[Tensor]) -> None:
    """Compare a difference with the tolerance of the outputs' dtype.

    Raises:
        ArgumentError: when it is larger, or not a number.
    """
    if not all(bool(tensor.isfinite().all()) for tensor in expected):
        raise ArgumentError(
            "check",
            expected="False for a model whose own outputs on random inputs are not finite",
            got=True,
            remedy="Compare outputs on your own inputs.",
        )
    allowed = max((TOLERANCE.get(tensor.dtype, 1e-4) for tensor in expected), default=0.0)
    if not off <= allowed:
        raise ArgumentError(
            "model",
            expected=f"outputs within {allowed:g} of the original's",
            got=f"{off:.2g}",
            remedy="It was left as it is. Please report this with the model's config.",
        )


def _base_model(model: nn.Module) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module.base_model
    raise ArgumentError(
        "model",
        expected="a model of transformers, or one that holds such a model",
        got=type(model).__name__,
        remedy="Pass the model, not one of its layers, or check=False.",
    )


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    config, device = model.config, model.device
    family = family_of(type(model))
    if family is not None and family.inputs is not None:
        made = family.inputs(model).items()
        return {k: x.to(device, model.dtype if x.is_floating_point() else None) for k, x in made}
    generator = torch.Generator().manual_seed(0)
    name = model.main_input_name
    if name == "input_ids":
        text = config.get_text_config()
        vocabulary = text.vocab_size
        # Some models begin their positions at 2; XLNet's limit of none is -1.
        limit = getattr(text, "max_position_embeddings", None) or 0
        length = min(LENGTH, limit - 2) if limit > 0 else LENGTH
        # Ids of special tokens are low ones.
        ids = torch.randint(vocabulary // 2, vocabulary, (ROWS, length), generator=generator)
        attended = torch.ones(ROWS, length, dtype=torch.long)
        attended[1, -PADDING:] = 0
        inputs = {"input_ids": ids, "attention_mask": attended}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids[:, : length // 2]
        return {key: value.to(device) for key, value in inputs.items()}
    image = getattr(config, "vision_config", config)
    shapes: dict[str, Any] = {
        "pixel_values": lambda: (ROWS, image.num_channels, *_pair(image.image_size)),
        "input_values": lambda: (ROWS, 8000),
        "input_features": lambda: (ROWS, LENGTH, config.feature_projection_input_dim),
    }
    values = torch.randn(shapes[name](), generator=generator)
    return {name: values.to(device, model.dtype)}


def _pair(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Floating-point tensors in an output of transformers, in order."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_in(value)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
