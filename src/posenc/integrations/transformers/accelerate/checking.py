"""Comparison of a model with itself on random inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from posenc.errors import ArgumentError
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily, family_of
from posenc.runtime import without_autocast

LENGTH, ROWS, PADDING = 48, 2, 7


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
"""By dtype."""

QUANTIZED = Precision(1 / 127, 1e-1, averaged=True)
"""Of activations in 8 bits."""


class Comparison:
    """Outputs of the transformers models inside a model, on random inputs.

    The same inputs every time, in evaluation mode; training flags and random states are kept.

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
        try:
            self.expected = self._outputs()
        except Exception as error:
            raise ArgumentError(
                "check",
                expected=f"False for a {_names(self.bases)}, which raises on random inputs",
                got=f"True; {type(error).__name__}: {error}",
                remedy="Compare outputs on your own inputs.",
            ) from error
        if not all(bool(tensor.isfinite().all()) for tensor in self.expected):
            raise ArgumentError(
                "check",
                expected="False for a model whose own outputs on random inputs are not finite",
                got=True,
                remedy="Compare outputs on your own inputs.",
            )
        self.precision = _precision(self.bases, self.expected)

    def difference(self) -> float:
        """The largest difference of outputs from those at first, as a share of each one's size.

        Raises:
            ArgumentError: when the model now raises.
        """
        try:
            outputs = self._outputs()
        except Exception as error:
            raise ArgumentError(
                "model",
                expected=f"a {_names(self.bases)} that posenc can compute",
                got=f"{type(error).__name__}: {error}",
                remedy="It was left as it is. Please report this with the model's config.",
            ) from error
        pairs = [(a, b) for a, b in zip(self.expected, outputs, strict=True) if a.numel()]
        return max((self._share(a, b) for a, b in pairs), default=0.0)

    def near(self, off: float) -> bool:
        """True if a difference is within the tolerance of the model's precision."""
        return off <= self.precision.tolerance

    def require_explained(self, off: float) -> None:
        """Require that a difference is of the size of what rounding errors do to the model.

        Args:
            off: the difference; the model is as it was at first.

        Raises:
            ArgumentError: when it is larger, or not a number.
        """
        with ExitStack() as stack:
            for module in self.modules:
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

        return tree_map(rounded, output)

    def _share(self, expected: Tensor, got: Tensor) -> float:
        off, size = got.double() - expected.double(), expected.double()
        mean = self.precision.averaged
        off, size = (x.square().mean().sqrt() if mean else x.abs().max() for x in (off, size))
        return float(off / size.clamp(min=1e-6))

    @torch.no_grad()
    def _outputs(self) -> list[Tensor]:
        outputs: list[Tensor] = []
        for base in self.bases:
            device = device_of(base)
            # Some models drop features in evaluation mode too.
            with evaluating(base), torch.random.fork_rng(), without_autocast(device):
                torch.manual_seed(0)
                inputs = _inputs(base, device)
                output = base(**inputs)
            attended = inputs.get("attention_mask")
            outputs += [_of_tokens(tensor, attended) for tensor in tensors_in(output)]
        return outputs


def _of_tokens(output: Tensor, attended: Tensor | None) -> Tensor:
    """A copy of an output, zero for padding: queries that see no key get what they may."""
    copied = output.detach().clone()
    if attended is not None and copied.shape[:2] == attended.shape:
        copied[attended == 0] = 0
    return copied


def without_values(model: nn.Module) -> bool:
    """True if some weights are on the meta device, and no hook fetches them from elsewhere."""
    return any(x.is_meta for x in model.parameters()) and _execution_device(model) is None


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
    found = list(_outermost(model, modules, of_family=True))
    return found or list(_outermost(model, modules, of_family=False))[:1]


def _outermost(
    model: nn.Module, modules: set[nn.Module], *, of_family: bool
) -> Iterator[PreTrainedModel]:
    if isinstance(model, PreTrainedModel) and (not of_family or _family(model) is not None):
        if not modules.isdisjoint(model.modules()):
            # The parameters of a sharded model are gathered where the whole of it is called.
            yield model if _is_sharded(model) else model.base_model
        return
    for child in model.children():
        yield from _outermost(child, modules, of_family=of_family)


def _family(model: nn.Module) -> AcceleratedFamily | None:
    """The family of a model's class, or of one that it is derived from."""
    families = (family_of(kind) for kind in type(model).__mro__)
    return next((family for family in families if family is not None), None)


def _names(models: Sequence[nn.Module]) -> str:
    return " and ".join(type(model).__name__ for model in models)


def _precision(models: Sequence[nn.Module], outputs: Sequence[Tensor]) -> Precision:
    """The lowest precision of weights and outputs."""
    if any(_is_quantized(model) for model in models):
        return QUANTIZED
    tensors = chain(outputs, *(model.parameters() for model in models))
    found = [PRECISIONS[x.dtype] for x in tensors if x.dtype in PRECISIONS]
    return max(found, key=lambda precision: precision.step, default=PRECISIONS[torch.float32])


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


def device_of(model: nn.Module) -> torch.device:
    """The device that inputs have to be on."""
    tensors = chain(model.parameters(), model.buffers())
    on = next((x.device for x in tensors if not x.is_meta), None)
    return _execution_device(model) or on or torch.device("cpu")


def _execution_device(model: nn.Module) -> torch.device | None:
    """The device to which the first hook of accelerate moves inputs, if there are any."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", [hook]):
            device = getattr(part, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return None


def _inputs(model: PreTrainedModel, device: torch.device) -> dict[str, Tensor]:
    family = _family(model)
    with torch.device("cpu"):  # that of the generators, whatever the default device is
        made = (getattr(family, "inputs", None) or _inputs_of_config)(model)
    return {
        k: x.to(device, model.dtype if x.is_floating_point() else None) for k, x in made.items()
    }


def _inputs_of_config(model: Any) -> dict[str, Tensor]:
    config, name = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(0)
    if name == "input_ids":
        text = config.get_text_config()
        length = fitting_length(model, text)
        ids = random_ids(text.vocab_size, (ROWS, length), generator)
        attended = torch.ones_like(ids)
        attended[1, length - min(PADDING, length // 2) :] = 0
        inputs = {"input_ids": ids, "attention_mask": attended}
        if "decoder_input_ids" in signature(model.forward).parameters:
            inputs["decoder_input_ids"] = ids[:, : (length + 1) // 2]
        return inputs
    image = getattr(config, "vision_config", config)
    shapes: dict[str, Any] = {
        "pixel_values": lambda: (ROWS, image.num_channels, *_pair(image.image_size)),
        "input_values": lambda: (ROWS, 8000),
        "input_features": lambda: (ROWS, *_features(config)),
    }
    made = {name: torch.randn(shapes[name](), generator=generator)}
    if name == "input_features" and "decoder_input_ids" in signature(model.forward).parameters:
        length = min(LENGTH, config.max_target_positions)
        made["decoder_input_ids"] = random_ids(config.vocab_size, (ROWS, length), generator)
    return made


def _features(config: Any) -> tuple[int, int]:
    """Frames and features of a spectrogram; Whisper's is transposed, and of one length."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return config.num_mel_bins, 2 * config.max_source_positions
    return LENGTH, config.feature_projection_input_dim


def random_ids(vocabulary: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Ids from the upper half of a vocabulary; those of special tokens are low ones."""
    return torch.randint(vocabulary // 2, vocabulary, size, generator=generator)


def fitting_length(model: nn.Module, config: Any, most: int = LENGTH) -> int:
    """A number of tokens that a model has positions for, some of which begin at 2."""
    names = ("max_position_embeddings", "max_seq_len")
    limits = [getattr(config, name, None) or 0 for name in names]
    limits += [
        table.num_embeddings
        for name, table in model.named_modules()
        if name.endswith(".position_embeddings") and isinstance(table, nn.Embedding)
    ]
    return max(1, min([most, *(limit - 2 for limit in limits if limit > 0)]))  # XLNet's is -1


def _pair(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Floating-point tensors in an output of transformers, in order."""
    tensors = (x for x in tree_leaves(output) if isinstance(x, Tensor))
    return (x for x in tensors if x.is_floating_point())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
