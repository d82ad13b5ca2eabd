"""Sort a sequence of symbols."""

from __future__ import annotations

from posenc.experiments.tasks.common.algorithm import DEFAULTS, rewriting
from posenc.experiments.tasks.common.task import TaskEntry

ENTRY = TaskEntry(
    make=lambda settings: rewriting(
        settings,
        name="sorting",
        title="Sort a sequence longer than any in training",
        rewrite=sorted,
    ),
    summary="Sort a sequence of symbols, longer than any in training",
    data="random symbols, generated",
    metric="share of tokens right; share of whole sequences right",
    expectation="The answer does not depend on where symbols stand, so that NoPE does as well "
    "as any, and unsorted random positions are no handicap; what fails past the training length "
    "are sinusoids, at positions they were not trained at (Ruoss et al. 2023, bucket sort).",
    defaults=DEFAULTS,
    options={"symbols": 32, "distinct": False},
    length_unit="symbols",
)
