"""The choice of a backend for a call: by name, as an instance, or by ``rules``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.attention import trial
from posenc.attention.backends.common.base import RARE, Attend, Backend, Plan, QueryKernel, Refusal
from posenc.attention.call import Call
from posenc.attention.problem.problem import Problem
from posenc.attention.repeats import repeatable
from posenc.attention.rules import Facts, Rule, rule_of
from posenc.encoding import Rotation
from posenc.errors import ArgumentError, BackendRefusal, UnknownNameError
from posenc.registration import Registry
from posenc.runtime import is_transformed, needs_dispatch

BACKENDS: Registry[Backend] = Registry(
    Backend, "backend", "posenc.attention.backends", group="posenc.backends"
)
"""All backends by name. ``preference`` gives the order in which ``auto`` tries posenc's own; those
of other packages are used when they are asked for."""

BACKENDS.load()  # compiled code can import nothing

LOG = logging.getLogger("posenc")

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


def describe_repeats(call: Call) -> str:
    """Text for ``explain`` on repeated calls; empty if they run like the first."""
    if not repeatable(call, prepare):
        return ""
    choice = _choose(call)
    by = next(backend for backend, plan in _preparing(call, choice) if plan.prepare() is not None)
    if by is choice.backend:
        return ""
    return "; from the second such call on by compiled kernels, prepared once"


def prepare(call: Call) -> Attend | None:
    """Attention of calls like this one, planned once."""
    prepared = (plan.prepare() for _, plan in _preparing(call, _choose(call)))
    return next(filter(None, prepared), None)


def _preparing(call: Call, choice: Choice) -> Iterator[tuple[Backend, Plan]]:
    """Backends by which calls like this one may be prepared, the fastest first, and their plans.

    Prepared, the compiled kernels are faster for few logits too.
    """
    native = BACKENDS["native"]
    faster = [native] if native.advantage(call.problem(rotate), prepared=True) else []
    others = (BACKENDS[name] for name in choice.rule.prepares)
    for backend in dict.fromkeys([*faster, choice.backend, *others]):
        plan = choice.plan if backend is choice.backend else _plan(backend, call)
        if isinstance(plan, Plan):
            yield backend, plan


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
    kernels = BACKENDS["native"].kernels
    return rotation.apply(q, k) if kernels is None else kernels.rotate(rotation, q, k)


def query_kernel(q: Tensor, k: Tensor, v: Tensor, *, plain: bool) -> QueryKernel | None:
    """Attention of one query a head to all keys on the CPU, see ``Kernels``.

    None where PyTorch's own operations serve, for gradients, and where calls are traced, watched or
    transformed.
    """
    if needs_dispatch(q, k, v) or is_transformed():
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return None
    kernels = BACKENDS["native"].kernels
    return None if kernels is None else kernels.query_kernel(q, k, v, plain=plain)


def _plan(backend: Backend, call: Call) -> Plan | Refusal:
    """The backend's plan on this machine."""
    return backend.unavailable(call.q.device) or backend.plan(call.problem(rotate))


def preference(device: torch.device, make_problem: Callable[[], Problem]) -> tuple[Rule, list[str]]:
    """The rule that applies, and the names of the backends in the order to be tried."""
    return rule_of(Facts(device, make_problem, BACKENDS["native"]))
