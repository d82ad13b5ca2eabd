"""vLLM on a processor, in one process: log-probabilities of every token of a text."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(sys.path.pop(0))  # this folder has a file of vLLM's name
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # some layers compile C++ even in eager mode
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
for name, value in SETTINGS.items():  # read while vLLM is imported
    os.environ.setdefault(name, value)

import numpy as np  # noqa: E402
from loop import main  # noqa: E402
from vllm import LLM, SamplingParams, __version__  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.logprobs import FlatLogprobs  # noqa: E402

gc.freeze()  # else each of an engine's nine collections walks all that is imported

ALL = -1
"""Number of log-probabilities that stands for the whole vocabulary."""

CACHE = 1 << 26
"""Bytes of keys and values: a text of 500 tokens in four layers takes 4 MB."""

_OPEN: dict[str, LLM] = {}
"""The engine of the last checkpoint."""


def load(folder: Path) -> Callable[[list[int]], np.ndarray]:
    """Open a checkpoint folder, for the longest of its texts."""
    _close()
    texts = json.loads((folder / "tokens.json").read_text())
    longest = max(map(len, texts.values())) + 1  # with the generated token
    model = _OPEN["model"] = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        max_num_seqs=1,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=CACHE,
        skip_tokenizer_init=True,
        max_logprobs=ALL,
        disable_log_stats=True,
    )
    every = SamplingParams(
        max_tokens=1, logprobs=ALL, prompt_logprobs=ALL, flat_logprobs=True, detokenize=False
    )

    def run(tokens: list[int]) -> np.ndarray:
        [answer] = model.generate({"prompt_token_ids": tokens}, every, use_tqdm=False)
        # of each token but the first, after those before it; then of the generated one
        return np.concatenate(
            [_by_token(answer.prompt_logprobs), _by_token(answer.outputs[0].logprobs)]
        )

    return run


def _by_token(flat: FlatLogprobs) -> np.ndarray:
    """Log-probabilities [positions, vocabulary]."""
    spans = [
        span for span in zip(flat.start_indices, flat.end_indices, strict=True) if span[0] < span[1]
    ]
    found = np.full((len(spans), max(flat.token_ids) + 1), np.nan, dtype=np.float32)
    for row, (start, end) in zip(found, spans, strict=True):
        row[flat.token_ids[start:end]] = flat.logprobs[start:end]
    return found


def _close() -> None:
    """Free the engine before; its end would take the next one's process groups away."""
    if _OPEN:
        _OPEN.pop("model").llm_engine.engine_core.shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()


def release() -> str:
    return __version__


if __name__ == "__main__":
    main(load, release)
