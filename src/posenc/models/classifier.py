"""Text classifier: encoder, mean over tokens and linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Interval, check
from posenc.encoding.tensors import TokenIds
from posenc.layout import Layout
from posenc.models.checkpoint import SavedModel
from posenc.models.encoder import Encoder, EncoderConfig
from posenc.models.stack import token_layout
from posenc.models.vision import mean_of_real


class TextClassifier(SavedModel):
    """``W · mean(encoder(tokens)) + b``, the mean over valid tokens.

    Args:
        config: of the encoder.
        classes: number of labels.

    Raises:
        ArgumentError: for fewer than two classes, or as ``Encoder``.

    >>> import torch
    >>> from posenc.models import EncoderConfig, TextClassifier
    >>> config = EncoderConfig(vocabulary=99, dim=32, layers=2, heads=4, encoding="rope")
    >>> TextClassifier(config, classes=3)(torch.randint(99, (2, 10))).shape
    torch.Size([2, 3])
    """

    kind = "text_classifier"

    def __init__(self, config: EncoderConfig, *, classes: int) -> None:
        super().__init__()
        self.classes = check("classes", Annotated[int, Interval(2, 2**16)], classes)
        self.encoder = Encoder(config)
        self.output = nn.Linear(config.dim, classes)
        nn.init.normal_(self.output.weight, std=config.dim**-0.5)
        nn.init.zeros_(self.output.bias)

    def forward(self, tokens: TokenIds, layout: Layout | None = None) -> Float[Tensor, "B classes"]:
        """Logits of the classes, ``[B, classes]``; as ``Encoder``."""
        layout = token_layout("tokens", tokens, layout)
        logits: Tensor = self.output(mean_of_real(self.encoder(tokens, layout), layout))
        return logits

    def _fields(self) -> dict[str, Any]:
        return {**self.encoder.config.to_json(), "classes": self.classes}

    @classmethod
    def _of_fields(cls, fields: Mapping[str, Any]) -> Self:
        shape = {key: value for key, value in fields.items() if key != "classes"}
        return cls(EncoderConfig(**shape), classes=fields["classes"])
