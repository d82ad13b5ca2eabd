"""Trial of a backend on the user's device: small problems against the definition, once each."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import RLock

import torch
from torch import Tensor, nn

from posenc import __version__
from posenc.attention.backends.common.base import Backend, Plan, Refusal
from posenc.attention.backends.common.definition import attend_by_definition
from posenc.attention.problem.lowering import GivenTerms, GivenValues, lower
from posenc.attention.problem.problem import Problem
from posenc.attention.user_cache import kept
from posenc.encoding import (
    BucketedTerms,
    DistanceFunction,
    Encoding,
    FusedScore,
    GateCounts,
    ScoreTerm,
    StickWeights,
    TokenTableProduct,
    ValueTerm,
    repeat_heads,
)
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores, StructuredTerms
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import is_transformed, without_autocast

HEADS, WIDTH, FARTHEST, LONGEST = 4, 64, 40, 200
"""Sizes of the trial problems. Offsets beyond ``FARTHEST`` share an entry, so that tiles of all
kinds appear."""


ENTRIES = 2 * FARTHEST + 1


def bucket(offset: Offsets) -> BucketIndex:
    """Clipped offsets."""
    return offset[..., 0].round().long().clamp(-FARTHEST, FARTHEST) + FARTHEST


class Structured(ScoreTerm):
    """A bias, rows for queries and for keys, by clipped offset, and a number a key.

    Their definition is that of their structured form.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()

        def drawn(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(size, generator=generator))

        self.table, self.column = drawn(HEADS, ENTRIES), drawn(1, HEADS, LONGEST)
        self.left, self.right = drawn(1, ENTRIES, WIDTH), drawn(1, ENTRIES, WIDTH)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        terms = GivenTerms(*self.lower(q, k, grid, scale=scale))
        return terms.forward(q, k, grid, scale=scale)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms:
        return (
            BucketedTerms(
                bucket,
                table=self.table,
                left=TokenTableProduct(q, scale * self.left),
                right=TokenTableProduct(repeat_heads(k, q.shape[1]), scale * self.right),
                column=self.column[..., : grid.key.length],
                max_distance=FARTHEST,
            ),
        )


class BucketedValues(ValueTerm):
    """Rows added to the values by clipped offset."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, ENTRIES, WIDTH, generator=generator))

    def forward(self, weights: Tensor, grid: Grid) -> Tensor:
        return GivenValues(self.lower(grid)).forward(weights, grid)

    def lower(self, grid: Grid) -> BucketedTerms:
        return BucketedTerms(bucket, value=self.rows, max_distance=FARTHEST)


def _sums_from(values: Tensor) -> Tensor:
    """Sums over each key and those stored after it."""
    return values.flip(-1).cumsum(-1).flip(-1)


class Counted(ScoreTerm):
    """CoPE-like score: vectors at sums of the gates of a key and later ones."""

    causal_only = True

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(FARTHEST, WIDTH, generator=generator))

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        gates = (q @ k.mT * scale).sigmoid().masked_fill(~grid.visible, 0.0)
        count = _sums_from(gates).clamp(max=FARTHEST - 1)
        low = count.detach().floor().clamp(max=FARTHEST - 2)
        products = q @ self.rows.mT.to(q.dtype)
        first, second = (products.gather(-1, low.long() + step) for step in (0, 1))
        return first + (count - low) * (second - first)

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        return GateCounts(TokenTableProduct(q, self.rows[None]))


class Curved(ScoreTerm):
    """A function, bent at knots, of numbers by distance times rates by position."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.knots = 5 * torch.rand(FARTHEST, generator=generator).sort().values
        self.numbers = nn.Parameter(torch.arange(LONGEST + 1).log1p())
        self.rates = nn.Parameter(torch.linspace(1, 0.5, LONGEST))
        self.rises = nn.Parameter(torch.randn(HEADS, FARTHEST, generator=generator))

    def _rates(self, grid: Grid) -> Tensor:
        return self.rates[grid.query.positions[..., 0].long()]

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        numbers = self.numbers[grid.offset[..., 0].abs().long()]
        arguments = (numbers * self._rates(grid).unsqueeze(-1)).unsqueeze(-1)
        bent = (arguments - self.knots.to(arguments)).relu()
        return (bent @ self.rises.mT).movedim(-1, 1).to(q.dtype)

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        knots = self.knots.to(self.rises)
        slope, intercept = (
            nn.functional.pad(each.cumsum(1), (1, 0)) for each in (self.rises, -self.rises * knots)
        )
        return DistanceFunction(
            lambda distance: self.numbers[distance.long()],
            self._rates(grid),
            knots,
            slope,
            intercept,
        )


class Broken(ScoreTerm):
    """Stick breaking: each key takes a share of what later keys have left, without a softmax."""

    causal_only = True
    replaces_product = True
    replaces_softmax = True

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        logits, same_order = (
            q @ k.mT * scale,
            grid.key.order.unsqueeze(1) == grid.query.order.unsqueeze(2),
        )
        before = grid.visible & ~same_order.unsqueeze(1)
        left = nn.functional.logsigmoid(-logits).masked_fill(~before, 0.0)
        taken = nn.functional.logsigmoid(logits) + _sums_from(left) - left
        return taken.where(before, left.sum(-1, keepdim=True))

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        return StickWeights(rest_to_self=True)


Kind = Callable[[torch.Generator], Encoding]

FORMULA: tuple[Kind, ...] = (
    lambda g: Encoding(score=Structured(g), value=BucketedValues(g)),
    lambda g: Encoding(score=Structured(g)),
)
"""Encodings that try the kernels of the formula; the second, backends without a value part."""

KERNELS: dict[str, Kind] = {
    "distance": lambda g: Encoding(score=Curved(g)),
    "counts": lambda g: Encoding(score=Counted(g)),
    "sticks": lambda g: Encoding(score=Broken()),
}
"""Encodings that try the kernels of fused forms, by ``Plan.trial``."""

KEY_HEADS = 2

GRID = Grid.of(Layout.packed([150, 50]))
"""Documents with tiles before, between and beyond the ends of tables, and masked ones. Compiling
kernels takes the time; one problem compiles them all."""

TOLERANCES = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Tolerance by dtype, relative to the largest number of the definition. Correct kernels err by a
fraction of it (float32 ones may multiply in TF32), wrong tiles by all of it."""

_LOCK = RLock()
_DIFFERENCES: dict[tuple[str, ...], str] = {}


def refusal(
    backend: Backend, device: torch.device, dtype: torch.dtype, kernels: str = ""
) -> Refusal | None:
    """The difference that a backend showed on a device; None if none, or if no trial can run.

    Runs once a device, dtype, backend, set of its kernels, and version of posenc and PyTorch, and
    is kept in the user's cache folder; a difference is warned of. Nothing is run
    while ``torch.compile`` traces, under transforms of ``torch.func``, or while a CUDA graph is
    captured.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    key = backend.name, _name(device), str(dtype), *([kernels] if kernels else [])
    with _LOCK:
        if key not in _DIFFERENCES:
            _DIFFERENCES[key] = ""  # what the trial itself calls is not tried
            _DIFFERENCES[key] = _stored(key, backend, device, dtype, kernels)
    return Refusal(_DIFFERENCES[key]) if _DIFFERENCES[key] else None


def _stored(
    key: tuple[str, ...], backend: Backend, device: torch.device, dtype: torch.dtype, kernels: str
) -> str:
    """The difference from the user's cache, or measured now."""
    versions = torch.__version__, __version__
    words = (*key, *versions)
    name = hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]

    def find() -> str:
        message = difference(backend, device, dtypes=(dtype,), kernels=kernels)
        if message:
            put_aside = f"backend {backend.name!r} is put aside: {message}"
            warnings.warn(put_aside, RuntimeWarning, stacklevel=4)
        return message

    return kept("trials", name, find, read=bytes.decode, write=str.encode)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def difference(
    backend: Backend,
    device: torch.device,
    *,
    grid: Grid = GRID,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    kernels: str = "",
) -> str:
    """A sentence on the first wrong output or gradient of a backend on a device; "" if none is.

    ``kernels`` apart from the formula are tried with their own kind.
    """
    kinds = (KERNELS[kernels],) if kernels else FORMULA
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(device):
        for kind in kinds:
            messages = [_compare(backend, kind, grid, dtype, device) for dtype in dtypes]
            if any(message is not None for message in messages):  # else it does not serve this kind
                return next(filter(None, messages), "")
    return ""


def _compare(
    backend: Backend, kind: Kind, grid: Grid, dtype: torch.dtype, device: torch.device
) -> str | None:
    """The difference in one problem, "" for none; None where the backend does not support it.

    Tile sizes are measured only where the first ones do not fit the device.
    """
    tensors, failure = _tensors(grid, device, dtype), ""
    for tried in dict.fromkeys((backend.untuned(), backend)):
        try:
            got = _computed(tried, kind, grid, device, *tensors)
            break
        except Exception as error:
            failure = f"on {_name(device)} it fails with {type(error).__name__}: {error}"
    else:
        return failure
    if got is None:
        return None
    wanted = _computed(None, kind, grid, device, *(x.double() for x in tensors))
    assert wanted is not None
    for name, mine in got.items():
        exact = wanted[name]
        off = (mine.double() - exact).abs().max() / exact.abs().max()
        if not off <= TOLERANCES.get(dtype, TOLERANCES[torch.float32]):
            return (
                f"on {_name(device)} its {name} in {dtype} is {off:.1g} off the definition, "
                "relative to the largest"
            )
    return ""


def _tensors(grid: Grid, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, grid.query), (KEY_HEADS, grid.key), (KEY_HEADS, grid.key)]
    q, k, v = (
        torch.randn(2, heads, side.length, WIDTH, generator=generator).to(device, dtype)
        for heads, side in shapes
    )
    return q, k, v


def _computed(
    backend: Backend | None, kind: Kind, grid: Grid, device: torch.device, *tensors: Tensor
) -> dict[str, Tensor] | None:
    """Output and all gradients by name, None where the backend does not support the problem.

    Without a backend, by definition.
    """
    encoding = kind(torch.Generator().manual_seed(7)).to(device)
    encoding = encoding.to(torch.promote_types(tensors[0].dtype, torch.float32))
    grid = replace(grid, query=grid.query.to(device), key=grid.key.to(device))
    q, k, v = (x.requires_grad_() for x in tensors)
    scale = WIDTH**-0.5 / 3
    lowered = lower(encoding, q, k, grid, scale=scale)
    problem = Problem(q, k, v, grid, encoding, scale, 0.0, lowered)
    if backend is None:
        output = attend_by_definition(problem).output
    else:
        plan = backend.plan(problem)
        if not isinstance(plan, Plan):
            return None
        output = plan.run(lse=False).output
    weights = torch.linspace(-1, 1, output.numel(), device=device).view_as(output)
    learned = {"q": q, "k": k, "v": v, **dict(encoding.named_parameters())}
    gradients = torch.autograd.grad(
        (output * weights).sum(), list(learned.values()), materialize_grads=True
    )
    named = zip(learned, gradients, strict=True)
    return {"output": output, **{f"gradient of {name}": x for name, x in named}}
