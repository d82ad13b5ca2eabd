"""The encodings of a trained model, and the same model with others."""

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
from posenc.models.sharing import share_encodings
from posenc.models.vision import ImageEncoder

__all__ = ["encodings_of", "with_encodings", "with_window"]

Model = TypeVar("Model", bound=nn.Module)


def encodings_of(model: nn.Module) -> list[Encoding]:
    """The record of each block's self-attention, in order."""
    return [layer.encoding for layer in _layers(model)]


def with_encodings(model: Model, encodings: Sequence[Encoding]) -> Model:
    """The same model with other records; all weights but the encodings' are shared with it.

    Args:
        model: a stack of blocks (``Decoder``, ``Encoder``, ``ImageEncoder``, and what holds one).
        encodings: one a block.

    Raises:
        ArgumentError: when there is not one a block.
    """
    if len(encodings) != len(_layers(model)):
        raise ArgumentError(
            "encodings",
            expected=f"{len(_layers(model))}, one a block",
            got=len(encodings),
            remedy="Begin from encodings_of(model).",
        )
    twin = _twin(model)
    for layer, encoding in zip(_layers(twin), encodings, strict=True):
        layer.encoding = encoding
        layer.lend_projections()
    for module in twin.modules():
        if hasattr(module, "shared_encodings"):
            module.shared_encodings = share_encodings(module)
        if isinstance(module, ImageEncoder):
            module.encoding = encodings[0]
        if isinstance(module, Decoder | Encoder | ImageEncoder):
            module.named = False  # it cannot be saved by name any more
    return twin


def with_window(model: Model, window: int) -> Model:
    """The same model, of which a token sees fewer than ``window`` steps only; weights are shared.

    Windows that are narrower stay.
    """
    twin = _twin(model)
    for layer in _layers(twin):
        layer.window = window if layer.window is None else min(window, layer.window)
    return twin


def _twin(model: Model) -> Model:
    """A copy that shares every tensor."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _layers(model: nn.Module) -> list[Attention]:
    blocks = (block.attention for block in model.modules() if isinstance(block, Block))
    return [attention for attention in blocks if isinstance(attention, Attention)]
