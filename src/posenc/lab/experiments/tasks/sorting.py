"""Sort a sequence of symbols."""

from __future__ import annotations

from posenc.lab.experiments.tasks.common.algorithm import rewriting

ENTRY = rewriting(
    name="sorting",
    job="Sort a sequence",
    rewrite=sorted,
    expectation="The answer does not depend on where symbols stand, so that NoPE does as well "
    "as any, and unsorted random positions are no handicap; what fails past the training length "
    "are sinusoids, at positions they were not trained at (Ruoss et al. 2023, bucket sort).",
    symbols=32,
)
