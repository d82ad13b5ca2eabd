"""Maps as images: a pixel a cell would blur, so cells are blocks of pixels."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["data_uri"]

PIXELS = 576
"""Pixels a side, roughly: cells have whole ones."""


def data_uri(colours: Float[Tensor, "R K 4"]) -> str:
    """A PNG as a ``data:`` address: each cell in its red, green, blue and opacity, from 0 to 1."""
    rows, columns, _ = colours.shape
    down, across = (max(1, round(PIXELS / count)) for count in (rows, columns))
    levels = (colours.clamp(0, 1) * 255).round().to(torch.uint8)
    pixels = levels.repeat_interleave(across, 1)
    # Every line of a PNG begins with how it is filtered (2: less the line above), so that the
    # repeated lines of a block are all zero.
    content = bytearray()
    above = torch.zeros_like(pixels[0])
    blank = bytes([2]) + bytes(pixels[0].numel())
    for line in pixels:
        content += bytes([2]) + bytes((line - above).flatten().tolist()) + blank * (down - 1)
        above = line
    header = struct.pack(">IIBBBBB", columns * across, rows * down, 8, 6, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, body)
        for kind, body in (
            (b"IHDR", header),
            (b"IDAT", zlib.compress(bytes(content), 9)),
            (b"IEND", b""),
        )
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, body: bytes) -> bytes:
    check = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)
