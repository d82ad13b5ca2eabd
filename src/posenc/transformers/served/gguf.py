"""The metadata of a GGUF file, read without the package of that name, and RoPE by it."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posenc.errors import CheckpointError
from posenc.transformers.engines.config import FULL
from posenc.transformers.engines.llama_cpp import KEY, LLAMA_CPP, TENSOR
from posenc.transformers.engines.rotation import RopeParameters
from posenc.transformers.served.launch import USUAL_BASE, StartedServer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY, FLOAT32 = 8, 9, 0
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
FORMATS |= {12: "d"}
"""Formats of ``struct`` by type of a value."""

TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that frequencies are divided by."""

RAMPS = ("mistral3",)
"""Architectures of which the ends of YaRN's ramp are read."""

WINDOW_BASE = {"gemma3": 10000.0, "gemma3n": 10000.0}
"""Bases of windows that the program has itself."""

UNSCALED_WINDOWS = ("gemma3", "gemma3n", "olmo2", "gemma4", "gpt-oss", "exaone4")


class _Reader:
    """Values one after another."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.content):
            raise ValueError("it ends early")
        self.at += size
        return self.content[self.at - size : self.at]

    def number(self, kind: int) -> Any:
        code = "<" + FORMATS[kind]
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        return self.take(self.number(10)).decode(errors="replace")

    def value(self, kind: int) -> Any:
        """A value; None for lists of texts, such as vocabularies."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(kind)
        inside, count = self.number(4), self.number(10)
        if inside == STRING:
            for _ in range(count):
                self.take(self.number(10))
            return None
        code = FORMATS[inside]
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code)))


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, tuple[float, ...]]]:
    """The metadata of a file, and the tensors that frequencies are divided by.

    Raises:
        CheckpointError: if it is missing, damaged or of another format.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as all_:
            return _read(_Reader(all_))
    except (OSError, ValueError, KeyError, struct.error, OverflowError) as error:
        got = "no such file" if isinstance(error, FileNotFoundError) else f"another file: {error}"
        raise CheckpointError(
            str(path),
            expected="a GGUF file of version 2 or 3",
            got=got,
            remedy="Convert or download it again; of a split model, name the first file.",
        ) from error


def _read(reader: _Reader) -> tuple[dict[str, Any], dict[str, tuple[float, ...]]]:
    if reader.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := reader.number(4)) not in VERSIONS:
        raise ValueError(f"version {version}")
    tensors, keys = reader.number(10), reader.number(10)
    values: dict[str, Any] = {}
    for _ in range(keys):
        name = reader.text()
        values[name] = reader.value(reader.number(4))
    places = {}
    for _ in range(tensors):
        name, axes = reader.text(), reader.number(4)
        sizes = [reader.number(10) for _ in range(axes)]
        kind, offset = reader.number(4), reader.number(10)
        if name in TENSORS and kind == FLOAT32:
            places[name] = (sizes[0], offset)
    align = values.get("general.alignment") or 32
    start = -(-reader.at // align) * align
    found = {}
    for name, (count, offset) in places.items():
        reader.at = start + offset
        found[name] = struct.unpack(f"<{count}f", reader.take(4 * count))
    return values, found


def launch_of(path: Path) -> StartedServer:
    """A server of a GGUF file by llama.cpp, without options.

    Raises:
        CheckpointError: as ``read_gguf``; or if the file does not describe a model of text.
    """
    values, tensors = read_gguf(path)
    arch = str(values.get("general.architecture") or "")
    keys = {k.removeprefix(f"{arch}."): v for k, v in values.items() if k.startswith(f"{arch}.")}
    try:
        rope = _rope(arch, keys, tensors)
    except (KeyError, TypeError, ZeroDivisionError, ValueError, IndexError) as error:
        raise CheckpointError(
            str(path),
            expected="sizes of a model with RoPE",
            got=f"none for {arch or 'its architecture'} ({error})",
            remedy="Name the file of the model itself, not of an adapter or a projector.",
        ) from error
    window, layers = keys.get("attention.sliding_window"), int(keys.get("block_count") or 0)
    ropes = {"": rope}
    if window:
        base = keys.get("rope.freq_base_swa") or WINDOW_BASE.get(arch, rope.base)
        scaling = {} if arch in UNSCALED_WINDOWS else rope.parameters
        windowed = replace(rope, base=float(base), parameters=scaling)
        ropes = {FULL: rope, "sliding_attention": windowed}
    return StartedServer(
        LLAMA_CPP,
        ropes,
        rope.longest,
        None if window else (0,) * layers,  # which layers have windows the program knows
        (),
        arch,
    )


def _rope(
    arch: str, keys: Mapping[str, Any], tensors: Mapping[str, tuple[float, ...]]
) -> RopeParameters:
    heads = keys["attention.head_count"]
    heads = heads if isinstance(heads, int) else max(heads)
    head = int(keys.get("attention.key_length") or keys["embedding_length"] // heads)
    longest = int(keys["context_length"])
    short, long = (tensors.get(f"rope_factors_{side}.weight") for side in ("short", "long"))
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear")
    parameters: dict[str, Any] = {"factor": float(factor) if factor else 1.0}
    kind = keys.get("rope.scaling.type") or ("linear" if factor else "default")
    parameters["rope_type"] = "default" if kind == "none" else kind
    gain = keys.get("rope.scaling.attn_factor")
    parameters |= {KEY: gain} if gain else {}
    every = keys.get("rope.scaling.yarn_log_multiplier")
    if every:
        parameters |= {"logarithm": every, "one": every if arch == "deepseek2" else 1.0}
    if arch in RAMPS:
        ends = {f"beta_{end}": keys.get(f"rope.scaling.yarn_beta_{end}") for end in _ENDS}
        parameters |= {name: value for name, value in ends.items() if value}
    if long and short:
        parameters |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        parameters.setdefault(KEY, 1.0)
    elif "rope_freqs.weight" in tensors:
        parameters |= {"rope_type": TENSOR, "factors": tensors["rope_freqs.weight"]}
    return RopeParameters(
        base=float(keys.get("rope.freq_base") or USUAL_BASE),
        width=int(keys.get("rope.dimension_count") or head),
        parameters=parameters,
        trained=int(keys.get("rope.scaling.original_context_length") or longest),
        longest=longest,
        head=head,
    )


_ENDS = ("fast", "slow")
