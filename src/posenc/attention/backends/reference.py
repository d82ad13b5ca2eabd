"""Every method straight from its definition; the oracle of all other backends."""

from __future__ import annotations

from functools import partial

from posenc.attention.backends.common.base import Backend, Plan, Problem
from posenc.attention.backends.common.definition import attend_by_definition


class Reference(Backend):
    """Materialises the logits. Serves everything; memory H·Q·K a batch row."""

    name = "reference"
    lse_has_gradient = True
    differentiates_parts = True
    keyed_dropout = True
    sinks_and_caps = True

    def plan(self, problem: Problem) -> Plan:
        score = problem.encoding.score
        size = "Q×K" if score is None or not score.keys_by_keys else "Q×K and K×K"
        how = f"materialises the logits from each part's own definition (memory of size {size})"
        return Plan(how, partial(attend_by_definition, problem), differentiable_twice=True)


ENTRY = Reference()
