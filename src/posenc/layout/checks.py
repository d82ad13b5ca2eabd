"""Validation of the arguments of layouts and of what layouts claim of their positions.

Every function raises ``ArgumentError``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posenc.arguments import EXACT, Count, Interval, check, memory
from posenc.errors import ArgumentError
from posenc.layout.integers import LARGEST, LARGEST_SINGLE, exact_floats
from posenc.runtime import has_values, is_transformed, needs_dispatch

TOKEN_FIELDS = {
    "order": torch.int64,
    "document": torch.int64,
    "valid": torch.bool,
    "special": torch.bool,
}
"""Fields of a layout of shape ``[B|1, L]``, and their dtypes."""

INTEGERS = (torch.int64, torch.int32)
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

LONG = 2**24
"""Tokens up to which memory is not asked for."""


def require_whole(
    name: str,
    value: int,
    least: int = 1,
    *,
    most: float = EXACT,
    remedy: str = "Count tokens; drop empty rows.",
) -> int:
    """``value`` as an int; ArgumentError unless it is a whole number in the range."""
    if type(value) is int and least <= value <= most:
        return value
    if isinstance(value, torch.SymInt):
        return value
    return int(check(name, Annotated[int, Interval(least, most, remedy=remedy)], value))


def require_device(device: object) -> None:
    """Require None or what PyTorch takes for a device."""
    if device is None or isinstance(device, torch.device):
        return
    try:
        if isinstance(device, (bool, Tensor)):
            raise TypeError
        torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            "device",
            expected="a device of PyTorch",
            got=reprlib.repr(device),
            remedy="Write 'cpu' or 'cuda:0', for example.",
        ) from error


def require_tensor(
    name: str,
    x: object,
    shape: Sequence[int | str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    *,
    remedy: str = "Use torch.tensor(…), or another constructor of Layout.",
) -> None:
    """Require a dense tensor.

    Args:
        name: of the argument, for messages.
        x: the argument.
        shape: its sizes; a word stands for any size.
        dtypes: those that it may have; None: any.
        remedy: for anything else.
    """
    if not isinstance(x, Tensor):
        raise ArgumentError(name, expected="a tensor", got=type(x).__name__, remedy=remedy)
    require_dense(name, x)
    fits = shape is None or len(shape) == x.dim()
    for wanted, size in zip(shape or (), x.shape, strict=False):  # no generator: in every call
        fits = fits and (wanted == size or isinstance(wanted, str))
    if not fits or (dtypes is not None and x.dtype not in dtypes):
        kinds = " or ".join(map(str, dtypes)) if dtypes else "a tensor"
        sizes = f" of shape [{', '.join(map(str, shape))}]" if shape else ""
        got = f"{x.dtype} of shape {list(x.shape)}"
        raise ArgumentError(name, expected=kinds + sizes, got=got, remedy=remedy)


def require_rows(rows: object, count: int | None) -> None:
    """Require a tensor of row numbers ``[rows]``, from ``-count`` to ``count - 1``.

    Args:
        rows: of a batch.
        count: how many it has; None: one that stands for any number.
    """
    require_tensor("rows", rows)
    assert isinstance(rows, Tensor)
    is_integer = rows.dtype in INTEGERS
    fits = rows.dim() == 1 and (
        is_integer or (rows.dtype == torch.bool and count in (None, rows.shape[0]))
    )
    readable = is_integer and fits and rows.device.type == "cpu" and has_values(rows)
    if readable and count is not None and len(rows):
        least, most = (int(end) for end in rows.aminmax())
        fits = -count <= least and most < count
    if not fits:
        raise ArgumentError(
            "rows",
            expected="int64 of shape [rows]" + ("" if count is None else f", below {count}"),
            got=reprlib.repr(rows) if is_integer else f"{rows.dtype} of shape {list(rows.shape)}",
            remedy="Number the batch rows to keep, from 0.",
        )


def require_tensors(positions: Tensor, token_fields: Mapping[str, Tensor | None]) -> None:
    """Require float32 or float64 positions ``[B|1, L, A]`` and fields ``[B|1, L]`` to match.

    Args:
        token_fields: by their names in ``TOKEN_FIELDS``.
    """
    remedy = "Use Layout.at(times). Narrower dtypes merge neighbours: in bfloat16, 257 is 256."
    require_tensor("positions", positions, ("B|1", "L", "A"), FLOATING[:2], remedy=remedy)
    rows = [positions.shape[0]]  # no set: symbolic sizes have no hash
    rows += require_fields(positions.shape[1], token_fields)
    require_batch(rows)


def require_batch(rows: Sequence[int]) -> None:
    """Require numbers of batch rows to be equal, or 1."""
    several = [count for count in rows if count != 1]
    if any(count != several[0] for count in several):
        raise ArgumentError(
            "layout",
            expected="equal batch sizes (or 1)",
            got=sorted(rows),
            remedy="Give every tensor of a layout B or 1 rows.",
        )


def require_fields(length: int, token_fields: Mapping[str, Tensor | None]) -> list[int]:
    """Require fields of shape ``[B|1, length]`` and of their dtypes; returns their rows."""
    rows = []
    for name, x in token_fields.items():
        if x is not None:
            shape, dtypes = ("B|1", length), (TOKEN_FIELDS[name],)
            require_tensor(name, x, shape, dtypes, remedy="Give one entry per token.")
            rows.append(x.shape[0])
    return rows


def require_times(times: Tensor, valid: Bool[Tensor, "b L"] | None) -> Float[Tensor, "b L A"]:
    """Require real numbers of one, two or three dimensions that are told apart as floats.

    Args:
        times: ``[L]``, ``[B, L]`` or ``[B, L, A]``.
        valid: ``[B|1, L]``; times of other tokens may hold anything, and become 0.
    """
    require_tensor("times", times)
    if times.dim() not in (1, 2, 3) or times.is_complex() or times.dtype == torch.bool:
        raise ArgumentError(
            "times",
            expected="real numbers of 1, 2 or 3 dimensions",
            got=f"{times.dtype} of {times.dim()}",
            remedy="See Layout.at.",
        )
    positions = times.reshape(1, -1, 1) if times.dim() == 1 else times
    positions = positions.unsqueeze(-1) if positions.dim() == 2 else positions
    if valid is not None:
        rows = require_fields(positions.shape[1], {"valid": valid})
        require_batch([positions.shape[0], *rows])
        positions = positions.masked_fill(~valid.unsqueeze(-1), 0)
    if not positions.is_floating_point():
        positions = exact_floats(positions, argument="times")
    require_finite(positions)
    require_spaced(positions)
    return positions


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


def require_spaced(times: Float[Tensor, "b L A"]) -> None:
    """Require times that float32 tells apart, if they have this dtype and can be read.

    Integers beyond 2^24 are not exact. Of fractions, where several neighbours are one rounding step
    apart, and most that differ are, readings were rounded: Julian days to 0.25.
    """
    if times.dtype != torch.float32 or not has_values(times):
        return
    ascending = times.detach().sort(dim=1).values
    lower, upper = ascending[:, :-1], ascending[:, 1:]
    gaps = upper - lower
    steps = (upper == lower.nextafter(upper)) & (gaps > 0) & (gaps != 1)
    count = steps.sum(1)
    rounded = (count > 1) & (2 * count > (gaps > 0).sum(1))
    if bool((ascending.abs() > LARGEST_SINGLE).any() | rounded.any()):
        raise ArgumentError(
            "times",
            expected="float32 times that are more than rounding steps apart, within 2^24",
            got=reprlib.repr(times.flatten().tolist()),
            remedy="Make them float64 before anything else, or subtract the first time first.",
        )


def require_tokens(name: str, count: int) -> None:
    """Require a number of tokens whose positions and orders fit into memory."""
    if type(count) is int and count > LONG and 24 * count > memory():
        raise ArgumentError(
            name,
            expected="tokens whose positions fit into memory",
            got=f"{count:,}",
            remedy="Use fewer tokens.",
        )


def require_lengths(lengths: Sequence[int], least: int, *, of: str) -> list[int]:
    """``lengths`` as a list; ArgumentError unless there are some, each ``least`` or more."""
    if isinstance(lengths, (str, bytes, bytearray, Mapping, Set)) or not isinstance(
        lengths, Iterable
    ):
        got: object = type(lengths).__name__
    elif isinstance(lengths, Tensor) and lengths.dim() != 1:
        got = f"a tensor of shape {list(lengths.shape)}"
    elif counts := [require_whole("lengths", length, least) for length in lengths]:
        return counts
    else:
        got = lengths
    raise ArgumentError(
        "lengths", expected=f"one length per {of}", got=got, remedy="Give at least 1."
    )


def require_padded(lengths: Collection[int], length: int | None, side: str) -> int:
    """Require rows of at most ``length`` tokens, and side left or right.

    Returns:
        ``length``, by default the longest of ``lengths``.
    """
    total = max(lengths) if length is None else require_whole("length", length, 0)
    check("lengths", Annotated[int, Interval(0, total, remedy="Raise `length`.")], max(lengths))
    check("side", Literal["left", "right"], side, "right")
    require_tokens("length", total * len(lengths))
    return total


def require_mask(mask: Tensor) -> None:
    """Require an attention mask of 0 and 1 and of shape ``[B, L]``."""
    require_tensor("mask", mask)
    if (
        mask.dim() != 2
        or mask.is_complex()
        or (has_values(mask) and not bool(((mask == 0) | (mask == 1)).all()))
    ):
        raise ArgumentError(
            "mask",
            expected="0 and 1 of shape [B, L]",
            got=f"{mask.dtype} of shape {list(mask.shape)}",
            remedy="Use the tokenizer's attention_mask; additive masks are (mask == 0).",
        )


def require_dense(name: str, x: Tensor) -> None:
    """Require a tensor that is neither nested nor sparse.

    Raises:
        ArgumentError: for nested tensors, naming the layouts for rows of different lengths.
    """
    if x.is_nested:
        raise ArgumentError(
            name,
            expected="rows of one length",
            got="a nested tensor",
            remedy="Pad its rows, torch.nested.to_padded_tensor(x, 0), with "
            "Layout.padded(lengths), or join them into one, torch.cat(x.unbind()), with "
            "Layout.packed(lengths).",
        )
    if x.layout is not torch.strided:
        raise ArgumentError(
            name, expected="a dense tensor", got=f"one in {x.layout}", remedy="Use .to_dense()."
        )


def require_claims(layout: Any) -> tuple[int | None, tuple[int, int] | None]:
    """``start`` and ``extent`` of a layout as plain numbers.

    Raises:
        ArgumentError: where they or ``consecutive`` are of another type, or, as far as values can
            be read on the CPU, not what positions and orders are.
    """
    start, extent = layout.start, layout.extent
    if start is not None:
        start = require_whole("start", start, -LARGEST, remedy="Leave it out.")
    if extent is not None:
        extent = check("extent", tuple[Count, Count], extent, None)
    check("consecutive", bool, layout.consecutive, False)
    if _are_readable(layout.positions):
        _require_values(start, extent, layout)
        if layout.consecutive:
            require_consecutive(layout)
    return start, extent


def require_unwritten(layout: Any) -> None:
    """Require positions and orders as ``start`` and ``extent`` say, in place as they are now.

    Raises:
        ArgumentError: where they are others, as far as values can be read on the CPU.
    """
    if layout.start is None and layout.extent is None:
        return
    if not layout.positions.is_cpu or torch._C._is_tracing():
        return
    if not needs_dispatch(layout.positions, layout.order):
        _require_values(layout.start, layout.extent, layout)


def _are_readable(positions: Tensor) -> bool:
    return positions.device.type == "cpu" and has_values(positions) and not is_transformed()


def _require_values(start: int | None, extent: tuple[int, int] | None, layout: Any) -> None:
    positions = layout.positions.detach()
    if start is not None:
        require_start(start, positions, layout.order)
    if extent is not None:
        require_extent(extent, positions, layout.special)


def require_start(start: int, positions: Float[Tensor, "b L A"], order: Int[Tensor, "b L"]) -> None:
    """Require positions and orders ``start, start + 1, …`` in every row."""
    expected = torch.arange(start, start + order.shape[1], device="cpu").view(1, -1, 1)
    orders = order.unsqueeze(-1)
    # most often in one row, which is compared in a tenth of the time
    if torch.equal(orders, expected) and torch.equal(positions, expected.to(positions.dtype)):
        return
    of_text = positions.shape[2] == 1
    if not (of_text and bool((orders == expected).all() & (positions == expected).all())):
        raise ArgumentError(
            "start",
            expected=f"positions and orders that are {start}, {start + 1}, … in every row",
            got="others",
            remedy="Leave it out, or use Layout.sequence(length, start).",
        )


def require_extent(
    extent: tuple[int, int], positions: Float[Tensor, "b L A"], special: Bool[Tensor, "b L"] | None
) -> None:
    """Require the cells of an image in raster order, after special tokens alone."""
    height, width = extent
    tokens = positions.shape[1]
    index = torch.arange(tokens, device=positions.device) - (tokens - height * width)
    before = index < 0
    cells = torch.stack([index // width, index % width], dim=-1)
    fits = height * width <= len(index) and positions.shape[2] == 2
    marked = not bool(before.any()) if special is None else bool((special == before).all())
    if not (fits and marked and bool((positions == cells)[:, ~before].all())):
        raise ArgumentError(
            "extent",
            expected=f"positions of {height} × {width} cells in raster order",
            got="others",
            remedy="Leave it out, or use Layout.image(height, width).",
        )


def require_consecutive(layout: Any) -> None:
    """Require real tokens of a document as far apart as they are in their row."""
    index = torch.arange(layout.length, device=layout.device)
    rows = torch.arange(layout.batch, device=layout.device).unsqueeze(1)
    document = torch.zeros_like(index) if layout.document is None else layout.document
    real = torch.ones_like(index, dtype=torch.bool) if layout.valid is None else layout.valid
    lags = (layout.positions.detach()[..., 0] - index, layout.order - index)
    parts = torch.broadcast_tensors(rows, document, *lags)  # type: ignore[no-untyped-call]
    tokens = torch.stack([part.double() for part in parts])[:, real.expand_as(parts[0])]
    # each document of a row has one lag of position and order
    steady = _columns(tokens) == _columns(tokens[:2])
    if layout.axes != 1 or not steady:
        raise ArgumentError(
            "consecutive",
            expected="tokens of a document as far apart as they are in their row, for True",
            got="others",
            remedy="Leave it out, or use Layout.packed(lengths) or Layout.padded(lengths).",
        )


def _columns(x: Float[Tensor, "N K"]) -> int:
    """Number of distinct columns."""
    distinct: Tensor = torch.unique(x, dim=1)
    return distinct.shape[1]
