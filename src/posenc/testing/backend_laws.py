"""Laws of backends, grouped heads and structured forms."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posenc.attention import BACKENDS, attend, explain
from posenc.attention.problem.lowering import GivenTerms, GivenValues
from posenc.encoding import (
    BucketedTerms,
    Encoding,
    ScoreTerm,
    StructuredScore,
    ValueTerm,
    ValueTransform,
)
from posenc.encoding.prepared import Prepared
from posenc.errors import ArgumentError, BackendRefusal
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.testing.subject import (
    HEADS,
    LENGTH,
    LawBroken,
    Subject,
    agree,
    heads_of,
    law,
    learned,
    observed,
    operands,
)


@law
def grouped_heads_are_repeated(subject: Subject) -> None:
    """Grouped key/value heads give the same as repeated heads."""
    encoding = subject.layer().encoding
    (q, k, v), grid = _case(subject, encoding, Layout.sequence(LENGTH))
    for backend in serving(q, k, v, grid, encoding):
        grouped = attend(q, k, v, grid, encoding, backend=backend)
        every_k, every_v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        agree(backend, grouped, attend(q, every_k, every_v, grid, encoding, backend="reference"))


@law
def heads_are_slices(subject: Subject) -> None:
    """The encoding of a range of heads gives that slice of the output and gradients.

    If heads depend on each other, it raises an error.
    """
    encoding = subject.layer().encoding
    (q, k, v), grid = _case(subject, encoding, Layout.sequence(LENGTH))
    tensors = [q, k, v, *encoding.parameters()]
    for begin, end in ((0, 2), (2, 6)):
        if any(part.mixes_heads for part in encoding.parts()):
            with contextlib.suppress(ArgumentError):
                encoding.heads(begin, end)
                raise LawBroken("an encoding that mixes heads raises no error")
            continue
        some = encoding.heads(begin, end)
        groups = slice(begin // 2, end // 2)
        all_heads = attend(q, k, v, grid, encoding, backend="reference")[:, begin:end]
        expected = _gradients(all_heads, tensors)
        inputs = (q[:, begin:end], k[:, groups], v[:, groups])
        for backend in serving(*inputs, grid, some):
            part = attend(*inputs, grid, some, backend=backend)
            agree(f"heads {begin} to {end} by {backend}", part, all_heads)
            _agree_gradients(backend, _gradients(part, tensors), expected)


@law
def lowered_is_forward(subject: Subject) -> None:
    """The structured form of each attention part equals its definition, including gradients."""
    encoding = subject.layer().encoding
    transform, score, value = encoding.query_key, encoding.score, encoding.value
    for start in (0, 4):
        q, k = heads_of(HEADS, 7, seed=2), heads_of(HEADS, 9, seed=3)
        keys = observed(subject, encoding, Layout.sequence(9))
        queries = observed(subject, encoding, Layout.sequence(7, start=start))
        grid = Grid(queries, keys, causal=True)
        q.requires_grad_()
        k.requires_grad_()
        rotation = None if transform is None else transform.lower(q, k, grid)
        if transform is not None and rotation is not None:
            for forward, x in zip(transform(q, k, grid), rotation.apply(q, k), strict=True):
                _match(forward, x, [q, k, *transform.parameters()], "query_key")
        if score is not None:
            terms = score.lower(q, k, grid, scale=0.3)
            if terms is not None:
                dense = GivenTerms(*terms)(q, k, grid, scale=0.3)
                _require_rows_alone(score, terms, score.lower(-q, k + 1, grid, scale=0.3) or ())
                _match(score(q, k, grid, scale=0.3), dense, [q, k, *score.parameters()], "score")
        if isinstance(value, ValueTransform):
            v = heads_of(HEADS, 9, seed=4)
            agree("undone values", value.undo(value(v, grid.key), grid.key), v)
        elif isinstance(value, ValueTerm):
            weights = heads_of(HEADS, 7, seed=6)[..., :1].expand(-1, -1, -1, 9).softmax(-1)
            weights = (weights * torch.arange(1, 10)).requires_grad_()
            term = value.lower(grid)
            if term is not None and term.value is not None:
                dense = GivenValues(term)(weights, grid)
                _match(value(weights, grid), dense, [weights, *value.parameters()], "value")


def _require_rows_alone(
    score: ScoreTerm, terms: Sequence[StructuredScore], others: Sequence[StructuredScore]
) -> None:
    """Require terms of other queries and keys to be the same but for tokens, if that is claimed."""
    if not (score.by_position or score.rows_by_position):
        return
    for term, other in zip(terms, others, strict=True):
        for x, y in zip(_rows(term), _rows(other), strict=True):
            if x is not None and y is not None:
                agree("rows for other queries and keys", x, y)


def _rows(term: StructuredScore) -> list[Tensor | None]:
    """All tensors of a term but the tokens of its products."""
    if not isinstance(term, BucketedTerms):
        return [term.query, term.key]
    products = (term.left, term.right)
    rows = [None if product is None else product.rows for product in products]
    return [*rows, term.table, term.value, term.row, term.column]


def _match(forward: Tensor, dense: Tensor, inputs: list[Tensor], label: str) -> None:
    dense = dense.expand_as(forward) if forward.shape[0] > 1 else dense
    forward = forward.expand_as(dense)
    agree(label, dense, forward)
    if not forward.requires_grad:
        return
    weight = torch.linspace(-1, 1, forward.numel(), dtype=forward.dtype).view(forward.shape)
    pairs = [
        torch.autograd.grad((side * weight).sum(), inputs, allow_unused=True, retain_graph=True)
        for side in (dense, forward)
    ]
    _agree_gradients(label, *pairs, tolerance=1e-6)


SHAPES = ((1, 1), (1, 65), (63, 63), (65, 65), (30, 65))
"""Numbers of queries (the last ones) and keys."""


@law
def backends_agree(subject: Subject) -> None:
    """Every backend that supports the encoding equals ``reference``, including gradients."""
    trained = bool(learned(subject.layer().encoding))
    for frozen in (False, True) if trained else (True,):
        encoding = subject.layer().encoding.requires_grad_(not frozen)
        for layout, queries in (
            *((Layout.sequence(keys), queries) for queries, keys in SHAPES),
            (Layout.packed([20, 1, 44]), 65),
            (Layout.padded([65, 20], side="left"), 65),
            (Layout.padded([40, 65]), 30),
        ):
            _all_agree(encoding, *_case(subject, encoding, layout, queries))


@law
def nan_stays_nan(subject: Subject) -> None:
    """A query of NaN gives a row of NaN on every backend, however few keys there are.

    Its LSE too. One that sees no key gives zeros, and -inf.
    """
    wide = subject.layer().encoding
    for keys, dtype in itertools.product((2, 8, 15, 16, 65), (torch.float32, torch.float64)):
        encoding = subject.layer(dtype=dtype).encoding
        softmax = encoding.score is None or not encoding.score.replaces_softmax
        layout = observed(subject, wide, Layout.sequence(keys))
        q, k, v = (x.to(dtype) for x in operands(keys, keys))
        q[0, :, [0, -1]] = torch.nan
        grid = Grid.of(layout, causal=True)
        for backend in BACKENDS:
            with contextlib.suppress(BackendRefusal):
                results = [attend(q, k, v, grid, encoding, backend=backend)]
                if softmax:
                    results += attend(q, k, v, grid, encoding, backend=backend, return_lse=True)
                if not all(bool(x[0, :, -1].isnan().all()) for x in results):
                    raise LawBroken(f"{backend} makes numbers of NaN beside {keys} keys")


@law
def half_precision_is_as_exact_as_the_definition(subject: Subject) -> None:
    """In half precision every backend errs at most twice as much as ``reference``.

    With queries of standard deviation 1, 3 and 10, since an error of a logit is a share of a
    weight; beside that, the result is rounded.
    """
    for dtype, size in itertools.product((torch.bfloat16, torch.float16), (1.0, 3.0, 10.0)):
        layer = subject.layer(dtype=dtype)
        wide, encoding = copy.deepcopy(layer).double(), layer.encoding
        grid = Grid.of(observed(subject, wide.encoding, Layout.sequence(65)), causal=True)
        q, k, v = (x.to(dtype) for x in operands(65, 65))
        q = q * size
        exact = q.double(), k.double(), v.double()
        expected = attend(*exact, grid, wide.encoding, backend="reference")
        outputs = {
            b: attend(q, k, v, grid, encoding, backend=b) for b in serving(q, k, v, grid, encoding)
        }
        errors = {b: (x.double() - expected).abs().max().item() for b, x in outputs.items()}
        rounding = torch.finfo(dtype).eps * expected.abs().max().item()
        allowed = 2 * (errors["reference"] + rounding)
        worst = max(errors, key=errors.__getitem__)
        if not errors[worst] <= allowed:
            raise LawBroken(
                f"{worst} is off by {errors[worst]:.3g} in {dtype} with queries of {size:g}, "
                f"more than {allowed:.3g}, twice the definition's error"
            )


@law
def double_is_double(subject: Subject) -> None:
    """In float64, positions too, every backend equals ``reference`` to 1e-11, also in gradients."""
    encoding = subject.layer().encoding
    for layout, queries in (
        (Layout.sequence(65), 65),
        (Layout.sequence(65), 30),
        (Layout.packed([20, 1, 44]), 65),
    ):
        wide = replace(layout, positions=layout.positions.double())
        _all_agree(encoding, *_case(subject, encoding, wide, queries), tolerance=1e-11)


def _case(
    subject: Subject,
    encoding: Encoding,
    layout: Layout,
    queries: int | None = None,
    *,
    rows: int | None = None,
    window: int | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], Grid]:
    """Queries, keys and values, and the grid of a layout's last ``queries`` with all its keys.

    Args:
        queries: by default all, in the layout of the keys.
        rows: of the batch; by default the layout's.
    """
    rows, keys = rows or layout.batch, layout.length
    q, k, v = (x.requires_grad_() for x in operands(queries or keys, keys, rows=rows))
    key = query = observed(subject, encoding, layout, rows=rows)
    if queries is not None:
        query = key.slice(keys - queries, keys)
    return (q, k, v), Grid(query, key, causal=True, window=window)


def _all_agree(
    encoding: Encoding,
    inputs: tuple[Tensor, Tensor, Tensor],
    grid: Grid,
    *,
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    """Require outputs and gradients of ``reference`` from every backend that supports a call.

    Args:
        inputs: queries, keys and values.
        **options: of ``attend``, of which tensors have gradients too.
    """
    tensors = [*inputs, *learned(encoding)]
    tensors += [x for x in options.values() if isinstance(x, Tensor)]
    expected = attend(*inputs, grid, encoding, backend="reference", **options)
    gradients = _gradients(expected, tensors)
    for backend in serving(*inputs, grid, encoding, **options):
        output = attend(*inputs, grid, encoding, backend=backend, **options)
        label = f"{backend} with {grid.query.length}×{grid.key.length}"
        agree(label, output, expected, tolerance=tolerance)
        _agree_gradients(label, _gradients(output, tensors), gradients, tolerance=tolerance)


def _agree_gradients(
    label: str,
    gradients: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    *,
    tolerance: float = 1e-5,
) -> None:
    """Require equal gradients; None counts as zeros."""
    for pair in zip(gradients, expected, strict=True):
        present = next((x for x in pair if x is not None), None)
        if present is not None:
            got, gradient = (torch.zeros_like(present) if x is None else x for x in pair)
            agree(f"a gradient of {label}", got, gradient, tolerance=tolerance)


@law
def lse_is_of_all_logits(subject: Subject) -> None:
    """Every backend that supports the encoding returns the LSE of ``reference``, and gradients."""
    encoding = subject.layer().encoding
    if encoding.score is not None and encoding.score.replaces_softmax:
        return
    length = 2 * LENGTH
    for layout, queries, window in (
        (Layout.sequence(length), length, None),
        (Layout.sequence(length), LENGTH, 4),
        (Layout.packed([LENGTH, 1, LENGTH - 1]), length, None),
        (Layout.padded([length, 6], side="left"), length, None),
        (Layout.padded([LENGTH, length]), LENGTH, None),
    ):
        (q, k, v), grid = _case(subject, encoding, layout, queries, window=window)
        tensors = [q, k, v, *learned(encoding)]
        # constant and learned tables take different paths
        with torch.set_grad_enabled(queries == length):
            expected, sums = attend(q, k, v, grid, encoding, backend="reference", return_lse=True)
            finite = sums.masked_fill(sums.isneginf(), 0.0)
            for backend in serving(q, k, v, grid, encoding):
                output, lse = attend(q, k, v, grid, encoding, backend=backend, return_lse=True)
                agree(f"the output of {backend}", output, expected)
                if not torch.equal(lse.isneginf(), sums.isneginf()):
                    raise LawBroken(f"{backend} is -inf for other queries")
                shown = lse.masked_fill(lse.isneginf(), 0.0)
                agree(backend, shown, finite)
                if queries == length:
                    gradients = (_gradients(x, tensors) for x in (shown, finite))
                    _agree_gradients(backend, *gradients)


def _gradients(x: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of the sum of sines; the graph is kept, as backends share that of the signals."""
    return torch.autograd.grad(x.sin().sum(), tensors, None, True, allow_unused=True)


@law
def sinks_and_caps_agree(subject: Subject) -> None:
    """Every backend that supports sinks or a softcap equals ``reference``, including gradients."""
    encoding = subject.layer().encoding
    if encoding.score is not None and encoding.score.replaces_softmax:
        return
    sinks = torch.linspace(-2.0, 2.0, HEADS, dtype=torch.float64).requires_grad_()
    for layout in (Layout.sequence(LENGTH), Layout.packed([LENGTH, 1, 3])):
        case = _case(subject, encoding, layout, rows=2)
        for softcap in (None, 0.8):
            _all_agree(encoding, *case, sinks=sinks, softcap=softcap)


def serving(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, encoding: Encoding, **options: Any
) -> list[str]:
    """Names of the backends that support these inputs."""
    names = []
    for name in BACKENDS:
        with contextlib.suppress(BackendRefusal):
            names.append(explain(q, k, v, grid, encoding, backend=name, **options).backend)
    return names


@law
def weights_that_change_are_followed(subject: Subject) -> None:
    """However weights are changed, nothing computed from the old ones is used.

    Written to by an optimizer, through ``.data`` or by a state dict, or replaced, all of them; and
    single numbers, rows and columns of one: through ``.data``, NumPy and a view.
    """
    encoding = subject.layer().encoding.eval()
    q, k, v = operands(LENGTH, LENGTH)
    grid = Grid.of(observed(subject, encoding, Layout.sequence(LENGTH)), causal=True)
    other = {name: 1.5 * x for name, x in copy.deepcopy(encoding.state_dict()).items()}

    def in_place() -> None:
        for parameter in encoding.parameters():
            parameter.mul_(-0.5)

    def behind_autograd() -> None:
        for parameter in encoding.parameters():
            parameter.data.copy_(2 * parameter.data)

    def replaced() -> None:
        for module in encoding.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(-parameter))

    def edit(name: str, part: Callable[[Tensor], None]) -> None:
        x = encoding.state_dict(keep_vars=True)[name]  # itself, not a copy
        part(x.view(-1, x.shape[-1] if x.dim() else 1))

    read = encoding.state_dict().items()
    names = [n for n, x in read if x.is_floating_point() and not n.startswith("embedding.")]
    parts = [partial(edit, name, part) for name in names for part in PARTS]
    changes: list[Callable[[], object]] = [in_place, behind_autograd, replaced, *parts]
    changes.append(partial(encoding.load_state_dict, other))
    prepared = Prepared()
    with torch.no_grad():
        for backend in ("auto", *serving(q, k, v, grid, encoding)):
            for change in changes:
                with prepared:
                    for _ in range(2):  # results are kept from the second call on
                        attend(q, k, v, grid, encoding, backend=backend)
                    change()
                    output = attend(q, k, v, grid, encoding, backend=backend)
                expected = attend(q, k, v, grid, copy.deepcopy(encoding), backend="reference")
                agree(backend, output, expected)


def _edit_number(rows: Tensor) -> None:
    numbers = rows.data.view(-1)
    numbers[max(0, numbers.numel() - 2)] += 0.25


def _edit_row(rows: Tensor) -> None:
    rows.detach().numpy()[-1] += 0.25


def _edit_column(rows: Tensor) -> None:
    rows[:, 0].add_(0.25)


PARTS = (_edit_number, _edit_row, _edit_column)
"""Edits of a single number, of a row and of a column of a matrix."""
