"""A share of the differential fuzz of ``attend``, and proof that it finds what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posenc.attention.backends.common.base import Plan, Refusal, Result
from posenc.attention.backends.sdpa import Sdpa
from posenc.attention.problem.problem import Problem
from tests.testing.attention_cases import BFLOAT16, LAYOUTS, AttentionCase, draw
from tests.testing.attention_fuzz import Failure, everywhere, fuzz

COUNT = 40


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("part", range(len(LAYOUTS)))
def test_backends_agree_on_random_calls(part: int) -> None:
    """Every encoding, and in all parts together with every kind of text."""
    count = len(everywhere().names)
    served = {name for _, names in fuzz(count, first=part * count) for name in names}
    assert {"auto", "sdpa", "blockwise", "reference"} <= served


@pytest.mark.usefixtures("poisoned")
def test_backends_agree_in_bfloat16() -> None:
    """Where the processor has AMX, or it is emulated, by other kernels."""
    served = {name for _, names in fuzz(COUNT, scope=everywhere(sizes=BFLOAT16)) for name in names}
    assert {"auto", "sdpa", "blockwise", "reference"} <= served


def test_a_case_is_its_number() -> None:
    cases = [draw(7, ["rope", "alibi"]) for _ in range(2)]
    assert str(cases[0]) == str(cases[1])
    assert torch.equal(cases[0].keys.positions, cases[1].keys.positions)


def test_a_wrong_backend_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Sdpa.plan

    def plan(self: Sdpa, problem: Problem) -> Plan | Refusal:
        made = whole(self, problem)
        if isinstance(made, Refusal):
            return made

        def compute(*, lse: bool) -> Result:
            output, sums = made.run(lse=lse)
            return Result(output.roll(1, dims=2), sums)

        return Plan(made.description, compute)

    monkeypatch.setattr(Sdpa, "plan", plan)
    with pytest.raises(Failure, match=r"(auto|sdpa): the output is off"):
        list(fuzz(60, scope=everywhere(["nope"])))


def test_a_backend_that_takes_wrong_heads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    number = next(n for n in range(10_000) if _is_wrong(draw(n, ["alibi"])))
    for check in ("api.validate", "problem.lowering._require_shapes"):
        monkeypatch.setattr(f"posenc.attention.{check}", lambda *given, **options: None)
    # Compiled kernels would read beyond the operands, which ends the process.
    scope = replace(everywhere(["alibi"]), backends=("reference", "blockwise"))
    with pytest.raises(Failure):
        list(fuzz(1, first=number, scope=scope))


def _is_wrong(case: AttentionCase) -> bool:
    return case.wrong == "heads"
