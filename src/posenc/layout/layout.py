"""Layout: positions, order, documents and padding of a batch of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.layout.checks import (
    FLOATING,
    TOKEN_FIELDS,
    require_claims,
    require_device,
    require_fields,
    require_finite,
    require_lengths,
    require_mask,
    require_padded,
    require_rows,
    require_tensor,
    require_tensors,
    require_times,
    require_tokens,
    require_whole,
)
from posenc.layout.coordinates import Coordinates, along, raster, require_coordinates
from posenc.layout.fields import join, join_field, register, require_joinable
from posenc.layout.integers import DOUBLE, LARGEST, exact_dtype, successors

TENSORS = ("positions", "order", "document", "valid", "special", "signal")


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions of the tokens of a batch, with their causal order, documents and padding.

    Args:
        positions: ``[B|1, L, A]`` float32 or float64 (exact integers up to 2^24 or 2^53), whatever
            the features' dtype; any finite reals. Encodings read these.
        order: ``[B|1, L]`` int64; under a causal mask a token attends to equal or lower order.
        document: ``[B|1, L]`` int64; tokens attend only within their document. None: one document.
        valid: ``[B|1, L]`` bool; False is padding, masked both as query and as key; its features
            may hold anything, NaN included. None: all valid.
        special: ``[B|1, L]`` bool; tokens without a position, such as a class token. None: none.
        signal: ``[B, L, S]``; per-token values that a part computed from the features (a forget
            gate, for example). Cached with the keys.
        start: set only if positions and order are both ``start, start + 1, …`` in every row; lets
            fast paths recognise a regular layout without reading the device.
        extent: set only if positions are the cells of a whole ``(height, width)`` grid in raster
            order, after any special tokens.
        consecutive: set only if positions and orders of the real tokens of a document are both as
            far apart as the tokens are in their row; likewise.

    Raises:
        ArgumentError: for inconsistent ranks, lengths or dtypes, positions that are not finite, or
            other than ``start``, ``extent`` and ``consecutive`` say (values are read on the CPU
            only, to avoid a device sync).
    """

    positions: Float[Tensor, "b L A"]
    order: Int[Tensor, "b L"]
    document: Int[Tensor, "b L"] | None = None
    valid: Bool[Tensor, "b L"] | None = None
    special: Bool[Tensor, "b L"] | None = None
    signal: Float[Tensor, "b L S"] | None = None
    start: int | None = None
    extent: tuple[int, int] | None = None
    consecutive: bool = False

    def __post_init__(self) -> None:
        token_fields = {name: getattr(self, name) for name in TOKEN_FIELDS}
        require_tensors(self.positions, token_fields)
        require_tensor("order", self.order)
        self._require_signal(self.signal)
        start, extent = require_claims(self)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "extent", extent)
        if start is None and self.positions.device.type == "cpu":
            require_finite(self.positions)

    @classmethod
    def _trusted(cls, positions: Tensor, order: Tensor, **others: Any) -> Layout:
        """A layout of tensors that are known to fit and to be as is claimed of them."""
        if torch.compiler.is_compiling():
            return cls(positions, order, **others)
        layout = object.__new__(cls)
        vars(layout).update(positions=positions, order=order, **others)  # others: the defaults
        return layout

    @classmethod
    def sequence(
        cls,
        length: int,
        start: int = 0,
        *,
        prefix: int = 0,
        device: torch.device | str | None = None,
    ) -> Layout:
        """Positions ``start, …, start + length - 1``, after ``prefix`` special tokens ([CLS]).

        Positions are float32 up to 2^24 and float64 beyond.

        Raises:
            ArgumentError: for an empty sequence, or positions beyond 2^53.
        """
        length = require_whole("length", length)
        start = require_whole("start", start, -(2**63), most=2**63, remedy="Use 0.")
        prefix = require_whole("prefix", prefix, 0, remedy="Count the special tokens.")
        require_device(device)
        require_tokens("length", length)
        exact_dtype(start, start + length - 1, torch.device("cpu"), argument="start")
        order = torch.arange(start, start + length, device=device).unsqueeze(0)
        dtype = exact_dtype(start, start + length - 1, order.device, argument="start")
        tokens = cls._trusted(order.to(dtype).unsqueeze(-1), order, start=start)
        return tokens._after(prefix, start - prefix)

    @classmethod
    def packed(cls, lengths: Sequence[int], *, device: torch.device | str | None = None) -> Layout:
        """Documents concatenated in one row; positions restart at 0 in each."""
        lengths = require_lengths(lengths, 1, of="document")
        require_device(device)
        require_tokens("lengths", sum(lengths))
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        document = torch.repeat_interleave(
            torch.arange(len(lengths), device=device),
            torch.tensor(lengths, device=device),
            output_size=sum(lengths),
        )
        order = torch.arange(len(positions), device=device)
        return cls._trusted(
            positions.to(torch.float32).reshape(1, -1, 1),
            order.unsqueeze(0),
            document=document.unsqueeze(0),
            consecutive=True,
        )

    @classmethod
    def padded(
        cls,
        lengths: Sequence[int],
        length: int | None = None,
        *,
        side: str = "right",
        prefix: int = 0,
        device: torch.device | str | None = None,
    ) -> Layout:
        """Rows of different lengths, padded; each row's first real token is at position 0.

        Args:
            lengths: real tokens of each row.
            length: tokens per row after padding; the longest of ``lengths`` by default.
            side: ``"right"`` or ``"left"``.
            prefix: special tokens ([CLS]) before each row and its padding, not counted above.
        """
        lengths = require_lengths(lengths, 0, of="row")
        prefix = require_whole("prefix", prefix, 0, remedy="Count the special tokens.")
        total = require_padded(lengths, length, side)
        require_device(device)
        real = torch.tensor(lengths, device=device).unsqueeze(1)
        order = torch.arange(total, device=device).unsqueeze(0)
        if side == "left":
            order = order - (total - real)
            valid = order >= 0
        else:
            order = order.expand(len(lengths), total)
            valid = order < real
        positions = order.to(torch.float32).unsqueeze(-1)
        tokens = cls._trusted(positions, order, valid=valid, consecutive=True)
        return tokens._after(prefix, -prefix)

    @classmethod
    def from_attention_mask(
        cls, mask: Tensor, *, special: Bool[Tensor, "b L"] | None = None
    ) -> Layout:
        """Layout from a tokenizer's attention mask; positions count real tokens from 0.

        Args:
            mask: ``[B, L]`` of any dtype, 1 for a real token and 0 for padding.
            special: ``[B|1, L]`` bool, tokens without a position (``tokens == cls_id``); they get
                position 0 and are not counted.

        Raises:
            ArgumentError: for another rank, or entries other than 0 and 1.
        """
        require_mask(mask)
        valid = mask != 0
        if special is not None:
            require_fields(mask.shape[1], {"special": special})
        counted = valid if special is None else valid & ~special
        places = (counted.cumsum(1) - 1).clamp(min=0).masked_fill(~counted, 0)
        order = valid.cumsum(1) - 1
        return cls(places.to(torch.float32).unsqueeze(-1), order, valid=valid, special=special)

    @classmethod
    def image(
        cls,
        height: int,
        width: int,
        *,
        valid: Bool[Tensor, "b h w"] | None = None,
        prefix: int = 0,
        device: torch.device | str | None = None,
    ) -> Layout:
        """The cells of an image in raster order, at (row, column), after ``prefix`` special tokens.

        Args:
            height, width: cells along each axis.
            valid: ``[B|1, height, width]`` bool, False for padding.
            prefix: special tokens before the image (a class token), at (0, 0).
        """
        height, width = require_whole("height", height), require_whole("width", width)
        prefix = require_whole("prefix", prefix, 0)
        require_device(device)
        require_tokens("height", height * width)
        positions = raster([torch.arange(side, device=device) for side in (height, width)], prefix)
        order = torch.arange(prefix + height * width, device=device).unsqueeze(0)
        if valid is not None:
            shape, remedy = ("B|1", height, width), "Give one entry per cell."
            require_tensor("valid", valid, shape, (torch.bool,), remedy=remedy)
            valid = torch.cat([valid.new_ones(valid.shape[0], prefix), valid.flatten(1)], dim=1)
        return cls._trusted(
            positions,
            order,
            valid=valid,
            special=order < prefix if prefix else None,
            extent=(height, width),
        )

    @classmethod
    def cells(
        cls,
        *sizes: int,
        coordinates: Coordinates | Sequence[Coordinates] = "indices",
        prefix: int = 0,
        device: torch.device | str | None = None,
    ) -> Layout:
        """The cells of a box on any number of axes in raster order, after ``prefix`` special ones.

        ``Layout.cells(frames, height, width)`` is a video. The coordinate of cell i of n is

        - ``"indices"``: i;
        - ``"centred"``: i - (n - n // 2), whole numbers, 0 where the second half begins;
        - ``"midpoints"``: (2i + 1) / n - 1, the middles of n equal parts of -1 to 1;
        - ``"ends"``: 2i / (n - 1) - 1, from -1 to 1; -1 alone.

        Args:
            sizes: cells along each axis.
            coordinates: of each axis or of all.
            prefix: special tokens before the cells (a class token), at 0 on all axes.

        Raises:
            ArgumentError: for no axes, an axis without cells, or too many cells; or if there are
                not as many ``coordinates`` as axes.
            UnknownNameError: for other ``coordinates``.
        """
        sizes = tuple(require_whole("sizes", size) for size in sizes)
        prefix = require_whole("prefix", prefix, 0)
        require_device(device)
        require_tokens("sizes", math.prod(sizes))
        kinds = require_coordinates(coordinates, len(sizes))
        axes = [along(size, kind, device) for size, kind in zip(sizes, kinds, strict=True)]
        positions = raster(axes, prefix)
        order = torch.arange(positions.shape[1], device=device).unsqueeze(0)
        return cls._trusted(positions, order, special=order < prefix if prefix else None)

    @classmethod
    def at(cls, times: Tensor, *, valid: Bool[Tensor, "b L"] | None = None) -> Layout:
        """Tokens at real positions ``times`` ([L], [B, L] or [B, L, A]), in the order given.

        Integers become float32 if all are within 2^24, else float64. Where ``valid`` [B|1, L] is
        False is padding, whose times may hold anything and become 0. Subtract an origin, which
        absolute encodings read, and choose a unit in which neighbours are about 1 apart.

        Raises:
            ArgumentError: for NaN, infinity, an integer beyond 2^53, or float32 times whose spacing
                is lost (unix seconds), on any device.
        """
        positions = require_times(times, valid)
        order = torch.arange(positions.shape[1], device=times.device).unsqueeze(0)
        return cls(positions, order, valid=valid)

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.positions.shape[1]

    @property
    def axes(self) -> int:
        """Coordinates per position."""
        return self.positions.shape[2]

    @property
    def batch(self) -> int:
        """Number of rows; 1 if all rows are the same."""
        rows = self.positions.shape[0]
        for name in TENSORS[1:]:
            part = getattr(self, name)
            rows = rows if part is None else max(rows, part.shape[0])
        return rows

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def __repr__(self) -> str:
        """``Layout(length=1024, batch=1, axes=1, document=…)``; reads shapes alone."""
        items = [f"length={self.length}", f"batch={self.batch}", f"axes={self.axes}"]
        items += [f"start={self.start}"] if self.start is not None else []
        items += [f"extent={self.extent}"] if self.extent is not None else []
        items += [f"{name}=…" for name in self._tensors() if name not in ("positions", "order")]
        dtype = self.positions.dtype
        items += [f"dtype={dtype}"] if dtype != torch.float32 else []
        items += [f"device={self.device}"] if self.device.type != "cpu" else []
        return f"Layout({', '.join(items)})"

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name in TENSORS if (value := getattr(self, name)) is not None}

    def _with(self, values: Mapping[str, Any]) -> Layout:
        """The layout with other values, of which the same claims hold or other ones are given."""
        fields_of_self = {field.name: getattr(self, field.name) for field in fields(self)}
        return self._trusted(**fields_of_self | dict(values))

    def to(self, device: torch.device | str | None) -> Layout:
        """The layout on another device; None keeps the current one."""
        require_device(device)
        if device is None or self.device == torch.device(device):
            return self
        return self._with({name: part.to(device) for name, part in self._tensors().items()})

    def in_precision_of(self, x: Tensor) -> Layout:
        """The layout with float64 positions beside ``DOUBLE`` features, else itself."""
        if x.dtype not in DOUBLE or self.positions.dtype == torch.float64:
            return self
        return self._with({"positions": self.positions.double()})

    def slice(self, begin: int, end: int) -> Layout:
        """Tokens ``begin`` to ``end`` (exclusive) of every row."""
        for name, index in (("begin", begin), ("end", end)):
            require_whole(name, index, -LARGEST, remedy="Count tokens.")
        begin, end = (_clipped(index, self.length) for index in (begin, end))
        parts = {name: tensor[:, begin:end] for name, tensor in self._tensors().items()}
        start = None if self.start is None else self.start + begin
        return self._with(parts | {"start": start, "extent": None})

    def select(self, rows: Int[Tensor, " rows"]) -> Layout:
        """The layout of the given batch rows (for beam search)."""
        require_rows(rows, None if self.batch == 1 else self.batch)
        if self.batch == 1:
            return self
        parts = {n: t if t.shape[0] == 1 else t[rows] for n, t in self._tensors().items()}
        return self._with(parts)

    def following(self) -> Layout:
        """The layout of the next token of every row, in the last token's document.

        On several axes its position is, along each, one past the maximum of the last document.

        Raises:
            ArgumentError: for a layout with a signal, which depends on the token.
        """
        if self.signal is not None:
            raise ArgumentError(
                "layout",
                expected="one without a signal",
                got="a signal",
                remedy="Use the layout passed to the model, not the observed one.",
            )
        if self.start is not None:
            return Layout.sequence(1, self.start + self.length, device=self.device)
        last = self.positions
        if self.axes > 1 and self.document is not None:
            others = self.document != self.document[:, -1:]
            last = last.masked_fill(others.unsqueeze(-1), -torch.inf)
        last = last[:, -1:] if self.axes == 1 else last.amax((1, 2), True)
        return Layout(
            successors(last.expand(-1, 1, self.axes)),
            self.order[:, -1:] + 1,
            document=None if self.document is None else self.document[:, -1:],
        )

    def _after(self, count: int, order: int) -> Layout:
        """Prepend ``count`` special tokens; the first has this ``order``."""
        if count == 0:
            return self
        orders = torch.arange(order, order + count, device=self.device).unsqueeze(0)
        zeros = self.positions.new_zeros(1, count, self.axes)
        special = torch.ones_like(orders, dtype=torch.bool)
        return Layout(zeros, orders, special=special).concat(self)

    def with_positions(self, positions: Float[Tensor, "b L A"]) -> Layout:
        """The layout with other positions; tokens, order and documents are unchanged."""
        return replace(self, positions=positions, start=None, extent=None, consecutive=False)

    def with_signal(self, signal: Float[Tensor, "b L S"] | None) -> Layout:
        """The layout with another signal, or with none.

        Raises:
            ArgumentError: for a signal of another length.
        """
        if torch.compiler.is_compiling():
            return replace(self, signal=signal)
        self._require_signal(signal)
        return self._with({"signal": signal})

    def _require_signal(self, signal: Tensor | None) -> None:
        if signal is not None:
            shape, remedy = ("B", self.length, "S"), "encoding.observe computes it."
            require_tensor("signal", signal, shape, FLOATING, remedy=remedy)

    def concat(self, other: Layout) -> Layout:
        """This layout's tokens followed by those of ``other``, in every row.

        If only one of the two has documents, validity or special tokens, the other's tokens are in
        document 0, valid and not special.
        """
        require_joinable(self, other)
        follows = self.start is not None and other.start == self.start + self.length
        return Layout._trusted(
            positions=join(self.positions, other.positions),
            order=join(self.order, other.order),
            document=join_field(self, other, "document", 0),
            valid=join_field(self, other, "valid", True),
            special=join_field(self, other, "special", False),
            signal=None
            if self.signal is None or other.signal is None
            else join(self.signal, other.signal),
            start=self.start if follows else None,
        )


def _clipped(index: int, length: int) -> int:
    """An index of a slice as Python reads it; PyTorch 2.11 does not trace ``slice.indices``."""
    if index < 0:
        return 0 if index < -length else index + length
    return length if index > length else index


register(Layout, "posenc.layout.Layout", TENSORS)
