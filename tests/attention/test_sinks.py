"""Sinks and caps of the logits, against loops over queries."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Attention, Encoding, Grid, Layout, attend, create, explain
from posenc.attention import LayerCache
from posenc.attention.backends.blockwise import definition, offsets
from posenc.attention.backends.common.base import Plan, Refusal, Result
from posenc.attention.backends.native import splitting
from posenc.attention.backends.native.build import missing
from posenc.attention.call import Call
from posenc.attention.decoding import attend_last
from posenc.attention.differentiation import differentiable_twice
from posenc.attention.dispatch import BACKENDS
from posenc.attention.problem.lowering import lower
from posenc.attention.problem.problem import GlobalSoftmax, Problem
from posenc.errors import ArgumentError, BackendRefusal
from tests.attention.comparing import cast, compare
from tests.support.exhaustive import in_turn

HEADS, WIDTH, LENGTH = 4, 5, 11

GRIDS = {
    "causal": Grid.of(Layout.sequence(LENGTH), causal=True),
    "window": Grid.of(Layout.sequence(LENGTH), window=3),
    "unseeing": Grid(Layout.sequence(LENGTH), Layout.sequence(LENGTH, 4), causal=True),
    "padded": Grid.of(Layout.padded([LENGTH, 4], side="left"), causal=True),
    "packed": Grid.of(Layout.packed([4, 5, 2]), causal=True),
}

ENCODINGS: dict[str, dict[str, Any]] = {
    "nope": {},
    "t5": {"heads": HEADS, "buckets": 4, "max_distance": 8},
    "shaw": {"head_dim": WIDTH, "max_distance": 2},
    "tupe": {"dim": 20, "heads": HEADS, "head_dim": WIDTH, "max_length": 20},
    "cope": {"head_dim": WIDTH, "max_length": 6},
}

EXTRAS = {"sinks": (True, None), "cap": (False, 0.7), "both": (True, 0.7)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "ROWS", 4)
    monkeypatch.setattr(definition, "BUDGET", 2 * HEADS * LENGTH * 4)


def lowered_problem(name: str, where: str, extras: str) -> tuple[Problem, list[Tensor]]:
    """The problem, and all that its output has gradients for."""
    generator, grid = torch.Generator().manual_seed(0), GRIDS[where]
    encoding = create(name, **ENCODINGS[name]).double()
    with torch.no_grad():
        for x in encoding.parameters():
            x.copy_(torch.randn(x.shape, generator=generator))
    q, k, v = (
        torch.randn(2, count, LENGTH, WIDTH, generator=generator).double().requires_grad_()
        for count in (HEADS, 2, 2)
    )
    sinks, cap = EXTRAS[extras]
    given = torch.tensor([-1.0, 0.0, 2.0, -math.inf], dtype=torch.float64) if sinks else None
    wanted = [q, k, v, *(x for x in encoding.parameters() if x.requires_grad)]
    if given is not None:
        wanted.append(given.requires_grad_())
    lowered = lower(encoding, q, k, grid, scale=0.4)
    problem = Problem(q, k, v, grid, encoding, 0.4, 0.0, lowered, sinks=given, softcap=cap)
    return problem, wanted


def by_loop(problem: Problem) -> Result:
    """Row by row, from the logits without a cap."""
    grid, encoding, heads = problem.grid, problem.encoding, problem.heads
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (problem.k, problem.v))
    logits = problem.scale * problem.q @ k.mT
    if encoding.score is not None:
        logits = logits + encoding.score(problem.q, k, grid, scale=problem.scale)
    visible = grid.visible.expand(len(k), heads, -1, -1)
    weights, sums = torch.zeros_like(logits), torch.zeros_like(logits[..., 0])
    for place in torch.cartesian_prod(*map(torch.arange, logits.shape[:3])).tolist():
        b, h, i = place
        seen = logits[b, h, i][visible[b, h, i]]
        if problem.softcap is not None:
            seen = problem.softcap * (seen / problem.softcap).tanh()
        total = seen.exp().sum()
        if problem.sinks is not None:
            total = total + problem.sinks[h].exp()
        if len(seen):
            index = (*map(torch.tensor, place), visible[b, h, i].nonzero().flatten())
            weights = weights.index_put(index, seen.exp() / total)
        if total:
            sums = sums.index_put(tuple(map(torch.tensor, place)), total.log())
        else:
            sums[b, h, i] = -math.inf
    output = weights @ v
    if encoding.value is not None:
        output = output + encoding.value(weights, grid)
    return Result(output, sums)


def computed(problem: Problem, backend: str) -> Result:
    plan = BACKENDS[backend].plan(problem)
    assert isinstance(plan, Plan)
    result = plan.run(lse=True)
    if plan.by_definition:
        return result
    return differentiable_twice(result, problem)


def serving(problem: Problem, *names: str) -> list[str]:
    """Backends of these that serve a problem on this machine."""
    backends = (BACKENDS[name] for name in names)
    usable = (x for x in backends if x.unavailable(problem.q.device) is None)
    return [x.name for x in usable if isinstance(x.plan(problem), Plan)]


@pytest.mark.parametrize(
    ("extras", "where", "name"), in_turn(5, list(EXTRAS), list(GRIDS), list(ENCODINGS))
)
def test_values_and_gradients(name: str, where: str, extras: str) -> None:
    problem, wanted = lowered_problem(name, where, extras)
    found = []
    names = ("reference", "blockwise", *serving(problem, "sdpa", "native"))
    for result in (by_loop(problem), *(computed(problem, x) for x in names)):
        assert result.lse is not None
        seen = ~result.lse.isneginf()
        parts = [result.output, 3 * result.lse.masked_fill(~seen, 0.0)]
        loss = sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in parts)
        gradients = torch.autograd.grad(loss, wanted, None, True, materialize_grads=True)
        found.append([result.output, result.lse, *gradients])
    for got in found[1:]:
        for mine, theirs in zip(got, found[0], strict=True):
            # Offsets, and what is found from them, are in float32.
            torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("where", ["unseeing", "padded"])
def test_queries_that_see_neither_a_key_nor_a_sink(where: str) -> None:
    """In every backend; a sink of -inf is none."""
    problem, _ = lowered_problem("nope", where, "sinks")
    expected = by_loop(problem)
    for name in serving(problem, "reference", "blockwise", "sdpa", "native"):
        torch.testing.assert_close(computed(problem, name), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", ["tupe", "path"])
def test_operands_of_few_heads_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in long sequences."""
    for size in ("LARGE", "MANY"):
        monkeypatch.setattr(splitting, size, 1)
    options = {"dim": 20, "heads": HEADS, "head_dim": WIDTH}
    options |= {"max_length": 20, "causal": True} if name == "tupe" else {}
    encoding = create(name, **options).double()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, LENGTH, WIDTH, generator=generator).double() for n in (4, 2, 2))
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    layout = encoding.observe(torch.ones(2, LENGTH, 20).double(), Layout.sequence(LENGTH))
    given = [x.requires_grad_() for x in (q, k, v, sinks)]
    extras: dict[str, Any] = {"sinks": sinks, "softcap": 0.7, "wanted": [sinks], "of_lse": True}
    compare(given[:3], Grid.of(layout, causal=True), encoding, tolerance=2e-6, **extras)


@pytest.mark.parametrize("name", ["t5", "cope"])
def test_second_derivatives(name: str) -> None:
    problem, wanted = lowered_problem(name, "causal", "both")
    found = []
    for way in ("reference", "blockwise", *serving(problem, "native")):
        output, lse = computed(problem, way)
        assert lse is not None
        loss = output.sin().sum() + lse.square().sum()
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), wanted))
    for got in found[1:]:
        for mine, theirs in zip(got, found[0], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
            assert theirs.abs().max() > 0


@pytest.mark.parametrize("name", ["t5", "cope"])
def test_dropped_weights_keep_their_sum(name: str) -> None:
    """Dropout of weights beside sinks: on average the output without it."""
    problem, _ = lowered_problem(name, "causal", "both")
    torch.manual_seed(0)
    with torch.no_grad():
        plain = computed(problem, "blockwise").output
        some = replace(problem, dropout=0.2)
        mean = torch.stack([computed(some, "blockwise").output for _ in range(300)]).mean(0)
    assert (mean - plain).abs().mean() < 0.05 * plain.abs().mean() + 0.02


@pytest.mark.parametrize("backend", ["native", "blockwise"])
def test_dropout(backend: str) -> None:
    """Of weights beside a sink, which is never dropped; gradients are of the same mask."""
    problem, (q, k, _, sinks) = lowered_problem("nope", "causal", "both")
    v = torch.eye(LENGTH, dtype=torch.float64).expand(2, 2, -1, -1)
    options: dict[str, Any] = {"scale": 0.4, "softcap": 0.7}
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64).requires_grad_()

    def weights(dropout: float, by: str, q: Tensor, sinks: Tensor) -> Tensor:
        torch.manual_seed(0)
        given = (q, k.detach(), v, problem.grid, Encoding())
        return attend(*given, backend=by, dropout=dropout, sinks=sinks, **options)

    dropped, whole = weights(0.5, backend, q, sinks), weights(0.0, "reference", q, sinks)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * whole[kept], atol=1e-6, rtol=1e-6)
    assert 0.4 < kept.sum() / (whole != 0).sum() < 0.6
    gradients = torch.autograd.grad(dropped.sin().sum(), (q, sinks))
    step = [1e-6 * torch.randn_like(x) for x in (q, sinks)]
    with torch.no_grad():
        ends = [
            weights(0.5, backend, q + sign * step[0], sinks + sign * step[1]).sin().sum()
            for sign in (1, -1)
        ]
    expected = sum((2 * dx * g).sum() for dx, g in zip(step, gradients, strict=True))
    torch.testing.assert_close(ends[0] - ends[1], expected, atol=1e-12, rtol=1e-4)


def test_gradients_of_many_gates() -> None:
    """Rounding of the gradients of keys does not grow in sums over them."""
    encoding, length = create("forgetting", dim=16, heads=HEADS), 2000
    torch.manual_seed(0)
    given = [torch.randn(1, n, length, WIDTH) for n in (HEADS, 2, 2)]
    x, sinks = torch.randn(1, length, 16), torch.linspace(-1, 2, HEADS)
    found = []
    for backend, dtype in (("reference", torch.float64), ("native", torch.float32)):
        q, k, v, tokens, of_heads = (y.to(dtype) for y in (*given, x, sinks))
        layout = encoding.to(dtype).observe(tokens, Layout.sequence(length))
        grid = Grid(layout.slice(length - 300, length), layout, causal=True, window=70)
        output = attend(q[:, :, -300:], k, v, grid, encoding, sinks=of_heads, backend=backend)
        found.append(torch.autograd.grad(output.sin().sum(), list(encoding.parameters())))
    for true, mine in zip(*found, strict=True):
        assert (mine.double() - true).abs().max() < 2e-5 * true.abs().max()


@pytest.mark.parametrize("name", ["swin", "decomposed2d"])
def test_images(name: str) -> None:
    """Between whole images, whose terms the native kernels read by cells."""
    shape = {"window": (3, 4)} if name == "swin" else {"head_dim": WIDTH, "size": (3, 4)}
    encoding = create(name, **shape, **({"heads": HEADS} if name == "swin" else {})).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    grid, generator = Grid.of(Layout.image(3, 4)), torch.Generator().manual_seed(0)
    given = [torch.randn(1, n, 12, WIDTH, generator=generator).double() for n in (HEADS, 2, 2)]
    sinks, *given = cast([torch.linspace(-1, 2, HEADS), *given], torch.float64)
    extras: dict[str, Any] = {"sinks": sinks, "softcap": 0.7, "wanted": [sinks], "lse": False}
    compare(given, grid, encoding, tolerance=2e-6, **extras)


def test_gradients_through_parts_of_the_keys() -> None:
    problem, wanted = lowered_problem("t5", "causal", "both")
    whole = computed(problem, "reference")
    tensors = wanted[:3]
    expected = torch.autograd.grad(whole.output.sum(), tensors)
    assert whole.lse is not None
    sums = [torch.zeros_like(x) for x in tensors]
    for part in (slice(0, 6), slice(6, LENGTH)):
        key = problem.grid.key.slice(part.start, part.stop)
        grid = Grid(problem.grid.query, key, causal=True)
        k, v = (x[:, :, part] for x in (problem.k, problem.v))
        lowered = lower(problem.encoding, problem.q, k, grid, scale=0.4)
        given = GlobalSoftmax(whole.output.detach(), whole.lse.detach())
        piece = replace(problem, k=k, v=v, grid=grid, lowered=lowered, global_softmax=given)
        plan = BACKENDS["blockwise"].plan(piece)
        assert isinstance(plan, Plan)
        for total, more in zip(
            sums, torch.autograd.grad(plan.run().output.sum(), tensors), strict=True
        ):
            total += more
    for mine, theirs in zip(sums, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("backend", sorted({"auto", *BACKENDS} - {"flex", "triton"}))
def test_attend(extras: str, backend: str) -> None:
    """Every backend, or a refusal that says which of the two."""
    problem, wanted = lowered_problem("nope", "padded", extras)
    operands = (problem.q, problem.k, problem.v, problem.grid, problem.encoding)
    options: dict[str, Any] = {"scale": 0.4, "sinks": problem.sinks, "softcap": problem.softcap}
    if backend not in SERVED[extras]:
        refusal = BACKENDS[backend].plan(problem)
        assert isinstance(refusal, Refusal)
        assert "sinks" in refusal.reason or "cap" in refusal.reason
        with pytest.raises(BackendRefusal):
            attend(*operands, **options, backend=backend)
        return
    output, lse = attend(*operands, **options, backend=backend, return_lse=True)
    expected = by_loop(problem)
    valid = problem.grid.query.valid
    assert valid is not None
    seen = valid.unsqueeze(1).expand_as(lse)
    loss, target = (x[seen].cos().sum() for x in (output, expected.output))
    close = partial(torch.testing.assert_close, atol=2e-6, rtol=2e-6)
    close(output[seen], expected.output[seen])
    close(lse[seen], expected.lse[seen])  # type: ignore[index]
    for mine, theirs in zip(
        torch.autograd.grad(loss, wanted), torch.autograd.grad(target, wanted), strict=True
    ):
        close(mine, theirs)
    assert explain(*operands, **options, backend=backend).backend in BACKENDS


EVERYWHERE = {"auto", "reference", "blockwise", "native"}

SERVED = {"sinks": EVERYWHERE | {"sdpa"}, "cap": EVERYWHERE, "both": EVERYWHERE}


def test_without_keys() -> None:
    """Rows that see nothing are zero, and their LSE is the sink."""
    q, k, sinks = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 0, 8), torch.arange(4.0)
    grid = Grid(Layout.sequence(3), Layout.sequence(3).slice(0, 0))
    output, lse = attend(q, k, k, grid, Encoding(), sinks=sinks, return_lse=True)
    assert not output.any()
    assert torch.equal(lse, sinks.view(1, 4, 1).expand(2, 4, 3))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sinks", [0.0] * HEADS, "a tensor of a floating dtype"),
        ("sinks", torch.zeros(HEADS, dtype=torch.int64), "a tensor of a floating dtype"),
        ("sinks", torch.zeros(HEADS + 1), f"shape [{HEADS}]"),
        ("sinks", torch.zeros(1, HEADS), f"shape [{HEADS}]"),
        ("sinks", torch.zeros(HEADS, device="meta"), "cpu as q"),
        ("softcap", 0.0, "a positive number"),
        ("softcap", math.inf, "a positive number"),
        ("softcap", True, "a positive number"),
    ],
)
def test_arguments_out_of_their_domain(name: str, value: Any, expected: str) -> None:
    q = torch.zeros(1, HEADS, 3, 8)
    with pytest.raises(ArgumentError) as raised:
        attend(q, q, q, Grid.of(Layout.sequence(3)), Encoding(), **{name: value})
    assert str(raised.value).startswith(name)
    assert expected in str(raised.value)


@pytest.mark.parametrize("options", [{"sinks": torch.zeros(HEADS)}, {"softcap": 30.0}])
def test_weights_that_are_no_softmax(options: dict[str, Any]) -> None:
    q = torch.zeros(1, HEADS, 3, 8)
    encoding = create("stick_breaking")
    assert encoding.score is not None
    assert encoding.score.replaces_softmax
    with pytest.raises(ArgumentError, match="replaces the softmax"):
        attend(q, q, q, Grid.of(Layout.sequence(3), causal=True), encoding, **options)


def layer(name: str = "nope", *, window: int | None = None, **options: Any) -> Attention:
    """An attention layer with sinks that are not zero, and a cap."""
    torch.manual_seed(0)
    attention = Attention(
        dim=32,
        heads=HEADS,
        kv_heads=2,
        encoding=create(name, **options),
        causal=True,
        window=window,
        sinks=True,
        softcap=0.3,
    )
    assert attention.sinks is not None
    assert not attention.sinks.any()
    torch.nn.init.normal_(attention.sinks)
    return attention


def test_layer() -> None:
    """The layer is its projections and ``attend``, and its sinks learn."""
    attention, x, layout = layer(), torch.randn(2, 7, 32), Layout.sequence(7)
    output = attention(x, layout)
    q, k, v = (
        m(x).view(2, 7, -1, 8).transpose(1, 2)  # type: ignore[misc]
        for m in (attention.query, attention.key, attention.value)
    )
    grid = Grid.of(layout, causal=True)
    own = attend(q, k, v, grid, Encoding(), sinks=attention.sinks, softcap=0.3, backend="reference")
    torch.testing.assert_close(output, attention.output(own.transpose(1, 2).flatten(2)))
    output.square().sum().backward()
    assert attention.sinks is not None
    assert attention.sinks.grad is not None
    assert attention.sinks.grad.abs().min() > 0
    assert "sinks" in attention.state_dict()


@pytest.mark.parametrize(
    ("name", "options", "window"),
    [
        ("nope", {}, None),
        ("nope", {}, 3),
        ("rope", {"head_dim": 8}, None),
        ("t5", {"heads": HEADS, "causal": True}, None),
        ("shaw", {"head_dim": 8, "max_distance": 3}, None),
    ],
)
def test_decoding(name: str, options: dict[str, Any], window: int | None) -> None:
    attention, x = layer(name, window=window, **options), torch.randn(2, 9, 32)
    with torch.no_grad():
        for parameter in attention.encoding.parameters():
            parameter.normal_()
        whole = attention(x, Layout.sequence(9))
        cache, parts = LayerCache(), []
        for begin, end in ((0, 5), (5, 6), (6, 8), (8, 9)):
            layout = Layout.sequence(end - begin, begin)
            parts.append(attention(x[:, begin:end], layout, cache=cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("name", ["nope", "shaw"])
def test_last_token_by_one_query(
    name: str, by_kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused query of decoding is explained, and is the definition's."""
    by_kernel = by_kernel and missing() is None
    if not by_kernel:
        native = BACKENDS["native"].kernels
        monkeypatch.setattr(native, "query_kernel", lambda *_, **__: None)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 9, 8).to(dtype) for n in (HEADS, 2, 2))
    layout, cache = Layout.sequence(9), LayerCache()
    cache.append(k, v, layout)
    grid = Grid(layout.slice(8, 9), layout, causal=True)
    extras: dict[str, Any] = {"sinks": torch.linspace(-1, 2, HEADS), "softcap": 0.7}
    given = (q[:, :, 8:], k, v, grid, create(name, **{"shaw": {"head_dim": 8}}.get(name, {})))
    with torch.no_grad():
        said = explain(*given, cache=cache, **extras)
        found = attend_last(Call(*given, scale=0.4, **extras))
        expected = attend(*given, scale=0.4, **extras, backend="reference")
    if (by_kernel and name == "nope") or dtype == torch.float32:
        assert said.backend == "decoding"
        torch.testing.assert_close(found, expected)
    else:
        assert found is None
        assert "logits would be rounded" in said.cached


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_query_of_heads_that_share_keys(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, *size, 8, dtype=dtype) for size in ((4, 1), (2, 9000), (2, 9000)))
    inputs = [x.requires_grad_() for x in (q, k, v, torch.randn(4, dtype=dtype))]
    grid = Grid(Layout.sequence(1, 8999), Layout.sequence(9000), causal=True)
    chosen = explain(*inputs[:3], grid, Encoding(), sinks=inputs[3]).backend
    assert chosen == ("sdpa" if missing() else "native")
    extras: dict[str, Any] = {"sinks": inputs[3], "wanted": inputs[3:], "of_lse": True}
    tolerance = 1e-5 if dtype == torch.float32 else 1e-7
    compare(inputs[:3], grid, Encoding(), "auto", tolerance=tolerance, **extras)
