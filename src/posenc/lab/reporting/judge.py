"""The judge of all programs: verdicts, gates, gaps, ties and ranks, from values by replicate.

A replicate is a seed of ``compare``, a piece of text, a document or an image of ``extend`` and
``evaluate``: subjects are compared on those that they have in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from posenc.lab.reporting.numbers import (
    CONFIDENCE,
    SHARES,
    Bounds,
    Estimate,
    estimate,
    paired_difference,
)

Values = Mapping[int, float]
"""Value by replicate."""

HOLDS, BREAKS = 0.05, 0.25
"""Deteriorations from the training length, as shares, up to which a value holds, and beyond which
it breaks; in between it degrades."""

MARGIN = 0.02
"""With one replicate, values that differ by at most this share of the larger count as the same."""

TIE = 0.01
"""Largest relative difference of losses that are called level, however significant it is."""

CLOSE = 0.05
"""Deficit in shares of answers that does not count, however sure it is."""

LEARNED = 3.0
"""Answers count if a model gives so many times more right ones than a guess."""

QUANTILE = 1.96
"""Quantile of the normal distribution, for 95 % intervals of shares."""

Word = Literal["holds", "unsure", "degrades", "breaks"]
"""Unsure where the interval of the change reaches from ``HOLDS`` to beyond ``BREAKS``."""

SEVERITY: tuple[Word, ...] = ("holds", "unsure", "degrades", "breaks")

Gate = Literal["tied", "unlearned", "overfitted", "untestable", "unfinished"]
Verdict = Word | Literal["learned"] | Gate
"""Verdict on length (``unsure`` also if a measurement says nothing); ``learned`` if the training
length is the only one; or a gate."""

GATES: tuple[Gate, ...] = ("unfinished", "untestable", "unlearned", "overfitted", "tied")
"""Reasons why there is no verdict, in the order in which they are asked."""

LEARNED_NOTHING: tuple[Gate, ...] = ("unlearned", "overfitted")
"""Gates of subjects whose values say nothing of length."""

HIGHEST = {"BLEU": 100.0, "chrF": 100.0}
"""Units of scores that end somewhere, and where."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity measured along an axis, and how it is judged.

    Args:
        key: its name in measurements ("loss", "recall").
        label: its name for people, the title of its chart; "": no chart.
        unit: of the value.
        axis: quantity on the horizontal axis, with the unit.
        lower_is_better: small values are good.
        description: how it is measured, or its chart is read, in a sentence or two.
        trivial: value of a predictor that sees no input, if there is one.
        trivial_rule: that predictor, in a phrase ("byte frequencies").
        headline: the comparison is decided by it; exactly one metric is.
        learned: value at the training length that shows that the task is learned; None: any that
            is significantly better than ``trivial``.
        rule: how ``learned`` is reached, in a phrase ("the byte before alone").
        overfit: largest gap between training and held-out data, net of the gap that ``rule`` has;
            None: any, if both are learned.
        short: its name after "best"; ``key`` in words by default.
        brief: tables show the first and the last length only.
    """

    key: str
    label: str = ""
    unit: str
    axis: str = ""
    lower_is_better: bool = False
    description: str = ""
    trivial: float | None = None
    trivial_rule: str = "a guess"
    headline: bool = False
    learned: float | None = None
    rule: str = ""
    overfit: float | None = None
    short: str = ""
    brief: bool = False

    @property
    def noun(self) -> str:
        """Name of the metric in a sentence, after "best"."""
        return self.short or self.key.replace("_", " ")

    @property
    def is_share(self) -> bool:
        """True for shares from 0 to 1, shown in percent."""
        return self.unit.startswith("share")

    @property
    def sign(self) -> int:
        """1 where lower values are better, else -1."""
        return 1 if self.lower_is_better else -1

    def bounds(self, *, changed: bool = False) -> Bounds:
        """Range of the metric, or of its change from the training length.

        Shares of what is right end at 1, scores where their unit does; errors, which may be shares
        too, are only positive. Changes of shares are differences, of other metrics parts of the
        value at the training length.
        """
        if self.is_share and not self.lower_is_better:
            return Bounds(-1.0, 1.0) if changed else SHARES
        if changed:
            return Bounds(-math.inf if self.is_share else -1.0)
        return Bounds(0.0, HIGHEST.get(self.unit, math.inf))

    def shown(self, value: float) -> str:
        """The value in tables of one model: whole percents, or three places."""
        return f"{value:.0%}" if self.is_share else f"{value:.3f}"


# Of one subject.


def deterioration(value: float, base: float, *, lower: bool) -> float:
    """Change from ``base`` to a worse ``value``, as a share of ``base``; negative if better.

    Args:
        value, base: before and after.
        lower: lower values are better.
    """
    difference = value - base if lower else base - value
    if not difference:
        return 0.0
    return difference / abs(base) if base else math.copysign(math.inf, difference)


def word(change: Estimate, limits: tuple[float, float] = (HOLDS, BREAKS)) -> Word:
    """The verdict on a deterioration.

    Args:
        change: for the worse, positive.
        limits: up to which a value holds, and beyond which it breaks.
    """
    holds, breaks = limits
    if change.low <= holds and change.high > breaks:
        return "unsure"
    if change.mean <= holds:
        return "holds"
    return "breaks" if change.mean > breaks else "degrades"


def change(metric: Metric, base: Values, last: Values) -> Estimate | None:
    """Deterioration from ``base`` to ``last`` as a share of ``base``, replicate by replicate."""
    most = Bounds(low=-1.0) if metric.lower_is_better else Bounds(high=1.0)
    return estimate(
        (
            deterioration(last[one], base[one], lower=metric.lower_is_better)
            for one in sorted(base.keys() & last.keys())
        ),
        most,
    )


def longest_change(metric: Metric, values: Mapping[int, Values], train: int) -> Estimate | None:
    """``change`` from the training length to the longest measured one; None if none is longer.

    Args:
        metric: of the values.
        values: by length.
        train: training length.
    """
    last = max((length for length in values if values[length]), default=train)
    if last <= train or not values.get(train):
        return None
    return change(metric, values[train], values[last])


def held(values: Mapping[int, Estimate], metric: Metric, train: int) -> int:
    """The longest length up to which the mean holds.

    Args:
        values: length to estimate of the metric.
        metric: of the values.
        train: training length, one of ``values``.
    """
    last = train
    for length in sorted(values):
        means = values[length].mean, values[train].mean
        if deterioration(*means, lower=metric.lower_is_better) > HOLDS:
            break
        last = length
    return last


def share_change(share: float, base: float, asked: int) -> Estimate:
    """Deterioration of a share of right answers, with its normal interval.

    Args:
        share: of ``asked`` answers.
        base: share that it is held to.
        asked: number of answers.
    """
    half = QUANTILE * math.sqrt(share * (1 - share) / asked) / base
    return Estimate(1 - share / base, half, asked)


def is_learned(metric: Metric, base: Estimate) -> bool:
    """True if the mean reaches the required level and the interval excludes the trivial one."""
    if metric.learned is not None and metric.sign * (base.mean - metric.learned) > 0:
        return False
    if metric.trivial is None:
        return True
    spread = MARGIN * abs(metric.trivial) if base.half_width is None else base.half_width
    return metric.sign * (base.mean - metric.trivial) + spread < 0


def is_overfitted(metric: Metric, held_out: Values, known: Metric, seen: Values) -> bool:
    """True if training data is learned, and held-out data is not or costs too much more.

    Nothing is overfitted that has not learned its training data either. Of the gap, that of the
    predictor behind ``Metric.learned`` is due to the data, not to the model.

    Args:
        metric, held_out: at the training length, on held-out data.
        known, seen: the same on training data.
    """
    base, mean = estimate(held_out.values()), estimate(seen.values())
    learned = base is not None and is_learned(metric, base)
    if mean is None or not (learned or is_learned(known, mean)):
        return False
    shift = 0.0
    if metric.learned is not None and known.learned is not None:
        shift = metric.learned - known.learned
    fair = {one: value + shift for one, value in seen.items()}
    if compared(metric, fair, held_out) != "better":
        return False
    if metric.overfit is None:
        return not learned
    difference = paired_difference(held_out, fair)
    return difference is not None and abs(difference.mean) > metric.overfit


def verdict(
    metric: Metric,
    values: Mapping[int, Values],
    train: int,
    *,
    known: tuple[Metric, Values] | None = None,
) -> Verdict:
    """The verdict of one metric, or the first gate that stops it, but for the control's.

    Args:
        metric: of the values.
        values: by every length that was to be tested; empty where nothing was measured.
        train: training length.
        known: the same metric on training data, with its values; None: not asked for.
    """
    base = estimate(values.get(train, {}).values())
    if base is None:
        return "untestable"
    if known is not None and is_overfitted(metric, values[train], *known):
        return "overfitted"
    if not is_learned(metric, base):
        return "unlearned"
    worse = longest_change(metric, values, train)
    if worse is None:
        return "untestable" if len(values) > 1 else "learned"
    return word(worse)


def both(predicts: Verdict, finds: Verdict | None) -> Verdict:
    """The worse verdict; at best unsure if recall was not learned."""
    if predicts in GATES or predicts == "learned" or finds is None:
        return predicts
    return max(predicts, finds if finds in SEVERITY else "unsure", key=SEVERITY.index)


# Of one subject beside others.


def gap(
    metric: Metric, one: Values, other: Values, *, confidence: float = CONFIDENCE
) -> Estimate | None:
    """Deficit of ``one`` to ``other`` over common replicates, positive where it is worse.

    Args:
        metric: of the values.
        one, other: subjects.
        confidence: of the interval; ``confidence_after`` so many looks at growing measurements.
    """
    pair = (one, other) if metric.lower_is_better else (other, one)
    return paired_difference(*pair, confidence=confidence)


def indistinguishable(metric: Metric, one: Values, other: Values) -> bool:
    """True if the interval of the gap is known and includes zero."""
    deficit = gap(metric, one, other)
    return deficit is not None and deficit.half_width is not None and not deficit.sure


def compared(
    metric: Metric, one: Values, other: Values
) -> Literal["better", "worse", "same"] | None:
    """Compare ``one`` with ``other`` by the interval of their gap.

    With one replicate in common, by ``MARGIN``; None without any.
    """
    deficit = gap(metric, one, other)
    if deficit is None:
        return None
    if deficit.half_width is None:
        common = one.keys() & other.keys()
        largest = max(abs(value) for key in common for value in (one[key], other[key]))
        differs = abs(deficit.mean) > MARGIN * largest
    else:
        differs = deficit.sure
    if not differs:
        return "same"
    return "better" if deficit.mean < 0 else "worse"


def is_tied(
    metric: Metric, mine: Mapping[int, Values], control: Mapping[int, Values], train: int
) -> bool:
    """True if a subject is the same as a control, at the training length and at the last.

    Args:
        metric: of the values.
        mine, control: by length.
        train: training length.
    """
    stands = {length: compared(metric, mine[length], control[length]) for length in mine}
    comparable = [length for length, how in stands.items() if how is not None]
    return train in comparable and stands[train] == stands[max(comparable)] == "same"


def ranks(metric: Metric, ordered: Sequence[Values]) -> list[int]:
    """Ranks from 1 on, shared by those that cannot be told from the first of a rank.

    Args:
        metric: of the values.
        ordered: of subjects, the best mean first.
    """
    found: list[int] = []
    leader: Values = {}
    for place, values in enumerate(ordered, start=1):
        if found and indistinguishable(metric, values, leader):
            found.append(found[-1])
        else:
            leader = values
            found.append(place)
    return found


def order_of(share: float, other: float, asked: int) -> int:
    """1 (-1) if a share of right answers is significantly more (less) than another, else 0.

    By the normal interval of the difference of two shares, each with one more right and one more
    wrong answer, so that shares of 0 and 1 have one too.

    Args:
        share, other: of ``asked`` answers.
        asked: number of answers.
    """
    padded = [(asked * each + 1) / (asked + 2) for each in (share, other)]
    error = math.sqrt(sum(each * (1 - each) / (asked + 2) for each in padded))
    difference = padded[0] - padded[1]
    return sign(difference) if abs(difference) > QUANTILE * error else 0


def sign(value: float) -> int:
    """-1, 0 or 1."""
    return (value > 0) - (value < 0)
