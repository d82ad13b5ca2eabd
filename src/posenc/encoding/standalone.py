"""Parts of an encoding as inputs of other attention implementations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posenc.encoding.parts import Part, QueryKeyTransform, ScoreTerm, ValueTerm, require_causal
from posenc.encoding.rotation import both_features
from posenc.encoding.tensors import Scores
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""New logit of a pair, from its logit and its batch row, head, query and key indices."""


class Standalone:
    """Mixin of ``Encoding`` with the forms that other attention implementations take."""

    query_key: QueryKeyTransform | None
    score: ScoreTerm | None
    value: ValueTerm | None
    parts: Callable[[], tuple[Part, ...]]

    def bias(self, grid: Grid, *, scale: float | None = None) -> Scores:
        """Bias that the score part adds to the scaled logits, ``[B|1, H, Q, K]`` float32 or 64.

        It does not include the mask (``grid.visible``) nor the query_key part (``cos_sin``).

        Args:
            grid: of queries and keys.
            scale: softmax scale, required for TUPE (``encoding.default_scale(head_dim)``).

        Raises:
            ArgumentError: unless there is a score part that depends on positions only and no value
                part; if a part is made for another causal mask than the grid has; or if ``scale``
                is required and missing.
        """
        if self.score is None or not self.score.by_position or self.value is not None:
            raise ArgumentError(
                "encoding",
                expected="a score part that depends on positions only, and no value part",
                got=_names(self.score, self.value),
                remedy="Use posenc.attend, which passes queries and keys to the parts.",
            )
        _require_axes(self.score, grid.query)
        require_causal(self.parts(), grid.causal)
        for parameter in self.score.parameters():
            grid = grid.in_precision_of(parameter)
        # queries and keys of NaN: the bias is NaN if it depends on them
        nan = grid.query.positions.new_tensor(torch.nan)
        q, k = (nan.expand(1, 1, side.length, 1) for side in (grid.query, grid.key))
        bias: Tensor = self.score(q, k, grid, scale=torch.nan if scale is None else scale)
        if scale is None and has_values(bias) and bool(bias.isnan().any()):
            raise ArgumentError(
                "scale",
                expected=f"the softmax scale, which {type(self.score).__name__} depends on",
                got=None,
                remedy="Use scale=encoding.default_scale(head_dim), as attend does.",
            )
        return bias

    def cos_sin(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Cosines and sines that rotate queries or keys: ``x * cos + rotate_half(x) * sin``.

        Each ``[B|1, L, R]`` float32 or float64, or ``[B|1, H, L, R]`` if heads differ, R the number
        of rotated features. Each value occurs twice: as ``[c, c]`` with pairing ``"half"`` (Hugging
        Face's models), as c₀, c₀, c₁, c₁, … with ``"adjacent"``.

        Raises:
            ArgumentError: unless the query_key part is a rotation by position.
        """
        factors = None
        if self.query_key is not None:
            _require_axes(self.query_key, layout)
            factors = self.query_key.rotation(layout)
        if factors is None:
            raise ArgumentError(
                "encoding",
                expected="a query_key part that only rotates by position",
                got=_names(self.query_key),
                remedy="Use encoding.query_key(q, k, grid), which transforms both.",
            )
        cosine, sine, pairing = factors
        full = both_features(cosine, pairing), both_features(sine, pairing)
        return (full[0].squeeze(1), full[1].squeeze(1)) if cosine.shape[1] == 1 else full

    def score_mod(self, grid: Grid, *, scale: float | None = None) -> ScoreMod:
        """``bias`` as a FlexAttention ``score_mod``, for use with ``grid.mask_mod()``.

        It holds the bias ``[B|1, H, Q, K]``.

        Args and Raises: as ``bias``.
        """
        bias = self.bias(grid, scale=scale).float()
        if bias.shape[0] == 1:
            row = bias[0]
            return lambda score, b, h, i, j: score + row[h, i, j]
        return lambda score, b, h, i, j: score + bias[b, h, i, j]


def _require_axes(part: Part, layout: Layout) -> None:
    if part.axes is not None and layout.axes not in part.axes:
        raise ArgumentError(
            "layout",
            expected=f"positions with {' or '.join(map(str, part.axes))} axes for "
            f"{type(part).__name__}",
            got=layout.axes,
            remedy="Use Layout.sequence or Layout.at for text, Layout.image for images.",
        )


def _names(*parts: object) -> str:
    return " and ".join(type(part).__name__ for part in parts if part is not None) or "no such part"
