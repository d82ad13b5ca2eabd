"""Every method straight from its definition; the oracle of all other backends."""

from __future__ import annotations

from functools import partial

from posenc.attention.backends.common.base import Backend, Plan, Result
from posenc.attention.backends.common.definition import attend_by_definition
from posenc.attention.problem.problem import Problem


class Reference(Backend):
    """Attention with materialised logits, for every problem; memory H·Q·K per batch row."""

    name = "reference"

    def plan(self, problem: Problem) -> Plan:
        score = problem.encoding.score
        size = "Q×K" if score is None or not score.keys_by_keys else "Q×K and K×K"
        how = f"materialises the logits from each part's own definition (memory of size {size})"
        return Plan(how, partial(_attend, problem), by_definition=True)


def _attend(problem: Problem, *, lse: bool) -> Result:
    return attend_by_definition(problem.by_definition(), lse=lse)


ENTRY = Reference()
