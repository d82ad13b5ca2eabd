"""PNG images of maps, whose cells are blocks of pixels, since one pixel a cell would blur."""

from __future__ import annotations

import base64
from io import BytesIO

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

PIXELS = 576
"""Pixels a side, roughly: cells have whole ones."""


def data_uri(colours: Float[Tensor, "R K 4"]) -> str:
    """A PNG as a ``data:`` address: each cell in its red, green, blue and opacity, from 0 to 1."""
    rows, columns, _ = colours.shape
    down, across = (max(1, round(PIXELS / count)) for count in (rows, columns))
    levels = (colours.clamp(0, 1) * 255).round().to(torch.uint8)
    image = Image.fromarray(levels.numpy())
    content = BytesIO()
    blocks = image.resize((columns * across, rows * down), Image.Resampling.NEAREST)
    blocks.save(content, "png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
