"""Validation of the arguments of layouts; every function raises ``ArgumentError``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.layout.nested import require_regular
from posenc.runtime import has_values

TOKEN_FIELDS = {
    "order": torch.int64,
    "document": torch.int64,
    "valid": torch.bool,
    "special": torch.bool,
}
"""Fields of a layout of shape ``[B|1, L]``, and their dtypes."""


def require_tensor(name: str, value: object) -> None:
    """Require a tensor."""
    if not isinstance(value, Tensor):
        raise ArgumentError(
            name,
            expected="a tensor",
            got=type(value).__name__,
            remedy="Use torch.tensor(…), or another constructor of Layout.",
        )
    require_regular(name, value)


def require_tensors(positions: Tensor, token_fields: Mapping[str, Tensor | None]) -> None:
    """Require float32 or float64 positions ``[B|1, L, A]`` and fields ``[B|1, L]`` to match.

    Args:
        token_fields: by their names in ``TOKEN_FIELDS``.
    """
    require_tensor("positions", positions)
    if positions.dim() != 3:
        raise ArgumentError(
            "positions",
            expected="shape [B|1, L, A]",
            got=list(positions.shape),
            remedy="Use Layout.at(times) for one axis, or add the missing dimensions.",
        )
    if positions.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            "positions",
            expected="float32 or float64",
            got=positions.dtype,
            remedy="Narrower dtypes merge neighbours: in bfloat16, 257 is 256.",
        )
    length = positions.shape[1]
    rows = [positions.shape[0]]  # no set: symbolic sizes have no hash
    for name, value in token_fields.items():
        if value is None:
            continue
        require_tensor(name, value)
        rows.append(value.shape[0])
        if value.dim() != 2 or value.shape[1] != length:
            raise ArgumentError(
                name,
                expected=f"shape [B|1, {length}]",
                got=list(value.shape),
                remedy="Give one entry per token.",
            )
        dtype = TOKEN_FIELDS[name]
        if value.dtype != dtype:
            raise ArgumentError(
                name, expected=f"{dtype}", got=value.dtype, remedy=f"Use .to({dtype})."
            )
    several = [count for count in rows if count != 1]
    if any(count != several[0] for count in several):
        raise ArgumentError(
            "layout",
            expected="equal batch sizes (or 1)",
            got=sorted(rows),
            remedy="Give every tensor of a layout B or 1 rows.",
        )


def require_finite(positions: Float[Tensor, "b L A"]) -> None:
    """Require finite positions, if their values can be read."""
    if not has_values(positions):
        return
    if not bool(torch.isfinite(positions.detach()).all()):
        raise ArgumentError(
            "positions",
            expected="finite numbers",
            got="NaN or infinity",
            remedy="Mark missing tokens with `valid` instead.",
        )


def require_length(length: int, least: int = 1) -> None:
    """Require a whole length of at least ``least``."""
    if isinstance(length, (float, str)) or length < least:
        expected = f"a whole number, {least} or more"
        raise ArgumentError(
            "length", expected=expected, got=length, remedy="Count tokens; drop empty rows."
        )


def require_documents(lengths: Sequence[int]) -> None:
    """Require at least one document, none of them empty."""
    if not lengths:
        raise ArgumentError(
            "lengths", expected="one length per document", got=lengths, remedy="Give at least 1."
        )
    for length in lengths:
        require_length(length)


def require_padded(lengths: Sequence[int], length: int | None, side: str) -> int:
    """Require rows of at most ``length`` tokens, and side left or right.

    Returns:
        ``length``, by default the longest of ``lengths``.
    """
    if not lengths:
        raise ArgumentError(
            "lengths", expected="one length per row", got=lengths, remedy="Give at least 1."
        )
    for count in lengths:
        require_length(count, 0)
    total = max(lengths) if length is None else length
    if max(lengths) > total:
        raise ArgumentError(
            "lengths", expected=f"0 to {total}", got=max(lengths), remedy="Raise `length`."
        )
    if side not in ("left", "right"):
        raise ArgumentError(
            "side", expected="'left' or 'right'", got=repr(side), remedy="Choose one."
        )
    return total


def require_mask(mask: Tensor) -> None:
    """Require an attention mask of 0 and 1 and of shape ``[B, L]``."""
    require_tensor("mask", mask)
    if mask.dim() != 2 or (has_values(mask) and not bool(((mask == 0) | (mask == 1)).all())):
        raise ArgumentError(
            "mask",
            expected="0 and 1 of shape [B, L]",
            got=f"{mask.dtype} of shape {list(mask.shape)}",
            remedy="Use the tokenizer's attention_mask; additive masks are (mask == 0).",
        )


def require_cells(valid: Bool[Tensor, "b h w"], height: int, width: int) -> None:
    """Require one entry per cell of an image."""
    if valid.dim() != 3 or valid.shape[1:] != (height, width):
        raise ArgumentError(
            "valid",
            expected=f"shape [B|1, {height}, {width}]",
            got=list(valid.shape),
            remedy="Give one entry per cell.",
        )
