"""Biases that are linear in the distance (ALiBi), divided in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posenc.encoding import Encoding
from posenc.encodings.score.alibi import Alibi
from posenc.errors import ArgumentError
from posenc.extension.methods.interpolate import SqueezedAlibi
from posenc.transformers.stretching.changes import Undoable
from posenc.transformers.stretching.probing import watch

NAMES = ("alibi", "position_bias")
"""Arguments of layers with the bias of each key, ``[…, K]``."""


@dataclass(frozen=True)
class LinearBias:
    """The bias that a layer is given.

    Args:
        path: of the layer in the model.
        layer: the outermost module that is given it.
        name: of the argument.
        heads: with a bias each.
        linear: False if it is no multiple of the distance, as T5's.
    """

    path: str
    layer: nn.Module
    name: str
    heads: int
    linear: bool

    def encoding(self) -> Encoding:
        """The bias as an encoding of posenc, with the slopes of ALiBi.

        Raises:
            ArgumentError: if it is not linear.
        """
        if not self.linear:
            raise ArgumentError(
                "model",
                expected="a bias that is linear in the distance",
                got=f"a learned {self.name} of {type(self.layer).__name__}",
                remedy="No method stretches a table by distance.",
            )
        return Encoding.of(Alibi(heads=self.heads))

    def set_encoding(self, encoding: Encoding) -> tuple[Undoable, float]:
        """Divide the bias as an extended encoding does; also returns the factor.

        Raises:
            ArgumentError: for an encoding that does more.
        """
        part = encoding.score
        if encoding.parts() != (part,) or not isinstance(part, SqueezedAlibi):
            raise ArgumentError(
                "method",
                expected="one that divides slopes",
                got=" and ".join(type(other).__name__ for other in encoding.parts()),
                remedy="interpolate does.",
            )
        divided = Divided(self.name, part.factor)
        return self.layer.register_forward_pre_hook(divided, with_kwargs=True), part.factor


@dataclass(frozen=True)
class Divided:
    """Hook of a layer that divides its bias, and the bias in a mask that holds it too."""

    name: str
    factor: float

    def __call__(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        options = {**options, self.name: options[self.name] / self.factor}
        mask = options.get("attention_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            visible = mask > torch.finfo(mask.dtype).min / 2
            options["attention_mask"] = torch.where(visible, mask / self.factor, mask)
        return arguments, options


def biases_in(model: Any) -> list[LinearBias]:
    """The biases by distance that layers are given in a pass over a text."""
    biases: list[LinearBias] = []
    paths = {module: path for path, module in model.named_modules()}

    def note(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        inside = any(paths[module].startswith(f"{bias.path}.") for bias in biases)
        for name in NAMES:
            bias = options.get(name)
            if not inside and isinstance(bias, Tensor):
                steps = bias.diff(dim=-1)
                linear = bool(torch.isclose(steps, steps[..., :1], rtol=2e-2).all())
                biases.append(LinearBias(paths[module], module, name, bias.shape[0], linear))

    watch(model, paths, note)
    return biases
