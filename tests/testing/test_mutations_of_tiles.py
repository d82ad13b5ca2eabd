"""Bugs planted in the tiled engine and around the raw kernel, one at a time: each is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention import flash_cpu
from posenc.attention.backends import sdpa, tiled
from posenc.attention.backends.tiled import engine, memory, passes, sdpa_cpu
from posenc.encodings.score.t5 import T5

Plant = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], None]


def close(got: Tensor, expected: Tensor, within: float = 1e-6) -> None:
    torch.testing.assert_close(got, expected, atol=within, rtol=within, check_dtype=False)


def draw(length: int, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, length, 8, generator=generator, dtype=torch.float64)
    return q, k, v


def frozen_table(values: Tensor) -> Encoding:
    """A causal T5 table ``[1, 8]`` whose last bucket begins at a distance of 16."""
    score = T5(heads=1, causal=True, buckets=8, max_distance=16).to(values.dtype)
    with torch.no_grad():
        next(score.parameters()).copy_(values.view_as(next(score.parameters())))
    return Encoding(score=score.requires_grad_(False))


def far_keys_that_matter(backend: str) -> Check:
    """One far key outweighs all near ones, though the table takes 290 from its logit.

    Queries and keys of length √150 along one axis: near products are -150, that one is 150.
    """

    def check() -> None:
        table = torch.zeros(8, dtype=torch.float64)
        table[-1] = -290
        q, k, v = draw(64, heads=1)
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 0], k[..., 0] = 150**0.5, -(150**0.5)
        k[..., 0, 0] *= -1
        grid, encoding = Grid.of(Layout.sequence(64), causal=True), frozen_table(table)
        got, expected = (
            attend(q, k, v, grid, encoding, backend=way, scale=1.0)
            for way in (backend, "reference")
        )
        close(got, expected)

    return check


def fine_differences(backend: str) -> Check:
    """Table entries that differ by less than half precision can tell."""

    def check() -> None:
        values = 100 + torch.linspace(0, 2, 8)
        q, k, v = (x.bfloat16() for x in draw(40, heads=1))
        grid, encoding = Grid.of(Layout.sequence(40), causal=True), frozen_table(values)
        got = attend(q, k, v, grid, encoding, backend=backend)
        wide = (x.double() for x in (q, k, v))
        close(got, attend(*wide, grid, encoding, backend="reference"), 0.02)

    return check


def rows_are_dropped_apart() -> None:
    q, k, v = (x.expand(2, -1, -1, -1) for x in draw(40))
    grid = Grid.of(Layout.sequence(40))
    output = attend(q, k, v, grid, Encoding(), backend="tiled", dropout=0.5)
    assert (output[0] - output[1]).abs().max() > 0.1


def little_is_kept() -> None:
    like = torch.empty(0)
    memory.release()
    memory.Memory("large", like).of(2**22 + 1)
    assert memory.kept_bytes() == 0
    memory.Memory("small", like).of(100)
    assert memory.kept_bytes() == 400
    memory.release()


def what_is_kept_serves_training() -> None:
    q, k, v = draw(40)
    grid = Grid.of(Layout.sequence(40))
    encoding = posenc.create("shaw", head_dim=8).double()
    memory.release()
    with torch.inference_mode():
        attend(q, k, v, grid, encoding, backend="tiled")
    kept = memory._kept.memories.by_key.values()
    assert kept
    assert not any(x.is_inference() for x in kept)
    memory.release()


def transposed_keys() -> None:
    q, k, v = draw(8)
    grid = Grid.of(Layout.sequence(8))
    got = attend(q, k.mT.contiguous().mT, v, grid, Encoding(), backend="tiled")
    close(got, attend(q, k, v, grid, Encoding(), backend="reference"))


def forward_derivatives() -> None:
    q, k, v = draw(20)
    grid = Grid.of(Layout.sequence(20), causal=True)
    found = [
        torch.func.jvp(
            lambda x, way=way: attend(x, k, v, grid, Encoding(), backend=way), (q,), (k,)
        )
        for way in ("tiled", "reference")
    ]
    close(found[0][1], found[1][1])


def far_gradients() -> None:
    tensors = [x.requires_grad_() for x in draw(700)]
    grid = Grid.of(Layout.sequence(700))
    encoding = Encoding(score=posenc.create("shaw", head_dim=8, max_distance=3).score).double()
    wanted = [*tensors, *encoding.parameters()]
    found = []
    for way in ("tiled", "reference"):
        output = attend(*tensors, grid, encoding, backend=way)  # type: ignore[arg-type]
        found.append(torch.autograd.grad(output.sin().sum(), wanted))
    for got, expected in zip(*found, strict=True):
        close(got, expected)


def wrap(owner: object, name: str, change: Callable[..., object]) -> Plant:
    """Replace ``owner.name`` by ``change(original, *arguments)``."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(
            owner, name, lambda *given, **named: change(original, *given, **named), raising=True
        )

    return plant


def put(owner: object, name: str, value: object) -> Plant:
    return lambda patch: patch.setattr(owner, name, value)


class _KeepsInference:
    """``torch``, whose memory is made in inference mode where that is on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def inference_mode(self, mode: bool) -> nullcontext[None]:
        return nullcontext()


def _coarse(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.bfloat16().float()


BUGS: dict[str, tuple[Plant, Check]] = {
    "tiles bound a product by one length less": (
        wrap(engine, "_narrowed", lambda f, x, *rest, **how: f(_half_scale(x), *rest, **how)),
        far_keys_that_matter("tiled"),
    ),
    "the fused kernel's bound likewise": (
        wrap(sdpa, "_drop_negligible", lambda f, bias, q, *rest: f(bias, q / 2, *rest)),
        far_keys_that_matter("sdpa"),
    ),
    "tiles read a table in bfloat16": (
        wrap(tiled, "read_offsets", lambda f, *given, **named: _coarse_line(f(*given, **named))),
        fine_differences("tiled"),
    ),
    "the fused kernel reads a table in bfloat16": (
        wrap(sdpa, "bias_by_offset", lambda f, *given: _coarse(f(*given))),
        fine_differences("sdpa"),
    ),
    "dropout is the same in all batch rows": (
        wrap(
            passes.ForwardPass,
            "__init__",
            lambda f, s, x, band, saved, dropout, lane: f(s, x, band, saved, dropout, lane % 2),
        ),
        rows_are_dropped_apart,
    ),
    "memory is kept without limit": (put(memory, "KEPT", 2**62), little_is_kept),
    "no memory is kept": (put(memory, "KEPT", -1), little_is_kept),
    "memory of inference mode is kept": (
        put(memory, "torch", _KeepsInference()),
        what_is_kept_serves_training,
    ),
    "strides of the raw kernel's operands are not looked at": (
        put(flash_cpu, "_rows", lambda x: x),
        transposed_keys,
    ),
    "forward-mode differentiation is not noticed": (
        put(tiled, "is_transformed", lambda: False),
        forward_derivatives,
    ),
    "keys far ahead have no gradient": (
        wrap(passes, "sums_ahead", lambda f, *given: f(*given) * 0),
        far_gradients,
    ),
    "outputs of parts are joined without weights": (
        wrap(
            passes,
            "join",
            lambda f, parts: f([sdpa_cpu.Partial(p.output, p.lse * 0) for p in parts]),
        ),
        far_gradients,
    ),
}


def _half_scale(x: engine.Operands) -> engine.Operands:
    return replace(x, scale=x.scale / 2)


def _coarse_line(terms: Any) -> Any:
    return replace(terms, bias_by_offset=_coarse(terms.bias_by_offset))


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    """Memory that a planted bug made must not serve the next test."""
    yield
    memory.release()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # at forward derivatives
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, notice = BUGS[name]
    notice()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        notice()
