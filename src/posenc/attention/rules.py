"""Measured rules for the order in which backends are tried, read from top to bottom.

Measured on CPU cores with heads of 64 by ``benchmarks.dispatch``, whose tables are
``benchmarks/results/dispatch.json`` and, of few queries, ``few_queries.json`` beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from posenc.attention.backends.common.base import (
    BFLOAT16,
    KEYS_ONCE,
    ROTATION_ALONE,
    SLOW_MKL,
    Backend,
)
from posenc.attention.backends.common.fused import are_few, shares_few
from posenc.attention.problem.lowering import is_constant_table
from posenc.attention.problem.problem import Problem
from posenc.encoding import LowRank
from posenc.runtime import is_exporting, is_transformed

FEW = 2**16
"""Logits in all up to which a call of the compiled kernels costs more than the definition."""

SMALL = 2**20
"""Logits in all up to which the definition computes without blocks; 4 MiB in float32."""

MASKED, MASKED_HEAD = 2**18, 2**15
"""Logits in all, and of one head, from which on kernels that skip masked blocks are faster."""

FEW_UNSTRUCTURED = 2**14
"""``FEW`` for score parts without structured form, whose definition costs more."""

FEW_LOGITS = "few logits"


class Facts:
    """Facts of a call that rules read; those that compare sizes when a rule asks for them.

    Args:
        device: where the tensors are.
        problem: queries and keys may have yet to be rotated.
        kernels: the backend of compiled kernels, whose advantage was measured.
    """

    def __init__(self, device: torch.device, problem: Problem, kernels: Backend) -> None:
        batch, heads, queries, _ = problem.q.shape
        self.problem, self._kernels = problem, kernels
        self.on_cpu = device.type == "cpu"
        self.structured = problem.lowered is not None
        self.logits = batch * heads * queries * problem.k.shape[2]

    def has_advantage(self, reason: str) -> bool:
        return self._kernels.has_advantage(reason, self.problem)

    @property
    def few(self) -> bool:
        return self.logits <= (FEW if self.structured else FEW_UNSTRUCTURED)

    @property
    def constant_tables(self) -> bool:
        lowered = self.problem.lowered
        return bool(lowered) and all(map(is_constant_table, lowered or ()))

    @property
    def wide_columns(self) -> bool:
        """True if columns of terms widen queries and keys to more than twice their width."""
        terms = self.problem.lowered or ()
        ranks = sum(x.query.shape[-1] for x in terms if isinstance(x, LowRank))
        return ranks > self.problem.q.shape[-1]

    @property
    def terms_by_offset(self) -> bool:
        return any(not isinstance(term, LowRank) for term in self.problem.lowered or ())

    @property
    def masked(self) -> bool:
        """True if kernels that skip masked blocks are faster."""
        q, keys = self.problem.q, self.problem.k.shape[2]
        many = self.logits > MASKED and q.shape[2] * keys > MASKED_HEAD
        return (many or self.logits > SMALL) and not are_few(q) and not self.problem.grid.dense

    @property
    def narrow_gradients(self) -> bool:
        q = self.problem.q
        return q.dtype.itemsize < 4 and q.requires_grad and torch.is_grad_enabled()


class Rule(NamedTuple):
    """A row of ``RULES``.

    Args:
        name: the reason, as ``explain`` prints it.
        applies: True for calls that it is the rule of, unless one above it is.
        order: names of backends in the order to be tried; on CPUs ``"blockwise"`` only where the
            definition would need blocks.
        prepares: backends that may prepare repeated calls, after the one that computes the first.
    """

    name: str
    applies: Callable[[Facts], bool]
    order: tuple[str, ...]
    prepares: tuple[str, ...] = ()


KERNELS = ("native", "sdpa", "blockwise", "reference")

RULES = (
    Rule(
        "on an accelerator, constant tables",
        lambda call: not call.on_cpu and call.constant_tables,
        ("sdpa", "flex", "triton", "blockwise", "reference"),
    ),
    Rule(
        "on an accelerator",
        lambda call: not call.on_cpu,
        ("sdpa", "fla", "triton", "flex", "blockwise", "reference"),
    ),
    # Rules that read sizes would fix them; other runtimes know no operators of ours.
    Rule("exporting", lambda call: is_exporting(), ("sdpa", "reference")),
    # vmap would call the fused kernel in a loop, with a warning.
    Rule(
        "few logits, under a transform of torch.func",
        lambda call: is_transformed() and call.logits <= SMALL,
        ("reference",),
    ),
    Rule(KEYS_ONCE, lambda call: call.structured and call.has_advantage(KEYS_ONCE), KERNELS),
    # The definition repeats keys that heads share.
    Rule(
        FEW_LOGITS,
        lambda call: call.few and shares_few(call.problem.q, call.problem.k),
        ("sdpa", "native", "reference"),
        prepares=("native",),
    ),
    Rule(FEW_LOGITS, lambda call: call.few, ("sdpa", "reference"), prepares=("native",)),
    Rule("a score part without structured form", lambda call: not call.structured, KERNELS),
    Rule(
        "sinks or a cap of the logits",
        lambda call: call.problem.sinks is not None or call.problem.softcap is not None,
        KERNELS,
    ),
    Rule("documents or padding", lambda call: call.problem.grid.segmented, KERNELS),
    Rule("more extra columns than features", lambda call: call.wide_columns, KERNELS),
    Rule("terms by offset", lambda call: call.terms_by_offset, KERNELS),
    Rule(
        "masked pairs, or gradients in half precision",
        lambda call: call.narrow_gradients or call.masked,
        KERNELS,
    ),
    Rule(SLOW_MKL, lambda call: call.has_advantage(SLOW_MKL), KERNELS),
    Rule(ROTATION_ALONE, lambda call: call.has_advantage(ROTATION_ALONE), KERNELS),
    Rule(BFLOAT16, lambda call: call.has_advantage(BFLOAT16), KERNELS),
    Rule("no terms by offset", lambda call: True, ("sdpa", "native", "blockwise", "reference")),
)
"""All rules of ``backend="auto"``; the first that applies gives the order."""


def rule_of(facts: Facts) -> tuple[Rule, list[str]]:
    """The rule that applies, and the names of the backends in the order to be tried."""
    rule = next(rule for rule in RULES if rule.applies(facts))
    if facts.on_cpu and "blockwise" in rule.order and facts.logits <= SMALL:
        return rule, [name for name in rule.order if name != "blockwise"]
    return rule, list(rule.order)
