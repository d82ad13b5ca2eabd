"""Time and memory of one layer of a model on this machine, with and without posenc."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from posenc.transformers.engines.config import LAYERS

LENGTHS = (128, 512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class LayerCost:
    """Forward pass of one layer over one row of tokens.

    Args:
        length: tokens.
        seconds, bytes: of transformers, peak of new tensors; None: not known.
        accelerated_seconds, accelerated_bytes: with posenc's attention; None where it has none.
        measured: False for what is computed from shorter lengths, as a + b·L + c·L².
    """

    length: int
    seconds: float | None
    bytes: float | None
    accelerated_seconds: float | None
    accelerated_bytes: float | None
    measured: bool


class TensorMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that operators made and that live at the same time, at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key and key not in self.live:
            self.live[key] = storage.nbytes()
            self.now += self.live[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


def costs(folder: Path, *, budget: float) -> tuple[list[LayerCost], str]:
    """Costs at 128 … 131,072 tokens, and a sentence on whether ``accelerate`` helps.

    Args:
        folder: with ``config.json``; weights are random ones.
        budget: seconds to measure for; longer inputs are computed from shorter ones.
    """
    try:
        from transformers import AutoConfig, AutoModel

        from posenc.transformers.acceleration import accelerate, restore
    except ModuleNotFoundError:
        return ([], "Costs were not measured: transformers is not installed.")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for name in (*LAYERS, "num_decoder_layers"):
            if isinstance(getattr(config, name, None), int):
                with suppress(AttributeError, ValueError):
                    setattr(config, name, 1)
        with torch.random.fork_rng():
            model = AutoModel.from_config(config, trust_remote_code=False).eval()
    except Exception as error:  # of an arbitrary config, or of another library
        return [], f"Costs were not measured: {shorten(str(error), 240, placeholder=' …')}"
    if model.main_input_name != "input_ids":
        return [], "Costs were not measured: the model does not read text."
    try:
        report = accelerate(model, shortest=0)
        served, reasons = report.accelerated > 0, {module.reason for module in report.modules}
        helps = (
            report.note or f"accelerate leaves attention as it is: {'; '.join(sorted(reasons))}."
        )
    except ValueError as error:
        served, helps = False, str(error)
    restore(model)
    rows, failure = _measured(model, accelerate if served else None, restore, budget)
    if not rows:
        return [], f"Costs were not measured: one layer does not run on text alone ({failure})."
    if served:
        helps = _helps(rows)
    return [*rows, *_computed(rows)], helps


def _measured(
    model: nn.Module, accelerate: Any, restore: Any, budget: float
) -> tuple[list[LayerCost], str]:
    """Costs of lengths within the budget, and why no further one could be measured."""
    rows: list[LayerCost] = []
    start = time.perf_counter()
    text = model.config.get_text_config()  # type: ignore[operator,union-attr]
    for length in LENGTHS:
        spent = time.perf_counter() - start
        # Four times the length costs up to 16 times as much, twice for each model.
        if rows and spent + 64 * (rows[-1].seconds or 0) > budget:
            break
        ids = torch.arange(length).remainder(text.vocab_size - 10).add(5).unsqueeze(0)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if model.config.is_encoder_decoder:  # type: ignore[union-attr]
            inputs["decoder_input_ids"] = ids
        try:
            original = _one(model, inputs)
        except (IndexError, RuntimeError, ValueError) as error:  # beyond the table of positions
            return rows, " ".join(str(error).split()).removesuffix(".")
        fast: tuple[float | None, float | None] = (None, None)
        if accelerate is not None:
            accelerate(model, check=False, shortest=0)
            fast = _one(model, inputs)
            restore(model)
        rows.append(LayerCost(length, *original, *fast, measured=True))
    return rows, ""


@torch.no_grad()
def _one(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, float]:
    """Seconds and peak bytes of a forward pass."""
    with TensorMemory() as memory:
        model(**inputs)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model(**inputs)
        times.append(time.perf_counter() - start)
        if times[-1] > 1:
            break
    return median(times), float(memory.peak)


def _computed(rows: Sequence[LayerCost]) -> list[LayerCost]:
    """Costs of the lengths that were not measured, by a parabola through the last three."""
    if len(rows) < 3:
        return []
    last = rows[-3:]
    names = ("seconds", "bytes", "accelerated_seconds", "accelerated_bytes")
    computed = []
    for length in LENGTHS[len(rows) :]:
        seconds, size, fast, fast_size = (_parabola(last, name, length) for name in names)
        computed.append(LayerCost(length, seconds, size, fast, fast_size, measured=False))
    return computed


def _parabola(rows: Sequence[LayerCost], name: str, length: int) -> float | None:
    values = [getattr(row, name) for row in rows]
    if None in values:
        return None
    x = torch.tensor([row.length for row in rows], dtype=torch.float64)
    y = torch.tensor(values, dtype=torch.float64)
    a, b, c = torch.linalg.solve(torch.stack([x**0, x, x**2], dim=1), y).tolist()
    return float(max(a + b * length + max(c, 0.0) * length**2, values[-1]))


def _helps(rows: Sequence[LayerCost]) -> str:
    faster = [
        row
        for row in rows
        if row.accelerated_seconds and row.seconds and row.accelerated_seconds < 0.95 * row.seconds
    ]
    if not faster:
        return f"accelerate(model) was not faster up to {rows[-1].length:,} tokens."
    last = rows[-1]
    ratio = (last.seconds or 0.0) / (last.accelerated_seconds or 1.0)
    return (
        f"accelerate(model) helps from about {faster[0].length:,} tokens on: the forward pass of a "
        f"layer over {last.length:,} tokens is {ratio:.1f} times as fast."
    )
