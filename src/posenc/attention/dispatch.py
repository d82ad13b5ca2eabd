"""The choice of a backend for a call: by name, as an instance, or by ``RULES``.

The rules were measured on CPU cores with heads of 64 by ``benchmarks.dispatch``, whose tables are
``benchmarks/results/dispatch.json`` and, of few queries, ``few_queries.json`` beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.attention import trial
from posenc.attention.backends.common.base import (
    ADVANTAGES,
    BFLOAT16,
    KEYS_ONCE,
    RARE,
    ROTATION_ALONE,
    SLOW_MKL,
    Backend,
    Plan,
    QueryKernel,
    Refusal,
)
from posenc.attention.backends.common.fused import are_few, shares_few
from posenc.attention.call import Call
from posenc.attention.problem.lowering import is_constant_table
from posenc.attention.problem.problem import Problem
from posenc.encoding import LowRank, Rotation
from posenc.errors import ArgumentError, BackendRefusal, UnknownNameError
from posenc.registration import Registry
from posenc.runtime import is_exporting, is_transformed, needs_dispatch

BACKENDS: Registry[Backend] = Registry(
    Backend, "backend", "posenc.attention.backends", group="posenc.backends"
)
"""All backends by name. ``preference`` gives the order in which ``auto`` tries posenc's own; those
of other packages are used when they are asked for."""

BACKENDS.load()  # compiled code can import nothing

LOG = logging.getLogger("posenc")

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
        ("sdpa", "triton", "flex", "blockwise", "reference"),
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

NAMED = Rule("named", lambda call: True, ())
"""Rule of a backend that was asked for."""


class Choice(NamedTuple):
    """A backend for a call, and the reasons for it.

    Args:
        backend: the backend.
        plan: its plan for the call.
        rule: that gave the order in which backends were tried, or ``NAMED``.
        refusals: reasons of the backends that were tried before it, by name.
    """

    backend: Backend
    plan: Plan
    rule: Rule
    refusals: dict[str, str]


def choose(call: Call, backend: str | Backend) -> Choice:
    """The backend that was asked for, or under ``"auto"`` the first that supports the call.

    Raises:
        ArgumentError: when ``backend`` is neither a name nor a backend.
        BackendRefusal: when the backend that was asked for does not support the call.
        UnknownNameError: when there is no backend of that name.
    """
    if isinstance(backend, str) and backend == "auto":
        return _choose(call)
    chosen = named(backend)
    plan = _plan(chosen, call)
    if plan == Refusal(
        RARE["global_softmax"]
    ):  # it computes outputs, but no gradients through some keys
        return _choose(call)
    if isinstance(plan, Refusal):
        raise BackendRefusal(
            "backend",
            expected="one that can do this job",
            got=f"{chosen.name!r}, which cannot, because {plan.reason}",
            remedy="Use backend='auto', and posenc.explain(...) to see what it takes.",
        )
    return Choice(chosen, plan, NAMED, {})


def preparing(call: Call) -> Iterator[Plan]:
    """Plans by which calls like this one may be prepared, the fastest first.

    Prepared, the compiled kernels are faster for few logits too.
    """
    choice = _choose(call)
    native, problem = BACKENDS["native"], call.problem(rotate)
    ahead = any(native.has_advantage(x, problem, prepared=True) for x in ADVANTAGES)
    faster = [native] if ahead else []
    others = (BACKENDS[name] for name in choice.rule.prepares)
    for backend in dict.fromkeys([*faster, choice.backend, *others]):
        plan = choice.plan if backend is choice.backend else _plan(backend, call)
        if isinstance(plan, Plan):
            yield plan


def refusals(call: Call) -> dict[str, str]:
    """The reasons of all backends that do not support the call, by name."""
    plans = {name: _plan(backend, call) for name, backend in BACKENDS.items()}
    return {name: plan.reason for name, plan in plans.items() if isinstance(plan, Refusal)}


def _choose(call: Call) -> Choice:
    rule, order = preference(call.q.device, call.problem(rotate))
    refused: dict[str, str] = {}
    for name in order:
        plan = _plan(BACKENDS[name], call)
        if isinstance(plan, Plan) and plan.trial is not None:
            device, dtype = call.q.device, call.q.dtype
            plan = trial.refusal(BACKENDS[name], device, dtype, plan.trial) or plan
        if isinstance(plan, Plan):
            return Choice(BACKENDS[name], plan, rule, refused)
        if plan.avoidable and not torch.compiler.is_compiling():
            _warn(name, plan.reason, call)
        refused[name] = plan.reason
    raise BackendRefusal(
        "backend", expected="one that can do this job", got=refused, remedy="Report this."
    )


_WARNED: set[str] = set()


def _warn(name: str, reason: str, call: Call) -> None:
    """Log once that a backend could have served a call, and why it did not."""
    if reason not in _WARNED and isinstance(BACKENDS[name].plan(call.problem(rotate)), Plan):
        _WARNED.add(reason)
        LOG.warning("attention is slower than with the backend %r, but %s", name, reason)


def named(backend: str | Backend) -> Backend:
    """The backend of a name other than ``"auto"``, or the backend itself.

    Raises:
        ArgumentError: when ``backend`` is neither a name nor a backend.
        UnknownNameError: when there is no backend of that name.
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise ArgumentError(
            "backend",
            expected="a name or a Backend",
            got=type(backend).__name__,
            remedy=f"Use 'auto' or one of {', '.join(map(repr, BACKENDS))}.",
        )
    if backend not in BACKENDS:
        raise UnknownNameError.of("backend", backend, ["auto", *BACKENDS])
    return BACKENDS[backend]


def rotate(rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated, by the compiled kernel of CPUs where it serves."""
    return BACKENDS["native"].rotate(rotation, q, k)


def query_kernel(q: Tensor, k: Tensor, v: Tensor, *, plain: bool) -> QueryKernel | None:
    """Attention of one query a head to all keys on the CPU, see ``Backend``.

    None where PyTorch's own operations serve, for gradients, and where calls are traced, watched or
    transformed.
    """
    if needs_dispatch(q, k, v):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return None
    return BACKENDS["native"].query_kernel(q, k, v, plain=plain)


def _plan(backend: Backend, call: Call) -> Plan | Refusal:
    """The backend's plan on this machine."""
    return backend.unavailable(call.q.device) or backend.plan(call.problem(rotate))


def preference(device: torch.device, problem: Problem) -> tuple[Rule, list[str]]:
    """The rule that applies, and the names of the backends in the order to be tried."""
    facts = Facts(device, problem, BACKENDS["native"])
    rule = next(rule for rule in RULES if rule.applies(facts))
    if facts.on_cpu and "blockwise" in rule.order and facts.logits <= SMALL:
        return rule, [name for name in rule.order if name != "blockwise"]
    return rule, list(rule.order)
