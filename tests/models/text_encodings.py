"""The encodings that a model of text can have."""

from __future__ import annotations

from posenc.registry import ENCODINGS

TEXT_ENCODINGS = [name for name, entry in ENCODINGS.items() if entry.claims.serves(1)]
