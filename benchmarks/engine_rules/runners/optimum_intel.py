"""Runner of OpenVINO: optimum-intel's export in float32, on the CPU."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
from loop import main
from optimum.exporters.openvino import main_export

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""CPUs with AMX compute in bfloat16 by default, and caches have 8 bits."""


def load(folder: Path) -> Callable[[list[int]], np.ndarray]:
    """Export the model, and compile it."""
    exported = Path(tempfile.mkdtemp())
    try:
        main_export(
            str(folder),
            exported,
            task="text-generation-with-past",
            convert_tokenizer=False,
            stateful=True,
        )
        core = openvino.Core()
        model = core.read_model(exported / "openvino_model.xml", config={"ENABLE_MMAP": False})
        compiled = core.compile_model(model, "CPU", FLOAT32)
    finally:
        shutil.rmtree(exported, ignore_errors=True)
    names = {name for one in compiled.inputs for name in one.names}

    def run(tokens: list[int]) -> np.ndarray:
        inputs = {
            "input_ids": np.array([tokens]),
            "attention_mask": np.ones((1, len(tokens)), dtype=np.int64),
            "position_ids": np.arange(len(tokens))[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        request = compiled.create_infer_request()
        answer = request.infer({name: x for name, x in inputs.items() if name in names})
        return np.array(answer["logits"][0])

    return run


def release() -> str:
    """The version of the runtime, whose exporter is pinned beside it."""
    return version("openvino")


if __name__ == "__main__":
    main(load, release)
