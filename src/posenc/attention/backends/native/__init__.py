"""Compiled CPU kernels for attention with structured terms, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from posenc.attention.backends.common.base import (
    BFLOAT16,
    KEYS_ONCE,
    RARE,
    ROTATION_ALONE,
    SLOW_MKL,
    Attend,
    Backend,
    Plan,
    QueryKernel,
    Refusal,
    Result,
)
from posenc.attention.backends.native.arguments import prepare
from posenc.attention.backends.native.build import description, missing, slow_mkl
from posenc.attention.backends.native.few_queries import ROWS, are_few_rows, attend_query
from posenc.attention.backends.native.op import NATIVE
from posenc.attention.backends.native.pairs import DESCRIPTIONS
from posenc.attention.backends.native.posing import fused_form, image_record, narrowed, record_of
from posenc.attention.backends.native.rotation import fits_inside, rotate, serves_inside
from posenc.attention.backends.native.splitting import (
    BandProblem,
    attend_with_special_tokens,
    join_keys,
    problem_of_cells,
    problems_by_band,
)
from posenc.attention.backends.native.variants import SWITCHED_OFF
from posenc.attention.problem.images import serves_images
from posenc.attention.problem.lowering import add_rows, has_rows, without_rows
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.problem import Problem
from posenc.attention.problem.record import KernelProblem
from posenc.encoding import BlockTransforms, DistanceFunction, FusedScore, Rotation, StructuredScore
from posenc.runtime import is_exporting, is_transformed

__all__ = ["Native"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

ONE_HEAD = 2**13
"""Fewest logits of a head for which the kernels can be faster than PyTorch's fused attention."""

MANY = 2**20
"""Fewest logits in all for which planning a call of the kernels pays off."""

READ = 2**20
"""Fewest numbers of keys and values, times the queries of a head, for which planning pays off with
terms or a rotation; twice as many without."""

OF_IMAGES = "compiled tiles with terms by image offset"

AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""True where the kernels, rotating as they read, beat a rotation and PyTorch's fused attention."""

ON_CPU = Refusal("its kernels run on CPUs alone")


class Native(Backend):
    """Online softmax over tiles, in C++, with terms read by spans of the offset.

    Serves regular grids, contiguous documents and padding, and tables between whole images.
    Gradients of everything, dropout included. Results are the same for any number of threads.
    """

    name = "native"

    def build(self) -> str:
        return description()

    def rotate(self, rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(rotation, q, k)

    def query_kernel(self, q: Tensor, k: Tensor, v: Tensor, *, plain: bool) -> QueryKernel | None:
        worth = not plain or q.dtype.itemsize < 4 or k.numel() + v.numel() >= 2 * READ
        alike = q.dtype == k.dtype == v.dtype and q.dtype in DTYPES
        if not (worth and alike and q.shape[1] // k.shape[1] <= ROWS):
            return None
        return attend_query if q.is_cpu and missing() is None else None

    def has_advantage(self, reason: str, problem: Problem, *, prepared: bool = False) -> bool:
        (batch, heads, queries, _), keys = problem.q.shape, problem.k.shape[2]
        pairs, rotation = queries * keys, problem.rotation
        if reason == KEYS_ONCE:
            if 16 * queries > keys or not are_few_rows(problem):
                return False
            read = (problem.k.numel() + problem.v.numel()) * queries
            least = READ if problem.lowered or rotation else 2 * READ
            return prepared or problem.q.dtype.itemsize < 4 or read >= least
        if reason == SLOW_MKL:
            return queries >= 16 and pairs >= ONE_HEAD and slow_mkl()
        if not (AVX512 if batch * heads * pairs > MANY else prepared):
            return False
        if reason == ROTATION_ALONE:
            return rotation is not None and serves_inside(rotation, problem.q, problem.k)
        narrow = problem.q.dtype == torch.bfloat16 and AVX512 and rotation is None
        return reason == BFLOAT16 and narrow and queries >= 16 and pairs >= ONE_HEAD

    def unavailable(self, device: torch.device) -> Refusal | None:
        if device.type != "cpu":
            return ON_CPU
        reason = missing()
        return None if reason is None else Refusal(reason, avoidable=reason != SWITCHED_OFF)

    def plan(self, problem: Problem) -> Plan | Refusal:
        if problem.counter_dropout is not None:
            return Refusal(RARE["counter_dropout"])
        if problem.q.device.type != "cpu":
            return ON_CPU
        if is_transformed():
            return Refusal("its kernels know no transforms of torch.func")
        if is_exporting():
            return Refusal("other runtimes do not have its kernels")
        if problem.q.dtype not in DTYPES:
            return Refusal(f"its kernels do not take {problem.q.dtype}")
        grid = problem.grid
        if grid.query.extent is not None:
            if serves_images(grid, problem.lowered):
                prepare = partial(_prepare_images, problem)
                return Plan(OF_IMAGES, partial(_attend_images, problem), prepare=prepare)
            cells = problem_of_cells(problem)
            if cells is not None:
                of_cells = partial(_attend_images, cells)
                how = f"{OF_IMAGES}; special tokens apart"
                return Plan(how, partial(attend_with_special_tokens, problem, of_cells))
        offsets = Offsets.of(grid)
        if isinstance(offsets, str) and grid.dense and problem.lowered == ():
            offsets = Offsets.shifted(grid, 0)  # which nothing reads
        return Refusal(offsets) if isinstance(offsets, str) else _plan(problem, offsets)


def _plan(problem: Problem, offsets: Offsets) -> Plan | Refusal:
    terms = problem.lowered
    if terms is None:  # documents, on which a part may have no form
        terms = problem.lower_on_sequences(*offsets.domain)
    if problem.softcap is not None and has_rows(terms or ()):
        return Refusal("a cap takes sums of gates, which its kernels keep apart from the logits")
    if terms is not None:
        how = "compiled tiles, terms read by spans of the offset (memory linear in the length)"
        return _plan_of(how, problem, offsets, terms)
    bands = problems_by_band(problem)
    if not isinstance(bands, str):
        how = "compiled tiles, each band of pairs by its rotation (memory linear in the length)"
        return Plan(how, partial(_attend_bands, bands))
    pairs, terms = fused_form(problem)
    if pairs is None or terms is None or (terms and not isinstance(pairs, DistanceFunction)):
        return Refusal(bands)
    if isinstance(pairs, BlockTransforms) and not offsets.shows_offset_zero:
        return Refusal("its products begin with the own keys of queries, of which some are hidden")
    how = f"compiled tiles with {DESCRIPTIONS[type(pairs)]} (memory linear in the length)"
    return _plan_of(how, problem, offsets, terms, pairs)


def _plan_of(
    how: str,
    problem: Problem,
    offsets: Offsets,
    terms: tuple[StructuredScore, ...],
    pairs: FusedScore | None = None,
) -> Plan:
    posed = problem, offsets, terms, pairs
    return Plan(how, partial(_attend, *posed), prepare=partial(_prepare, *posed))


def _prepare(
    problem: Problem, offsets: Offsets, terms: tuple[StructuredScore, ...], pairs: FusedScore | None
) -> Attend | None:
    rotation = problem.rotation
    if rotation is not None and not fits_inside(rotation, problem.q, problem.k):
        return None
    if not isinstance(pairs, DistanceFunction | None) or has_rows(terms):
        return None
    record = record_of(problem, offsets, terms, pairs, rotated=False)
    return prepare(record) if narrowed(record) is record else None


def _prepare_images(problem: Problem) -> Attend | None:
    servable = problem.rotation is None and not has_rows(problem.lowered or ())
    return prepare(image_record(problem)) if servable else None


def _attend(
    problem: Problem,
    offsets: Offsets,
    terms: tuple[StructuredScore, ...],
    pairs: FusedScore | None = None,
    *,
    lse: bool,
) -> Result:
    record = record_of(problem, offsets, terms, pairs)
    if problem.global_softmax is None and pairs is None:
        record = narrowed(record)
    return _run(problem, terms, record, lse=lse)


def _attend_bands(bands: Sequence[BandProblem], *, lse: bool) -> Result:
    problem, joined = bands[0][0], lse or len(bands) > 1
    by_band = [_attend(band, offsets, (), lse=joined) for band, offsets in bands]
    if problem.global_softmax is None:
        return join_keys(by_band, lse=lse)
    return Result(sum(result.output for result in by_band), None)  # type: ignore[arg-type]


def _attend_images(problem: Problem, *, lse: bool) -> Result:
    return _run(problem, problem.lowered or (), image_record(problem), lse=lse)


def _run(
    problem: Problem, terms: tuple[StructuredScore, ...], record: KernelProblem, *, lse: bool
) -> Result:
    if problem.global_softmax is not None:
        sums = without_rows(problem.global_softmax.lse, terms).detach().double().contiguous()
        return Result(NATIVE.zeros(record, problem.global_softmax.output, sums)[0], None)
    output, sums = NATIVE.attend(record)
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    return Result(output.to(problem.v.dtype), add_rows(sums, terms).to(wide) if lse else None)


ENTRY = Native()
