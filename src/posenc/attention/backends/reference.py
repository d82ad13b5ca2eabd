"""Every method straight from its definition; the oracle of all other backends."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.base import Backend, Problem
from posenc.attention.backends.definition import attend_by_definition

__all__ = ["Reference"]


class Reference(Backend):
    """Materialises the logits. Serves everything; memory H·Q·K a batch row."""

    name = "reference"

    def refusal(self, problem: Problem) -> str | None:
        return None

    def describe(self, problem: Problem) -> str:
        score = problem.encoding.score
        size = "Q×K" if score is None or not score.keys_by_keys else "Q×K and K×K"
        return f"materialises the logits from each part's own definition (memory of size {size})"

    def run(self, problem: Problem) -> Float[Tensor, "B H Q E"]:
        return attend_by_definition(problem)
