"""Lengths of a study: those that fit into memory and time, and the effective one of a model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from statistics import fmean

import torch
from jaxtyping import Int
from torch import Tensor, nn

from posenc.arguments import GIB
from posenc.errors import ArgumentError
from posenc.lab.evaluation.results import Effective, Rise
from posenc.lab.experiments.text_loss import rows_a_call
from posenc.lab.reporting.judge import BREAKS
from posenc.lab.reporting.numbers import CONFIDENCE, Estimate, estimate
from posenc.lab.training.machine import PeakMemory


@torch.inference_mode()
def affordable(
    model: nn.Module,
    text: Int[Tensor, " T"],
    lengths: Sequence[int],
    *,
    needed: int,
    passes: int,
    memory: float | None,
    minutes: float | None,
    limit: int | None = None,
) -> tuple[tuple[int, ...], dict[str, str]]:
    """The lengths from the first on that fit, and why the others do not.

    A pass over as many texts of each length as are read at a time is run, from the shortest on,
    unless it is expected to take too much memory: as the one before it, but in proportion to the
    number of texts and the square of their length.

    Args:
        model: to run.
        text: ids.
        lengths: in rising order.
        needed: length without which nothing can be said.
        passes: texts read at each length.
        memory: GiB of a pass.
        minutes: of all passes.
        limit: longer texts are cut to it.

    Raises:
        ArgumentError: if ``needed`` does not fit.
    """
    device = next(model.parameters()).device
    affordable_lengths: list[int] = []
    left_out: dict[str, str] = {}
    peak, seconds, before, reason = 0, 0.0, 1, ""
    for length in lengths:
        rows = rows_a_call(length)
        if memory is not None and peak * rows * length**2 / before > memory * GIB:
            reason = f"memory: a pass would take more than {memory:g} GiB"
        else:
            used = PeakMemory(device)
            began = time.perf_counter()
            model(text[: min(length, limit or length)].expand(rows, -1).to(device))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds += passes / rows * (time.perf_counter() - began)
            peak, before = used.used(), rows * length**2
            if memory is not None and peak > memory * GIB:
                reason = f"memory: a pass takes more than {memory:g} GiB"
            elif minutes is not None and seconds > 60 * minutes:
                reason = f"minutes: measuring would take more than {minutes:g}"
        if reason:
            left_out = {str(n): reason for n in lengths[lengths.index(length) :]}
            break
        affordable_lengths.append(length)
    if not affordable_lengths or max(affordable_lengths) < needed:
        name, _, rest = reason.partition(": ")
        raise ArgumentError(
            name,
            expected=f"enough for contexts of {needed}, the trained length",
            got=f"{memory:g} GiB" if name == "memory" else f"{minutes:g}",
            remedy=f"{rest[0].upper()}{rest[1:]}; raise the limit, or measure on another device.",
        )
    return tuple(affordable_lengths), left_out


ANSWERS = "answers"
"""The group of the tasks with questions."""

NARROW = 1.2
"""Ratio of the ends of an interval that is not divided further."""


@dataclass(frozen=True)
class Series:
    """One ability, measured on the same pieces at every length.

    Args:
        name: of the ability.
        group: abilities of a group are judged together.
        values: length → value of each piece: bits of a text, or share of an answer.
        lower: lower values are better: a loss; else shares.
        chance: share of right answers by guessing.
        confidence: of intervals.
    """

    name: str
    group: str
    values: Mapping[int, Sequence[float]]
    lower: bool = False
    chance: float = 0.0
    confidence: float = CONFIDENCE

    def excess(self, length: int, reference: int, margin: float) -> Estimate:
        """The mean value beyond the margin of that at ``reference``; positive: outside of it.

        Paired over pieces. Of shares two pieces more are counted, one right at either length alone
        (Bonett and Price 2012), so that the interval of few, or all right, is not a point.
        """
        pairs = list(zip(self.values[reference], self.values[length], strict=True))
        if self.lower:
            excesses = [value - (1 + margin) * base for base, value in pairs]
        else:
            pairs += [(1.0, 0.0), (0.0, 1.0)]
            excesses = [(1 - margin) * base - value for base, value in pairs]
        difference = estimate(excesses, confidence=self.confidence)
        assert difference is not None  # no series is empty
        return difference

    def learned(self, reference: int, lengths: Iterable[int]) -> bool:
        """True if it was measured at all ``lengths``, and surely more is right than by guessing.

        Args:
            reference: where that is asked; not of losses.
            lengths: that are compared.
        """
        if not all(length in self.values for length in (reference, *lengths)):
            return False
        if self.lower:
            return True
        mean = estimate([*self.values[reference], 0.0, 0.0, 1.0, 1.0])
        assert mean is not None  # there are four values at least
        return mean.low > self.chance

    def at_ceiling(self) -> bool:
        """True if everything is right at every length."""
        return not self.lower and all(min(values) == 1 for values in self.values.values())


def task_series(name: str, values: Mapping[int, Sequence[float]]) -> Series:
    """The answers of a task, by length."""
    return Series(name, ANSWERS, values)


def effective_length(
    series: Iterable[Series], *, claimed: int, margin: float, most: int | None = None
) -> Effective:
    """The longest length up to which every ability is within the margin of its own reference.

    The reference is the claimed length, or the longest measured one up to it. If the loss there is
    surely more than ``BREAKS`` above that in a shorter context, the model does not read as claimed,
    as more context can only help; the reference is then the shorter length of least loss. So it is
    where surely more than ``BREAKS`` of the right answers are lost, if all lengths were asked. The
    interval begins at the longest length up to which all abilities are surely within the margin,
    and ends before the first at which one is surely outside.

    Args:
        series: abilities, at the same lengths; those at chance do not count.
        claimed: the trained length, as config.json or the user says.
        margin: share of the reference's value by which one may be worse.
        most: input length beyond which texts are cut; what is longer is not read.
    """
    abilities = list(series)
    measured = sorted({length for ability in abilities for length in ability.values})
    lengths = [length for length in measured if most is None or length <= most]
    stated = max([length for length in lengths if length <= claimed], default=lengths[0])
    reference = _reference(abilities, lengths, stated)
    longer = [length for length in lengths if length > reference]
    counted = [ability for ability in abilities if ability.learned(reference, longer)]
    groups = _joined(counted)
    low = point = reference
    limited, end = "", None
    within = sure = True
    for length in longer if groups else ():
        excesses = {group.name: group.excess(length, reference, margin) for group in groups}
        worst = max(excesses, key=lambda name: excesses[name].low)
        if excesses[worst].low > 0:
            limited, end = limited or worst, length
            break
        within = within and all(excess.mean <= 0 for excess in excesses.values())
        sure = sure and all(excess.high <= 0 for excess in excesses.values())
        if not within and not limited:
            limited = max(excesses, key=lambda name: excesses[name].mean)
        point = length if within else point
        low = length if sure else low
    recalls = [ability for ability in counted if not ability.lower]
    return Effective(
        length=point,
        low=low,
        end=end,
        margin=margin,
        reference=reference,
        claimed=claimed,
        honest=reference == stated,
        limited_by=limited,
        abilities=tuple(ability.name for ability in counted),
        unlearned=tuple(ability.name for ability in abilities if ability not in counted),
        ceiling=bool(recalls) and all(ability.at_ceiling() for ability in recalls),
        cut=most,
    )


def _joined(series: Iterable[Series]) -> list[Series]:
    """The abilities of each group as one."""
    groups: dict[str, list[Series]] = {}
    for ability in series:
        groups.setdefault(ability.group, []).append(ability)
    joined = []
    for name, several in groups.items():
        shared = set.intersection(*(set(ability.values) for ability in several))
        values = {n: [*chain(*(ability.values[n] for ability in several))] for n in shared}
        joined.append(replace(several[0], name=name, values=values))
    return joined


def _reference(series: Sequence[Series], lengths: Sequence[int], stated: int) -> int:
    """The length that the others are held to; see ``effective_length``."""
    asked = [one for one in series if one.group == ANSWERS and one.values.keys() >= set(lengths)]
    for ability in (*(one for one in series if one.lower), *_joined(asked)):
        shorter = [
            length
            for length in lengths
            if length < stated and ability.excess(stated, length, BREAKS).low > 0
        ]
        if shorter:
            sign = 1 if ability.lower else -1
            return min(shorter, key=lambda n: sign * sum(ability.values[n]))
    return stated


def next_length(effective: Effective, lengths: Iterable[int]) -> int | None:
    """The middle between the first length that is surely too long and the one before it.

    Args:
        effective: so far.
        lengths: measured ones.

    Returns:
        None where nothing is too long, or the two are near one another.
    """
    if effective.end is None:
        return None
    before = max(length for length in lengths if length < effective.end)
    middle = round((before * effective.end) ** 0.5)
    narrow = effective.end <= NARROW * before or middle in (before, effective.end)
    return None if narrow else middle


def rise(places: Mapping[int, Sequence[float]], *, claimed: int) -> Rise | None:
    """The position from which on the loss of the same tokens is surely higher than before.

    Args:
        places: first position of each place in a long context → bits of each segment of text there.
        claimed: the trained length; places beyond it do not count.

    Returns:
        None if it is nowhere before ``claimed`` higher by more than ``BREAKS``.
    """
    starts = sorted(places)
    begins = [begin for begin, end in pairwise(starts) if end <= claimed]
    bits = [places[begin] for begin in begins]
    means = [fmean(values) for values in bits]
    for place in range(1, len(bits)):
        before = min(range(place), key=means.__getitem__)
        excesses = (
            estimate(b - (1 + BREAKS) * a for a, b in zip(bits[before], later, strict=True))
            for later in bits[place:]
        )
        if all(excess is not None and excess.low > 0 for excess in excesses):
            after = fmean(means[place:])
            return Rise(position=begins[place], before=means[before], after=after)
    return None
