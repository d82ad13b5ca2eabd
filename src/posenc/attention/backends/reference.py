"""Every method straight from its definition; the oracle of all other backends."""

from __future__ import annotations

from posenc.attention.backends.base import Backend, Problem, Result
from posenc.attention.backends.definition import attend_by_definition

__all__ = ["Reference"]


class Reference(Backend):
    """Materialises the logits. Serves everything; memory H·Q·K a batch row."""

    name = "reference"
    lse_has_gradient = True

    def refusal(self, problem: Problem) -> str | None:
        return None

    def describe(self, problem: Problem) -> str:
        score = problem.encoding.score
        size = "Q×K" if score is None or not score.keys_by_keys else "Q×K and K×K"
        return f"materialises the logits from each part's own definition (memory of size {size})"

    def run(self, problem: Problem, *, lse: bool = False) -> Result:
        return attend_by_definition(problem, lse=lse)
