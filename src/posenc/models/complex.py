"""Complex-valued sequence classifiers.

A model is an embedding table, an encoding (such as ``complex_order``), a body that maps a sequence
to one vector, and a linear readout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, Length, Width, check_fields
from posenc.attention.extra.complex import side_by_side
from posenc.encoding import Encoding
from posenc.encoding.tensors import TokenIds
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.models import stack
from posenc.models.block import Block, ComplexNorm
from posenc.models.checkpoint import SavedModel
from posenc.models.complex_layers import (
    ComplexAttention,
    ComplexConv,
    ComplexFeedForward,
    ComplexLinear,
    folded,
    on_parts,
)
from posenc.models.stack import StackConfig, share_encodings
from posenc.models.vision import mean_of_real

Body = Literal["fasttext", "lstm", "cnn", "transformer"]


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Configuration of a ``SequenceClassifier``.

    Args:
        body: ``"fasttext"`` (a mean and a hidden layer), ``"lstm"``, ``"cnn"`` or
            ``"transformer"``.
        vocabulary: number of token ids.
        classes: number of labels.
        dim: complex width of a word vector.
        hidden: complex width of the hidden layer, state, filters, or feed-forward layers.
        encoding: name in the registry, or several joined by ``+``. Without a Transformer body it
            must have an embedding part only, or be ``nope``.
        options: the encoding's options.
        max_length: number of positions of a learned table.
        layers, heads: of the Transformer.
        kernel: odd kernel size of the CNN.
    """

    body: Body
    vocabulary: Length
    classes: Count
    dim: Width
    hidden: Length
    encoding: str = "complex_order"
    options: Mapping[str, Any] = field(default_factory=dict)
    max_length: Length | None = None
    layers: Count = 1
    heads: Count = 1
    kernel: Count = 3

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kernel % 2 == 0:
            raise ArgumentError("kernel", expected="odd", got=self.kernel, remedy="3 is common.")


class SequenceClassifier(SavedModel[ClassifierConfig]):
    """Embedding, encoding, body and readout; complex except for the embedding and the logits.

    The readout is the real part of a complex linear map. In a complex LSTM the gates are real (the
    sigmoid of the real part); ReLU and tanh act on real and imaginary parts separately, as in the
    paper.

    Args:
        config: its shape.

    Raises:
        ArgumentError: if the encoding does not suit the body, or dimensions do not fit.

    Reference: Wang et al. 2019, "Encoding word order in complex embeddings".

    >>> import torch
    >>> from posenc.models import ClassifierConfig, SequenceClassifier
    >>> config = ClassifierConfig(body="cnn", vocabulary=99, classes=2, dim=16, hidden=32)
    >>> SequenceClassifier(config)(torch.randint(99, (3, 10))).shape
    torch.Size([3, 2])
    """

    kind, made_from = "sequence_classifier", ClassifierConfig

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config)
        reals = 2 * config.dim
        shape = StackConfig(dim=reals, heads=config.heads, max_length=config.max_length)
        layers = config.layers if config.body == "transformer" else 1
        encodings = stack.make_encodings(
            shape, config.encoding, config.options, layers=layers, causal=False
        )
        self.encoding = encodings[0]
        self.embedding = nn.Embedding(config.vocabulary, reals)
        stack.draw_embedding(self.embedding)
        if config.body == "transformer":
            self.body: nn.Module = TransformerBody(config, encodings)
        else:
            self._require_embedding()
            self.body = BODIES[config.body](config)
        self.shared_encodings = share_encodings(self)
        self.readout = nn.Linear(
            reals if config.body == "transformer" else 2 * config.hidden, config.classes
        )
        nn.init.normal_(self.readout.weight, std=self.readout.in_features**-0.5)
        nn.init.zeros_(self.readout.bias)

    def _require_embedding(self) -> None:
        parts = self.encoding.parts()
        if parts and parts != (self.encoding.embedding,):
            raise ArgumentError(
                "encoding",
                expected=f"an embedding part only, as a {self.config.body} has no attention",
                got=repr(self.config.encoding),
                remedy="Use body='transformer', or another encoding.",
            )

    def forward(self, tokens: TokenIds, layout: Layout | None = None) -> Float[Tensor, "B N"]:
        """Logits ``[B, classes]``; the arguments are those of ``Encoder.forward``."""
        layout = stack.token_layout("tokens", tokens, layout)
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        x = stack.embed(self.encoding, x, layout, tokens)
        logits: Tensor = self.readout(side_by_side(self.body(folded(x), layout)))
        return logits


class FastText(nn.Module):
    """The mean of the word vectors, then a hidden layer (not in Joulin et al. 2017)."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.hidden = ComplexLinear(config.dim, config.hidden)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return on_parts(torch.relu, cast(Tensor, self.hidden(mean_of_real(x, layout))))


class Lstm(nn.Module):
    """The state of an LSTM after the last token; padding does not change it."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.width = config.hidden
        self.input = ComplexLinear(config.dim, 4 * config.hidden)
        self.state = ComplexLinear(config.hidden, 4 * config.hidden, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        inputs: Tensor = self.input(x)
        state = cell = inputs.new_zeros(len(x), self.width)
        for index in range(x.shape[1]):
            parts = (inputs[:, index] + self.state(state)).chunk(4, dim=-1)
            take, forget, show = (torch.sigmoid(part.real) for part in parts[:3])
            new_cell = forget * cell + take * on_parts(torch.tanh, parts[3])
            new_state = show * on_parts(torch.tanh, new_cell)
            if layout.valid is not None:
                real = layout.valid[:, index, None]
                new_cell = torch.where(real, new_cell, cell)
                new_state = torch.where(real, new_state, state)
            state, cell = new_state, new_cell
        return state


class Cnn(nn.Module):
    """Convolution, ReLU and maximum over the sequence; padding counts as zeros."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.filters = ComplexConv(config.dim, config.hidden, kernel=config.kernel)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        hidden = None if layout.valid is None else ~layout.valid.unsqueeze(-1)
        x = x if hidden is None else x.masked_fill(hidden, 0)
        answers = self.filters(x.mT).mT

        def largest(part: Tensor) -> Tensor:
            part = torch.relu(part)
            return (part if hidden is None else part.masked_fill(hidden, 0)).amax(1)

        return on_parts(largest, answers)


class TransformerBody(nn.Module):
    """The mean of the vectors after pre-norm Transformer blocks."""

    def __init__(self, config: ClassifierConfig, encodings: Sequence[Encoding]) -> None:
        super().__init__()
        self.blocks = stack.Blocks(
            Block(
                dim=config.dim,
                attention=ComplexAttention(dim=config.dim, heads=config.heads, encoding=encoding),
                feed_forward=ComplexFeedForward(dim=config.dim, hidden=config.hidden),
                norm="complex",
            )
            for encoding in encodings
        )
        self.norm = ComplexNorm(config.dim)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return mean_of_real(self.norm(self.blocks(x, layout)), layout)


BODIES: dict[str, Callable[[ClassifierConfig], nn.Module]] = {
    "cnn": Cnn,
    "fasttext": FastText,
    "lstm": Lstm,
}
