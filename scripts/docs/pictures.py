"""Pictures of encodings for their pages."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import vl_convert
from PIL import Image

from posenc.visualization.pictures import draw
from posenc.visualization.profile import make_profile

COLOURS = 128


def save(name: str, path: Path) -> None:
    """Draw an encoding as a small PNG; its title is the page's."""
    spec = draw(make_profile(name))
    del spec["title"]
    image = Image.open(BytesIO(vl_convert.vegalite_to_png(spec, scale=1.25)))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert("RGB").quantize(COLOURS).save(path, optimize=True)
