"""Replacement of the encodings or windows of a trained model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

from torch import nn

from posenc.attention import Attention
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.models.block import Block
from posenc.models.decoder import Decoder
from posenc.models.encoder import Encoder
from posenc.models.stack import share_encodings
from posenc.models.vision import ImageEncoder

Model = TypeVar("Model", bound=nn.Module)


def encodings_of(model: nn.Module) -> list[Encoding]:
    """The encoding of each block's self-attention, in order."""
    return [layer.encoding for layer in _layers(model)]


def with_encodings(model: Model, encodings: Sequence[Encoding]) -> Model:
    """A copy of the model with other encodings; all other weights are shared.

    Args:
        model: a ``Decoder``, ``Encoder``, ``ImageEncoder``, or a model that contains one.
        encodings: one per block.

    Raises:
        ArgumentError: if there is not one per block.
    """
    if len(encodings) != len(_layers(model)):
        raise ArgumentError(
            "encodings",
            expected=f"{len(_layers(model))}, one per block",
            got=len(encodings),
            remedy="Start from encodings_of(model).",
        )
    replaced = _sharing_copy(model)
    for layer, encoding in zip(_layers(replaced), encodings, strict=True):
        layer.encoding = encoding
        layer.lend_projections()
    for module in replaced.modules():
        if hasattr(module, "shared_encodings"):
            module.shared_encodings = share_encodings(module)
        if isinstance(module, Decoder | Encoder | ImageEncoder):
            module.named = False  # cannot be saved by name
    return replaced


def with_window(model: Model, window: int) -> Model:
    """A copy of the model with this attention window; weights are shared.

    Narrower windows are kept.
    """
    replaced = _sharing_copy(model)
    for layer in _layers(replaced):
        layer.window = window if layer.window is None else min(window, layer.window)
    return replaced


def _sharing_copy(model: Model) -> Model:
    """A copy that shares every tensor."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _layers(model: nn.Module) -> list[Attention]:
    blocks = (block.attention for block in model.modules() if isinstance(block, Block))
    return [attention for attention in blocks if isinstance(attention, Attention)]
