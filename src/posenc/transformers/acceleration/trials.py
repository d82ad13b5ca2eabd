"""Short passes on made inputs, in which a model is compared with itself or its parts watched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel

from posenc.errors import ArgumentError
from posenc.runtime import without_autocast
from posenc.transformers.acceleration.accelerated import AcceleratedFamily, family_of
from posenc.transformers.acceleration.routing import recorded
from posenc.transformers.calls import cache_name, is_cache, names_of
from posenc.transformers.settings import settings_kept

ROWS, LENGTH, PADDING, STEPS = 2, 48, 7, 2

LONG = 300
"""Tokens of a row for which ``attend`` takes compiled kernels, whatever the number of heads."""

UNITS = {"input_ids": "tokens", "input_features": "frames", "pixel_values": "images"}


@dataclass(frozen=True)
class Trial:
    """Random inputs for a model, the same every time.

    Args:
        model: that is run in evaluation mode; training flags and random states are kept.
        rows: of the batch; of two, the second begins with padding.
        length: number of tokens in a row, at most: as many as the model has positions for.
        steps: further tokens, one at a time, behind the cache that the batch leaves, if it does.
    """

    model: PreTrainedModel
    rows: int = ROWS
    length: int = LENGTH
    steps: int = 0

    @torch.no_grad()
    def run(self) -> tuple[list[Tensor], str]:
        """Outputs, zero for padding, and in words what they are of.

        Where calls of attention are recorded, those of a batch of several rows are.
        """
        model, device = self.model, device_of(self.model)
        names = names_of(model.forward)
        batch, *steps = self._parts(self._inputs(device))
        options = {"use_cache": self.steps > 0} if "use_cache" in names else {}
        # Some models drop features in evaluation mode too.
        with evaluating(model), torch.random.fork_rng(), without_autocast(device):
            torch.manual_seed(0)
            with recorded() if self.rows == 1 else nullcontext():
                output = model(**batch, **options)
            attended = batch.get("attention_mask")
            outputs = [_of_tokens(tensor, attended) for tensor in tensors_in(output)]
            cache = cache_in(output)
            description = _description(model.config, batch)
            if steps and cache is not None:
                description += f"; {len(steps)} steps behind a cache"
                held = {str(cache_name(names)): cache}
                with recorded():
                    for step in steps:
                        outputs += map(torch.clone, tensors_in(model(**step, **options, **held)))
        return outputs, description

    def _inputs(self, device: torch.device) -> dict[str, Tensor]:
        model = self.model
        make = getattr(family_behind(model), "inputs", None) or _inputs_of_config
        extra = 0 if model.config.is_encoder_decoder else self.steps
        with torch.device("cpu"):  # that of the generators, whatever the default device is
            made = make(model, self.rows, self.length + extra)
        return {
            k: x.to(device, model.dtype if x.is_floating_point() else None) for k, x in made.items()
        }

    def _parts(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Inputs of the first pass and of each step behind it, one for each of the last tokens."""
        decoded = [name for name in batch if name.startswith("decoder_")]
        (grown, *_) = decoded or ["input_ids"]
        length = batch[grown].shape[1] if grown in batch else 0
        if not self.steps or length <= self.steps:
            return [batch]
        parts, ends = [], range(length - self.steps, length + 1)
        for begin, end in zip((0, *ends), ends, strict=False):
            part = batch | {grown: batch[grown][:, begin:end]}
            if "attention_mask" in batch and not decoded:
                part["attention_mask"] = batch["attention_mask"][:, :end]
            parts.append(part)
        return parts


def trials_of(model: PreTrainedModel) -> tuple[Trial, ...]:
    """A padded batch, with steps if the model takes a cache; and a long row, where there is one."""
    names = names_of(model.forward)
    batch = Trial(model, steps=STEPS if cache_name(names) and "use_cache" in names else 0)
    sized = model.main_input_name == "pixel_values" or (
        model.main_input_name == "input_features" and _is_whispers(model.config)
    )
    return (batch,) if sized else (batch, Trial(model, 1, LONG))


def _description(config: Any, batch: dict[str, Tensor]) -> str:
    """The size of a batch in words."""
    name, first = next(iter(batch.items()))
    if name == "pixel_values":
        return f"{len(first)} images"
    rows = "1 row" if len(first) == 1 else f"{len(first)} rows"
    mask = batch.get("attention_mask")
    padded = ", one padded" if mask is not None and not bool(mask.all()) else ""
    length = first.shape[2 if name == "input_features" and _is_whispers(config) else 1]
    return f"{rows} of {length} {UNITS.get(name, 'values')}{padded}"


def cache_in(output: Any) -> Cache | None:
    """The cache in an output; None if there is none."""
    values = output.values() if isinstance(output, dict) else output
    values = () if isinstance(values, Tensor) else values
    return next((value for value in values if isinstance(value, Cache)), None)


def _inputs_of_config(model: Any, rows: int, length: int) -> dict[str, Tensor]:
    config, name = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(0)
    if name == "input_ids":
        text = config.get_text_config()
        ids = random_ids(text.vocab_size, (rows, fitting_length(model, text, length)), generator)
        length = ids.shape[1]
        inputs = {"input_ids": ids}
        if rows > 1:
            inputs["attention_mask"] = padded_mask(ids)
        if "decoder_input_ids" in names_of(model.forward):
            inputs["decoder_input_ids"] = ids[:, : (length + 1) // 2]
        return inputs
    image = getattr(config, "vision_config", config)
    shapes: dict[str, Any] = {
        "pixel_values": lambda: (rows, image.num_channels, *_pair(image.image_size)),
        "input_values": lambda: (rows, length * prod(config.conv_stride)),
        "input_features": lambda: (rows, *_features(config, length)),
    }
    made = {name: torch.randn(shapes[name](), generator=generator)}
    if name == "input_features" and "decoder_input_ids" in names_of(model.forward):
        size = rows, min(length, config.max_target_positions)
        made["decoder_input_ids"] = random_ids(config.vocab_size, size, generator)
    return made


def _is_whispers(config: Any) -> bool:
    """True if spectrograms are ``[B, features, frames]``, and of one length."""
    return hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")


def _features(config: Any, length: int) -> tuple[int, int]:
    """Frames and features of a spectrogram, in the model's order."""
    if _is_whispers(config):
        return config.num_mel_bins, 2 * config.max_source_positions
    return length, config.feature_projection_input_dim


def padded_mask(ids: Tensor) -> Tensor:
    """A mask of tokens, 0 for padding, with which the last of several rows begins."""
    attended = torch.ones_like(ids)
    if len(ids) > 1:
        attended[-1, : min(PADDING, ids.shape[1] // 2)] = 0
    return attended


def random_ids(vocabulary: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Ids from the upper half of a vocabulary; those of special tokens are low ones."""
    return torch.randint(vocabulary // 2, vocabulary, size, generator=generator)


def fitting_length(model: nn.Module, config: Any, most: int) -> int:
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
    tensors = (x for x in tree_leaves(output, is_leaf=is_cache) if isinstance(x, Tensor))
    return (x for x in tensors if x.is_floating_point())


def _of_tokens(output: Tensor, attended: Tensor | None) -> Tensor:
    """A copy of an output, zero for padding: queries that see no key get what they may."""
    copied = output.detach().clone()
    if attended is not None and copied.shape[:2] == attended.shape:
        copied[attended == 0] = 0
    return copied


def family_behind(model: nn.Module) -> AcceleratedFamily | None:
    """The family of a model's class, or of one that it is derived from."""
    families = (family_of(kind) for kind in type(model).__mro__)
    return next((family for family in families if family is not None), None)


def device_of(model: nn.Module) -> torch.device:
    """The device that inputs have to be on."""
    tensors = chain(model.parameters(), model.buffers())
    on = next((x.device for x in tensors if not x.is_meta), None)
    return execution_device(model) or on or torch.device("cpu")


def execution_device(model: nn.Module) -> torch.device | None:
    """The device to which the first hook of accelerate moves inputs, if there are any."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", [hook]):
            device = getattr(part, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards the model is as it was, see ``settings_kept``."""
    with settings_kept(model):
        for module in model.modules():
            module.training = False
        yield


TOKENS = 9


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The outermost model of transformers in a model.

    Raises:
        ArgumentError: if there is none.
    """
    for part in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(part, PreTrainedModel):
            return part
    raise ArgumentError(
        "model",
        expected="a model of transformers, or one that holds such a model",
        got=type(model).__name__,
        remedy="Load it by one of transformers' Auto classes.",
    )


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Passes without gradients, dropout or autocast, which leave random states as they are."""
    device = device_of(model)
    with torch.no_grad(), evaluating(model), torch.random.fork_rng(), without_autocast(device):
        yield


def run(model: PreTrainedModel, tokens: int | None = None, **options: Any) -> Any:
    """One pass over a few different tokens, or over an image.

    Args:
        tokens: of a text; by default as many as the model has positions for, at most ``TOKENS``.
        **options: further arguments of the model, or others than these.

    Raises:
        ArgumentError: if the model takes other inputs.
    """
    if tokens is None:
        tokens = fitting_length(model, model.config, TOKENS)
    inputs = {name: x.to(device_of(model)) for name, x in inputs_for(model, tokens).items()}
    caches = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
    try:
        return model(**inputs | caches | options)
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(
            "model",
            expected=f"one that runs on {' and '.join(inputs)} alone",
            got=f"{type(model).__name__}: {type(error).__name__}: {error}",
            remedy=_parts(model),
        ) from error


def _parts(model: nn.Module) -> str:
    """The parts of a model that can be stretched by themselves, in words."""
    parts = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
    which = f": {' or '.join(parts)}" if parts else ""
    return f"Pass the part of it that reads text, or images{which}."


def inputs_for(model: Any, tokens: int) -> dict[str, Tensor]:
    """A few different tokens, or an image, by the names of the model's arguments.

    Raises:
        ArgumentError: if it takes neither.
    """
    names = signature(model.forward).parameters
    if "input_ids" in names:
        text = model.config.get_text_config()
        # neither neighbours nor special tokens, whose ids are low
        ids = (torch.arange(tokens) * 5 + 10).unsqueeze(0) % text.vocab_size
        padding = getattr(text, "pad_token_id", None)
        if padding is not None:
            ids = torch.where(ids == padding, (ids + 1) % text.vocab_size, ids)
        inputs = {"input_ids": ids}
        if "decoder_input_ids" in names:
            inputs["decoder_input_ids"] = ids
        return inputs
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None)
    if "pixel_values" not in names or size is None:
        raise ArgumentError(
            "model",
            expected="one that takes input_ids, or pixel_values of a known size",
            got=type(model).__name__,
            remedy="Pass the part of it that reads text.",
        )
    height, width = (size, size) if isinstance(size, int) else size
    shape = 1, getattr(config, "num_channels", 3), height, width
    return {"pixel_values": torch.zeros(shape, dtype=model.dtype)}


def layer_type_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """The type of layers that a rotary module is called for; "" if it has only one."""
    return next((x for x in (*arguments, *options.values()) if isinstance(x, str)), "")


def watch(model: Any, modules: Iterable[nn.Module], note: Callable[..., None]) -> None:
    """One quiet pass with a hook before each of some modules."""
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        with quiet(model):
            run(model)
    finally:
        for hook in hooks:
            hook.remove()
