"""Rotations of queries and keys within the Triton kernels; run by ``test_triton.py``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention import Backend, dispatch
from posenc.attention.backends import triton
from posenc.attention.backends.triton import Triton
from posenc.encoding import Rotation
from posenc.encodings.query_key.rope import Rope
from posenc.extension import dynamic_ntk
from tests.attention.triton_kernels import check, inputs, sequence

pytestmark = pytest.mark.usefixtures("poisoned")

WIDTH = 16

FUSED = "as they read them"

UNFUSED = Triton(fuse_rotations=False)


def rope(**options: object) -> Encoding:
    """One whose positions and gain would be missed."""
    width = options.pop("head_dim", WIDTH)
    return Encoding(query_key=Rope(head_dim=width, gain=1.2, **options))  # type: ignore[arg-type]


CHUNK = Grid(Layout.sequence(9, 31), Layout.sequence(40), causal=True)

PADDED = Grid.of(Layout.padded([5, 12]), causal=True)

CASES = {
    "some neighbours": (rope(pairing="adjacent", fraction=0.5), CHUNK, (4, 2), WIDTH),
    "some halves of an odd width": (rope(head_dim=21, fraction=8 / 21), PADDED, (2, 1), 21),
    "each query head its own way": (
        posenc.create("rope_pp", head_dim=WIDTH),
        sequence(12, window=7),
        (2, 1),
        WIDTH,
    ),
    "each head its own way": (
        posenc.create("rope_mixed", heads=2, head_dim=WIDTH).requires_grad_(False),
        Grid.of(Layout.image(3, 4, prefix=1)),
        (2, 2),
        WIDTH,
    ),
    "with scales of each side's own": (
        posenc.create("xpos", head_dim=WIDTH, scale_base=8.0),
        sequence(12, causal=True),
        (4, 2),
        WIDTH,
    ),
    "each batch row its own way": (
        dynamic_ntk(posenc.create("rope", head_dim=WIDTH), factor=2, length=10),
        PADDED,
        (2, 2),
        WIDTH,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case: str) -> None:
    encoding, grid, heads, width = CASES[case]
    given = inputs(grid, batch=grid.query.batch, heads=heads, width=width)
    assert FUSED in str(explain(*given, grid, encoding, backend="triton"))
    check(encoding, grid, given)


def test_many_keys_are_rotated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, grid, heads, width = CASES["some neighbours"]
    given = inputs(grid, heads=heads, width=width)
    monkeypatch.setattr(triton, "FUSED_KEYS", grid.key.length - 1)
    assert FUSED not in str(explain(*given, grid, encoding, backend="triton"))
    check(encoding, grid, given)


LAST = Grid(Layout.sequence(1, 39), Layout.sequence(40), causal=True)


def test_half_precision_errs_as_little_as_rotating_before() -> None:
    encoding, grid, dtype = rope(), sequence(12, causal=True), torch.bfloat16
    given = inputs(grid, dtype=dtype)

    def run(given: list[Tensor], backend: str | Backend) -> list[Tensor]:
        output = attend(*given, grid, encoding, backend=backend)
        return [output, *torch.autograd.grad(output.double().sin().sum(), given)]

    exact = run([x.detach().double().requires_grad_() for x in given], "reference")
    fused, before = run(given, "triton"), run(given, UNFUSED)
    for mine, theirs, true in zip(fused, before, exact, strict=True):
        assert mine.dtype == dtype
        error, other = ((x.double() - true).abs().max() for x in (mine, theirs))
        assert error <= 1.5 * other + torch.finfo(dtype).eps


def test_nothing_is_rotated_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except where it is asked for."""
    called = []

    def watched(rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        called.append(rotation)
        return rotation.apply(q, k)

    monkeypatch.setattr(dispatch, "rotate", watched)
    grid = LAST
    given = [x.detach() for x in inputs(grid)]
    fused = attend(*given, grid, rope(), backend="triton")
    assert not called
    before = attend(*given, grid, rope(), backend=UNFUSED)
    assert len(called) == 1
    torch.testing.assert_close(fused, before)


BEFORE = {
    "learned angles": (rope(learned=True), sequence(9), "triton"),
    "keys in each head's own way": (
        posenc.create("rope_mixed", heads=2, head_dim=WIDTH).requires_grad_(False),
        Grid.of(Layout.image(3, 3)),
        "triton",
    ),
    "positions with gradients": (
        rope(),
        Grid.of(Layout.at(torch.linspace(0, 1, 9).requires_grad_())),
        "triton",
    ),
    "scores of rotated queries": (
        rope() + posenc.create("shaw", head_dim=WIDTH),
        sequence(9),
        "triton",
    ),
    "no rotation": (posenc.create("grape_multiplicative", head_dim=WIDTH), sequence(9), "triton"),
    "asked for": (rope(), sequence(9), UNFUSED),
}


@pytest.mark.parametrize("case", BEFORE)
def test_what_is_rotated_before(case: str) -> None:
    encoding, grid, backend = BEFORE[case]
    how = str(explain(*inputs(grid), grid, encoding, backend=backend))
    name = backend if isinstance(backend, str) else backend.name
    assert how.startswith(f"{name} (named)")
    assert "after queries and keys are transformed" in how


def test_learned_angles_without_gradients_are_fused() -> None:
    grid = LAST
    with torch.no_grad():
        assert FUSED in str(explain(*inputs(grid), grid, rope(learned=True), backend="triton"))
