"""Linear layers by oneDNN, where it is faster than the library that PyTorch takes.

In float32 PyTorch calls MKL, which takes up to three times as long as oneDNN on processors of AMD,
above all for few rows. oneDNN reads the weights where they are: no copy is made or remembered.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import inf
from statistics import median
from types import FunctionType, MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from posenc.runtime import is_scripted, needs_dispatch, without_autocast

LAYERS = (nn.Linear, Conv1D)
"""Classes that are served; subclasses, as those of quantizers, compute in their own ways."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ROWS = (1, 8, 64, 512)
"""Numbers of rows that are tried. Each decides for those up to the next."""

LARGEST = 2.5e9
"""Multiplications of the largest product tried, which takes some 30 ms."""

ROUNDS, SECONDS = 3, 0.25
"""Most rounds of a trial, and the time for those of one shape; what is not tried is not used."""

GAIN = 0.95
"""Share of the time of PyTorch's product that oneDNN's must not exceed to be used."""

Faster = tuple[float, ...]
"""How many times as fast oneDNN is, by ``ROWS``; 1 where it is not used."""


def take_products(model: nn.Module) -> str:
    """Let linear layers compute by oneDNN where a trial shows that it is faster.

    Layers keep their class, weights and names. Gradients, autocast, graphs and hooks are PyTorch's.

    Returns:
        In a sentence, what was done; "" for a model without such layers on a CPU.
    """
    layers, taken = list(_layers(model)), []
    for layer in layers:
        sizes = (*_by_output(layer).shape, isinstance(layer, Conv1D))
        faster = trial(*sizes, layer.weight.dtype, torch.get_num_threads())
        if max(faster) > 1:
            computed = _forward(layer.weight.dtype, faster)
            layer.__dict__["forward"] = MethodType(computed, layer)
            taken.append(faster)
    if not layers:
        return ""
    if not taken:
        return f"{len(layers)} linear layers: PyTorch's, since oneDNN was not faster here."
    times = (f"{median(each):.1f}" for each in zip(*taken, strict=True))
    return (
        f"{len(taken)} of {len(layers)} linear layers: oneDNN where it is faster, here with "
        f"{', '.join(map(str, ROWS))} rows {', '.join(times)} times as fast."
    )


def put_products_back(model: nn.Module) -> bool:
    """Undo ``take_products``; returns True if there was anything to undo."""
    found = False
    for module in model.modules():
        if _is_taken(module, "forward"):
            del module.__dict__["forward"]
            found = True
        elif _is_taken(module, "_old_forward"):  # under a hook of accelerate that came later
            module.__dict__["_old_forward"] = MethodType(type(module).forward, module)
            found = True
    return found


@lru_cache(maxsize=256)
def trial(outputs: int, inputs: int, by_input: bool, dtype: torch.dtype, threads: int) -> Faster:
    """How much faster oneDNN is for weights of a shape, timed once in a process.

    Args:
        by_input: True for weights stored with a row an input, as those of GPT-2.
        threads: that PyTorch computes with.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device="cpu").to(dtype)

    factors: list[float] = []
    end = time.perf_counter() + SECONDS
    with torch.inference_mode(), without_autocast(torch.device("cpu")):
        weight = drawn(inputs, outputs).T if by_input else drawn(outputs, inputs)
        for rows in ROWS:
            if factors and rows * outputs * inputs > LARGEST:
                factors.append(factors[-1])
                continue
            try:
                factors.append(_times_as_fast(drawn(rows, inputs), weight, end))
            except RuntimeError:  # oneDNN has no kernel of this dtype here
                return (1.0,) * len(ROWS)
    return tuple(factors)


def _times_as_fast(x: Tensor, weight: Tensor, end: float) -> float:
    """Time of PyTorch's product over that of oneDNN's; 1 where that is hardly shorter.

    Args:
        end: time from which on no further round begins.
    """
    products: tuple[Callable[..., Tensor], ...] = nn.functional.linear, product
    shortest = [inf, inf]  # as other work only lengthens times
    for turn in range(ROUNDS + 1):
        if turn and time.perf_counter() > end:
            break
        for which, compute in enumerate(products):
            start = time.perf_counter()
            compute(x, weight, None)
            if turn:  # the first call of a product prepares it
                shortest[which] = min(shortest[which], time.perf_counter() - start)
    plain, other = shortest
    return plain / other if other <= GAIN * plain else 1.0


def product(
    x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "*B O"]:
    """``x @ weight.T + bias`` by oneDNN, without gradients.

    Raises:
        RuntimeError: for dtypes that oneDNN has no kernel of on this processor.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _layers(model: nn.Module) -> Iterator[Any]:
    """Linear layers whose products PyTorch computes, in float32 or less, from weights on a CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    layers: list[Any] = [module for module in model.modules() if type(module) in LAYERS]
    for layer in layers:
        weight = layer.weight
        served = weight.is_cpu and weight.dtype in DTYPES and "forward" not in vars(layer)
        if served and not needs_dispatch(weight, layer.bias):
            yield layer


def _by_output(layer: Any) -> Float[Tensor, "O I"]:
    """The weights with a row an output."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


@lru_cache
def _forward(dtype: torch.dtype, faster: Faster) -> Callable[..., Tensor]:
    """A method for ``forward`` of layers, by how much faster oneDNN was in a dtype."""
    taken = [factor > 1 for factor in faster]

    def forward(self: Any, *arguments: Tensor, **options: Tensor) -> Tensor:
        (x,) = *arguments, *options.values()
        if x.dtype == dtype and _is_plain(x, self.weight, self.bias):
            rows = x.numel() // max(1, x.shape[-1])
            if rows and taken[bisect_right(ROWS, rows) - 1]:
                return product(x, _by_output(self), self.bias)
        return type(self).forward(self, x)

    return forward


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if oneDNN's product is that of PyTorch for these tensors, and no gradient is wanted."""
    if needs_dispatch(x, weight, bias) or is_scripted():
        return False
    if not (x.is_cpu and weight.is_cpu) or x.dtype != weight.dtype or x.dim() < 2:
        return False
    learned = weight.requires_grad or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and (x.requires_grad or learned):
        return False
    # oneDNN reads a bias as if its numbers were one after the other.
    plain = bias is None or (bias.dtype == x.dtype and bias.is_contiguous() and bias.is_cpu)
    return plain and not torch.is_autocast_enabled("cpu")


def _is_taken(module: nn.Module, name: str) -> bool:
    method = module.__dict__.get(name)
    function = getattr(method, "__func__", None)  # of a hook that wraps ours it is no function
    return isinstance(function, FunctionType) and function.__module__ == __name__
