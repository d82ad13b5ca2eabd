"""Short passes through a model that show what its parts do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posenc.errors import ArgumentError
from posenc.runtime import without_autocast
from posenc.transformers.acceleration.trials import device_of, evaluating, fitting_length
from posenc.transformers.stretching.changes import undo

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


def run(model: PreTrainedModel, tokens: int | None = None) -> Any:
    """One pass over a few different tokens, or over an image.

    Args:
        tokens: of a text; by default as many as the model has positions for, at most ``TOKENS``.

    Raises:
        ArgumentError: if the model takes other inputs.
    """
    if tokens is None:
        tokens = fitting_length(model, model.config, TOKENS)
    inputs = {name: x.to(device_of(model)) for name, x in _inputs(model, tokens).items()}
    caches = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
    try:
        return model(**inputs, **caches)
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


def _inputs(model: Any, tokens: int) -> dict[str, Tensor]:
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
        undo(hooks)
