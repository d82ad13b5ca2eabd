"""Calls and passes of attention, and their interleaved timing, for ratios on a shared machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from posenc import registration
from posenc.attention import Backend, attend, explain
from posenc.encoding import Encoding
from posenc.encoding.prepared import Prepared
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.lab.experiments.recipe import Positions, require_axes
from posenc.lab.reporting.numbers import Bounds, Estimate, estimate
from posenc.layout import Layout
from posenc.registry import ENCODINGS, create

FROZEN = "frozen"
"""Suffix after ``@`` of an encoding whose parameters require no gradient."""

SCORES = "scores"
"""Suffix after ``@`` of an encoding without its value part (Shaw's keys alone)."""

OF_EXTENT = ("window", "size")
"""Options of image encodings for the number of cells."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Encoding, sizes and device of a call.

    Args:
        encoding: as read by ``parse_name``: ``t5``, ``t5@frozen``, ``shaw@max_distance=64``,
            ``shaw@scores``.
        length: tokens; encodings of two axes get an image of as many cells.
        causal: with a causal mask.
        batch, heads, head_dim: of q, k and v.
        device, dtype: of tensors and parameters, as named by torch: those of a model cast to it.
    """

    encoding: str
    length: int
    causal: bool = False
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    device: str = "cpu"
    dtype: str = "float32"

    def build(self) -> TimedCall:
        """Tensors and encoding of the case, the same in every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self._build()

    def _build(self) -> TimedCall:
        name, options, suffixes = parse_name(self.encoding)
        width = self.heads * self.head_dim
        layout = self._layout(name)
        if layout.extent is not None:
            valid = ENCODINGS[name].options() if name in ENCODINGS else {}
            sizes = {option: layout.extent for option in OF_EXTENT if option in valid}
            options = {**sizes, **options}
        encoding = create(
            name,
            dim=width,
            heads=self.heads,
            head_dim=self.head_dim,
            max_length=self.length,
            causal=self.causal,
            **options,
        )
        if SCORES in suffixes:
            encoding = Encoding(query_key=encoding.query_key, score=encoding.score)
        dtype = getattr(torch, self.dtype)
        encoding = encoding.to(self.device, dtype).requires_grad_(FROZEN not in suffixes)
        projections = (nn.Linear(width, width), nn.Linear(width, width))
        for part in encoding.parts():
            part.attach(*(projection.to(self.device, dtype) for projection in projections))
        shape = (self.batch, self.heads, self.length, self.head_dim)
        q, k, v, weight = (self._draw(*shape) for _ in range(4))
        x = self._draw(self.batch, self.length, width)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        return TimedCall(self, q, k, v, x, weight, layout, encoding, projections)

    def _layout(self, name: str) -> Layout:
        if axes_of(name) == 1:
            return Layout.sequence(self.length, device=self.device)
        height = math.isqrt(self.length)
        while self.length % height:
            height -= 1
        return Layout.image(height, self.length // height, device=self.device)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.device, getattr(torch, self.dtype))

    def __str__(self) -> str:
        rows = f"{self.batch} × " if self.batch > 1 else ""
        causal = ", causal" if self.causal else ""
        dtype = "" if self.dtype == "float32" else f", {self.dtype}"
        return f"{self.encoding}, {rows}{self.length} tokens{causal}{dtype}"


@dataclass(frozen=True, eq=False)
class TimedCall:
    """The tensors of a case.

    Args:
        case: the case.
        q, k, v: ``[B, H, L, D]``, requiring gradients.
        x: ``[B, L, C]``, the layer's input, for parts that read the tokens.
        weight: ``[B, H, L, D]``, the gradient of the output.
        layout: of the tokens.
        encoding: requires gradients unless frozen.
        projections: of queries and keys, for parts that share a layer's.
    """

    case: Case
    q: Float[Tensor, "B H L D"]
    k: Float[Tensor, "B H L D"]
    v: Float[Tensor, "B H L D"]
    x: Float[Tensor, "B L C"]
    weight: Float[Tensor, "B H L D"]
    layout: Layout
    encoding: Encoding
    projections: tuple[nn.Linear, nn.Linear]

    @property
    def grid(self) -> Grid:
        """The grid of all pairs, with the signals of the encoding."""
        return Grid.of(self.encoding.observe(self.x, self.layout), causal=self.case.causal)

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.encoding.default_scale(self.case.head_dim)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def wanted(self) -> list[Tensor]:
        """Tensors that require gradients: q, k, v and the encoding's parameters."""
        return [*self.inputs, *(p for p in self.encoding.parameters() if p.requires_grad)]


def parse_name(text: str) -> tuple[str, Mapping[str, Any], frozenset[str]]:
    """The name of an encoding, its options, and which of ``FROZEN`` and ``SCORES`` it has.

    Raises:
        UnknownNameError: for an unknown encoding, option or change.
        ArgumentError: for an encoding without a part in attention, or other positions.
    """
    parsed = registration.parse_name(ENCODINGS, text, words=(FROZEN, SCORES, *get_args(Positions)))
    require_axes(parsed.entries, axes=axes_of(parsed.name))
    suffixes = frozenset(parsed.words)
    if suffixes - {FROZEN, SCORES}:
        raise ArgumentError(
            "encoding",
            expected="no change but options, @frozen and @scores",
            got=repr(text),
            remedy="Positions of other kinds are for posenc compare.",
        )
    for name, entry in parsed.entries.items():
        sites = entry.claims.sites
        if sites and not set(sites) - {"embedding"}:
            raise ArgumentError(
                "encoding",
                expected="one with a part inside attention",
                got=f"{name}, which changes embeddings only",
                remedy="It costs attention nothing; leave it out.",
            )
    return parsed.name, parsed.options, suffixes


def past_only(text: str) -> bool:
    """True if an encoding requires a causal mask.

    Raises: as ``parse_name``.
    """
    return any(ENCODINGS[name].claims.causal_only for name in parse_name(text)[0].split("+"))


def axes_of(name: str) -> int:
    """Axes of positions: 1 for encodings of text, 2 for those of images only."""
    claims_of_parts = [ENCODINGS[part].claims for part in name.split("+") if part in ENCODINGS]
    return 2 if any(not claims.serves(1) and claims.serves(2) for claims in claims_of_parts) else 1


LEAST_SECONDS = 0.02
"""Shortest round; short calls are repeated."""

MOST_CALLS = 50

SHORT = 1024
"""Tokens up to which calls on the CPU may be repeated."""


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass that is ready to run.

    Args:
        run: the forward pass.
        wanted: tensors to compute gradients of; none if there is no backward pass.
        weight: gradient of the output.
        served_by: the backend or kernel, if chosen.
        tokens: that ``run`` generates; times are of one.
    """

    run: Callable[[], Tensor]
    wanted: list[Tensor]
    weight: Tensor
    served_by: str = ""
    tokens: int = 1

    def forward(self) -> None:
        """Run without a graph."""
        with torch.no_grad():
            self.run()

    def both(self) -> tuple[Tensor, ...]:
        """Run forward and backward; the gradients of ``wanted``."""
        return torch.autograd.grad(self.run(), self.wanted, self.weight, allow_unused=True)


def plain(call: TimedCall) -> Pass:
    """PyTorch's fused kernel without positions, the reference of all others."""

    def run() -> Tensor:
        return scaled_dot_product_attention(*call.inputs, is_causal=call.case.causal)

    return Pass(run, list(call.inputs), call.weight)


def attending(call: TimedCall, backend: str | Backend) -> Pass:
    """``posenc.attend`` as layers call it; BackendRefusal if the backend does not support it."""
    served_by = explain(*call.inputs, call.grid, call.encoding, backend=backend).backend
    prepared = Prepared()

    def run() -> Tensor:
        with prepared:
            return attend(*call.inputs, call.grid, call.encoding, backend=backend)

    return Pass(run, call.wanted, call.weight, served_by)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of a pass.

    Args:
        rounds: timed forward, and forward and backward.
        forward_seconds, both_seconds: medians; ``both`` is forward and backward, None if there is
            no backward pass.
        forward_ratio, both_ratio: medians of ratios to the reference in the same round.
        forward_spread, both_spread: half the 95 % interval of the mean of these ratios.
    """

    rounds: tuple[int, int] = (0, 0)
    forward_seconds: float | None = None
    both_seconds: float | None = None
    forward_ratio: float | None = None
    both_ratio: float | None = None
    forward_spread: float | None = None
    both_spread: float | None = None


def timed(
    passes: Mapping[str, Pass], rounds: Mapping[str, tuple[int, int]], *, device: str, length: int
) -> dict[str, Times]:
    """Times of every pass: rounds of all forward passes in turn, then of both.

    Args:
        passes: by name, the reference first.
        rounds: of each pass, forward, and forward and backward.
        device: where they run.
        length: tokens; short calls on the CPU are repeated in a round.
    """
    repeated = device.startswith("cuda") or length <= SHORT
    base = next(iter(passes))
    ahead_runs = {name: (one.forward, rounds[name][0]) for name, one in passes.items()}
    forward = interleaved(ahead_runs, device, repeated=repeated)
    both_runs = {name: (one.both, rounds[name][1]) for name, one in passes.items() if one.wanted}
    both = interleaved(both_runs, device, repeated=repeated)
    times = {}
    for name, one in passes.items():
        ahead, back = forward[name], both.get(name)
        alone, trained = ratio(ahead, forward[base]), ratio(back, both[base]) if back else None
        times[name] = Times(
            rounds=(len(ahead), len(back or ())),
            forward_seconds=statistics.median(ahead) / one.tokens,
            forward_ratio=alone.mean,
            forward_spread=alone.half_width,
            both_seconds=statistics.median(back) if back else None,
            both_ratio=None if trained is None else trained.mean,
            both_spread=None if trained is None else trained.half_width,
        )
    return times


def interleaved(
    entrants: Mapping[str, tuple[Callable[[], object], int]], device: str, *, repeated: bool
) -> dict[str, list[float]]:
    """Seconds per call of every entrant and round; each round runs all of them in turn.

    The order is reversed in every other round.

    Args:
        entrants: each a call, and its number of rounds from the first on.
        device: where they run.
        repeated: repeat short calls within a round.
    """
    calls = dict.fromkeys(entrants, 1)
    for name, (run, _) in entrants.items() if repeated else ():
        calls[name] = min(MOST_CALLS, math.ceil(LEAST_SECONDS / _seconds(run, 1, device)))
    seconds: dict[str, list[float]] = {name: [] for name in entrants}
    for number in range(max((rounds for _, rounds in entrants.values()), default=0)):
        due = [name for name, (_, rounds) in entrants.items() if number < rounds]
        for name in reversed(due) if number % 2 else due:
            seconds[name].append(_seconds(entrants[name][0], calls[name], device))
    return seconds


def ratio(mine: list[float], base: list[float]) -> Estimate:
    """Median over rounds of the ratio of times in the same round, with the interval of its mean."""
    ratios = [a / b for a, b in zip(mine, base, strict=False)]
    spread = estimate(ratios, Bounds(0.0))
    assert spread is not None  # a pass has at least one round
    return replace(spread, mean=statistics.median(ratios))


def _seconds(run: Callable[[], object], calls: int, device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
