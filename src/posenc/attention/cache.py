"""The KV cache: keys, values and their layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, cat

from posenc.encoding import Encoding
from posenc.encoding.prepared import reused_of_layouts
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.checks import require_rows, require_whole
from posenc.layout.features import require_layout, require_layout_of
from posenc.runtime import is_transformed

T = TypeVar("T")

Pair = tuple[Float[Tensor, "B G K D"], Float[Tensor, "B G K E"]]
"""Keys and values."""


class LayerCache:
    """The past of one attention layer.

    Keys are kept with their layout as they came from the projection, so that every method,
    length-dependent ones included, sees the past exactly as in one pass over the whole sequence.
    Where the attention layer knows that its encoding transforms each key by its own position
    alone, it gives them transformed; so it does values. Where gradients are disabled, tokens are
    written behind the past, in memory that doubles when it is full.

    Attributes:
        transformed: whether ``keys`` have been transformed by the encoding.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.layout: Layout | None = None
        self.transformed = False
        self._rest: Encoding | None = None
        self._storage: tuple[Pair, Pair] | None = None
        """Preallocated keys and values, and the views of them that were returned last."""
        self.inputs: tuple[Tensor, Layout, Tensor | None] | None = None

    def embed(
        self,
        encoding: Encoding,
        x: Float[Tensor, "B L C"],
        layout: Layout,
        *,
        tokens: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L C"]:
        """``encoding.embed`` of tokens that follow what is cached, which it may read."""
        lookback = 0 if encoding.embedding is None else encoding.embedding.lookback
        if lookback == 0:
            return encoding.embed(x, layout, tokens=tokens)
        length = x.shape[1]
        if self.inputs is not None:
            past, past_layout, past_tokens = self.inputs
            x, layout = cat([past, x], dim=1), past_layout.concat(layout)
            if tokens is not None and past_tokens is not None:
                tokens = cat([past_tokens, tokens], dim=1)
        begin = max(0, layout.length - lookback)
        last_tokens = None if tokens is None else tokens[:, begin:]
        self.inputs = x[:, begin:], layout.slice(begin, layout.length), last_tokens
        return encoding.embed(x, layout, tokens=tokens)[:, layout.length - length :]

    def without_transform(self, encoding: Encoding) -> Encoding:
        """The encoding's score and value parts, for queries and keys that are transformed."""
        score, value, rest = encoding.score, encoding.value, self._rest
        if rest is None or rest.score is not score or rest.value is not value:
            rest = self._rest = Encoding(score=score, value=value)
        return rest

    def append(
        self, keys: Float[Tensor, "B G L D"], values: Float[Tensor, "B G L E"], layout: Layout
    ) -> tuple[Float[Tensor, "B G K D"], Float[Tensor, "B G K E"], Layout]:
        """Add tokens, and return keys, values and layout of everything so far.

        Raises:
            ArgumentError: for tokens that do not fit each other or the past.
        """
        self._require_fit(keys, values, layout)
        if self.keys is None or self.values is None or self.layout is None:
            self.keys, self.values, self.layout = keys, values, layout
        else:
            self.layout = _joined(self.layout, layout)
            self.keys, self.values = self._extended(self.keys, self.values, keys, values)
        return self.keys, self.values, self.layout

    def _require_fit(self, keys: Tensor, values: Tensor, layout: Layout) -> None:
        require_layout("layout", layout)
        if isinstance(keys, Tensor):
            require_layout_of("keys", keys, layout, "layout")
        for name, x, past in (("keys", keys, self.keys), ("values", values, self.values)):
            if not isinstance(x, Tensor):
                got, remedy = type(x).__name__, "Its shape is [B, G, L, D]."
                raise ArgumentError(name, expected="a tensor", got=got, remedy=remedy)
            like = keys if past is None else past
            fits = x.is_floating_point() and x.layout is torch.strided and x.dim() == 4
            fits = fits and x.shape[:2] == like.shape[:2] and x.shape[2] == layout.length
            fits = fits and (past is None or x.shape[3] == past.shape[3])
            if not fits or x.device != like.device:
                width = "D" if past is None else past.shape[3]
                raise ArgumentError(
                    name,
                    expected=f"floats of shape {[*like.shape[:2], layout.length, width]}, dense on "
                    f"{like.device}",
                    got=f"{x.dtype} of shape {list(x.shape)}, {x.layout} on {x.device}",
                    remedy="Keys and values are of the layout's tokens, and of the past's sizes.",
                )

    def _extended(
        self, past_keys: Tensor, past_values: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The past with new tokens appended: in place if memory is left and no graph records it."""
        pasts, news = (past_keys, past_values), (keys, values)
        plain = all(
            new.dtype == past.dtype and new.shape[:2] == past.shape[:2]
            for past, new in zip(pasts, news, strict=True)
        )
        # Queries alone may have gradients, which then need the keys as they were.
        graphs = torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed()
        if graphs or not plain:
            self._storage = None
            return cat([past_keys, keys], dim=2), cat([past_values, values], dim=2)
        begin, end = past_keys.shape[2], past_keys.shape[2] + keys.shape[2]
        buffers, returned = self._storage or (None, pasts)
        replaced = any(
            past is not last or (buffers is not None and past.data_ptr() != buffer.data_ptr())
            for past, last, buffer in zip(pasts, returned, buffers or pasts, strict=True)
        )
        # Tensors of inference mode cannot be written to outside of it.
        inference = torch.is_inference_mode_enabled()
        frozen = buffers is not None and buffers[0].is_inference() and not inference
        if buffers is None or replaced or frozen or buffers[0].shape[2] < end:
            size = max(end, 2 * begin)
            first, second = (past.new_empty(*past.shape[:2], size, past.shape[3]) for past in pasts)
            buffers = first, second
            for buffer, past in zip(buffers, pasts, strict=True):
                buffer[:, :, :begin] = past
        for buffer, new in zip(buffers, news, strict=True):
            buffer[:, :, begin:end] = new
        extended = buffers[0][:, :, :end], buffers[1][:, :, :end]
        self._storage = buffers, extended
        return extended

    def __copy__(self) -> LayerCache:
        """A cache with the same past; tokens appended to either do not affect the other."""
        copied = LayerCache()
        copied.__dict__ |= self.__dict__ | {"_storage": None}
        return copied

    def __getstate__(self) -> dict[str, object]:
        """The past alone, to be copied or pickled, without what was computed for later tokens."""
        return self.__dict__ | dict.fromkeys(("_rest", "_storage"))

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these batch rows, in this order; a row may come more than once (beam search).

        Raises:
            ArgumentError: for rows that there are not.
        """
        self._select(rows, {})

    def _select(self, rows: Int[Tensor, " rows"], selected: dict[Layout, Layout]) -> None:
        """Select batch rows; ``selected`` maps layouts of several layers to the selected ones."""

        def chosen(layout: Layout) -> Layout:
            if layout not in selected:
                selected[layout] = layout.select(rows)
            return selected[layout]

        if self.keys is not None:
            require_rows(rows, self.keys.shape[0])
        self._storage = None
        if self.keys is not None and self.values is not None and self.layout is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]
            self.layout = chosen(self.layout)
        if self.inputs is not None:
            x, layout, tokens = self.inputs
            selected_tokens = None if tokens is None else tokens[rows]
            self.inputs = x[rows], chosen(layout), selected_tokens

    def truncate(self, length: int) -> None:
        """Forget all but the last ``length`` tokens, and the graph that made them."""
        length = require_whole("length", length, 0)
        self._storage = None
        if self.keys is not None and self.values is not None and self.layout is not None:
            begin = max(0, self.layout.length - length)
            self.keys = self.keys[:, :, begin:].detach()
            self.values = self.values[:, :, begin:].detach()
            self.layout = _detached(self.layout.slice(begin, self.layout.length))
        if self.inputs is not None:
            x, layout, tokens = self.inputs
            self.inputs = x.detach(), _detached(layout), tokens

    def following(self, length: int, *, device: torch.device | None = None) -> Layout:
        """A sequence of ``length`` tokens that goes on where the cached ones end, or begins at 0.

        Raises:
            ArgumentError: where the cached tokens are no plain sequence.
        """
        if self.layout is None:
            return Layout.sequence(length, device=device)
        if self.layout.start is None:
            raise ArgumentError(
                "layout",
                expected="where these tokens stand",
                got="nothing, and a past that is no plain sequence",
                remedy="Pass layout=…; for one token more: the past's layout.following().",
            )
        return Layout.sequence(length, self.layout.start + self.layout.length, device=device)

    @property
    def length(self) -> int:
        """Tokens kept."""
        return 0 if self.layout is None else self.layout.length


class Cache:
    """One ``LayerCache`` a layer of a model.

    Raises:
        ArgumentError: for a number of layers that is none.
    """

    def __init__(self, layers: int) -> None:
        layers = require_whole("layers", layers, 0, most=2**16, remedy="Use the model's layers.")
        self.layers = [LayerCache() for _ in range(layers)]

    def __getitem__(self, layer: int) -> LayerCache:
        count = len(self.layers)
        remedy = f"It has {count} layers."
        return self.layers[require_whole("layer", layer, -count, most=count - 1, remedy=remedy)]

    @property
    def length(self) -> int:
        """Tokens kept."""
        return self.layers[0].length if self.layers else 0

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these batch rows in every layer."""
        selected: dict[Layout, Layout] = {}
        for layer in self.layers:
            layer._select(rows, selected)

    def truncate(self, length: int) -> None:
        """Forget all but the last ``length`` tokens in every layer."""
        for layer in self.layers:
            layer.truncate(length)


def _joined(past: Layout, layout: Layout) -> Layout:
    """The layout of new tokens behind the past, one for all layers of a model."""
    if past.signal is not None or layout.signal is not None:
        return past.concat(layout)
    return reused_of_layouts(lambda: past.concat(layout), "past", layouts=(past, layout))


def _detached(layout: Layout) -> Layout:
    """The layout without the graph that made its positions and signal."""
    signal = None if layout.signal is None else layout.signal.detach()
    return replace(layout, positions=layout.positions.detach(), signal=signal)
