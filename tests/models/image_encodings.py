"""The encodings that a model of images can have."""

from __future__ import annotations

from posenc.registry import ENCODINGS

IMAGE_ENCODINGS = [
    name
    for name, entry in ENCODINGS.items()
    if entry.claims.serves(2) and not entry.claims.causal_only
]
