"""Models without memory for their weights, made to compare their shapes with a file's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["unfilled"]

Model = TypeVar("Model", bound=nn.Module)

STEPS, SLACK = 20, 500
"""Tensors made for each that is stored, and beside them; the encodings of the registry need 9."""

NUMBERS = 1 << 24
"""Of a tensor that is computed and not stored, at least."""

IN_PLACE = ("normal_", "uniform_", "copy_", "fill_", "zero_", "clamp_")
"""Left out, as all of ``torch.nn.init``: there is nothing to change. PyTorch would import its
compiler for some of them, and for ``arange``, when they are called on the meta device."""


def unfilled(make: Callable[[], Model], shapes: Iterable[tuple[int, ...]]) -> Model:
    """A model on the meta device, whose weights take no memory.

    Its making ends as soon as it is clear that it is larger than what is stored, so that a
    configuration of many layers or large widths costs no more time than the file is worth.

    Args:
        make: makes it.
        shapes: of the stored tensors that are to fill it.

    Raises:
        ValueError: when it needs more tensors, or larger ones, than are stored.
    """
    sizes = [math.prod(shape) for shape in shapes]
    with torch.device("meta"), _Limits(STEPS * len(sizes) + SLACK, max(NUMBERS, 2 * sum(sizes))):
        return make()


class _Limits(TorchFunctionMode):
    """Counts the tensors that PyTorch's functions return in this thread, and their numbers."""

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
    """As ``torch.arange``, on the meta device."""
    values = range(*map(math.ceil, bounds))
    return torch.empty(len(values), dtype=dtype or torch.int64)
