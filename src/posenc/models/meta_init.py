"""Models on the meta device, to compare their shapes with a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Model = TypeVar("Model", bound=nn.Module)

STEPS, SLACK = 20, 500
"""Allowed tensor operations per stored tensor, and in addition; encodings need up to 9."""

NUMBERS = 1 << 24
"""Allowed size of a tensor that is not stored."""

IN_PLACE = ("normal_", "uniform_", "copy_", "fill_", "zero_", "clamp_")
"""In-place initialisers, skipped like ``torch.nn.init``: on the meta device they do nothing, but
some of them, and ``arange``, import PyTorch's compiler."""


def meta_init(make: Callable[[], Model], shapes: Iterable[tuple[int, ...]]) -> Model:
    """A model on the meta device, without memory for its weights.

    Stops early if the model is larger than the file, so an implausible configuration costs little
    time.

    Args:
        make: makes the model.
        shapes: of the stored tensors.

    Raises:
        ValueError: if the model has more tensors, or larger ones, than are stored.
    """
    sizes = [math.prod(shape) for shape in shapes]
    with torch.device("meta"), _Limits(STEPS * len(sizes) + SLACK, max(NUMBERS, 2 * sum(sizes))):
        return make()


class _Limits(TorchFunctionMode):
    """Counts the tensors, and their elements, that PyTorch functions return in this thread."""

    def __init__(self, steps: int, numbers: int) -> None:
        super().__init__()
        self.steps, self.numbers = steps, numbers

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(func, "__module__", "") == "torch.nn.init" or func.__name__ in IN_PLACE:
            return args[0] if args else named["tensor"]
        if func is torch.arange and str(named.get("device") or "meta") == "meta":
            result = _arange(*args, dtype=named.get("dtype"))
        else:
            result = func(*args, **named)
        if isinstance(result, Tensor):
            self.steps -= 1
            if self.steps < 0 or result.numel() > self.numbers:
                raise ValueError("a model that is larger than its weights")
        return result


def _arange(*bounds: float, dtype: torch.dtype | None) -> Tensor:
    """``torch.arange`` on the meta device."""
    values = range(*map(math.ceil, bounds))
    return torch.empty(len(values), dtype=dtype or torch.int64)
