"""Models on disk: safetensors and JSON, never pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from posenc.errors import CheckpointError, PosencError
from posenc.models.sharing import state_by_layer
from posenc.storage import load_tensors, make_folder, read_json, save_tensors, write_json

__all__ = ["load_model", "save_model"]

TENSORS, CONFIG = "model.safetensors", "config.json"

Model = TypeVar("Model", bound=nn.Module)


def save_model(
    model: nn.Module, config: Mapping[str, Any], folder: Path | str, *, kind: str
) -> None:
    """Write a model's tensors and configuration into ``folder``, each file whole or not at all.

    A tensor that several layers share is written once.

    Raises:
        OutputError: when the folder cannot be written to.
    """
    folder = Path(folder)
    make_folder(folder)
    save_tensors(folder / TENSORS, _distinct(state_by_layer(model)), {"kind": kind})
    write_json(folder / CONFIG, {"kind": kind, "config": dict(config)})


def load_model(
    folder: Path | str,
    *,
    kind: str,
    make: Callable[[Mapping[str, Any]], Model],
    device: torch.device | str,
) -> Model:
    """The model that ``save_model`` wrote, in eval mode.

    Args:
        folder: where it is.
        kind: what kind of model it has to be.
        make: makes the empty model from its configuration.
        device: where it goes.

    Raises:
        CheckpointError: when files are missing, damaged or of another kind, or tensors do not fit.
    """
    folder = Path(folder)
    described = read_json(folder / CONFIG)
    if not isinstance(described, dict) or described.get("kind") != kind:
        found = described.get("kind") if isinstance(described, dict) else type(described).__name__
        raise CheckpointError(
            str(folder / CONFIG),
            expected=f"the configuration of a {kind}",
            got=found,
            remedy="Load it with the class that saved it.",
        )
    try:
        model = make(described["config"])
    except (PosencError, KeyError, TypeError) as error:
        raise CheckpointError(
            str(folder / CONFIG),
            expected=f"the configuration of a {kind}",
            got=error,
            remedy="It was changed, or written by another version of posenc.",
        ) from error
    tensors, _ = load_tensors(folder / TENSORS)
    _fill(model, tensors, folder / TENSORS)
    return model.to(device).eval()


def _distinct(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each under the first of its names."""
    seen: set[int] = set()
    distinct = {}
    for name, tensor in tensors.items():
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        distinct[name] = tensor
    return distinct


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    wanted = _distinct(state_by_layer(model))
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors or name not in wanted:
            raise CheckpointError(
                str(path),
                expected="exactly the tensors of its configuration",
                got=f"{'no' if name in wanted else 'an unknown'} {name}",
                remedy="model.safetensors and config.json do not belong together.",
            )
        if tensors[name].shape != wanted[name].shape:
            raise CheckpointError(
                str(path),
                expected=f"{name} of shape {list(wanted[name].shape)}",
                got=list(tensors[name].shape),
                remedy="model.safetensors and config.json do not belong together.",
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            wanted[name].copy_(tensor)
