"""A decoder language model with any positional encoding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.attention import Attention, Cache
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.models.block import Activation, Block, FeedForward, Norm, make_norm
from posenc.models.checkpoint import load_model, save_model
from posenc.registry import create_layers

__all__ = ["Decoder", "DecoderConfig"]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that decides the shape of a ``Decoder``.

    Args:
        vocabulary: number of token ids.
        dim: width C.
        layers: blocks.
        heads: query heads.
        kv_heads: key/value heads; as many as query heads by default.
        head_dim: width of a head; ``dim / heads`` by default.
        hidden: width of the feed-forward layer; by default 8/3 of ``dim`` for SwiGLU, rounded up
            to a multiple of 8, and 4 times ``dim`` for the others.
        activation, norm, norm_first: see ``Block``.
        encoding: name in the registry, or several joined by ``+``.
        options: the encoding's options.
        max_length: positions of a learned table.
        window: a token sees fewer than this many steps back only; None: all.
        dropout: probability of dropping a feature or an attention weight in training.
        scale: factor of the logits; the encoding's default if None.
        tied: the output layer is the token embedding, transposed.
    """

    vocabulary: int
    dim: int
    layers: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    activation: Activation = "swiglu"
    norm: Norm = "rms"
    norm_first: bool = True
    encoding: str = "rope"
    options: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    window: int | None = None
    dropout: float = 0.0
    scale: float | None = None
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocabulary", "dim", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ArgumentError(
                    name, expected="1 or more", got=getattr(self, name), remedy="Change it."
                )
        if not 0.0 <= self.dropout < 1.0:
            raise ArgumentError(
                "dropout", expected="0 ≤ dropout < 1", got=self.dropout, remedy="0 is common."
            )

    @property
    def feed_forward_width(self) -> int:
        """``hidden``, or its default."""
        if self.hidden is not None:
            return self.hidden
        if self.activation == "swiglu":
            return 8 * math.ceil(self.dim / 3)
        return 4 * self.dim

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


class Decoder(nn.Module):
    """A causal language model: token embedding · √C, blocks, a norm, logits.

    Args:
        config: its shape.
        encodings: one record a layer, instead of the ones that ``config.encoding`` names. Such a
            model cannot be saved, since a record cannot be written down.

    Raises:
        ArgumentError: when there is not one record a layer, or dimensions do not fit.

    >>> import torch
    >>> from posenc.models import Decoder, DecoderConfig
    >>> model = Decoder(DecoderConfig(vocabulary=256, dim=32, layers=2, heads=4, encoding="alibi"))
    >>> model(torch.randint(256, (1, 10))).shape
    torch.Size([1, 10, 256])
    """

    def __init__(
        self, config: DecoderConfig, *, encodings: Sequence[Encoding] | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.named = encodings is None
        if encodings is None:
            # Apart from the other weights' stream, so that these do not depend on the encoding.
            with torch.random.fork_rng(devices=[]):
                encodings = create_layers(
                    config.encoding,
                    layers=config.layers,
                    dim=config.dim,
                    heads=config.heads,
                    head_dim=config.head_dim,
                    max_length=config.max_length,
                    causal=True,
                    **config.options,
                )
        if len(encodings) != config.layers:
            raise ArgumentError(
                "encodings",
                expected=f"{config.layers}, one a layer",
                got=len(encodings),
                remedy="Use posenc.create_layers(name, layers=…).",
            )
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_make_block(config, encoding) for encoding in encodings)
        self.norm = make_norm(config.norm, config.dim)
        self.output = None
        if not config.tied:
            self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights but the encodings'.

        Normal, with the fan-in's -1/2 power as standard deviation, times (2 · layers)^-1/2 where
        a layer's output joins the residual.
        """
        nn.init.normal_(self.embedding.weight, std=self.config.dim**-0.5)
        residual = (2 * self.config.layers) ** -0.5
        for name, linear in self.blocks.named_modules():
            if isinstance(linear, nn.Linear) and ".encoding." not in name:
                gain = residual if name.endswith(".output") else 1.0
                nn.init.normal_(linear.weight, std=gain * linear.in_features**-0.5)
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=self.config.dim**-0.5)

    @property
    def encodings(self) -> list[Encoding]:
        """The record of each layer."""
        blocks = cast(Iterable[Block], self.blocks)
        return [block.attention.encoding for block in blocks]

    def forward(
        self,
        tokens: Int[Tensor, "B L"],
        layout: Layout | None = None,
        *,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B L V"]:
        """Logits of the next token at every place, ``[B, L, vocabulary]``.

        Args:
            tokens: ``[B, L]`` ids.
            layout: where they are; by default a sequence that continues what is cached.
            cache: the past, from ``new_cache``; it is extended by these tokens.

        Raises:
            ArgumentError: on tokens of another rank or dtype.
        """
        if tokens.dim() != 2 or tokens.dtype != torch.int64:
            raise ArgumentError(
                "tokens",
                expected="int64 of shape [B, L]",
                got=f"{tokens.dtype} of shape {list(tokens.shape)}",
                remedy="Use tokens.long(), and one row a sequence.",
            )
        if layout is None:
            start = 0 if cache is None else cache.length
            layout = Layout.sequence(tokens.shape[1], start, device=tokens.device)
        x = self.embedding(tokens) * self.config.dim**0.5
        first = self.encodings[0]
        if first.embedding is not None and not first.embedding.every_layer:
            embed = first.embed if cache is None else partial(cache[0].embed, first)
            x = embed(x, layout, tokens=tokens)
        x = self.dropout(x)
        for index, block in enumerate(self.blocks):
            x = block(x, layout, cache=None if cache is None else cache[index])
        x = self.norm(x)
        if self.output is None:
            return nn.functional.linear(x, self.embedding.weight)
        logits: Tensor = self.output(x)
        return logits

    def new_cache(self) -> Cache:
        """An empty cache for ``forward``."""
        return Cache(self.config.layers)

    def require_position(self, position: int) -> None:
        """Refuse a position that the encoding cannot represent, before any work is done.

        Raises:
            LengthError: from the encoding, with the remedy.
        """
        weight = self.embedding.weight
        with torch.no_grad():
            layout = Layout.sequence(1, position, device=weight.device)
            token = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
            self.encodings[0].embed(weight.new_zeros(1, 1, self.config.dim), layout, tokens=token)

    def save(self, folder: Path | str) -> None:
        """Write ``model.safetensors`` and ``config.json`` into ``folder``.

        Raises:
            ArgumentError: for a model made from encoding records.
            OutputError: when the folder cannot be written to; what was there before is whole.
        """
        if not self.named:
            raise ArgumentError(
                "encodings",
                expected="an encoding by name",
                got="records, which config.json cannot hold",
                remedy="Make the model with DecoderConfig(encoding=…, options=…), or save its "
                "state_dict() yourself.",
            )
        save_model(self, self.config.to_json(), folder, kind="decoder")

    @classmethod
    def load(cls, folder: Path | str, *, device: torch.device | str = "cpu") -> Decoder:
        """The model that ``save`` wrote.

        Raises:
            CheckpointError: when files are missing, damaged or of another kind, or a tensor is
                missing, unknown or of another shape (it is named).
        """
        return load_model(folder, kind="decoder", make=_from_json, device=device)


def _make_block(config: DecoderConfig, encoding: Encoding) -> Block:
    attention = Attention(
        dim=config.dim,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        encoding=encoding,
        causal=True,
        window=config.window,
        dropout=config.dropout,
        scale=config.scale,
    )
    feed_forward = FeedForward(
        dim=config.dim, hidden=config.feed_forward_width, activation=config.activation
    )
    return Block(
        dim=config.dim,
        attention=attention,
        feed_forward=feed_forward,
        norm=config.norm,
        norm_first=config.norm_first,
        dropout=config.dropout,
    )


def _from_json(fields: Mapping[str, Any]) -> Decoder:
    return Decoder(DecoderConfig(**fields))
