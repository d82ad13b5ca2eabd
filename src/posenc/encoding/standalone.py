"""Parts of an encoding in the forms that attention written elsewhere takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding.parts import Part, QueryKeyTransform, ScoreTerm, ValueTerm
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values

__all__ = ["ScoreMod", "Standalone"]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""The logit of a pair, from the product, its batch row, head, query and key."""


class Standalone:
    """What ``Encoding`` gives to attention that is not posenc's."""

    query_key: QueryKeyTransform | None
    score: ScoreTerm | None
    value: ValueTerm | None

    def bias(self, grid: Grid, *, scale: float | None = None) -> Float[Tensor, "b H Q K"]:
        """What the score part adds to the scaled logits, ``[B|1, H, Q, K]`` float32 or float64.

        Who sees whom is not in it: mask with ``grid.visible`` besides. A query_key part is not in
        it either: see ``cos_sin``.

        Args:
            grid: where queries and keys are.
            scale: factor of the logits; only TUPE's bias depends on it, which then has to be
                given (``encoding.default_scale(head_dim)``).

        Raises:
            ArgumentError: for an encoding without a score part, with one that reads queries, keys
                or other tokens, or with a value part, which no bias can replace; or without the
                ``scale`` that is needed.
        """
        if self.score is None or not self.score.by_position or self.value is not None:
            raise ArgumentError(
                "encoding",
                expected="a score part that depends on positions alone, and no value part",
                got=_named(self.score, self.value),
                remedy="Use posenc.attend, which gives such parts the queries and keys.",
            )
        _require_axes(self.score, grid.query)
        # Queries and keys of NaN: a part that read them after all could not go unnoticed.
        given = grid.query.positions.new_tensor(torch.nan)
        q, k = (given.expand(1, 1, side.length, 1) for side in (grid.query, grid.key))
        bias: Tensor = self.score(q, k, grid, scale=torch.nan if scale is None else scale)
        if scale is None and has_values(bias) and bool(bias.isnan().any()):
            raise ArgumentError(
                "scale",
                expected=f"the factor of the logits, which {type(self.score).__name__} multiplies",
                got=None,
                remedy="Use scale=encoding.default_scale(head_dim), as attend does.",
            )
        return bias

    def cos_sin(
        self, layout: Layout
    ) -> tuple[Float[Tensor, "b *h L R"], Float[Tensor, "b *h L R"]]:
        """Cosines and sines that rotate queries or keys at ``layout``, in the field's shapes.

        Each ``[B|1, L, R]`` in float32 or float64, or ``[B|1, H, L, R]`` where every head has its
        own; R of the head's features are rotated, ``x * cos + rotate_half(x) * sin``. Both hold
        each pair's number twice: with pairing ``"half"`` as ``[c, c]``, as Hugging Face's models
        do, with ``"adjacent"`` as c₀, c₀, c₁, c₁, …

        Raises:
            ArgumentError: for an encoding without a query_key part, or one that does more than
                rotate by position.
        """
        factors = None
        if self.query_key is not None:
            _require_axes(self.query_key, layout)
            factors = self.query_key.rotation(layout)
        if factors is None:
            raise ArgumentError(
                "encoding",
                expected="a query_key part that rotates by position alone",
                got=_named(self.query_key),
                remedy="Use encoding.query_key(q, k, grid), which returns both transformed.",
            )
        cosine, sine, pairing = factors
        if pairing == "half":
            full = [torch.cat([x, x], dim=-1) for x in (cosine, sine)]
        else:
            full = [x.repeat_interleave(2, dim=-1) for x in (cosine, sine)]
        if cosine.shape[1] == 1:
            full = [x.squeeze(1) for x in full]
        return full[0], full[1]

    def score_mod(self, grid: Grid, *, scale: float | None = None) -> ScoreMod:
        """``bias`` as FlexAttention's ``score_mod``: adds to each pair's logit.

        It reads one number a pair from the bias ``[B|1, H, Q, K]``, which it keeps. Who sees whom
        is in ``grid.mask_mod()``.

        Args and Raises: as ``bias``.
        """
        bias = self.bias(grid, scale=scale).float()
        if bias.shape[0] == 1:
            only = bias[0]
            return lambda score, b, h, i, j: score + only[h, i, j]
        return lambda score, b, h, i, j: score + bias[b, h, i, j]


def _require_axes(part: Part, layout: Layout) -> None:
    if part.axes is not None and layout.axes not in part.axes:
        raise ArgumentError(
            "layout",
            expected=f"positions with {' or '.join(map(str, part.axes))} axes, as "
            f"{type(part).__name__} reads",
            got=layout.axes,
            remedy="Use Layout.sequence or Layout.at for text, Layout.image for images.",
        )


def _named(*parts: object) -> str:
    return " and ".join(type(part).__name__ for part in parts if part is not None) or "no such part"
