"""Patterns of the mask functions of transformers while a graph is made of a model.

What a function holds cannot be read there, nor the numbers in a tensor. Its code and the shape of
its result tell functions apart; the options and the config that a mask is made with say the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import masking_utils

from posenc.runtime import is_exporting
from posenc.transformers.acceleration.patterns import MaskFunction, Pattern, Place


def pattern_in_graph(
    function: MaskFunction,
    place: Place,
    config: Any,
    attended: Bool[Tensor, "B L"] | None,
    options: Mapping[str, Any],
) -> Pattern | None:
    """The pattern of a causal function or a window, also of packed documents; None of others.

    Args:
        config: of the model; None if it is not known.
        attended: False for padding, beside which transformers packs no documents.
        options: further ones of the mask.
    """
    if function is masking_utils.causal_mask_function:
        return Pattern(high=0)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if is_exporting():  # other runtimes have no kernels that skip pairs
        return None
    if options.get("use_vmap") or getattr(function, "__code__", None) is not OF_SEVERAL:
        return None
    window, plain = options.get("local_size"), not _reads_tensors(function, place)
    if window is not None and window != getattr(config, "sliding_window", None):
        return None
    if "allow_is_bidirectional_skip" in options:
        return Pattern(-window, window) if plain and window is not None else None
    band = Pattern(high=0) if window is None else Pattern(1 - window, 0)
    if plain:
        return None if window is None else band
    alike = (place.queries, place.first) == (place.keys, place.start)
    if attended is not None or not alike or getattr(config, "attention_chunk_size", None):
        return None
    return band & Pattern(intervals=_documents(function, place))


def _reads_tensors(function: MaskFunction, place: Place) -> bool:
    """True if a mask function reads tensors by the batch row: no row leaves all in the result."""
    one = torch.zeros(1, dtype=torch.int64, device=place.device)
    return bool(function(None, None, one, one).dim() > 1)


def _documents(function: MaskFunction, place: Place) -> Int[Tensor, "B Q 2"]:
    """Intervals from a query's document on; one begins where a token is not seen by the next."""
    index = place.index
    row = torch.arange(place.batch, device=place.device)[:, None]
    same = function(row, None, index[:, 1:], index[:, :-1]).expand(place.batch, -1)
    begins = torch.nn.functional.pad(index[:, 1:].where(~same, 0), (1, 0)).cummax(-1).values
    return torch.stack([begins, (index + 1).expand_as(begins)], dim=-1)


OF_SEVERAL = masking_utils.and_masks().__code__
"""Code of functions that hold where several do."""
