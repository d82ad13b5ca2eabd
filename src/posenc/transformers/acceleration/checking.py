"""Comparison of a model with itself on random inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from posenc.errors import ArgumentError
from posenc.transformers.acceleration.trials import (
    Trial,
    execution_device,
    family_behind,
    trials_of,
)
from posenc.transformers.calls import is_cache


@dataclass(frozen=True)
class Precision:
    """Precision of a model's arithmetic, and the difference between its outputs that it explains.

    Args:
        step: rounding error of a number, as a share of it.
        tolerance: largest difference allowed, as a share of the largest value.
        averaged: root mean squares are compared instead of largest values: rounding alone makes
            routers send single tokens to other experts.
    """

    step: float
    tolerance: float
    averaged: bool = False


PRECISIONS = {
    torch.float64: Precision(2.0**-52, 1e-7),
    torch.float32: Precision(2.0**-23, 1e-4),
    torch.float16: Precision(2.0**-10, 2e-2, averaged=True),
    torch.bfloat16: Precision(2.0**-7, 1e-1, averaged=True),
}
"""Precision of a model by its dtype."""

QUANTIZED = Precision(1 / 127, 1e-1, averaged=True)
"""Precision of quantised models, whose activations may have 8 bits."""


class OutputComparison:
    """Outputs of the transformers models inside a model, on random inputs.

    The inputs are a padded batch, tokens behind its cache, and a row long enough for compiled
    kernels.

    Attributes:
        tried: the inputs in words.

    Args:
        model: as it is.
        modules: those to be accelerated; models without any are not run.

    Raises:
        ArgumentError: when there is no such model, or it raises, or its outputs are not finite.
    """

    def __init__(self, model: nn.Module, modules: Collection[nn.Module]) -> None:
        self.bases = _bases(model, set(modules))
        if not self.bases:
            raise ArgumentError(
                "model",
                expected="a model of transformers, or one that holds such a model",
                got=type(model).__name__,
                remedy="Pass the model, not one of its layers, or check=False.",
            )
        self.modules = modules
        self.expected: dict[Trial, list[Tensor]] = {}
        descriptions: list[str] = []
        for trial in chain.from_iterable(map(trials_of, self.bases)):
            descriptions += self._begin(trial)
        self.tried = "; ".join(dict.fromkeys(descriptions))
        outputs = [*chain.from_iterable(self.expected.values())]
        if not all(bool(tensor.isfinite().all()) for tensor in outputs):
            raise ArgumentError(
                "check",
                expected="False for a model whose own outputs on random inputs are not finite",
                got=True,
                remedy="Compare outputs on your own inputs.",
            )
        self.precision = _precision(self.bases, outputs)

    def _begin(self, trial: Trial) -> list[str]:
        """Keep a trial's outputs; returns in words what was tried.

        What a model's own code cannot do is left out, but not its plain batch.
        """
        try:
            self.expected[trial], description = trial.run()
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            if trial.steps:
                return [*self._begin(replace(trial, steps=0)), f"no steps, which raise {got}"]
            if trial.rows == 1:
                return [f"no row of {trial.length}, which raises {got}"]
            raise ArgumentError(
                "check",
                expected=f"False for a {_names(self.bases)}, which raises on random inputs",
                got=f"True; {got}",
                remedy="Compare outputs on your own inputs.",
            ) from error
        return [description]

    def difference(self, *, short: bool = False) -> float:
        """The largest difference of outputs from those at first, as a share of each one's size.

        Args:
            short: without long rows.

        Raises:
            ArgumentError: when the model now raises.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        try:
            for trial, expected in self.expected.items():
                if trial.rows > 1 or not short:
                    pairs += zip(expected, trial.run()[0], strict=True)
        except Exception as error:
            raise ArgumentError(
                "model",
                expected=f"a {_names(self.bases)} that posenc can compute",
                got=f"{type(error).__name__}: {error}",
                remedy="It was left as it is. Please report this with the model's config.",
            ) from error
        return max((self._share(a, b) for a, b in pairs if a.numel()), default=0.0)

    def near(self, off: float) -> bool:
        """True if a difference is within the tolerance of the model's precision."""
        return off <= self.precision.tolerance

    def require_explained(self, off: float, layers: Iterable[nn.Module]) -> None:
        """Require that a difference is of the size of what rounding errors do to the model.

        Where a router follows, they send tokens to other experts.

        Args:
            off: the difference; the model is as it was at first.
            layers: of attention, whose outputs are rounded elsewhere.

        Raises:
            ArgumentError: when it is larger, or not a number.
        """
        with ExitStack() as stack:
            for module in {*self.modules, *layers}:
                handle = module.register_forward_hook(self._with_rounding_errors)
                stack.callback(handle.remove)
            allowed = max(self.precision.tolerance, 4 * self.difference())
        if not off <= allowed:
            raise ArgumentError(
                "model",
                expected=f"outputs within {allowed:.2g} of the original's",
                got=f"{off:.2g}",
                remedy="It was left as it is. Please report this with the model's config.",
            )

    def _with_rounding_errors(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        def rounded(x: Any) -> Any:
            if not (isinstance(x, Tensor) and x.is_floating_point()):
                return x
            return x * (1 + self.precision.step * (2 * torch.rand_like(x) - 1))

        return tree_map(rounded, output, is_leaf=is_cache)

    def _share(self, expected: Tensor, got: Tensor) -> float:
        off, size = got.double() - expected.double(), expected.double()
        mean = self.precision.averaged
        off, size = (x.square().mean().sqrt() if mean else x.abs().max() for x in (off, size))
        share = float(off / size.clamp(min=1e-6))
        return share if share >= 0 else inf  # not a number, which max would pass over


def without_values(model: nn.Module) -> bool:
    """True if some weights are on the meta device, and no hook fetches them from elsewhere."""
    return any(x.is_meta for x in model.parameters()) and execution_device(model) is None


def is_sharded_around(model: nn.Module) -> bool:
    """True if a module that holds a model of transformers is sharded, by which it must be called.

    Models of transformers that ``fully_shard`` itself was called with are none.
    """
    sharded = (part for part in model.modules() if _is_sharded(part))
    around = (part for part in sharded if not isinstance(part, PreTrainedModel))
    return any(isinstance(inner, PreTrainedModel) for part in around for inner in part.modules())


def _is_sharded(module: nn.Module) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, FSDPModule | FullyShardedDataParallel)


def _bases(model: nn.Module, modules: set[nn.Module]) -> list[PreTrainedModel]:
    """The outermost transformers models of a family; if none, the outermost of any.

    Models put together from others (an encoder of images and T5) are so compared part by part,
    since inputs for the whole do not follow from its config.
    """
    of_family = list(_outermost(model, modules, of_family=True))
    return of_family or list(_outermost(model, modules, of_family=False))[:1]


def _outermost(
    model: nn.Module, modules: set[nn.Module], *, of_family: bool
) -> Iterator[PreTrainedModel]:
    if isinstance(model, PreTrainedModel) and (not of_family or family_behind(model) is not None):
        if not modules.isdisjoint(model.modules()):
            # The parameters of a sharded model are gathered where the whole of it is called.
            yield model if _is_sharded(model) else model.base_model
        return
    for child in model.children():
        yield from _outermost(child, modules, of_family=of_family)


def _names(models: Sequence[nn.Module]) -> str:
    return " and ".join(type(model).__name__ for model in models)


def _precision(models: Sequence[nn.Module], outputs: Sequence[Tensor]) -> Precision:
    """The lowest precision of weights and outputs."""
    if any(_is_quantized(model) for model in models):
        return QUANTIZED
    tensors = chain(outputs, *(model.parameters() for model in models))
    precisions = [PRECISIONS[x.dtype] for x in tensors if x.dtype in PRECISIONS]
    return max(precisions, key=lambda precision: precision.step, default=PRECISIONS[torch.float32])


def _is_quantized(model: nn.Module) -> bool:
    """True for weights of torch.ao, of bitsandbytes, of subclasses of tensors, and in packed bits.

    transformers notes in the config how it quantised the weights it loaded.
    """
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        return True
    weights = [getattr(module, "weight", None) for module in model.modules()]
    return any(
        isinstance(weight, MethodType)
        or (isinstance(weight, Tensor) and not weight.is_floating_point())
        or type(weight).__module__.partition(".")[0] not in ("torch", "builtins")
        for weight in weights
    )
