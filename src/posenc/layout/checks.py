"""Checks of what layouts are made from; each raises ``ArgumentError``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.runtime import has_values

__all__ = [
    "MARKS",
    "require_cells",
    "require_documents",
    "require_finite",
    "require_length",
    "require_mask",
    "require_padded",
    "require_tensors",
]

MARKS = {
    "order": torch.int64,
    "document": torch.int64,
    "valid": torch.bool,
    "special": torch.bool,
}
"""Fields of a layout with one entry a token, ``[B|1, L]``, and their dtypes."""


def require_tensors(positions: Tensor, marks: Mapping[str, Tensor | None]) -> None:
    """Refuse positions that are not ``[B|1, L, A]``, and marks that do not fit to them.

    Args:
        positions: of float32 or float64.
        marks: by their names in ``MARKS``.
    """
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
            remedy="Narrower types merge neighbours: bfloat16 cannot tell 256 from 257.",
        )
    length = positions.shape[1]
    rows = [positions.shape[0]]  # no set: symbolic sizes have no hash
    for name, value in marks.items():
        if value is None:
            continue
        rows.append(value.shape[0])
        if value.dim() != 2 or value.shape[1] != length:
            raise ArgumentError(
                name,
                expected=f"shape [B|1, {length}]",
                got=list(value.shape),
                remedy="Give one entry a token.",
            )
        dtype = MARKS[name]
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
    """Refuse NaN and infinity, where the values can be read."""
    if not has_values(positions):
        return
    if not bool(torch.isfinite(positions.detach()).all()):
        raise ArgumentError(
            "positions",
            expected="finite numbers",
            got="NaN or infinity",
            remedy="Mark missing tokens with `valid` instead.",
        )


def require_length(length: int) -> None:
    """Refuse a length below 1."""
    if length < 1:
        raise ArgumentError("length", expected="1 or more", got=length, remedy="Drop empty rows.")


def require_documents(lengths: Sequence[int]) -> None:
    """Refuse a packed row without documents, and empty documents."""
    if not lengths:
        raise ArgumentError(
            "lengths", expected="one length a document", got=lengths, remedy="Give at least 1."
        )
    for length in lengths:
        require_length(length)


def require_padded(lengths: Sequence[int], total: int, side: str) -> None:
    """Refuse rows longer than ``total``, and sides other than left and right."""
    for count in lengths:
        if not 0 <= count <= total:
            raise ArgumentError(
                "lengths", expected=f"0 to {total}", got=count, remedy="Raise `length`."
            )
    if side not in ("left", "right"):
        raise ArgumentError(
            "side", expected="'left' or 'right'", got=repr(side), remedy="Choose one."
        )


def require_mask(mask: Tensor) -> None:
    """Refuse an attention mask that is not 0 and 1 of shape ``[B, L]``."""
    if mask.dim() != 2 or (has_values(mask) and not bool(((mask == 0) | (mask == 1)).all())):
        raise ArgumentError(
            "mask",
            expected="0 and 1 of shape [B, L]",
            got=f"{mask.dtype} of shape {list(mask.shape)}",
            remedy="Use the tokenizer's attention_mask; additive masks are (mask == 0).",
        )


def require_cells(valid: Bool[Tensor, "b h w"], height: int, width: int) -> None:
    """Refuse marks that are not one a cell of an image."""
    if valid.dim() != 3 or valid.shape[1:] != (height, width):
        raise ArgumentError(
            "valid",
            expected=f"shape [B|1, {height}, {width}]",
            got=list(valid.shape),
            remedy="Give one entry a cell.",
        )
