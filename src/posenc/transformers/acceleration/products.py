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
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from posenc.runtime import is_scripted, needs_dispatch, without_autocast
from posenc.transformers.acceleration.accelerated import FASTER, Replacing, change_class, put_back

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ROWS = (1, 8, 64, 512)
"""Numbers of rows that are tried. Each decides for those up to the next."""

MOST_TRIED = 2.5e9
"""Multiplications of the largest product tried, which takes some 30 ms."""

ROUNDS, SECONDS = 3, 0.25
"""Most rounds of a trial, and the time after which that of a shape ends."""

GAIN = 0.95
"""Share of the time of PyTorch's product that oneDNN's must not exceed to be used."""

Faster = tuple[float, ...]
"""How many times as fast oneDNN is, by ``ROWS``; 1 where it is not used or was not tried."""


class OneDnnLinear(Replacing, nn.Linear):
    """A linear layer that oneDNN computes, for numbers of rows at which it is faster."""

    def forward(self, input: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:  # noqa: A002
        if type(self) is OneDnnLinear and _is_served(self, input, self.weight, self.bias):
            return product(input, self.weight, self.bias)
        return nn.Linear.forward(self, input)


class OneDnnConv1D(Replacing, Conv1D):
    """A layer of GPT-2's kind, whose weight has a row an input, as ``OneDnnLinear``."""

    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        if type(self) is OneDnnConv1D and _is_served(self, x, self.weight, self.bias):
            return product(x, self.weight.T, self.bias)
        output: Tensor = Conv1D.forward(self, x)
        return output


LAYERS: dict[type[nn.Module], type[Replacing]] = {nn.Linear: OneDnnLinear, Conv1D: OneDnnConv1D}
"""Classes by those that they replace; subclasses, as of quantizers, compute in their own ways."""


def take_products(model: nn.Module) -> str:
    """Let linear layers compute by oneDNN where a trial shows that it is faster.

    Weights and names stay. What needs gradients, autocast or a graph is computed as before.

    Returns:
        In a sentence, what was done; "" for a model without such layers on a CPU.
    """
    layers, taken = list(_layers(model)), []
    for layer in layers:
        by_input = isinstance(layer, Conv1D)
        outputs, inputs = reversed(layer.weight.shape) if by_input else layer.weight.shape
        threads = torch.get_num_threads()
        faster = trial(outputs, inputs, layer.weight.dtype, by_input=by_input, threads=threads)
        if max(faster) > 1:
            change_class(layer, LAYERS[type(layer)])
            layer.__dict__[FASTER] = (layer.weight.dtype, *faster)
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
    taken = products_of(model)
    for layer in taken:
        put_back(layer)
    return bool(taken)


def products_of(model: nn.Module) -> list[Replacing]:
    """The layers that oneDNN computes since ``take_products``."""
    kinds = tuple(LAYERS.values())
    return [x for x in model.modules() if isinstance(x, kinds) and type(x) in kinds]


@lru_cache(maxsize=256)
def trial(outputs: int, inputs: int, dtype: torch.dtype, *, by_input: bool, threads: int) -> Faster:
    """How much faster oneDNN is for weights of a shape, timed once in a process.

    Args:
        by_input: True for weights stored with a row an input.
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
            if factors and rows * outputs * inputs > MOST_TRIED:
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
        if time.perf_counter() > end:
            break
        for which, compute in enumerate(products):
            start = time.perf_counter()
            compute(x, weight, None)
            if turn:  # the first call of a product prepares it
                shortest[which] = min(shortest[which], time.perf_counter() - start)
    plain, other = shortest
    return plain / other if other <= GAIN * plain < inf else 1.0


def product(
    x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "*B O"]:
    """``x @ weight.T + bias`` by oneDNN, without gradients.

    Raises:
        RuntimeError: for dtypes that oneDNN has no kernel of on this processor.
    """
    computed: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return computed


def _layers(model: nn.Module) -> Iterator[Any]:
    """Linear layers whose products PyTorch computes, in float32 or less, from weights on a CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    layers: list[Any] = [module for module in model.modules() if type(module) in LAYERS]
    for layer in layers:
        weight = layer.weight
        if "forward" in vars(layer) or weight is None or not _is_dense(weight, 2):
            continue
        if weight.dtype in DTYPES and weight.numel() and not needs_dispatch(weight):
            yield layer


def _is_served(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if oneDNN computes what PyTorch does for these tensors, faster, without gradients."""
    dtype, *faster = layer.__dict__[FASTER]
    if needs_dispatch(x, weight, bias) or is_scripted():
        return False
    if not (x.dtype == weight.dtype == dtype and _is_dense(weight, 2)):
        return False
    if not x.is_cpu or x.layout is not torch.strided or x.is_nested or x.dim() < 2:
        return False
    outputs = weight.shape[1 if isinstance(layer, Conv1D) else 0]
    inputs = weight.numel() // outputs if outputs else 0
    rows = x.numel() // inputs if inputs and x.shape[-1] == inputs else 0
    if not rows or faster[bisect_right(ROWS, rows) - 1] == 1:
        return False
    learned = weight.requires_grad
    if bias is not None:
        # oneDNN reads a bias as so many numbers, one after the other.
        if bias.dtype != dtype or not _is_dense(bias, 1) or len(bias) != outputs:
            return False
        learned = learned or bias.requires_grad
    if torch.is_grad_enabled() and (x.requires_grad or learned):
        return False
    return bool(torch.backends.mkldnn.enabled) and not torch.is_autocast_enabled("cpu")


def _is_dense(x: Tensor, axes: int) -> bool:
    """True of a tensor on a CPU that lies in memory as it is indexed."""
    plain = x.is_cpu and x.layout is torch.strided and not x.is_nested
    return plain and x.dim() == axes and x.is_contiguous()
