"""Runner of ONNX Runtime GenAI: its model builder's graph in float32, on the CPU."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime_genai
from loop import main

MODELS = Path(onnxruntime_genai.__file__).parent / "models"
sys.path.insert(0, str(MODELS))  # the builder's own imports
from builder import create_model, parse_extra_options  # noqa: E402

OPTIONS = ["hf_token=false", "windowed_kv_cache=false"]
"""Caches of windows would need texts as long as a window."""


def load(folder: Path) -> Callable[[list[int]], np.ndarray]:
    """Build the graph, and open it."""
    built = Path(tempfile.mkdtemp())
    places = {"output_dir": str(built), "cache_dir": str(built / "cache")}
    try:
        target = {"precision": "fp32", "execution_provider": "cpu", **places}
        source = {"model_name": None, "input_path": str(folder)}
        options = parse_extra_options(**source, **target, extra_options=OPTIONS)
        create_model(**source, **target, **options)
        model = onnxruntime_genai.Model(str(built))
    finally:
        shutil.rmtree(built, ignore_errors=True)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]

    def run(tokens: list[int]) -> np.ndarray:
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=len(tokens) + 1, batch_size=1)
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(np.array(tokens, dtype=np.int32))
        return np.asarray(generator.get_output("logits"))[0, :, :vocabulary]

    return run


def release() -> str:
    """The engine's version."""
    return version("onnxruntime-genai")


if __name__ == "__main__":
    main(load, release)
