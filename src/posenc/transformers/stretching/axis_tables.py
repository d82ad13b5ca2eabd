"""Tables of cosines and sines on several axes: their frequencies read, and some made slower."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encodings.common.precision import wider
from posenc.encodings.query_key.axial_rope import AxialRope
from posenc.errors import ArgumentError

Table = tuple[Tensor, Tensor]
"""Cosines and sines, with tokens and features on any dimensions."""

Form = tuple[int, int, int]
"""See ``Ladders`` for tokens, dims and features."""

TOLERANCE = 0.02
"""Largest error of angles in radians: LTX-Video's fastest are off by 0.004 in float32."""

ALIKE = 1e-3
"""Relative difference of frequencies up to which features are rotated alike."""

MEASURED = 31
"""Tokens along an axis that a frequency is measured with."""

BOXES = ((3, 4, 3, 4), (1, 4, 3, 4))
"""Sizes that frequencies are verified with; the second for text before an image."""


class TableProbe(Protocol):
    """A way to call for the tables of a box of tokens.

    Args:
        axes: of the tokens' coordinates.
        steps: distances of neighbours to measure frequencies with, ascending; the fastest pair
            turns by less than π in the first, each of the next is twice the one before.
    """

    axes: int
    steps: Sequence[float]

    def __call__(self, sizes: tuple[int, ...], step: float = 1.0) -> Any:
        """Result of a call for tokens so far apart; None if it fails."""


@dataclass(frozen=True, eq=False)
class Ladders:
    """Frequencies of tables, axis by axis.

    Args:
        tokens: dimension of the tables' tokens; those before and after it but the batch, which is
            the first if the tokens are not, are the features.
        dims: dimensions of the tables.
        features: number of features.
        theta: frequencies of each axis's pairs in radians per unit of its coordinate, falling.
        columns: features of each of these pairs.
    """

    tokens: int
    dims: int
    features: int
    theta: tuple[tuple[float, ...], ...]
    columns: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def rope(self) -> AxialRope:
        """Axial RoPE of these frequencies."""
        pairs = tuple(map(len, self.theta))
        bases = []
        for ladder in self.theta:
            ratio = ladder[0] / ladder[-1] if len(ladder) > 1 else 1.0
            base = ratio ** (len(ladder) / (len(ladder) - 1)) if ratio > 1 else 10000.0
            bases.append(_rounded(base))
        steps = tuple(_rounded(ladder[0]) if ladder else 1.0 for ladder in self.theta)
        return AxialRope(head_dim=2 * sum(pairs), pairs=pairs, base=bases, step=steps)

    def rows(self, x: Tensor) -> Float[Tensor, "B L R"] | None:
        """A table by batch row, token and feature; None if it is another's."""
        if x.dim() != self.dims or x.dim() < 2:
            return None
        rows = (x.unsqueeze(0) if self.tokens == 0 else x).movedim(max(1, self.tokens), 1)
        return rows.flatten(2) if math.prod(rows.shape[2:]) == self.features else None

    def unrows(self, rows: Float[Tensor, "B L R"], like: Tensor) -> Tensor:
        """The inverse of ``rows``, in the shape and dtype of the table."""
        batched = like.unsqueeze(0) if self.tokens == 0 else like
        moved = batched.movedim(max(1, self.tokens), 1).shape
        table = rows.reshape(moved).movedim(1, max(1, self.tokens))
        return table.reshape(like.shape).to(like.dtype).contiguous()

    def unwrapped(
        self, cosine: Float[Tensor, "B L R"], sine: Float[Tensor, "B L R"], axis: int
    ) -> tuple[Float[Tensor, "B L T"], Float[Tensor, "B L T"]]:
        """Angles of an axis's pairs without multiples of 2π left out, and the error of each.

        The slowest pair says where a token is, faster ones say it more exactly.
        """
        first = [own[0] for own in self.columns[axis]]
        angles = torch.atan2(sine[..., first], cosine[..., first])
        theta = angles.new_tensor(self.theta[axis])
        coordinate = angles.new_zeros(angles.shape[:-1])
        count = len(first)
        for t in range(count - 1, -1, -max(1, count // 8)):
            coordinate = _nearest(angles[..., t], coordinate * theta[t]) / theta[t]
        expected = coordinate.unsqueeze(-1) * theta
        angles = _nearest(angles, expected)
        return angles, angles - expected


@dataclass(eq=False)
class StretchedTable:
    """Tables with other cosines and sines of the pairs that a method changed.

    Args:
        ladders: as they were.
        after: the stretched rotation.
        axis: along which it is stretched.
        verified: whether tables are known to have these frequencies.
    """

    ladders: Ladders
    after: AxialRope
    axis: int
    verified: bool = True

    def __call__(self, cosine: Tensor, sine: Tensor) -> Table:
        """The tables, as they are if they are not of these features.

        Raises:
            ArgumentError: for tables of other frequencies, unless ``verified``.
        """
        ladders = self.ladders
        rows = [ladders.rows(wider(table)) for table in (cosine, sine)]
        if rows[0] is None or rows[1] is None:
            return cosine, sine
        angles, errors = ladders.unwrapped(rows[0], rows[1], self.axis)
        if not self.verified and bool(errors.abs().max() > 0.1):
            raise ArgumentError(
                "image_rotary_emb",
                expected="the frequencies of get_3d_rotary_pos_embed of diffusers",
                got="others",
                remedy="Stretch before they are computed.",
            )
        begin = sum(map(len, ladders.theta[: self.axis]))
        divisors = (self.after.divisors or ())[begin:][: angles.shape[-1]]
        slowed = [t for t, divisor in enumerate(divisors) if divisor != 1]
        own = [
            (column, i) for i, t in enumerate(slowed) for column in ladders.columns[self.axis][t]
        ]
        columns, of_slowed = [column for column, _ in own], [i for _, i in own]
        angles = angles[..., slowed] / angles.new_tensor([divisors[t] for t in slowed])
        size = torch.hypot(rows[0][..., columns], rows[1][..., columns])
        made = []
        for table, before, of_pairs in zip(
            (cosine, sine), rows, (angles.cos(), angles.sin()), strict=True
        ):
            assert before is not None
            after = before.clone()
            after[..., columns] = size * of_pairs[..., of_slowed]
            made.append(ladders.unrows(after * self.after.gain, table))
        return made[0], made[1]


def map_tables(result: Any, change: Callable[[Tensor, Tensor], Table]) -> Any:
    """A result with its tables changed: complex tensors, and pairs of cosines and sines."""
    if isinstance(result, Tensor):
        return torch.complex(*change(result.real, result.imag)) if result.is_complex() else result
    if isinstance(result, Mapping):
        return {key: map_tables(value, change) for key, value in result.items()}
    if not isinstance(result, tuple | list):
        return result
    if _is_table(result):
        return type(result)(change(*result))
    return type(result)(map_tables(part, change) for part in result)


def read_ladders(probe: TableProbe) -> Ladders | None:
    """The frequencies of tables; None if they are another rotation than of one axis a feature."""
    measured = [_measured(probe, axis) for axis in range(probe.axes)]
    forms = {found[0] for found in measured if found is not None}
    if None in measured or len(forms) != 1:
        return None
    features = torch.stack([found[1] for found in measured if found is not None])
    if (features < 0).any() or ((features > 0).sum(0) > 1).any():
        return None
    ladders = [_ladder(row.tolist()) for row in features]
    while ladders and not ladders[-1]:
        ladders.pop()
    theta = tuple(tuple(frequency for frequency, _ in ladder) for ladder in ladders)
    columns = tuple(tuple(own for _, own in ladder) for ladder in ladders)
    made = Ladders(*forms.pop(), theta, columns)
    return made if ladders and _geometric(theta) and _verified(made, probe) else None


def _measured(probe: TableProbe, axis: int) -> tuple[Form, Float[Tensor, " R"]] | None:
    """Form of the tables, and the angle of each feature by a unit of an axis's coordinate."""
    sizes = tuple(MEASURED if other == axis else 1 for other in range(probe.axes))
    theta, form = torch.zeros(()), None
    for step in probe.steps:
        tables = [both for both in tables_of(probe(sizes, step)) if _form(both[0], MEASURED)]
        if not tables:
            return None
        form = _form(tables[0][0], MEASURED)
        assert form is not None
        rows = [Ladders(*form, (), ()).rows(wider(table)) for table in tables[0]]
        assert rows[0] is not None
        assert rows[1] is not None
        turns = torch.atan2(rows[1], rows[0])[0].diff(dim=0)
        turns = _nearest(turns, theta * step)
        theta = turns.mean(0) / step
        if (turns - theta * step).abs().max() > TOLERANCE:
            return None
    assert form is not None
    return form, theta


def _ladder(theta: list[float]) -> list[tuple[float, tuple[int, ...]]]:
    """Frequencies of an axis, falling, each with its features."""
    order = sorted((t for t in range(len(theta)) if theta[t] > 0), key=lambda t: -theta[t])
    steps: list[list[int]] = []
    for t in order:
        if steps and theta[steps[-1][0]] < theta[t] * (1 + ALIKE):
            steps[-1].append(t)
        else:
            steps.append([t])
    return [(sum(theta[t] for t in own) / len(own), tuple(sorted(own))) for own in steps]


def _geometric(theta: tuple[tuple[float, ...], ...]) -> bool:
    """True if frequencies of each axis fall by the same factor from pair to pair."""
    for ladder in theta:
        if len(ladder) > 2:
            ratio = (ladder[-1] / ladder[0]) ** (1 / (len(ladder) - 1))
            exact = [ladder[0] * ratio**t for t in range(len(ladder))]
            if any(abs(a / b - 1) > ALIKE for a, b in zip(ladder, exact, strict=True)):
                return False
    return True


def _verified(ladders: Ladders, probe: TableProbe) -> bool:
    """True if the angles of a box of tokens are those of coordinates, times the frequencies."""
    for box in BOXES:
        sizes = box[: probe.axes]
        for cosine, sine in tables_of(probe(sizes)):
            form = ladders.tokens, ladders.dims, ladders.features
            if _form(cosine, math.prod(sizes)) != form:
                continue
            rows = [ladders.rows(wider(table)) for table in (cosine, sine)]
            assert rows[0] is not None
            assert rows[1] is not None
            for axis in range(len(ladders.theta)):
                if ladders.theta[axis]:
                    _, errors = ladders.unwrapped(rows[0], rows[1], axis)
                    if errors.abs().max() > TOLERANCE:
                        return False
            return True
    return False


def tables_of(result: Any) -> list[Table]:
    """The tables of a result, on the CPU."""
    found: list[Table] = []

    def note(cosine: Tensor, sine: Tensor) -> Table:
        found.append((cosine.detach().cpu(), sine.detach().cpu()))
        return cosine, sine

    map_tables(result, note)
    return found


def _form(table: Tensor, tokens: int) -> Form | None:
    """Dimension of the tokens, dimensions and features; None if there are not so many tokens."""
    sizes = list(table.shape[:-1])
    return (sizes.index(tokens), table.dim(), table.numel() // tokens) if tokens in sizes else None


def _is_table(result: tuple[Any, ...] | list[Any]) -> bool:
    if len(result) != 2 or not all(isinstance(x, Tensor) for x in result):
        return False
    cosine, sine = result
    real = cosine.is_floating_point() and sine.is_floating_point()
    return real and cosine.shape == sine.shape


def _rounded(value: float) -> float:
    """The whole number that a measured value is."""
    whole = float(round(value))
    return whole if abs(value - whole) < 1e-4 * value else value


def _nearest(angle: Tensor, expected: Tensor) -> Tensor:
    """The angle, plus the multiple of 2π that brings it nearest to what is expected."""
    return angle + 2 * math.pi * ((expected - angle) / (2 * math.pi)).round()
