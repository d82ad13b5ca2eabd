"""Differential fuzzing: random calls of ``attend``, each backend against ``reference``.

    python -m tests.testing.attention_fuzz --count 2000
    python -m tests.testing.attention_fuzz --first 1234 --count 1
    TRITON_INTERPRET=1 python -m tests.testing.attention_fuzz --backend triton --count 500

A case is determined by its number. Values and all gradients are compared; in some cases heads,
widths or axes are invalid, and every backend has to raise ``ArgumentError``. With ``--backend
triton`` cases are such as its kernels serve, in tiles of random sides.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc.attention import BACKENDS, attend
from posenc.attention.backends import blockwise, sdpa
from posenc.attention.backends.native import posing
from posenc.attention.backends.triton.form import INTERPRETED as HAS_INTERPRETER
from posenc.encoding import Encoding
from posenc.encoding.entry import CONTEXT
from posenc.encoding.prepared import Prepared
from posenc.errors import ArgumentError, BackendRefusal, PosencError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.registry import ENCODINGS
from posenc.testing.subject import spread
from tests.support.guarded import FORMS, guarded
from tests.support.interpreter import language_patched
from tests.support.tiling import tiles
from tests.testing.attention_cases import (
    EXTENDED,
    INTERPRETED,
    MAX_LENGTH,
    METHODS,
    RANDOM,
    WIDE,
    AttentionCase,
    Sizes,
    draw,
    shown,
)
from tests.testing.rounding import nudged, rounded_logits
from tests.testing.tolerances import FACTOR, distance, tolerance

FLOOR = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Minimum tolerances: positions may be float32 even with float64 features, and sums that cancel
are exactly 0 only in the definition."""

DOUBLE = 1e-10
"""That of float64 features at float64 positions."""

ROUNDINGS = 32.0
"""Allowed multiple of an error in float64; units that ``_rounded`` is off by."""

SHARED = Prepared()
"""Results that backends share over all cases, which must not take one for the other."""

POISON = (torch.nan, torch.inf, -torch.inf)
"""What padding may hold."""

DRAWS = 4
"""Of ``_rounded``: whether a number crosses a bend is a matter of chance."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The cases to run.

    Args:
        backends: compared with the reference.
        names: encodings to draw from.
        sizes: of the cases.
        context: of a case's calls, such as the sides of tiles.
    """

    backends: tuple[str, ...]
    names: tuple[str, ...]
    sizes: Sizes
    context: Callable[[AttentionCase], AbstractContextManager[None]] = lambda case: nullcontext()


def everywhere(names: list[str] | None = None, sizes: Sizes = WIDE) -> Scope:
    """All backends, with encodings that act in attention, or those named."""
    if names is None:
        names = [n for n, e in ENCODINGS.items() if e.claims.sites != ("embedding",)]
        names += [RANDOM] * (len(names) // 8) + [EXTENDED] * 3
    return Scope(backends=("auto", *BACKENDS), names=tuple(names), sizes=sizes, context=_pieces)


@contextmanager
def _pieces(case: AttentionCase) -> Iterator[None]:
    """A case's calls are computed a few tokens at a time, if it says so."""
    limits = ((posing, "LONG", 0), (blockwise, "BUDGET", 10_000), (sdpa, "CAUSAL_BLOCK", 64))
    with pytest.MonkeyPatch.context() as patch:
        for module, name, limit in limits if case.apart else ():
            patch.setattr(module, name, limit)
        yield


def interpreted(names: list[str] | None = None) -> Scope:
    """The kernels of ``triton`` by its interpreter, with encodings that they serve, or those named.

    Triton has to be told of its interpreter before it is imported.
    """
    return Scope(
        backends=("triton",),
        names=tuple(names or (*SERVED, RANDOM, RANDOM)),
        sizes=INTERPRETED,
        context=lambda case: tiles(*case.tile),
    )


SERVED = (
    *("nope", "rope", "p_rope", "rope_pp", "xpos", "alibi", "t5", "kerple", "sandwich", "shaw"),
    *("transformer_xl", "deberta", "tupe", "forgetting", "cope", "stick_breaking", "fire"),
    "relative_logits",
)
"""Encodings in the form that the kernels take."""


class Failure(AssertionError):
    """A backend differs from the reference, or accepts an invalid argument."""


def make_encoding(case: AttentionCase) -> tuple[Encoding, int]:
    """The case's encoding in float64 with perturbed parameters, and its head width.

    The width is 8 if the method does not support the drawn one.
    """
    entry = METHODS[case.name]
    parameters = entry.parameters()
    for head_dim in (case.head_dim, 8):
        context = {
            "dim": case.heads * head_dim,
            "heads": case.heads,
            "head_dim": head_dim,
            "max_length": 3 * max(MAX_LENGTH, case.keys.length),
            "causal": case.causal,
        }
        options: dict[str, object] = {key: context[key] for key in CONTEXT if key in parameters}
        try:
            made = entry.factory(**options, **{**entry.sample, **case.options})
            break
        except ArgumentError:
            if head_dim == 8:
                raise
    encoding = made if isinstance(made, Encoding) else Encoding.of(made)
    spread(encoding)
    return encoding.double().requires_grad_(not case.frozen), head_dim


def _operand(
    shape: tuple[int, ...],
    memory: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    padding: Tensor | None = None,
) -> Tensor:
    """A random leaf tensor of the shape, in memory of that form, with anything in ``padding``."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    made = FORMS[memory](x)
    if padding is not None and torch.equal(made, x):  # no two numbers are in one place
        numbers = torch.tensor(POISON, dtype=dtype).repeat(shape[-1])[: shape[-1]]
        made.copy_(torch.where(padding[:, None, :, None], numbers, made))
    return guarded(made)


Outcome = tuple[list[Tensor], None] | tuple[None, PosencError]
"""Output and gradients, or the error that was raised."""


def run(case: AttentionCase, backends: tuple[str, ...]) -> list[str]:
    """Compare backends with the reference on one case.

    Returns:
        Names of the backends that support it.

    Raises:
        Failure: if a backend differs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.number)
        try:
            encoding, head_dim = make_encoding(case)
        except PosencError:
            return []  # the method does not support these sizes
    call = _call(case, encoding, head_dim)
    if case.wrong is not None:
        for name in backends:
            _expect_refusal(case, name, encoding, call)
        return []
    exact, error = _outcome(lambda: call("reference", torch.float64))
    narrow = exact
    if case.dtype != torch.float64:
        narrow, error = _outcome(lambda: call("reference", case.dtype))
    exactly = cache(lambda: _exactly(case, encoding, head_dim))
    rounded = cache(lambda: _rounded(case, encoding, head_dim))
    served = []
    for name in backends:
        try:
            got, raised = _outcome(lambda name=name: call(name, case.dtype))  # type: ignore[misc]
        except BackendRefusal:
            continue
        if (raised is None) != (error is None):
            raise Failure(f"{case}\n{name}: {raised!r}, but the reference: {error!r}")
        if got is None or exact is None or narrow is None:
            continue
        _compare(case, name, got, narrow, exact, exactly, rounded)
        served.append(name)
    return served


def _call(case: AttentionCase, encoding: Encoding, head_dim: int) -> Callable[..., list[Tensor]]:
    """A function from a backend and a dtype to the output and all gradients."""
    value_dim = head_dim if case.value_dim == case.head_dim else case.value_dim
    groups, heads, width, key_width = case.kv_heads, case.heads, head_dim, head_dim
    queries, keys = case.queries, case.keys
    if case.wrong == "heads":
        groups, heads = groups + 1, 2 * heads + 1
    elif case.wrong == "head_dim":
        width = key_width = 2 * head_dim + 2
    elif case.wrong == "key_width":
        key_width += 1
    elif case.wrong == "axes":
        queries = keys = keys.with_positions(keys.positions.repeat(1, 1, 4))
    batch, size = case.batch, (queries.length, keys.length)
    if case.wrong == "length":
        size = (size[0] + 1, size[1])
    shapes = ((heads, size[0], width), (groups, size[1], key_width), (groups, size[1], value_dim))
    parameters = [p for p in encoding.parameters() if p.requires_grad]
    softmax = encoding.score is None or not encoding.score.replaces_softmax
    places, moved = _places(case, queries, keys)

    def of_weights(dtype: torch.dtype) -> torch.dtype:
        return dtype if case.narrow else torch.promote_types(dtype, torch.float32)

    def draw(dtype: torch.dtype, seed: int, *, poisoned: bool = False) -> list[Tensor]:
        """Queries, keys, values, features that signals are of, and sinks."""
        generator = torch.Generator().manual_seed(seed)
        padding = [x.valid if x.valid is None else ~x.valid for x in (queries, keys, keys)]
        leaves = [
            _operand((batch, *s), form, dtype, generator, hidden if poisoned else None)
            for s, form, hidden in zip(
                shapes, case.forms or (case.memory,) * 3, padding, strict=True
            )
        ]
        features = (batch, 1, keys.length, case.heads * head_dim)
        leaves.append(_operand(features, "contiguous", of_weights(dtype), generator))
        if case.sinks and softmax:
            leaves.append(torch.randn(heads, generator=generator).to(dtype))
        return _graded(leaves)

    def _graded(leaves: list[Tensor]) -> list[Tensor]:
        for name, x in zip("qkvxs", leaves, strict=False):
            x.requires_grad_(not case.graded or name in case.graded)
        return leaves

    def compute(backend: str, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """The output, and the LSE where it is asked for."""
        q, k, v, x, *sinks = leaves
        if case.wrong == "dtype":
            k = k.half() if k.dtype != torch.float16 else k.float()
        grid = _grid(case, encoding, *places, x.squeeze(1))
        options: dict[str, Any] = {"sinks": sinks[0]} if sinks else {}
        options |= {"softcap": case.softcap} if softmax else {}
        options["scale"] = case.scale
        wanted: Any = case.lse and softmax
        options |= {"backend": backend, "return_lse": wanted}
        with nullcontext() if backend == "reference" else SHARED:
            made: Any = attend(q, k, v, grid, encoding, **options)
        return made if wanted else (made,)

    def call(backend: str, dtype: torch.dtype, *, nudge: int | None = None) -> list[Tensor]:
        encoding.to(of_weights(dtype))
        for parameter in encoding.parameters():
            if parameter.dim() > 1:
                parameter.data = guarded(FORMS[case.memory](parameter.data))
        poisoned = case.poisoned and case.wrong is None and backend != "reference"
        leaves = draw(dtype, case.number, poisoned=poisoned)
        if nudge is not None:
            unit = ROUNDINGS * torch.finfo(dtype).eps
            leaves = _graded([nudged(x.detach(), unit, nudge) for x in leaves])
        if case.repeated:
            with torch.no_grad():
                for seed in (1, 2) if backend != "reference" else ():
                    compute(backend, [x.detach() for x in draw(dtype, case.number + seed)])
                return list(compute(backend, [x.detach() for x in leaves]))
        output, *lse = compute(backend, leaves)
        inputs = [x for x in (*leaves, *parameters, *moved) if x.requires_grad]
        zeros = [torch.zeros_like(x) for x in inputs]
        if not output.requires_grad:
            if any(x.requires_grad for x in leaves[:3]):
                raise Failure(f"{case}\n{backend}: the output is detached from the graph")
            return [output, *zeros]
        sent = [guarded(FORMS[case.memory](output.detach().cos()))]
        lse = [x for x in lse if x.requires_grad]
        sent += [x.detach().masked_fill(x.isneginf(), 0.0).cos() for x in lse]
        raw = torch.autograd.grad([output, *lse], inputs, sent, allow_unused=True)
        gradients = [z if g is None else g for z, g in zip(zeros, raw, strict=True)]
        return [output.detach(), *gradients]

    return call


def _places(
    case: AttentionCase, queries: Layout, keys: Layout
) -> tuple[tuple[Layout, Layout], list[Tensor]]:
    """The layouts, and their positions that require gradients."""
    if not case.placed or queries.start is not None or keys.start is not None or queries.extent:
        return (queries, keys), []
    sides = list(dict.fromkeys((queries, keys)))
    moved = [side.positions.clone().requires_grad_() for side in sides]
    made = [side.with_positions(x) for side, x in zip(sides, moved, strict=True)]
    return (made[0], made[-1]), moved


def _grid(
    case: AttentionCase, encoding: Encoding, queries: Layout, keys: Layout, x: Tensor
) -> Grid:
    """The case's grid, with the signals of the encoding."""
    causal = case.causal != (case.wrong == "causal")
    seen = encoding.observe(x, keys)
    if queries is keys:
        return shown(case, Grid(seen, seen, causal, case.window))
    if queries.length <= keys.length:
        x = x[:, keys.length - queries.length :]
    else:
        x = torch.cat([x, x[:, :1].expand(-1, queries.length - keys.length, -1)], dim=1)
    return shown(case, Grid(encoding.observe(x, queries), seen, causal, case.window))


def _outcome(work: Callable[[], list[Tensor]]) -> Outcome:
    try:
        return work(), None
    except BackendRefusal:
        raise
    except PosencError as error:
        return None, error


def _expect_refusal(
    case: AttentionCase,
    name: str,
    encoding: Encoding,
    call: Callable[[str, torch.dtype], list[Tensor]],
) -> None:
    try:
        call(name, case.dtype)
    except PosencError:
        return
    except Exception as error:
        raise Failure(f"{case}\n{name} raised {error!r}") from error
    if _takes_any(case, encoding):
        return
    raise Failure(f"{case}\n{name} accepted it")


def _shows_no_later_key(window: int | tuple[int | None, int | None] | None) -> bool:
    """True if a grid with such a window is causal in any case."""
    last = window[1] if isinstance(window, tuple) else window and window - 1
    return last is not None and last <= 0


def _takes_any(case: AttentionCase, encoding: Encoding) -> bool:
    """True if the method accepts any heads, width, mask and axes."""
    if case.wrong == "axes":
        taken = METHODS[case.name].claims.axes
        return taken is None or 4 * case.keys.axes in taken
    if case.wrong == "causal" and _shows_no_later_key(case.window):
        return True
    if case.wrong not in ("heads", "head_dim", "causal"):
        return False
    if case.wrong == "causal" and encoding.causal_only:
        return False
    # Queries and keys have the wrong width, which a value part alone does not see.
    parts = [
        part for part in encoding.parts() if case.wrong != "head_dim" or part is not encoding.value
    ]
    return all(getattr(part, case.wrong) is None for part in parts)


def _exactly(case: AttentionCase, encoding: Encoding, head_dim: int) -> list[Tensor]:
    """The definition in float64 with positions in float64 too."""
    queries = replace(case.queries, positions=case.queries.positions.double())
    keys = replace(case.keys, positions=case.keys.positions.double())
    wide = replace(case, queries=queries, keys=queries if case.keys is case.queries else keys)
    return _call(wide, encoding, head_dim)("reference", torch.float64)


def _rounded(case: AttentionCase, encoding: Encoding, head_dim: int) -> list[list[Tensor]]:
    """The definition in the case's dtype, rounded more than it is and at other places."""
    call, unit = _call(case, encoding, head_dim), ROUNDINGS * torch.finfo(case.dtype).eps
    found = []
    for seed in range(DRAWS):
        with rounded_logits(unit, seed):
            found.append(call("reference", case.dtype, nudge=seed))
    return found


def _compare(
    case: AttentionCase,
    name: str,
    got: list[Tensor],
    narrow: list[Tensor],
    exact: list[Tensor],
    exactly: Callable[[], list[Tensor]],
    rounded: Callable[[], list[list[Tensor]]],
) -> None:
    """Require output and gradients as exact as the definition in the same dtype.

    Positions are float32: ``exact`` may be off where sums over many pairs cancel, or a network
    reads them. Then what is at most twice as far as that from the definition with float64
    positions is right: both are rounded, at different places. So is what is off by little more
    than the definition is when its operands and logits are: where gradients cancel, a function
    bends or logits are large, it may be exact by chance.
    """
    floor = DOUBLE if case.double else FLOOR[case.dtype]
    for index, (mine, reference, truth) in enumerate(zip(got, narrow, exact, strict=True)):
        largest = truth.abs().max().item() if truth.numel() else 0.0
        allowed = max(tolerance(reference, truth, factor=ROUNDINGS), floor * max(1.0, largest))
        off = distance(mine, truth)
        if off <= allowed:
            continue
        spread = max(distance(draw[index], truth) for draw in rounded())
        allowed = max(allowed, FACTOR * spread)
        truth = exactly()[index]
        if off <= allowed or distance(mine, truth) <= 2 * distance(reference, truth):
            continue
        label = "the output" if index == 0 else f"result {index}"
        raise Failure(f"{case}\n{name}: {label} is off by {off:.3g}, more than {allowed:.3g}")


def fuzz(
    count: int, *, first: int = 0, scope: Scope | None = None
) -> Iterator[tuple[AttentionCase, list[str]]]:
    """Run cases ``first`` to ``first + count - 1``; yield each with the backends that support it.

    Args:
        scope: all backends by default.

    Raises:
        Failure: for the first case in which a backend differs.
    """
    scope = everywhere() if scope is None else scope
    for number in range(first, first + count):
        case = draw(number, list(scope.names), scope.sizes)
        try:
            with scope.context(case):
                served = run(case, scope.backends)
        except Failure:
            raise
        except Exception as error:
            raise Failure(f"{case}\nraised {error!r}") from error
        yield case, served


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare the backends on random calls of attend.")
    parser.add_argument("--count", type=int, default=2000, help="cases (2000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (0)")
    parser.add_argument("--only", nargs="*", default=None, help="encodings (all)")
    parser.add_argument("--backend", choices=["triton"], help="by its interpreter; else all")
    parser.add_argument("--all", action="store_true", help="continue after a failure")
    arguments = parser.parse_args()
    if arguments.backend and not HAS_INTERPRETER:
        parser.error("--backend triton needs TRITON_INTERPRET=1 in the environment")
    scope = (interpreted if arguments.backend else everywhere)(arguments.only)
    warnings.simplefilter("error")
    patched = language_patched() if arguments.backend else nullcontext()
    numbers = range(arguments.first, arguments.first + arguments.count)
    with patched:
        return _report(numbers, scope, go_on=arguments.all)


def _report(numbers: range, scope: Scope, *, go_on: bool) -> int:
    served = Counter[str]()
    failures = 0
    for number in numbers:
        try:
            for _, names in fuzz(1, first=number, scope=scope):
                served.update(names)
        except Failure as failure:
            failures += 1
            sys.stdout.write(f"{failure}\n")
            sys.stdout.flush()
            if not go_on:
                break
    sys.stdout.write(f"{len(numbers)} cases, {failures} failures; served: {dict(served)}\n")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
