"""Stacks of blocks: configuration, construction, initialisation, input checks, shared encodings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from posenc.arguments import Count, Length, Probability, Rate, Width, check, check_fields
from posenc.attention import Attention, Cache, Context, LayerCache
from posenc.encoding import Encoding
from posenc.encoding.prepared import Prepared
from posenc.encoding.tensors import Features, TokenIds
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.checks import require_tensor
from posenc.layout.features import require_token_ids
from posenc.models.block import (
    GATED,
    Activation,
    Block,
    FeedForward,
    Norm,
    SourceContext,
    make_norm,
)
from posenc.models.complex_layers import ComplexAttention
from posenc.registry import create_layers

AttentionBias = Literal["all", "inputs", "none"]


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Configuration of a model's blocks.

    Args:
        dim: width C.
        heads: query heads.
        kv_heads: key/value heads; as many as query heads by default.
        head_dim: width of a head; ``dim / heads`` by default.
        hidden: width of the feed-forward layer; by default 8/3 of ``dim`` with gates, rounded up
            to a multiple of 8, else 4 times ``dim``.
        activation, norm, norm_first, norm_eps, parallel: see ``Block``.
        bias: attention and feed-forward layers have biases.
        attention_bias: attention projections with biases: ``"all"``, ``"inputs"`` (queries, keys
            and values) or ``"none"``; from ``bias`` by default.
        merged: project queries, keys and values with one matrix; see ``Attention``.
        max_length: number of positions of a learned table.
        embedding_scale: factor of the token embedding; None: √C (BERT, GPT and Llama use 1).
        dropout: of features and attention weights.
        scale: softmax scale; None: the encoding's default.
        sinks, softcap: see ``Attention``.

    Raises:
        ArgumentError, UnknownNameError: for a field outside its domain.
    """

    dim: Width
    heads: Count
    kv_heads: Count | None = None
    head_dim: Width | None = None
    hidden: Width | None = None
    activation: Activation = "swiglu"
    norm: Norm = "rms"
    norm_first: bool = True
    norm_eps: float | None = None
    parallel: bool = False
    bias: bool = False
    attention_bias: AttentionBias | None = None
    merged: bool = False
    max_length: Length | None = None
    embedding_scale: float | None = None
    dropout: Probability = 0.0
    scale: float | None = None
    sinks: bool = False
    softcap: Rate | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def biases(self) -> AttentionBias:
        """``attention_bias``, or its default."""
        return self.attention_bias or ("all" if self.bias else "none")

    @property
    def feed_forward_width(self) -> int:
        """``hidden``, or its default."""
        if self.hidden is not None:
            return self.hidden
        if self.activation in GATED:
            return 8 * math.ceil(self.dim / 3)
        return 4 * self.dim

    @property
    def embedding_factor(self) -> float:
        """``embedding_scale``, or its default."""
        return self.dim**0.5 if self.embedding_scale is None else self.embedding_scale


@dataclass(frozen=True, kw_only=True)
class LayersConfig(StackConfig):
    """Configuration of a model with one stack of blocks.

    Args:
        layers: number of blocks.
        encoding: name in the registry, or several joined by ``+``.
        options: the encoding's options.

    The others are those of ``StackConfig``.
    """

    layers: Count
    encoding: str
    options: Mapping[str, Any] = field(default_factory=dict)


def make_encodings(
    config: StackConfig,
    name: str,
    options: Mapping[str, Any],
    records: Sequence[Encoding] | None = None,
    *,
    layers: int,
    causal: bool,
    field: str = "encoding",
) -> Sequence[Encoding]:
    """The encoding of each layer: ``records`` if given, else new ones called ``name``.

    New ones leave the random state unchanged, so other weights do not depend on the encoding.

    Args:
        field: name of the argument in errors.

    Raises:
        ArgumentError: if there is not one encoding per layer, one requires a causal mask and
            ``causal`` is False, or ``options`` contradict ``config``.
    """
    if records is None:
        shape = {
            "dim": config.dim,
            "heads": config.heads,
            "head_dim": config.head_dim,
            "max_length": config.max_length,
            "causal": causal,
        }
        for option in shape.keys() & options.keys():
            if options[option] != shape[option]:
                raise ArgumentError(
                    f"options[{option!r}]",
                    expected=f"{shape[option]!r}, as the model has it",
                    got=repr(options[option]),
                    remedy="Leave it out of options: the model passes it to its encodings.",
                )
        with torch.random.fork_rng(devices=[]):
            records = create_layers(name, layers=layers, **(shape | dict(options)))
    records = check(f"{field}s", Sequence[Encoding], records)
    if len(records) != layers:
        raise ArgumentError(
            f"{field}s",
            expected=f"{layers}, one per layer",
            got=len(records),
            remedy="Use posenc.create_layers(name, layers=…).",
        )
    if not causal and any(record.causal_only for record in records):
        raise ArgumentError(
            field,
            expected="an encoding for bidirectional attention",
            got=f"{name!r}, which requires a causal mask",
            remedy="Use another encoding here; this one is for a decoder's self-attention.",
        )
    return records


def norm(config: StackConfig) -> nn.Module:
    """A norm of the kind and width of the blocks'."""
    return make_norm(config.norm, config.dim, eps=config.norm_eps)


class Blocks(nn.ModuleList):
    """Blocks, one after the other."""

    @property
    def encodings(self) -> list[Encoding]:
        """The encoding of each block's self-attention."""
        return [cast(Block, block).attention.encoding for block in self]

    def reset_parameters(self) -> None:
        """Initialise all weights of the blocks except the encodings'.

        Normal with standard deviation fan_in^-1/2, divided by √residuals of the stack for output
        projections; biases 0.
        """
        layers = sum(2 if cast(Block, block).cross is None else 3 for block in self)
        for name, linear in self.named_modules():
            if isinstance(linear, nn.Linear) and ".encoding." not in name:
                gain = layers**-0.5 if name.endswith(".output") else 1.0
                nn.init.normal_(linear.weight, std=gain * linear.in_features**-0.5)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def embed(
        self,
        x: Features,
        layout: Layout,
        tokens: TokenIds | None = None,
        cache: LayerCache | None = None,
    ) -> Features:
        """Token vectors after the embedding part that enters before the first block.

        Args:
            cache: of the first block.
        """
        return embed(self.encodings[0], x, layout, tokens, cache)

    def forward(
        self,
        x: Features,
        layout: Layout,
        *,
        cache: Cache | None = None,
        contexts: Sequence[Context | SourceContext] | None = None,
    ) -> Features:
        """``x`` after all blocks.

        Args:
            contexts: of each block's cross-attention.
        """
        for index, block in enumerate(self):
            layer_cache = None if cache is None else cache[index]
            context = None if contexts is None else contexts[index]
            x = block(x, layout, cache=layer_cache, context=context)
        return x


def embed(
    encoding: Encoding,
    x: Features,
    layout: Layout,
    tokens: TokenIds | None = None,
    cache: LayerCache | None = None,
) -> Features:
    """Token vectors after the embedding part of ``encoding``, unless it enters every layer."""
    if encoding.embedding is None or encoding.embedding.every_layer:
        return x
    if cache is None:
        return encoding.embed(x, layout, tokens=tokens)
    return cache.embed(encoding, x, layout, tokens=tokens)


def make_blocks(
    config: StackConfig,
    encodings: Sequence[Encoding],
    *,
    causal: bool,
    window: int | Sequence[int | None] | None = None,
    cross: Sequence[Encoding] | None = None,
) -> Blocks:
    """One block per encoding, with cross-attention if ``cross`` is given.

    Args:
        window: one for all blocks, or one per block.

    Raises:
        ArgumentError: if there is not one window per block.
    """
    windows = window if isinstance(window, Sequence) else [window] * len(encodings)
    if len(windows) != len(encodings):
        raise ArgumentError(
            "window",
            expected=f"one, or {len(encodings)}, one per layer",
            got=f"{len(windows)}",
            remedy="Use None for a layer without a window.",
        )

    prepared = Prepared()

    def attention(encoding: Encoding, *, causal: bool, window: int | None) -> Attention:
        layer = Attention(
            dim=config.dim,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            encoding=encoding,
            causal=causal,
            window=window,
            bias=config.biases != "none",
            output_bias=config.biases == "all",
            merged=config.merged,
            dropout=config.dropout,
            scale=config.scale,
            sinks=config.sinks,
            softcap=config.softcap,
        )
        layer.prepared = prepared
        return layer

    def block(index: int) -> Block:
        return Block(
            dim=config.dim,
            attention=attention(encodings[index], causal=causal, window=windows[index]),
            cross=None if cross is None else attention(cross[index], causal=False, window=None),
            feed_forward=FeedForward(
                dim=config.dim,
                hidden=config.feed_forward_width,
                activation=config.activation,
                bias=config.bias,
            ),
            norm=config.norm,
            norm_first=config.norm_first,
            parallel=config.parallel,
            norm_eps=config.norm_eps,
            dropout=config.dropout,
        )

    return Blocks(block(index) for index in range(len(encodings)))


def draw_embedding(embedding: nn.Embedding) -> None:
    """Initialise token vectors with norm about 1 (unit variance after the factor √C)."""
    nn.init.normal_(embedding.weight, std=embedding.embedding_dim**-0.5)


def token_layout(
    name: str, tokens: Tensor, layout: Layout | None, cache: LayerCache | None = None
) -> Layout:
    """``layout`` of a batch of token ids; by default a sequence that continues the cache.

    Raises:
        ArgumentError: for tokens of another rank or dtype, or that the layout does not fit.
    """
    remedy = "Use tokens.long(), and one row a sequence."
    require_tensor(name, tokens, ("B", "L"), (torch.int64,), remedy=remedy)
    if layout is not None:
        require_token_ids(tokens, layout, name=name)
        return layout
    return (cache or LayerCache()).following(tokens.shape[1], device=tokens.device)


def share_encodings(model: nn.Module) -> nn.ModuleList:
    """Encodings owned by ``model`` itself, to which its attention layers then refer.

    These have parameters that several layers use, or an embedding part that enters before the
    first block. All others belong to their layer. A block can therefore be sharded, offloaded or
    saved alone.
    """
    layers = _layers(model)
    records = list(dict.fromkeys(layer.encoding for layer in layers.values()))
    uses = Counter(layer.encoding for layer in layers.values())
    holders = Counter(id(tensor) for record in records for tensor in _tensors(record))

    def shared(record: Encoding) -> bool:
        tensors = _tensors(record)
        first = record.embedding is not None and not record.embedding.every_layer
        several = uses[record] > 1 or any(holders[id(tensor)] > 1 for tensor in tensors)
        return bool(tensors) and (first or several)

    owned = [record for record in records if shared(record)]
    for layer in layers.values():
        if layer.encoding in owned:
            layer.refer_to(layer.encoding)
    return nn.ModuleList(owned)


def state_by_layer(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """The state dict, with a shared encoding under the name of the first layer that uses it.

    Names in files then do not depend on sharing.
    """
    names: dict[str, str] = {}
    layers = _layers(model)
    for owner, module in model.named_modules():
        records = getattr(module, "shared_encodings", ())
        for index, record in enumerate(records):
            user = next(name for name, layer in layers.items() if layer.encoding is record)
            names[f"{owner}.shared_encodings.{index}.".lstrip(".")] = f"{user}.encoding."
    state = {}
    for name, tensor in model.state_dict(keep_vars=keep_vars).items():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), "")
        state[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return state


def _layers(model: nn.Module) -> dict[str, Attention | ComplexAttention]:
    modules = model.named_modules()
    return {n: m for n, m in modules if isinstance(m, Attention | ComplexAttention)}


def _tensors(record: Encoding) -> list[Tensor]:
    return [*record.parameters(), *record.buffers()]
