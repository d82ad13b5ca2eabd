"""Loss on the tokens that a long context helps to predict: LongPPL (Fang et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from posenc.lab.evaluation.results import KeyTokens
from posenc.lab.evaluation.suites.next_token import BUDGET, FEWEST, MOST
from posenc.lab.evaluation.suites.reading import accelerated
from posenc.lab.evaluation.texts import Text
from posenc.lab.experiments.text_loss import Targets, at_device
from posenc.lab.reporting.numbers import estimate

ALPHA, BETA = 2.0, -2.0
"""The paper's thresholds of gain and of log-probability, in nats."""

SHARE = 4
"""A short context of n tokens serves the n / 4 tokens behind it, as 4096 and 1024 of the paper."""


def is_key(
    long: Float[Tensor, "*T"],
    short: Float[Tensor, "*T"],
    *,
    alpha: float = ALPHA,
    beta: float = BETA,
) -> Bool[Tensor, "*T"]:
    """True for tokens that the long context surely helps to predict.

    Equations 4 and 6 of Fang et al. 2024: ``long - short > alpha`` (the gain, LSD) and
    ``long > beta`` (the likelihood, LCL).

    Args:
        long, short: log-probabilities of tokens given a long and a short context, in nats.
        alpha, beta: thresholds, in nats.
    """
    return (long - short > alpha) & (long > beta)


def served_by(short: int) -> int:
    """Tokens that are predicted behind a short context of ``short`` tokens, one after another."""
    return max(1, short // SHARE)


def longest_short(short: int) -> int:
    """Tokens of the longest input with a short context, the target left out."""
    return short + served_by(short) - 1


def measure_key_tokens(
    model: nn.Module, text: Text, lengths: Sequence[int], *, short: int, reference: int
) -> KeyTokens:
    """Loss on key tokens in contexts of each length, the same tokens at all.

    They are key for this model, by its contexts of ``reference`` tokens beside those of ``short``;
    the paper chooses them by a stronger model.

    Args:
        model: causal.
        text: of more than the longest length and one.
        lengths: of contexts, rising; those that are no longer than the short ones are left out.
        short: tokens of the short context; ``longest_short(short)`` is below ``reference``.
        reference: one of ``lengths``.
    """
    longest, width = lengths[-1], served_by(short)
    count = min(MOST, max(FEWEST, BUDGET // longest))
    targets = Targets.spread(text.measured_pieces, width=width, longest=longest, count=count)
    with accelerated(model):
        run, ids = at_device(model), text.measured
        before = targets.each(run, ids, longest_short(short))
        bits = {n: targets.each(run, ids, n) for n in lengths if n > longest_short(short)}
    nats = math.log(2)
    everything = torch.ones_like(before, dtype=torch.bool)
    key = is_key(-nats * bits[reference], -nats * before)
    return KeyTokens(
        short=short,
        reference=reference,
        count=int(key.sum()),
        tokens=key.numel(),
        loss={n: float(each[key].mean()) for n, each in bits.items()} if key.any() else {},
        every={n: float(each.mean()) for n, each in bits.items()},
        segments=int(key.any(1).sum()),
        loss_error=_errors(bits, key),
        every_error=_errors(bits, everything),
    )


def _errors(
    bits: Mapping[int, Float[Tensor, "W width"]], counted: Bool[Tensor, "W width"]
) -> dict[int, float]:
    """Half the 95 % interval of the mean of the counted tokens; empty for less than two segments.

    Tokens of a segment share their context: the values are the segments', whose numbers of counted
    tokens differ, so that the mean is a ratio of sums, linearised (Cochran 1977, section 6.3).
    Segments without a counted token add nothing, and are not among those that are counted.
    """
    held = counted.any(1)
    if held.sum() < 2:
        return {}
    sizes = counted[held].sum(1)
    errors = {}
    for length, values in bits.items():
        chosen = torch.where(counted, values, 0.0)[held].double()
        deviations = chosen.sum(1) - sizes * (chosen.sum() / sizes.sum())
        over = estimate((deviations / sizes.double().mean()).tolist())
        assert over is not None  # there are two segments at least
        assert over.half_width is not None
        errors[length] = over.half_width
    return errors
