"""The choice of a backend for a call: by name, as an instance, or by ``RULES``.

The rules were measured on CPU cores with heads of 64 by ``benchmarks.dispatch``, whose tables are
``benchmarks/results/dispatch.json`` and, of few queries, ``few_queries.json`` beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
    """Facts of a call that rules are for, by name; those that compare sizes are properties.

    Args:
        device: where the tensors are.
        problem: queries and keys may have yet to be rotated.
    """

    always = True

    def __init__(self, device: torch.device, problem: Problem) -> None:
        batch, heads, queries, width = problem.q.shape
        lowered = problem.lowered
        self.problem, self._native = problem, BACKENDS["native"]
        self.logits = batch * heads * queries * problem.k.shape[2]
        self.on_cpu = device.type == "cpu"
        self.on_accelerator = not self.on_cpu
        self.constant_tables_on_accelerator = (
            self.on_accelerator and bool(lowered) and all(map(is_constant_table, lowered or ()))
        )
        self.exporting = is_exporting()
        self.unstructured = lowered is None
        self.capped = problem.sinks is not None or problem.softcap is not None
        self.terms_by_offset, columns = False, 0
        for term in lowered or ():
            if isinstance(term, LowRank):
                columns += term.query.shape[-1]
            else:
                self.terms_by_offset = True
        self.wide_columns = columns > width
        """True if columns of terms widen queries and keys to more than twice their width."""

    @property
    def few(self) -> bool:
        return self.logits <= (FEW_UNSTRUCTURED if self.unstructured else FEW)

    @property
    def few_transformed(self) -> bool:
        return is_transformed() and self.logits <= SMALL

    @property
    def few_shared(self) -> bool:
        return self.few and shares_few(self.problem.q, self.problem.k)

    @property
    def segmented(self) -> bool:
        return self.problem.grid.segmented

    @property
    def masked_or_narrow(self) -> bool:
        """True if kernels that skip masked blocks are faster, or for narrow gradients."""
        q, keys = self.problem.q, self.problem.k.shape[2]
        if q.dtype.itemsize < 4 and q.requires_grad and torch.is_grad_enabled():
            return True
        many = self.logits > MASKED and q.shape[2] * keys > MASKED_HEAD
        return (many or self.logits > SMALL) and not are_few(q) and not self.problem.grid.dense

    @property
    def keys_once(self) -> bool:
        return not self.unstructured and self._native.has_advantage(KEYS_ONCE, self.problem)

    @property
    def slow_mkl(self) -> bool:
        return self._native.has_advantage(SLOW_MKL, self.problem)

    @property
    def rotation_alone(self) -> bool:
        return self._native.has_advantage(ROTATION_ALONE, self.problem)

    @property
    def bfloat16(self) -> bool:
        return self._native.has_advantage(BFLOAT16, self.problem)


class Rule(NamedTuple):
    """A row of ``RULES``.

    Args:
        name: the reason, as ``explain`` prints it.
        fact: the name of the fact of ``Facts`` by which calls are its own, unless a rule above it
            has them.
        order: names of backends in the order to be tried; on CPUs ``"blockwise"`` only where the
            definition would need blocks.
        prepares: backends that may prepare repeated calls, after the one that computes the first.
    """

    name: str
    fact: str
    order: tuple[str, ...]
    prepares: tuple[str, ...] = ()


KERNELS = ("native", "sdpa", "blockwise", "reference")

RULES = (
    Rule(
        "on an accelerator, constant tables",
        "constant_tables_on_accelerator",
        ("sdpa", "flex", "triton", "blockwise", "reference"),
    ),
    Rule(
        "on an accelerator", "on_accelerator", ("sdpa", "triton", "flex", "blockwise", "reference")
    ),
    # Rules that read sizes would fix them; other runtimes know no operators of ours.
    Rule("exporting", "exporting", ("sdpa", "reference")),
    # vmap would call the fused kernel in a loop, with a warning.
    Rule("few logits, under a transform of torch.func", "few_transformed", ("reference",)),
    Rule(KEYS_ONCE, "keys_once", KERNELS),
    # The definition repeats keys that heads share.
    Rule(FEW_LOGITS, "few_shared", ("sdpa", "native", "reference"), prepares=("native",)),
    Rule(FEW_LOGITS, "few", ("sdpa", "reference"), prepares=("native",)),
    Rule("a score part without structured form", "unstructured", KERNELS),
    Rule("sinks or a cap of the logits", "capped", KERNELS),
    Rule("documents or padding", "segmented", KERNELS),
    Rule("more extra columns than features", "wide_columns", KERNELS),
    Rule("terms by offset", "terms_by_offset", KERNELS),
    Rule("masked pairs, or gradients in half precision", "masked_or_narrow", KERNELS),
    Rule(SLOW_MKL, "slow_mkl", KERNELS),
    Rule(ROTATION_ALONE, "rotation_alone", KERNELS),
    Rule(BFLOAT16, "bfloat16", KERNELS),
    Rule("no terms by offset", "always", ("sdpa", "native", "blockwise", "reference")),
)
"""All rules of ``backend="auto"``; the first that applies gives the order."""

NAMED = Rule("named", "always", ())
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
    device, problem = call.q.device, call.problem(rotate)
    rule, order = preference(device, problem)
    refused: dict[str, str] = {}
    for name in order:
        backend = BACKENDS[name]
        plan = backend.unavailable(device) or backend.plan(problem)
        if isinstance(plan, Plan) and plan.trial is not None:
            plan = trial.refusal(backend, device, call.q.dtype, plan.trial) or plan
        if isinstance(plan, Plan):
            return Choice(backend, plan, rule, refused)
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
    if torch.compiler.is_compiling():  # no size is read
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return None
    kernel = BACKENDS["native"].query_kernel(q, k, v, plain=plain)
    return None if kernel is None or needs_dispatch(q, k, v) else kernel


def _plan(backend: Backend, call: Call) -> Plan | Refusal:
    """The backend's plan on this machine."""
    return backend.unavailable(call.q.device) or backend.plan(call.problem(rotate))


def preference(device: torch.device, problem: Problem) -> tuple[Rule, list[str]]:
    """The rule that applies, and the names of the backends in the order to be tried."""
    facts = Facts(device, problem)
    for rule in RULES:
        if getattr(facts, rule.fact):
            break
    if facts.on_cpu and "blockwise" in rule.order and facts.logits <= SMALL:
        return rule, [name for name in rule.order if name != "blockwise"]
    return rule, list(rule.order)
