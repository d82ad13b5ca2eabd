"""A checkpoint folder, read and validated: ``config.json``, RoPE and extensions in it, tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posenc import storage
from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError, CheckpointError
from posenc.extension.methods.dynamic_ntk import DynamicNtkRope
from posenc.extension.methods.longrope import LongRope
from posenc.storage import open_tensors

SAVE_AGAIN = "Save it again; nothing was loaded."


class Fields:
    """The fields of a ``config.json``, or of a file beside it.

    Args:
        values: of the file.
        path: of the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    @classmethod
    def read(cls, folder: Path) -> Fields:
        """The configuration of a checkpoint folder.

        Raises:
            CheckpointError: if it is missing or not a JSON object.
        """
        path = folder / "config.json"
        if not path.exists():
            _refuse_other_kinds(folder)
        values = read_json(path)
        if not isinstance(values, dict):
            raise CheckpointError(
                str(path),
                expected="a JSON object",
                got=type(values).__name__,
                remedy="Name a folder written by transformers' save_pretrained.",
            )
        return cls(values, path)

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        return float(self._valid(name, default, "a finite number", _is_number))

    def numbers(self, name: str) -> list[float]:
        """A list of numbers."""
        return [float(item) for item in self._valid(name, None, "a list of numbers", _are_numbers)]

    def flag(self, name: str) -> bool:
        """True or False."""
        return bool(self._valid(name, None, "true or false", lambda v: isinstance(v, bool)))

    def _valid(self, name: str, default: Any, expected: str, valid: Callable[[Any], bool]) -> Any:
        value = self.values.get(name, default)
        if not valid(value):
            raise self.wrong(name, expected, value)
        return value

    def wrong(self, name: str, expected: str, got: object) -> CheckpointError:
        """An error about one field."""
        return CheckpointError(
            f"{name} in {self.path}",
            expected=expected,
            got=got,
            remedy="This model is not supported; nothing was loaded.",
        )


def _is_number(value: object) -> bool:
    """True for a finite number within the range of a float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        CheckpointError: if it is missing, unreadable, too large or not JSON.
    """
    return storage.read_json(
        path,
        expected="a JSON file of a checkpoint",
        remedy="Download or write it again; nothing was loaded.",
    )


def _refuse_other_kinds(folder: Path) -> None:
    """Refuse adapters and GGUF files by name.

    Raises:
        CheckpointError: saying what to name instead.
    """
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_object(adapter).get("base_model_name_or_path")
        got = f"an adapter of {base or 'another model'}"
        remedy = "Name that model; or merge the adapter into it and save it whole: "
        remedy += "model.merge_and_unload().save_pretrained(FOLDER)"
    elif folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        got, remedy = "a GGUF file", "Name the folder that the file was converted from."
    else:
        return
    raise CheckpointError(
        str(folder), expected="a folder with the config.json of a model", got=got, remedy=remedy
    )


def read_object(path: Path) -> dict[str, Any]:
    """The fields of a JSON file beside ``config.json``; none where there is no file.

    Raises:
        CheckpointError: when it is no JSON object.
    """
    if not path.exists():
        return {}
    fields = storage.read_json(path, expected="a JSON object", remedy=SAVE_AGAIN)
    if not isinstance(fields, dict):
        raise CheckpointError(
            str(path), expected="a JSON object", got=type(fields).__name__, remedy=SAVE_AGAIN
        )
    return fields


FIELD = "posenc_extension"
"""Field of ``config.json`` with method, factor, length and options, if transformers has none."""


def require_extension(fields: Fields) -> None:
    """Require method, factor, length and options of an extension.

    Raises:
        CheckpointError: for any other value.
    """
    extension = fields.values.get(FIELD)
    if (
        not isinstance(extension, Mapping)
        or set(extension) != {"method", "factor", "length", "options"}
        or not isinstance(extension["options"], Mapping)
    ):
        raise fields.wrong(FIELD, "method, factor, length and options", extension)


@contextmanager
def fitting(fields: Fields) -> Iterator[None]:
    """Turn errors of the extension of an arbitrary file into a ``CheckpointError``."""
    try:
        yield
    except Exception as error:
        raise fields.wrong(FIELD, "an extension that fits the model", error) from error


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

Shapes = dict[str, tuple[int, ...]]


def stored_shapes(folder: Path) -> Shapes:
    """Shapes of all tensors by name, read without executing code.

    Raises:
        CheckpointError: if there are no safetensors, or a shard is missing, damaged or lacks a
            tensor of the index.
    """
    if (folder / INDEX).exists():
        return _of_shards(folder)
    if (folder / WHOLE).exists():
        return _of_file(folder / WHOLE)
    pickled = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind))
    raise CheckpointError(
        str(folder),
        expected=f"{WHOLE}, or {INDEX} with its shards",
        got=f"{pickled[0]}, which is pickle" if pickled else "none",
        remedy="Save with save_pretrained of a recent transformers."
        if pickled
        else "Download or save the weights into the folder; nothing was loaded.",
    )


def _of_shards(folder: Path) -> Shapes:
    path = folder / INDEX
    index = read_json(path)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(
        isinstance(file, str) and 0 < len(file.encode()) < 256 and Path(file).name == file
        for file in weights.values()
    ):
        raise CheckpointError(
            str(path),
            expected="a weight_map from tensors to files in this folder",
            got="another value",
            remedy="Download or write the checkpoint again.",
        )
    files = sorted(set(weights.values()))
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise CheckpointError(
            str(folder),
            expected=f"all {len(files)} shards of {INDEX}",
            got=f"no {', '.join(missing)}",
            remedy="Download the missing shards; nothing was loaded.",
        )
    stored = {file: _of_file(folder / file) for file in files}
    for name, file in weights.items():
        if name not in stored[file]:
            raise CheckpointError(
                str(folder / file),
                expected=f"{name} according to {INDEX}",
                got="none",
                remedy="Download this shard again; nothing was loaded.",
            )
    return {name: stored[file][name] for name, file in weights.items()}


def _of_file(path: Path) -> Shapes:
    remedy = "Download or write it again; nothing was loaded."
    with open_tensors(path, expected="a complete safetensors file", remedy=remedy) as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


TRAINED = "original_max_position_embeddings"
"""Name of the trained length of an extended model."""

DEFAULT_LENGTH = 2048
"""Longest text of a model that has none, as in transformers' Llama."""


def parameters_in(config: Mapping[str, Any]) -> Any:
    """RoPE's parameters in a config, which may be by layer type; empty if it has none.

    Recent files have ``rope_parameters``, older ones ``rope_scaling``, which transformers prefers
    where there are both: it may have been added by hand.
    """
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def scaling_of(parameters: Mapping[str, Any]) -> str:
    """The kind of scaling that RoPE's parameters name, ``rope_type`` also by its older name."""
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


SCALINGS: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
    "dynamic": ("dynamic_ntk", {}),
    "linear": ("interpolate", {}),
    "llama3": ("llama3", {"low": ("low_freq_factor", 1.0), "high": ("high_freq_factor", 4.0)}),
    "longrope": (
        "longrope",
        {
            "long_factors": ("long_factor", ()),
            "short_factors": ("short_factor", ()),
            "temperature": ("attention_factor", None),
        },
    ),
    "yarn": (
        "yarn",
        {
            "alpha": ("beta_slow", 1.0),
            "beta": ("beta_fast", 32.0),
            "truncate": ("truncate", True),
            "temperature": ("attention_factor", None),
        },
    ),
}
"""Method by ``rope_type``, and its options' names and defaults in transformers."""


def yarn_gain(factor: float, temperature: float | None) -> dict[str, float]:
    """Parameters of YaRN by which every program scales rotated features by ``temperature``.

    A quotient of ``mscale`` in transformers, vLLM and mlx-lm; in SGLang and older vLLM
    ``attn_factor``, relative to the default. They disagree about ``attention_factor``; files of
    llama.cpp keep none of these.
    """
    usual = 0.1 * math.log(factor) + 1
    if temperature is None or temperature == usual:
        return {}
    if factor == 1:
        return {"attention_factor": temperature}
    every = float(f"{(usual / temperature - 1) / math.log(factor) * 10:.12g}")
    return {"mscale": 1.0, "mscale_all_dim": every, "attn_factor": temperature / usual}


def parameters_of(encoding: Encoding, longest: int | None) -> dict[str, Any]:
    """``rope_parameters`` of an encoding, in a model of texts of up to ``longest`` tokens."""
    part, rope = _supported_rope(encoding)
    learned = rope.log_frequencies is not None
    if rope.pairing != "half" or learned:
        raise _unknown(
            "rope with pairing='half' and learned=False",
            f"pairing={rope.pairing!r}, learned={learned}",
        )
    base = {"rope_theta": rope.base, "partial_rotary_factor": rope.fraction}
    if isinstance(part, DynamicNtkRope):
        return {"rope_type": "dynamic", "factor": part.factor, **base}
    if isinstance(part, LongRope):
        trained = int(part.length)
        return _longrope(part.long, part.short, part.gain, trained, longest or trained) | base
    if part.divisors is None:
        return {"rope_type": "default", **base}
    raised = _raised_base(part)
    if raised is not None:
        return {"rope_type": "default", **base, "rope_theta": raised}
    if math.isclose(min(part.divisors), max(part.divisors), rel_tol=1e-6) and part.gain == 1:
        return {"rope_type": "linear", "factor": part.divisors[0], **base}
    return equal_factors(encoding, longest)


def equal_factors(encoding: Encoding, longest: int | None) -> dict[str, Any]:
    """``rope_parameters`` of LongRoPE with the same factors for short and long texts.

    Raises:
        ArgumentError: unless the encoding is RoPE with other frequencies.
    """
    part, rope = _supported_rope(encoding)
    if part is not rope or rope.divisors is None:
        raise _unknown("rope with other frequencies", type(part).__name__)
    longest = longest or DEFAULT_LENGTH
    base = {"rope_theta": rope.base, "partial_rotary_factor": rope.fraction}
    return _longrope(rope.divisors, rope.divisors, rope.gain, longest, longest) | base


def _raised_base(rope: Rope) -> float | None:
    """The base that divides the frequencies as NTK-aware scaling does; None for other divisors."""
    assert rope.divisors is not None
    pairs, slowest = rope.rotated // 2, rope.divisors[-1]
    steps = (slowest ** (t / max(1, pairs - 1)) for t in range(pairs))
    same = all(map(math.isclose, rope.divisors, steps))
    if not same or rope.gain != 1 or slowest == math.inf or (pairs == 1 and slowest != 1):
        return None
    return float(rope.base * slowest ** (pairs / max(1, pairs - 1)))


STOPPED = 1e30
"""Factor of a pair that does not turn; JSON has no infinity."""


def _longrope(
    long: Sequence[float], short: Sequence[float], gain: float, trained: int, longest: int
) -> dict[str, Any]:
    """LongRoPE's parameters; the gain by the names of transformers and of vLLM.

    mlx-lm derives it from the lengths: 1 unless ``longest`` exceeds ``trained``.
    """
    return {
        "rope_type": "longrope",
        "factor": max(1.0, longest / trained),
        "long_factor": [min(factor, STOPPED) for factor in long],
        "short_factor": [min(factor, STOPPED) for factor in short],
        "attention_factor": gain,
        "long_mscale": gain,
        "short_mscale": gain,
        TRAINED: trained,
    }


def _supported_rope(encoding: Encoding) -> tuple[Rope | DynamicNtkRope | LongRope, Rope]:
    """The only part of an encoding that transformers supports, and its RoPE as trained.

    Raises:
        ArgumentError: for other parts.
    """
    part = encoding.query_key
    if encoding.parts() == (part,) and isinstance(part, Rope | DynamicNtkRope | LongRope):
        return part, part if isinstance(part, Rope) else part.rope
    names = " and ".join(type(part).__name__ for part in encoding.parts()) or "no encoding"
    raise _unknown("a model encoded by rope only", names)


def _unknown(expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        "model",
        expected=expected,
        got=got,
        remedy="Save it by model.save(folder), which supports every encoding.",
    )
