"""GGUF files with metadata and tensors of RoPE alone."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LLAMA = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 2,
    "llama.rope.dimension_count": 32,
    "llama.rope.freq_base": 5e5,
    "tokenizer.ggml.tokens": ["a", "bc"],
    "tokenizer.ggml.scores": [0.5, 1.0],
}
"""Metadata of the model of ``test_loaded.made``."""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def typed(value: Any) -> bytes:
    """A value behind its type."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    first = value[0]
    head = struct.pack("<IIQ", 9, 8 if isinstance(first, str) else 6, len(value))
    items = map(text, value) if isinstance(first, str) else (struct.pack("<f", x) for x in value)
    return head + b"".join(items)


def write_gguf(
    path: Path, values: Mapping[str, Any], tensors: Mapping[str, Sequence[float]] | None = None
) -> Path:
    """A file of version 3."""
    tensors = tensors or {}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(text(name) + typed(value) for name, value in values.items())
    data = b""
    for name, items in tensors.items():
        head += text(name) + struct.pack("<IQIQ", 1, len(items), 0, len(data))
        data += struct.pack(f"<{len(items)}f", *items)
        data += b"\0" * (-len(data) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path
