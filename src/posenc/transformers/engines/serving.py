"""Commands and settings that serve an extended model in an engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.transformers.checkpoints import TRAINED
from posenc.transformers.engines.config import Engine, ModelConfig
from posenc.transformers.engines.llama_cpp import KEY, LLAMA_CPP, architecture

KEYS = {
    "default": {},
    "linear": {"factor": "float32"},
    "yarn": {"factor": "float32", "original_context_length": "uint32", "attn_factor": "float32"},
}
"""Scalings that keys of GGUF can express, with the types of their values.

That of a gain, ``attn_factor``, is read by every model and written by no conversion of YaRN, so
that the command gives it too; those of its ramp are read by hardly one.
"""

OVERRIDING = {
    "vllm": ("vllm serve", "--hf-overrides", "--max-model-len"),
    "sglang": (
        "python -m sglang.launch_server --model-path",
        "--json-model-override-args",
        "--context-length",
    ),
}
"""Commands by engine, and their options for other fields of the config and for the longest text."""

COMMANDS = {
    "transformers": "transformers serve {folder}",
    "mlx": "mlx_lm.server --model {folder}",
    "ctranslate2": "ct2-transformers-converter --model {folder} --output_dir model-ct2",
    "onnxruntime-genai": "python -m onnxruntime_genai.models.builder -i {folder} -o model-onnx "
    "-p fp32 -e cpu",
    "openvino": "optimum-cli export openvino --model {folder} --task text-generation-with-past "
    "model-openvino",
}
"""Commands by engine, of those that read the folder and nothing else: they serve or convert it."""

FROM = {"factor": "factor", "original_context_length": TRAINED, "attn_factor": KEY}
"""Parameters of ``config.json`` by keys of GGUF."""


@dataclass(frozen=True)
class Serving:
    """Words to type.

    Args:
        engine: its name.
        command: that serves the written folder.
        original: that serves the model as it was in the same way; "": there is none.
        keys: metadata that a GGUF file of the model as it was needs for it, with values and types.
    """

    engine: str
    command: str
    original: str = ""
    keys: Mapping[str, tuple[Any, str]] | None = None


def serving(
    engine: Engine, fields: Mapping[str, Any], out: Path, source: str, goal: int
) -> Serving:
    """How to serve an extended folder.

    Args:
        engine: that rotates as the folder says.
        fields: of its ``config.json``.
        out: the folder.
        source: the model as it was, as commands name it; "" if its weights are others.
        goal: tokens of the longest text.
    """
    config = ModelConfig.of(fields)
    folder = shlex.quote(str(out))
    if engine.option in OVERRIDING:
        start, fields_option, longest = OVERRIDING[engine.option]
        overrides_json = shlex.quote(json.dumps(overrides(config, goal=goal)))
        original = (
            f"{start} {source} {fields_option} {overrides_json} {longest} {goal}" if source else ""
        )
        return Serving(engine.name, f"{start} {folder} {longest} {goal}", original)
    if engine.option == "llama.cpp":
        command = f"python convert_hf_to_gguf.py {folder} --outfile model.gguf && "
        command += f"llama-server -m model.gguf -c {goal}"
        keys = gguf_keys(config, goal=goal)
        for key, (value, _) in (keys or {}).items():
            if key.endswith(".attn_factor"):
                command += f" --override-kv {key}=float:{value:.9g}"
        return Serving(engine.name, command, keys=keys)
    return Serving(engine.name, COMMANDS[engine.option].format(folder=folder))


def overrides(config: ModelConfig, *, goal: int) -> dict[str, Any]:
    """Fields that turn the config of the model as it was into the extended one.

    Linear and dynamic scaling multiply the longest text, which stays that of training.
    """
    parameters = dict(config.written.get("rope_parameters") or {})
    changes: dict[str, Any] = {"rope_parameters": parameters}
    if parameters.get("rope_type") not in ("linear", "dynamic"):
        changes["max_position_embeddings"] = goal
    if TRAINED in config.written:
        changes[TRAINED] = config.written[TRAINED]
    return {config.nested: changes} if config.nested else changes


def gguf_keys(config: ModelConfig, *, goal: int) -> dict[str, tuple[Any, str]] | None:
    """Metadata of GGUF by key, with the types of the values; None for scalings kept in tensors."""
    rope = LLAMA_CPP.with_options(config).ropes().get("")
    if rope is None or rope.kind not in KEYS:
        return None
    arch = architecture(config)
    keys: dict[str, tuple[Any, str]] = {f"{arch}.context_length": (goal, "uint32")}
    if rope.kind == "default":
        return keys | {f"{arch}.rope.freq_base": (rope.base, "float32")}
    keys[f"{arch}.rope.scaling.type"] = (rope.kind, "string")
    for key, kind in KEYS[rope.kind].items():
        value = rope.parameters.get(FROM[key])
        if value is not None:
            keys[f"{arch}.rope.scaling.{key}"] = (value, kind)
    return keys
