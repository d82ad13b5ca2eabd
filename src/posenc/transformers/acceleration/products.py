"""Linear layers by oneDNN or posenc, where they are faster than the library that PyTorch takes.

In float32 PyTorch calls MKL, which takes up to three times as long as oneDNN on processors of AMD.
For a few rows, as in decoding, reading weights takes the time, and posenc's kernel reads each once.
Weights are read where they are: no copy is made or remembered.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from math import inf
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from posenc.attention.backends.native.linear import has_linear, linear
from posenc.runtime import PLAIN_TENSORS, is_scripted, needs_dispatch, without_autocast
from posenc.transformers.acceleration.accelerated import FASTER, Replacing, change_class, put_back

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ROWS = (1, 2, 4, 8, 64, 512)
"""Numbers of rows that are tried. Each decides for those up to the next."""

MOST_READ = 4
"""The largest of ``ROWS`` at which reading weights takes most of the time."""

READ_BYTES = 2**26
"""Bytes of the weights that a trial reads in turn, so that none is in a cache, as in a model."""

MOST_TRIED = 2.5e9
"""Multiplications of the largest product tried, which takes some 30 ms."""

ROUNDS, SECONDS = 3, 0.25
"""Most rounds of a trial, and the time after which that of a shape ends."""

GAIN = 0.95
"""Share of the time of PyTorch's product that another's must not exceed to be used."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From rows, a weight with a row an output, and a bias to the product."""


def by_onednn(
    x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "*B O"]:
    """``x @ weight.T + bias`` by oneDNN, without gradients.

    Raises:
        RuntimeError: for dtypes that oneDNN has no kernel of on this processor.
    """
    computed: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return computed


PRODUCTS: dict[str, Product] = {"oneDNN": by_onednn, "posenc": linear}

Fastest = tuple[tuple[str, float], ...]
"""By ``ROWS``, the product to use and how many times as fast it is; ("", 1.0) is PyTorch's."""


class FasterLinear(Replacing, nn.Linear):
    """A linear layer by the product that is fastest for the number of rows."""

    def forward(self, input: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:  # noqa: A002
        if type(self) is FasterLinear:
            weight, bias = self.weight, self.bias
            product = _product_for(self, input, weight, bias)
            if product is not None:
                return product(input, weight, bias)
        return nn.Linear.forward(self, input)


class FasterConv1D(Replacing, Conv1D):
    """A layer of GPT-2's kind, whose weight has a row an input, as ``FasterLinear``."""

    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        if type(self) is FasterConv1D:
            weight, bias = self.weight, self.bias
            product = _product_for(self, x, weight, bias)
            if product is not None:
                return product(x, weight.T, bias)
        output: Tensor = Conv1D.forward(self, x)
        return output


LAYERS: dict[type[nn.Module], type[Replacing]] = {nn.Linear: FasterLinear, Conv1D: FasterConv1D}
"""Classes by those that they replace; subclasses, as of quantizers, compute in their own ways."""


def take_products(model: nn.Module) -> str:
    """Let linear layers compute by other products where a trial shows that they are faster.

    Weights and names stay. What needs gradients, autocast or a graph is computed as before.

    Returns:
        In a sentence, what was done; "" for a model without such layers on a CPU.
    """
    layers, taken = list(_layers(model)), []
    for layer in layers:
        by_input = isinstance(layer, Conv1D)
        outputs, inputs = reversed(layer.weight.shape) if by_input else layer.weight.shape
        threads = torch.get_num_threads()
        fastest = trial(outputs, inputs, layer.weight.dtype, by_input=by_input, threads=threads)
        if any(name for name, _ in fastest):
            change_class(layer, LAYERS[type(layer)])
            layer.__dict__[FASTER] = (layer.weight.dtype, *(name for name, _ in fastest))
            taken.append(fastest)
    if not layers:
        return ""
    if not taken:
        return f"{len(layers)} linear layers: PyTorch's, since no other was faster here."
    names = {name for each in taken for name, _ in each} - {""}
    times = (f"{median(gain for _, gain in each):.1f}" for each in zip(*taken, strict=True))
    return (
        f"{len(taken)} of {len(layers)} linear layers: {' or '.join(sorted(names))} where that is "
        f"faster, here with {', '.join(map(str, ROWS))} rows {', '.join(times)} times as fast."
    )


def put_products_back(model: nn.Module) -> bool:
    """Undo ``take_products``; returns True if there was anything to undo."""
    taken = products_of(model)
    for layer in taken:
        put_back(layer)
    return bool(taken)


def products_of(model: nn.Module) -> list[Replacing]:
    """The layers with other products since ``take_products``."""
    kinds = tuple(LAYERS.values())
    return [x for x in model.modules() if isinstance(x, kinds) and type(x) in kinds]


@lru_cache(maxsize=256)
def trial(
    outputs: int, inputs: int, dtype: torch.dtype, *, by_input: bool, threads: int
) -> Fastest:
    """The fastest products for weights of a shape, timed once in a process.

    Args:
        by_input: True for weights stored with a row an input.
        threads: that PyTorch computes with.
    """
    found: list[tuple[str, float]] = []
    end = time.perf_counter() + SECONDS
    shape = (inputs, outputs) if by_input else (outputs, inputs)
    copies = 1 + READ_BYTES // (outputs * inputs * dtype.itemsize)
    with torch.inference_mode(), without_autocast(torch.device("cpu")):
        weights = torch.ones(copies, *shape, dtype=dtype, device="cpu")
        for rows in ROWS:
            if found and rows * outputs * inputs > MOST_TRIED:
                found.append(found[-1])
                continue
            few = rows <= MOST_READ
            names = ["oneDNN", "posenc"] if few and not by_input else ["oneDNN"]
            names = [name for name in names if _is_available(name, outputs, inputs, dtype)]
            layers = {name: _layer(name, outputs, inputs, dtype, by_input) for name in ("", *names)}
            x = torch.ones(1, rows, inputs, dtype=dtype, device="cpu")
            found.append(_fastest(x, weights if few else weights[:1], layers, end))
    return tuple(found)


def _layer(name: str, outputs: int, inputs: int, dtype: torch.dtype, by_input: bool) -> nn.Module:
    """A layer by one product for every number of rows, whose weight is yet to be set."""
    with torch.device("meta"):  # where no random numbers are drawn
        layer: Any = Conv1D(outputs, inputs) if by_input else nn.Linear(inputs, outputs)
    bias = torch.zeros(outputs, dtype=dtype, device="cpu")
    layer.bias = nn.Parameter(bias, requires_grad=False)
    if name:
        change_class(layer, LAYERS[type(layer)])
        layer.__dict__[FASTER] = (dtype, *[name] * len(ROWS))
    made: nn.Module = layer
    return made


def _fastest(
    x: Tensor, weights: Iterable[Tensor], layers: Mapping[str, nn.Module], end: float
) -> tuple[str, float]:
    """The fastest of some products, and PyTorch's time over its; PyTorch's if hardly slower.

    Args:
        weights: of the layers, used in turn.
        layers: by the name of their product, ``""`` for PyTorch's.
        end: time from which on no further round begins.
    """
    parameters = [nn.Parameter(weight, requires_grad=False) for weight in weights]
    shortest = dict.fromkeys(layers, inf)  # as other work only lengthens times
    for turn in range(ROUNDS + 1):
        if time.perf_counter() > end:
            break
        for name in list(shortest):
            try:
                times = [_time(layers[name], parameter, x) for parameter in parameters]
            except RuntimeError:  # oneDNN has no kernel of this dtype here
                del shortest[name]
                continue
            if turn:  # the first call of a product prepares it
                shortest[name] = min(shortest[name], *times)
    plain, best = shortest[""], min(shortest, key=lambda name: shortest[name])
    if not shortest[best] <= GAIN * plain < inf:
        return "", 1.0
    return best, plain / shortest[best]


def _time(layer: nn.Module, weight: nn.Parameter, x: Tensor) -> float:
    layer.weight = weight
    start = time.perf_counter()
    layer(x)
    return time.perf_counter() - start


def _layers(model: nn.Module) -> Iterator[Any]:
    """Linear layers whose products PyTorch computes, in float32 or less, from weights on a CPU."""
    layers: list[Any] = [module for module in model.modules() if type(module) in LAYERS]
    for layer in layers:
        weight = layer.weight
        if "forward" in vars(layer) or weight is None or not _is_dense(weight, 2):
            continue
        if weight.dtype in DTYPES and weight.numel() and not needs_dispatch(weight):
            yield layer


def _product_for(
    layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Product | None:
    """The product that is faster than PyTorch's for these tensors without gradients, if one is."""
    if torch.compiler.is_compiling() or is_scripted() or type(x) not in PLAIN_TENSORS:
        return None  # sizes that are read would be those of a graph
    dtype, *fastest = layer.__dict__[FASTER]
    # Before the rest, what decides most calls: in decoding, each line waits for memory.
    inputs = 0 if x.is_nested or x.dim() < 2 else x.shape[-1]
    rows = x.numel() // inputs if inputs else 0
    name = fastest[bisect_right(ROWS, rows) - 1] if rows else ""
    if not name or needs_dispatch(x, weight, bias):
        return None
    if not (x.dtype == weight.dtype == dtype and _is_dense(weight, 2)):
        return None
    if not x.is_cpu or x.layout is not torch.strided:
        return None
    outputs, width = reversed(weight.shape) if isinstance(layer, Conv1D) else weight.shape
    if width != inputs or not _is_available(name, outputs, inputs, dtype):
        return None
    learned = weight.requires_grad
    if bias is not None:
        # A bias is read as so many numbers, one after the other.
        if bias.dtype != dtype or not _is_dense(bias, 1) or len(bias) != outputs:
            return None
        learned = learned or bias.requires_grad
    if torch.is_grad_enabled() and (x.requires_grad or learned):
        return None
    return None if torch.is_autocast_enabled("cpu") else PRODUCTS[name]


def _is_available(name: str, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """True if a product can be used for weights of this shape."""
    if name == "posenc":
        return has_linear(outputs, inputs, dtype)
    mkldnn = torch.backends.mkldnn
    return bool(mkldnn.enabled) and mkldnn.is_available()  # type: ignore[no-untyped-call]


def _is_dense(x: Tensor, axes: int) -> bool:
    """True of a tensor on a CPU that lies in memory as it is indexed."""
    plain = x.is_cpu and x.layout is torch.strided and not x.is_nested
    return plain and x.dim() == axes and x.is_contiguous()
