"""One configuration of a transformers model, with inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posenc.transformers.acceleration.trials import tensors_in
from tests.support.tiny_models import build

VOCABULARY = 60

ENCODER: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
ENCODER |= {"num_attention_heads": 3}
"""Sizes by the names that most configs have for them."""


def of(
    kind: str | type[PreTrainedModel], sizes: dict[str, Any], **options: Any
) -> Callable[[], PreTrainedModel]:
    """Makes such a model."""
    return partial(build, kind, sizes, **options)


def texts(length: int = 23) -> dict[str, Tensor]:
    """Two rows of ids, one padded on the left and one on the right."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY // 2, VOCABULARY, (2, length), generator=generator)
    attended = torch.ones_like(ids)
    attended[0, :4] = 0
    attended[1, -6:] = 0
    return {"input_ids": ids, "attention_mask": attended}


def whole_texts(length: int = 23) -> dict[str, Tensor]:
    """Two rows of ids without padding."""
    return {"input_ids": texts(length)["input_ids"]}


def images(height: int = 20, width: int = 20) -> dict[str, Tensor]:
    """Two images."""
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(2, 3, height, width, generator=generator)}


def seeing(inputs: dict[str, Any]) -> Tensor:
    """Tokens that see any under a causal mask; the others' weights are those of rounding."""
    attended: Tensor = inputs["attention_mask"]
    return attended.cumsum(1) > 0


@dataclass(frozen=True)
class Case:
    """A model and inputs.

    Args:
        make: makes the model; weights are drawn anew by ``model``.
        inputs: makes the inputs.
        compared: False where an output row is undefined, such as that of a padded token, whose
            numbers nothing reads; broadcast over the first two sizes of the outputs.
        accelerated: number of accelerated modules; None: all that have a class.
        relative: difference of outputs allowed, as a share of the largest value; of gradients, 10
            times that.
        written: True if PyTorch's kernel reads the bias written out.
    """

    make: Callable[[], PreTrainedModel]
    inputs: Callable[[], dict[str, Any]] = texts
    compared: Callable[[dict[str, Any]], Tensor] | None = None
    accelerated: int | None = None
    relative: float = 1e-5
    written: bool = False

    def model(self) -> PreTrainedModel:
        """The model in evaluation mode, its weights away from zero."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.make().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    def outputs(self, model: PreTrainedModel, **options: Any) -> list[Tensor]:
        """Floating-point outputs, with rows that are not compared set to zero."""
        inputs = self.inputs()
        found = list(tensors_in(model(**inputs, **options)))
        if self.compared is None:
            return found
        rows = self.compared(inputs)
        return [
            x.where(rows.view(*rows.shape, *[1] * (x.dim() - 2)), 0.0)
            if x.shape[:2] == rows.shape
            else x
            for x in found
        ]

    def gradients(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Gradients of all parameters that get one, of a sum that weighs outputs unevenly."""
        return self.results(model)[1]

    def results(self, model: PreTrainedModel) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Outputs and ``gradients``, of one call."""
        model.zero_grad()
        outputs = self.outputs(model)
        loss = torch.zeros(())
        for output in outputs:
            weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
            loss = loss + (output * weights).sum()
        loss.backward()
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        return [output.detach() for output in outputs], gradients
