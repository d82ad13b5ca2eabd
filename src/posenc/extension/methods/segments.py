"""Long inputs in overlapping segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.arguments import EXACT, Interval, Natural
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension
from posenc.extension.fitting import TRAINED
from posenc.layout import Layout

Combine = Literal["before", "mean", "middle"]


def segments(
    model: nn.Module,
    *,
    length: Annotated[int, Interval(2, EXACT, remedy=TRAINED)],
    overlap: Natural | None = None,
    combine: Combine = "before",
) -> Segments:
    """Segment-wise inference: a long input in overlapping segments, each at positions from 0.

    Segments of L tokens start every ``L - overlap`` tokens, the last one so that it ends with the
    input. The outputs of a token in several segments are combined. Shorter inputs are not split.
    Cost: up to ``L / (L - overlap)`` times that of one pass over segments, linear in the length,
    with the memory of one segment. No token sees farther than L.

    Args:
        model: called with ``(tokens, layout)``, with outputs ``[B, L, …]``.
        length: L, the trained length.
        overlap: tokens shared by neighbouring segments, below L; L/2 by default.
        combine: ``"before"``: the output with the most tokens before it (language models);
            ``"middle"``: the output farthest from a cut (encoders); ``"mean"``: the mean.

    Raises:
        ArgumentError: if ``length`` or ``overlap`` is outside its domain.
        UnknownNameError: for another ``combine``.

    >>> import torch
    >>> from posenc.extension import segments
    >>> class Places(torch.nn.Module):
    ...     def forward(self, tokens, layout):
    ...         return layout.positions.expand(len(tokens), -1, -1)
    >>> read = segments(Places(), length=4, overlap=2)
    >>> read(torch.zeros(1, 7, dtype=torch.long)).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0, 2.0, 3.0, 3.0]
    """
    overlap = length // 2 if overlap is None else overlap
    if overlap >= length:
        raise ArgumentError(
            "overlap",
            expected=f"0 to {length - 1}, fewer than the {length} tokens of a segment",
            got=overlap,
            remedy="None shares a half.",
        )
    return Segments(model, length=length, overlap=overlap, combine=combine)


class Segments(nn.Module):
    """A model that reads long inputs in segments; see ``segments``."""

    def __init__(self, model: nn.Module, *, length: int, overlap: int, combine: Combine) -> None:
        super().__init__()
        self.model, self.length, self.overlap, self.combine = model, length, overlap, combine

    def extra_repr(self) -> str:
        return f"length={self.length}, overlap={self.overlap}, {self.combine}"

    def forward(
        self, tokens: Int[Tensor, "B L"], layout: Layout | None = None
    ) -> Float[Tensor, "B L *features"]:
        """The model's outputs ``[B, L, …]``.

        Args:
            tokens: ``[B, L]`` ids.
            layout: with one axis and without documents; a sequence by default.

        Raises:
            ArgumentError: for a layout with documents.
        """
        count = tokens.shape[1]
        layout = Layout.sequence(count, device=tokens.device) if layout is None else layout
        if layout.document is not None:
            raise ArgumentError(
                "layout",
                expected="one text a row",
                got="documents",
                remedy="Give each document a row of its own (Layout.padded).",
            )
        if count <= self.length:
            single: Tensor = self.model(tokens, layout)
            return single
        starts = self.starts(count)
        weights = self._weights(starts, count).to(tokens.device)
        output: Tensor | None = None
        for row, begin in enumerate(starts):
            end = begin + self.length
            outputs: Tensor = self.model(tokens[:, begin:end], _from_zero(layout.slice(begin, end)))
            if output is None:
                output = outputs.new_zeros(outputs.shape[0], count, *outputs.shape[2:])
            share = weights[row, begin:end].to(outputs.dtype)
            first, last = _span(share)
            share = share[first:last].view(-1, *[1] * (outputs.dim() - 2))
            output[:, begin + first : begin + last].add_(outputs[:, first:last] * share)
        assert output is not None  # there is at least one segment
        return output

    def starts(self, count: int) -> list[int]:
        """First tokens of the segments."""
        last = max(0, count - self.length)
        return [*range(0, last, self.length - self.overlap), last]

    def _weights(self, starts: list[int], count: int) -> Float[Tensor, "S L"]:
        """Share of each segment in each token's output; sums to 1 over segments."""
        places = torch.arange(count).unsqueeze(0)
        begins = torch.tensor(starts).unsqueeze(1)
        inside = (places >= begins) & (places < begins + self.length)
        if self.combine == "mean":
            return inside / inside.sum(0, keepdim=True)
        before, after = places - begins, begins + self.length - 1 - places
        space = before if self.combine == "before" else torch.minimum(before, after)
        best = space.masked_fill(~inside, -1).argmax(0)
        return nn.functional.one_hot(best, len(starts)).T.float()


def _span(share: Float[Tensor, " n"]) -> tuple[int, int]:
    """First place with a share, and the end of the last."""
    places = share.nonzero().flatten()
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def _from_zero(layout: Layout) -> Layout:
    """The layout moved so that the first valid token of each row is at 0."""
    if layout.start is not None:
        return Layout.sequence(layout.length, device=layout.device)
    positions = layout.positions
    if layout.valid is not None:
        rows = max(positions.shape[0], layout.valid.shape[0])
        real = positions.expand(rows, -1, -1)
        real = real.masked_fill(~layout.valid.unsqueeze(-1), torch.inf)
        first = real.amin(1, keepdim=True)
        first = torch.where(first.isinf(), 0.0, first)
    else:
        first = positions.amin(1, keepdim=True)
    return replace(layout.with_positions(positions - first), order=layout.order)


ENTRY = Extension(
    function=segments,
    summary="Reads long inputs in overlapping segments, each at trained positions.",
    on=("any",),
    decodes_as_whole=False,
    short_unchanged=True,
    training="none",
    expect="As good as the model is at its trained length, at any length; nothing is seen from "
    "farther away.",
    cost="each token up to L / (L - overlap) times",
    level="model",
    trials={"text_table": ("",)},
)
