"""The choice of a backend for a call: by name, as an instance, or by measured rules.

Measured on CPU cores with heads of 64 by ``benchmarks.dispatch``, whose tables are
``benchmarks/results/dispatch.json`` and, of few queries, ``few_queries.json`` beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.attention import trial
from posenc.attention.backends.common.base import RARE, Attend, Backend, Plan, QueryKernel, Refusal
from posenc.attention.backends.common.fused import are_few, shares_few
from posenc.attention.call import Call
from posenc.attention.problem.lowering import is_constant_table
from posenc.attention.problem.problem import Problem
from posenc.attention.repeats import repeatable
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
"""Name of the rule for calls with at most ``FEW`` logits."""


class Choice(NamedTuple):
    """A backend for a call, and the reasons for it.

    Args:
        backend: the backend.
        plan: its plan for the call.
        rule: the rule that gave the order in which backends were tried; ``"named"`` for a backend
            that was asked for.
        refusals: reasons of the backends that were tried before it, by name.
    """

    backend: Backend
    plan: Plan
    rule: str
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
    return Choice(chosen, plan, "named", {})


def describe_repeats(call: Call) -> str:
    """Text for ``explain`` on repeated calls; empty if they run like the first."""
    if not repeatable(call, prepare):
        return ""
    backends = _preparing(call)
    by = next(x for x in backends if x.prepare(call.problem()) is not None)
    if by is _choose(call).backend:
        return ""
    return "; from the second such call on by compiled kernels, prepared once"


def prepare(call: Call) -> Attend | None:
    """Attention of calls like this one, planned once."""
    problem = replace(call.problem(), rotate=rotate)
    prepared = (backend.prepare(problem) for backend in _preparing(call))
    return next(filter(None, prepared), None)


def _preparing(call: Call) -> list[Backend]:
    """Backends by which calls like this one may be prepared, the fastest first.

    Prepared, the compiled kernels are faster for few logits too.
    """
    choice, native = _choose(call), BACKENDS["native"]
    if native.unavailable(call.q.device):
        return [choice.backend]
    problem = call.problem()
    once = native.reads_keys_once(problem, prepared=True)
    if once or native.outpaces_sdpa(problem, prepared=True):
        return [native, choice.backend]
    return [choice.backend, native] if choice.rule == FEW_LOGITS else [choice.backend]


def refusals(call: Call) -> dict[str, str]:
    """The reasons of all backends that do not support the call, by name."""
    plans = {name: _plan(backend, call) for name, backend in BACKENDS.items()}
    return {name: plan.reason for name, plan in plans.items() if isinstance(plan, Refusal)}


def _choose(call: Call) -> Choice:
    rule, order = preference(call.q.device, partial(call.problem, rotate))
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
    """Attention of one query a head to all keys on the CPU, see ``Backend.query_kernel``.

    None where PyTorch's own operations serve, for gradients, and where calls are traced, watched or
    transformed.
    """
    if needs_dispatch(q, k, v) or is_transformed():
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return None
    return BACKENDS["native"].query_kernel(q, k, v, plain=plain)


def _plan(backend: Backend, call: Call) -> Plan | Refusal:
    """The backend's plan on this machine."""
    return backend.unavailable(call.q.device) or backend.plan(call.problem(rotate))


def preference(device: torch.device, make_problem: Callable[[], Problem]) -> tuple[str, list[str]]:
    """The rule that applies, and the names of the backends in the order to be tried.

    Args:
        device: where the tensors are.
        pose: makes the problem with queries and keys transformed; called only where a rule needs
            it.
    """
    if device.type != "cpu":
        lowered = make_problem().lowered
        if lowered and all(map(is_constant_table, lowered)):
            rest = ["flex", "triton", "blockwise", "reference"]
            return "on an accelerator, constant tables", ["sdpa", *rest]
        return "on an accelerator", ["sdpa", "fla", "triton", "flex", "blockwise", "reference"]
    if is_exporting():
        # A rule that reads sizes would fix them; other runtimes know no operators of ours.
        return "exporting", ["sdpa", "reference"]
    problem = make_problem()
    batch, heads, queries, _ = problem.q.shape
    keys = problem.k.shape[2]
    logits = batch * heads * queries * keys
    if logits <= SMALL and is_transformed():
        # vmap would call the fused kernel in a loop, with a warning
        return "few logits, under a transform of torch.func", ["reference"]
    last = ["blockwise", "reference"] if logits > SMALL else ["reference"]
    kernels = ["native", "sdpa", *last]
    if problem.lowered is not None and BACKENDS["native"].reads_keys_once(problem):
        return "few queries, for which keys are read once", kernels
    few = FEW_UNSTRUCTURED if problem.lowered is None else FEW
    if logits <= few:
        # The definition repeats keys that heads share.
        shared = ["native"] if shares_few(problem.q, problem.k) else []
        return FEW_LOGITS, ["sdpa", *shared, "reference"]
    if problem.lowered is None:
        return "a score part without structured form", kernels
    if problem.sinks is not None or problem.softcap is not None:
        return "sinks or a cap of the logits", kernels
    if problem.grid.segmented:
        return "documents or padding", kernels
    ranks = sum(x.query.shape[-1] for x in problem.lowered if isinstance(x, LowRank))
    if ranks > problem.q.shape[-1]:
        return "more extra columns than features", kernels
    if any(not isinstance(term, LowRank) for term in problem.lowered):
        return "terms by offset", kernels
    narrow = problem.q.dtype.itemsize < 4 and problem.q.requires_grad and torch.is_grad_enabled()
    masked = logits > SMALL or (logits > MASKED and queries * keys > MASKED_HEAD)
    if narrow or (masked and not are_few(problem.q) and not problem.grid.dense):
        return "masked pairs, or gradients in half precision", kernels
    reason = BACKENDS["native"].outpaces_sdpa(problem)
    return (reason, kernels) if reason else ("no terms by offset", ["sdpa", "native", *last])
