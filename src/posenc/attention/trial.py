"""Trial of a backend on the user's device: small problems beside the definition, once a device."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from threading import RLock

import torch
from torch import Tensor, nn

from posenc.attention.backends.common.base import Backend, Plan, Problem, Unsupported
from posenc.attention.lowering import lower
from posenc.encoding import (
    BlockTransforms,
    BucketedTerms,
    Encoding,
    FusedScore,
    GateCounts,
    ScoreTerm,
    StickWeights,
    TokenTableProduct,
    ValueTerm,
)
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores, StructuredTerms
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import is_transformed, without_autocast

HEADS, KEY_HEADS, WIDTH, FARTHEST, LONGEST = 4, 2, 64, 40, 200
"""Of the problems; offsets beyond ``FARTHEST`` share an entry: tiles of all kinds appear."""

GRIDS = (Grid.of(Layout.sequence(LONGEST), causal=True), Grid.of(Layout.packed([150, 50])))
"""For parts of the formula, and for the whole: documents with tiles before, between and beyond the
ends of tables, and masked ones. Compiling kernels takes the time; one problem compiles them all."""

TOLERANCES = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Of the largest number of the definition. Correct kernels err by a fraction (float32 ones may
multiply in TF32); where a tile is wrong, by all of it."""


class Bucketed(ScoreTerm):
    """A bias, and rows for queries and for keys, by clipped offset."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        entries = 2 * FARTHEST + 1
        self.bias = nn.Parameter(torch.randn(HEADS, entries, generator=generator))
        self.left = nn.Parameter(torch.randn(1, entries, WIDTH, generator=generator))
        self.right = nn.Parameter(torch.randn(1, entries, WIDTH, generator=generator))

    @staticmethod
    def bucket(offset: Offsets) -> BucketIndex:
        return offset[..., 0].round().long().clamp(-FARTHEST, FARTHEST) + FARTHEST

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        index = self.bucket(grid.offset)[:, None].expand(len(q), HEADS, -1, -1)
        left = (q @ self.left.mT.to(q.dtype)).gather(-1, index)
        right = (k @ self.right.mT.to(k.dtype)).gather(-1, index.mT).mT
        bias = self.bias[:, self.bucket(grid.offset)].transpose(0, 1)
        return scale * (left + right) + bias

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        left = TokenTableProduct(q, scale * self.left)
        right = TokenTableProduct(k, scale * self.right)
        return (BucketedTerms(self.bucket, self.bias, left, right, max_distance=FARTHEST),)


class BucketedValues(ValueTerm):
    """Rows added to the values by clipped offset."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, 2 * FARTHEST + 1, WIDTH, generator=generator))

    def forward(self, weights: Tensor, grid: Grid) -> Tensor:
        index = Bucketed.bucket(grid.offset)[:, None].expand_as(weights)
        sums = weights.new_zeros(*weights.shape[:3], 2 * FARTHEST + 1).scatter_add(
            3, index, weights
        )
        return sums @ self.rows.to(sums.dtype)

    def lower(self, grid: Grid) -> BucketedTerms | None:
        return BucketedTerms(Bucketed.bucket, value=self.rows, max_distance=FARTHEST)


class Biased(ScoreTerm):
    """The bias alone."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, 2 * FARTHEST + 1, generator=generator))

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return self.bias[:, Bucketed.bucket(grid.offset)].transpose(0, 1)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        return (BucketedTerms(Bucketed.bucket, self.bias, max_distance=FARTHEST),)


class Columns(ScoreTerm):
    """A number a key."""

    causal_only = True

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.randn(1, HEADS, LONGEST, generator=generator))

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        column = self.numbers[:, :, None, : grid.key.length]
        return column.expand(len(q), -1, grid.query.length, -1)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        column = self.numbers[..., : grid.key.length]
        return (BucketedTerms(Bucketed.bucket, column=column, max_distance=0),)


class Reflected(ScoreTerm):
    """Keys reflected by each token up to the query, on the way to it."""

    causal_only = True

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(1, HEADS, LONGEST, WIDTH, generator=generator))
        self.logits = nn.Parameter(torch.randn(1, HEADS, LONGEST, generator=generator))

    def _reflections(self, heads: slice, tokens: slice) -> tuple[Tensor, Tensor]:
        vectors = self.vectors[:, heads, tokens]
        return nn.functional.normalize(vectors, dim=-1), self.logits[:, heads, tokens].sigmoid()

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        keys = k.shape[2]
        every = self._reflections(slice(None), slice(0, keys))
        directions, strengths = (x.to(q.dtype) for x in every)
        product, rows, columns = q @ k.mT, torch.arange(keys, device=q.device), []
        for j in reversed(range(keys)):
            columns.append((q @ k[:, :, j, :, None]).squeeze(-1))
            along = q @ directions[:, :, j, :, None] * strengths[:, :, j, None, None]
            q = q - along.where((rows >= j)[:, None], 0.0) * directions[:, :, j, None]
        return scale * (torch.stack(columns[::-1], dim=-1) - product)

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        parameters = (self.vectors, self.logits)
        return BlockTransforms.of_reflections(
            q, k, 0, parameters, reflections=self._reflections, scale=scale
        )


def _sums_from(values: Tensor) -> Tensor:
    """Sums over each key and those stored after it."""
    return values.flip(-1).cumsum(-1).flip(-1)


class Counted(ScoreTerm):
    """Vectors at sums of gates of the keys from a key on."""

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


class Broken(ScoreTerm):
    """Shares of what later keys have left, in place of the softmax."""

    causal_only = True
    replaces_product = True
    replaces_softmax = True

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        logits, own = q @ k.mT * scale, grid.key.order.unsqueeze(1) == grid.query.order.unsqueeze(2)
        before = grid.visible & ~own.unsqueeze(1)
        left = nn.functional.logsigmoid(-logits).masked_fill(~before, 0.0)
        taken = nn.functional.logsigmoid(logits) + _sums_from(left) - left
        return taken.where(before, left.sum(-1, keepdim=True))

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        return StickWeights(rest_to_self=True)


Kind = Callable[[torch.Generator], Encoding]

WHOLE: tuple[Kind, ...] = (lambda g: Encoding(score=Bucketed(g), value=BucketedValues(g)),)

PARTS: tuple[Kind, ...] = (
    lambda g: Encoding(score=Biased(g)),
    lambda g: Encoding(score=Columns(g)),
    lambda g: Encoding(score=Reflected(g)),
)

KERNELS: dict[str, Kind] = {
    "counts": lambda g: Encoding(score=Counted(g)),
    "sticks": lambda g: Encoding(score=Broken()),
}
"""Of kernels apart from those of the formula, by ``Plan.kernels``."""

_LOCK = RLock()
_FOUND: dict[tuple[str, ...], str] = {}


def refusal(
    backend: Backend,
    definition: Backend,
    device: torch.device,
    dtype: torch.dtype,
    kernels: str = "",
) -> Unsupported | None:
    """The difference that a backend showed on a device; None if none, or if none can be looked for.

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
        if key not in _FOUND:
            _FOUND[key] = ""  # what the trial itself calls is not tried
            _FOUND[key] = _stored(key, backend, definition, device, dtype, kernels)
    return Unsupported(_FOUND[key]) if _FOUND[key] else None


def _stored(
    key: tuple[str, ...],
    backend: Backend,
    definition: Backend,
    device: torch.device,
    dtype: torch.dtype,
    kernels: str,
) -> str:
    """The difference as an earlier process found it, or found now."""
    versions = torch.__version__, importlib.metadata.version("posenc")
    words = (*key, *versions)
    name = hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]
    base = os.environ.get("XDG_CACHE_HOME")
    path = (Path(base) if base else Path.home() / ".cache") / "posenc" / "trials" / name
    try:
        return path.read_text()
    except OSError:
        pass
    found = difference(backend, definition, device, dtypes=(dtype,), kernels=kernels)
    if found:
        warnings.warn(
            f"backend {backend.name!r} is put aside: {found}", RuntimeWarning, stacklevel=2
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(found)
        part.replace(path)
    except OSError:
        pass  # tried again by the next process
    return found


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def difference(
    backend: Backend,
    definition: Backend,
    device: torch.device,
    *,
    grids: Sequence[Grid] = GRIDS,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    kernels: str = "",
) -> str:
    """A sentence on the first wrong output or gradient of a backend on a device; "" if none is.

    On the last grid; backends without the whole formula are tried with parts of it, on the first.
    ``kernels`` apart from the formula are tried with their own kind.
    """
    sets = [(WHOLE, grids[-1]), (PARTS, grids[0])]
    if kernels:
        sets = [((KERNELS[kernels],), grids[-1])]
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(device):
        for kinds, grid in sets:
            served = False
            for kind, dtype in product(kinds, dtypes):
                found = _compare(backend, definition, kind, grid, dtype, device)
                if found:
                    return found
                served = served or found is not None
            if served:
                break
    return ""


def _compare(
    backend: Backend,
    definition: Backend,
    kind: Kind,
    grid: Grid,
    dtype: torch.dtype,
    device: torch.device,
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
    wanted = _computed(definition, kind, grid, device, *(x.double() for x in tensors))
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
    backend: Backend, kind: Kind, grid: Grid, device: torch.device, *tensors: Tensor
) -> dict[str, Tensor] | None:
    """Output and all gradients by name; None where the backend does not support the problem."""
    encoding = kind(torch.Generator().manual_seed(7)).to(device)
    encoding = encoding.to(torch.promote_types(tensors[0].dtype, torch.float32))
    grid = Grid(grid.query.to(device), grid.key.to(device), grid.causal, grid.window)
    q, k, v = (x.requires_grad_() for x in tensors)
    scale = WIDTH**-0.5 / 3
    lowered = lower(encoding, q, k, grid, scale=scale)
    plan = backend.plan(Problem(q, k, v, grid, encoding, scale, 0.0, lowered))
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
