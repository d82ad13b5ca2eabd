"""Stick breaking and contextual positions: sums over the keys of a row, from tile to tile."""

from __future__ import annotations

from posenc.attention.backends.common.base import Refusal, Result
from posenc.attention.backends.common.sinks import beside_sinks
from posenc.attention.backends.triton.form import NO_INTERVALS
from posenc.attention.backends.triton.op import TRITON
from posenc.attention.backends.triton.posing import sums_record
from posenc.attention.problem.problem import Problem
from posenc.attention.problem.spacing import find_spacing
from posenc.encoding import FusedScore, GateCounts, StickWeights

SumsForm = GateCounts | StickWeights

NAMES: dict[type, str] = {GateCounts: "counts", StickWeights: "sticks"}
"""Of the forms, in ``trial.KERNELS``."""

MOST = 4096
"""Vectors by count; the more there are, the coarser counts are."""


def sums_form(problem: Problem, form: FusedScore | None) -> SumsForm | Refusal | None:
    """The score part with carried sums, or why the kernels cannot take it; None if it is no such.

    Reads the values of a layout with documents or padding, once.
    """
    if not isinstance(form, GateCounts | StickWeights):
        return None
    if problem.softcap is not None:
        return Refusal("its kernels that carry sums do not cap logits")
    if problem.encoding.value is not None:
        return Refusal("its kernels that carry sums have no place for a value part")
    if isinstance(form, GateCounts) and form.product.rows.shape[1] > MOST:
        return Refusal(f"its kernels count to {MOST} at most")
    if problem.grid.intervals is not None:
        return NO_INTERVALS
    found = find_spacing(problem.grid)
    if isinstance(found, str):
        return Refusal(found)
    if not found.ordered:
        return Refusal("its kernels sum over keys in the order in which they are stored")
    return form


def attend_with_sums(problem: Problem, form: SumsForm, *, tuned: bool, lse: bool) -> Result:
    """Attention for a problem with such a score part."""
    result = Result(*TRITON.attend(sums_record(problem, form, tuned=tuned)))
    if problem.sinks is not None:
        return beside_sinks(result, problem.sinks, lse=lse)
    return result if lse else result._replace(lse=None)
