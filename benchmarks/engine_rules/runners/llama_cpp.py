"""Logits of llama.cpp, on the processor in float32: its converter, and its program in xllamacpp.

The converter is that of a source distribution, unpacked in the environment. Its vocabulary is set
aside, since it takes none but those of released models; the file has the number of tokens instead.
``override_kv.json`` of a folder has keys of GGUF that ``--override-kv`` sets, with numbers.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from loop import main

CONTEXT = 512
"""Tokens of the longest text."""

FLOAT32 = 0
"""Of ``ggml_type``, and of the converter's ``LlamaFileType``."""

DOUBLE = 1
"""Of ``llama_model_kv_override_type``."""


class Override(ctypes.Structure):
    """``llama_model_kv_override`` with a number."""

    _fields_ = (
        ("tag", ctypes.c_int),
        ("key", ctypes.c_char * 128),
        ("value", ctypes.c_double),
        ("rest", ctypes.c_char * 120),
    )


class ModelOptions(ctypes.Structure):
    """``llama_model_params``."""

    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("n_gpu_layers", "split_mode", "load_mode")),
        *((name, ctypes.c_int) for name in ("lazy_mode", "main_gpu")),
        *((name, ctypes.c_void_p) for name in ("tensor_split", "progress", "progress_data")),
        ("kv_overrides", ctypes.POINTER(Override)),
        *((name, ctypes.c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts")),
        *((name, ctypes.c_bool) for name in ("no_host", "no_alloc", "load_mtp")),
    )


class ContextOptions(ctypes.Structure):
    """``llama_context_params``."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        *((name, ctypes.c_uint32) for name in ("n_rs_seq", "n_outputs", "n_outputs_per_seq")),
        *((name, ctypes.c_int32) for name in ("n_threads", "n_threads_batch")),
        *((name, ctypes.c_int) for name in ("ctx_type", "rope_scaling_type", "pooling_type")),
        *((name, ctypes.c_int) for name in ("attention_type", "flash_attn_type")),
        *((name, ctypes.c_float) for name in ("rope_freq_base", "rope_freq_scale")),
        *((name, ctypes.c_float) for name in ("yarn_ext_factor", "yarn_attn_factor")),
        *((name, ctypes.c_float) for name in ("yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", ctypes.c_uint32),
        ("defrag_thold", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("cb_eval", "cb_eval_user_data")),
        *((name, ctypes.c_int) for name in ("type_k", "type_v")),
        ("moe_cache_size", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("abort_callback", "abort_callback_data")),
        *((name, ctypes.c_bool) for name in ("embeddings", "offload_kqv", "no_perf")),
        *((name, ctypes.c_bool) for name in ("op_offload", "swa_full", "kv_unified")),
        ("samplers", ctypes.c_void_p),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", ctypes.c_void_p),
    )


class Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def program() -> ctypes.CDLL:
    """The C library, whose structures must be those above: their defaults are looked at."""
    [place] = find_spec("xllamacpp").submodule_search_locations
    library = ctypes.CDLL(str(Path(place) / "xllamacpp.abi3.so"))
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    for name, result, given in (
        ("llama_model_default_params", ModelOptions, []),
        ("llama_context_default_params", ContextOptions, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, ModelOptions]),
        ("llama_init_from_model", pointer, [pointer, ContextOptions]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", number, [pointer]),
        ("llama_batch_init", Batch, [number, number, number]),
        ("llama_batch_free", None, [Batch]),
        ("llama_decode", number, [pointer, Batch]),
        ("llama_get_logits", ctypes.POINTER(ctypes.c_float), [pointer]),
        ("llama_free", None, [pointer]),
        ("llama_model_free", None, [pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, given
    options = library.llama_context_default_params()
    usual = (options.n_batch, options.type_k, options.type_v, options.swa_full, options.n_samplers)
    if usual != (2048, 1, 1, True, 0) or not library.llama_model_default_params().use_extra_bufts:
        raise RuntimeError(f"the structures of llama.cpp have changed: {usual}")
    library.llama_backend_init()
    return library


def convert(folder: Path, file: Path) -> None:
    """Write a checkpoint as GGUF in float32, with its number of tokens in place of a vocabulary."""
    [source] = (Path(sys.prefix) / "sources").glob("llama_cpp_python-*/vendor/llama.cpp")
    if str(source) not in sys.path:
        sys.path[:0] = [str(source), str(source / "gguf-py")]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    with torch.inference_mode():
        fields = ModelBase.load_hparams(folder, False)
        made = get_model_class(get_model_architecture(fields, ModelType.TEXT))
        model = made(folder, gguf.LlamaFileType(FLOAT32), file)
        model.set_vocab = lambda: write_vocabulary_size(model)
        model.write()


def write_vocabulary_size(model: Any) -> None:
    model.gguf_writer.add_tokenizer_model("none")
    key = f"{model.gguf_writer.arch}.vocab_size"
    if not any(key in part for part in model.gguf_writer.kv_data):
        model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])


def overrides(folder: Path) -> ctypes.Array[Override] | None:
    """Keys that an option of the server sets, and an empty one as their end."""
    file = folder / "override_kv.json"
    if not file.exists():
        return None
    keys = json.loads(file.read_text())
    listed = [Override(DOUBLE, key.encode(), float(value)) for key, value in keys.items()]
    return (Override * (len(listed) + 1))(*listed)


def load(folder: Path) -> Callable[[list[int]], np.ndarray]:
    """Logits of a checkpoint whose weights are float32, in contexts of ``CONTEXT`` tokens."""
    library = program()
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / "model.gguf"
        convert(folder, file)
        options = library.llama_model_default_params()
        keys = overrides(folder)
        if keys is not None:
            options.kv_overrides = keys
        model = library.llama_model_load_from_file(os.fsencode(file), options)
    if not model:
        raise RuntimeError("the program does not load the file: see the log")
    vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def run(tokens: list[int]) -> np.ndarray:
        chosen = library.llama_context_default_params()
        chosen.n_ctx = chosen.n_batch = chosen.n_ubatch = CONTEXT
        chosen.n_threads = chosen.n_threads_batch = 1
        chosen.type_k = chosen.type_v = FLOAT32
        chosen.flash_attn_type = 0
        context = library.llama_init_from_model(model, chosen)
        if not context:
            raise RuntimeError("the program makes no context: see the log")
        batch = library.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, 1
            failed = library.llama_decode(context, batch)
            if failed:
                raise RuntimeError(f"llama_decode returned {failed}")
            logits = library.llama_get_logits(context)
            return np.ctypeslib.as_array(logits, (len(tokens), vocabulary)).copy()
        finally:
            library.llama_batch_free(batch)
            library.llama_free(context)

    weakref.finalize(run, library.llama_model_free, model)
    return run


def release() -> str:
    return version("xllamacpp")


if __name__ == "__main__":
    main(load, release)
