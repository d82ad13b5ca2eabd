"""SGLang's rotations: the modules that its own model makes for a config, by layer type.

Its models do not run without a graphics card, since their kernels come in packages for CUDA. The
modules are made all the same, on a processor, with empty stand-ins for those packages.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

sys.path.append(sys.path.pop(0))  # this folder has a file of SGLang's name
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import numpy as np
import torch
import tvm_ffi  # noqa: F401 - before stand-ins, which it would look into
from loop import main
from transformers.utils import import_utils

KERNELS = frozenset(
    {"aiter", "compressed_tensors", "cuda", "deep_ep", "fastsafetensors", "flash_attn"}
    | {"flashinfer", "gguf", "petit_kernel", "pplx_kernels", "pynvml", "sentencepiece"}
    | {"sgl_kernel", "torch_memory_saver", "torchcodec", "torchvision", "triton_kernels"}
    | {"vllm", "xielu"}
)
"""Packages that the models import and that making them does not call."""


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in the place of ``KERNELS``."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in KERNELS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing."""


def _attribute(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


for name in dir(import_utils):  # transformers remembers what there is not
    if name.startswith("is_") and name.endswith("_available"):
        with contextlib.suppress(Exception):
            getattr(import_utils, name)()
sys.meta_path.append(StandIns())

from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers.dp_attention import initialize_dp_attention  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402
from sglang.version import __version__  # noqa: E402

RANKS = (
    "tp_rank",
    "pp_rank",
    "attn_tp_rank",
    "attn_dp_rank",
    "attn_cp_rank",
    "moe_ep_rank",
    "moe_tp_rank",
)
LAYER = "layers."
"""Before the number of a layer in the names of modules."""


def load(folder: Path) -> Callable[[list[int]], dict[str, np.ndarray]]:
    """Make the model of a checkpoint folder, without its weights."""
    arguments = ServerArgs(model_path=str(folder), device="cpu", dtype="float32")
    _begin(arguments)
    config = ModelConfig(str(folder), dtype="float32")
    model_class, _ = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    torch.set_default_dtype(torch.float32)
    model = model_class(config.hf_config)
    rotations = _by_layer_type(model, getattr(config.hf_text_config, "layer_types", None))
    if not rotations:
        raise LookupError(f"{model_class.__name__} has no module that rotates")

    def run(tokens: list[int]) -> dict[str, np.ndarray]:
        found = {}
        for kind, module in rotations.items():
            for name, table in zip(("cos", "sin"), _tables(module, len(tokens)), strict=True):
                found["/".join(filter(None, (kind, name)))] = table.numpy()
        return found

    return run


def _begin(arguments: ServerArgs) -> None:
    """Set what a server sets before it makes a model: one process is all of its groups."""
    if torch.distributed.is_initialized():
        return
    set_global_server_args_for_scheduler(arguments)
    store = Path(tempfile.mkdtemp()) / "store"
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{store}",
        backend="gloo",
    )
    get_parallel().override_permanently(**dict.fromkeys(RANKS, 0))
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(arguments)


def _by_layer_type(
    model: torch.nn.Module, layer_types: list[str] | None
) -> dict[str, torch.nn.Module]:
    """Modules that rotate, by layer type; and as "" where all layers have the same."""
    by_layer: dict[int, torch.nn.Module] = {}
    whole_model = of_windows = None
    for name, module in model.named_modules(remove_duplicate=False):
        if name.rpartition(".")[2] == "rotary_emb" and LAYER in name:
            by_layer[int(name.partition(LAYER)[2].partition(".")[0])] = module
        elif name.endswith("model.rotary_emb"):  # by transformers' formulas
            whole_model = module
        elif name.endswith("model.rotary_emb_local"):
            of_windows = module
    if whole_model is not None and of_windows is not None:  # those of layers serve processors
        return {"full_attention": whole_model, "sliding_attention": of_windows}
    if not by_layer and whole_model is not None:
        return {"": whole_model}
    found = {} if layer_types is None else {layer_types[n]: m for n, m in by_layer.items()}
    if len({*by_layer.values()}) == 1:
        found[""] = next(iter(by_layer.values()))
    return found


def _tables(rotary: torch.nn.Module, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, pairs]: of queries (1, 0) in each pair, rotated."""
    positions = torch.arange(length)
    if not hasattr(rotary, "rotary_dim"):  # that of transformers
        cos, sin = rotary(torch.empty(1, 1), positions.unsqueeze(0))
        return cos[0].chunk(2, -1)[0], sin[0].chunk(2, -1)[0]
    width, size = rotary.rotary_dim, rotary.head_size
    halves = getattr(rotary, "is_neox_style", True)
    first = slice(width // 2) if halves else slice(0, width, 2)
    second = slice(width // 2, width) if halves else slice(1, width, 2)
    flat = hasattr(rotary, "long_short_cos_sin_cache")
    queries = torch.zeros((length, size) if flat else (length, 1, size))
    queries[..., first] = 1
    rotate = getattr(rotary, "forward_native", rotary.forward)
    rotated = rotate(positions, queries, queries.clone())[0].reshape(length, size)
    return rotated[:, first], rotated[:, second]


def release() -> str:
    return str(__version__)


if __name__ == "__main__":
    main(load, release)
