"""The Triton kernels with a function of the distance, interpreted; run by ``test_triton.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention.backends.triton.kernels.forward import forward_kernel
from posenc.attention.backends.triton.kernels.gradients import gradients_kernel
from posenc.errors import BackendRefusal
from tests.attention.triton_kernels import HEADS, KEY_HEADS, WIDTH, check, inputs, sequence

pytestmark = pytest.mark.usefixtures("poisoned")


def fire(heads: int = HEADS, hidden: int = 9, scale: float = 0.1) -> Encoding:
    torch.manual_seed(3)
    encoding = posenc.create("fire", heads=heads, hidden=hidden, scale=scale, threshold=20.0)
    for parameter in encoding.score.output.parameters():  # type: ignore[union-attr]
        torch.nn.init.normal_(parameter)
    return encoding.double()


FIRE = fire()

ORDER = torch.randperm(33, generator=torch.Generator().manual_seed(0)).unsqueeze(0)

GRIDS = {
    "one": sequence(1, causal=True),
    "tiles": sequence(49, causal=True),
    "two-sided": sequence(20),
    "window": sequence(40, window=6),
    "chunk": Grid(Layout.sequence(9, 31), Layout.sequence(40), causal=True),
    "queries before keys": Grid(Layout.sequence(20), Layout.sequence(17, 3), causal=True),
    "far": Grid.of(Layout.sequence(20, 5000), causal=True),
    "padded": Grid.of(Layout.padded([9, 20], side="left"), causal=True),
    "packed": Grid.of(Layout.packed([17, 9]), window=18),
    "in another order": Grid.of(
        Layout(torch.arange(33.0).view(1, -1, 1), ORDER), causal=True, window=9
    ),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_equals_reference(grid: str) -> None:
    where = GRIDS[grid]
    given = inputs(where, batch=where.query.batch)
    assert "a function of the distance" in str(explain(*given, where, FIRE, backend="triton"))
    check(FIRE, where, given)


def test_many_knots_in_a_tile() -> None:
    """Tokens so far apart that a tile meets most of the pieces."""
    grid, encoding = sequence(20, causal=True), fire(hidden=70, scale=30.0)
    check(encoding, grid, inputs(grid))


def test_groups_of_heads_and_widths_that_are_no_powers_of_two() -> None:
    grid = GRIDS["packed"]
    given = inputs(grid, heads=(4, 2), width=24, out=5)
    check(fire(heads=4, hidden=1), grid, given)


def test_beside_rotations_and_values_by_offset() -> None:
    grid = sequence(20, causal=True)
    value = posenc.create("shaw", head_dim=WIDTH, max_distance=3).value
    rope = posenc.create("rope", head_dim=WIDTH)
    whole = Encoding(query_key=rope.query_key, score=FIRE.score, value=value)
    check(whole, grid, inputs(grid))


@pytest.mark.parametrize("tile", [(32, 16), (16, 32)])
def test_tiles_that_are_not_square(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (forward_kernel, gradients_kernel):
        chosen = type(kernel.configs[0])({"block_x": tile[0], "block_y": tile[1]})
        monkeypatch.setattr(kernel, "configs", [chosen])
    check(FIRE, GRIDS["window"], inputs(GRIDS["window"]))


@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        *((torch.float32, 33), (torch.float16, 20)),
        pytest.param(torch.bfloat16, 20, marks=pytest.mark.exhaustive),
    ],
)
def test_errs_as_little_as_the_definition(dtype: torch.dtype, length: int) -> None:
    """Gradients of the scale and the threshold, too, whose sums by number and by query cancel."""
    layout, encoding = Layout.sequence(length), fire()
    exact = Grid.of(replace(layout, positions=layout.positions.double()), causal=True)
    grid = Grid.of(layout, causal=True)
    given = [x.detach() for x in inputs(grid, batch=2, dtype=dtype)]
    learned = list(encoding.parameters())

    def computed(grid: Grid, backend: str, dtype: torch.dtype) -> list[Tensor]:
        tensors = [x.to(dtype).requires_grad_() for x in given]
        output = attend(*tensors, grid, encoding, backend=backend)
        found = torch.autograd.grad(output.double().sin().sum(), [*tensors, *learned])
        return [x.double() for x in (output, *found)]

    wanted = computed(exact, "reference", torch.float64)
    rounded = computed(grid, "reference", dtype)
    for mine, theirs, true in zip(computed(grid, "triton", dtype), rounded, wanted, strict=True):
        # Gradients of what all keys of a query share cancel but for rounding.
        size = max(4.0, true.abs().max().item())
        allowed = 4 * (theirs - true).abs().max() + 8 * torch.finfo(dtype).eps * size
        assert (mine - true).abs().max() <= allowed


def test_frozen_functions_have_no_gradients() -> None:
    grid = GRIDS["far"]
    check(fire().requires_grad_(False), grid, inputs(grid))


def test_dropout_is_the_same_in_both_directions() -> None:
    """With unit vectors for values the output shows the weights that were kept."""
    grid = sequence(32, causal=True)
    q, k, _ = (x.detach().requires_grad_() for x in inputs(grid))
    v = torch.eye(32).expand(1, KEY_HEADS, -1, -1).contiguous()
    kept = attend(q, k, v, grid, FIRE, backend="triton", dropout=0.4)
    weights = attend(q, k, v, grid, FIRE, backend="reference")
    chosen = (kept != 0).float().detach()
    assert 0.4 < chosen.sum() / grid.visible.expand_as(chosen).sum() < 0.8
    learned = [q, k, *FIRE.parameters()]
    got = torch.autograd.grad(kept.sin().sum(), learned)
    wanted = torch.autograd.grad((weights * chosen / 0.6).sin().sum(), learned)
    torch.testing.assert_close(got, wanted, atol=5e-5, rtol=1e-4)


def test_every_run_gives_the_same_bits() -> None:
    grid = GRIDS["packed"]
    given, runs = inputs(grid), []
    for _ in range(2):
        output = attend(*given, grid, FIRE, backend="triton")
        learned = [*given, *FIRE.parameters()]
        runs.append([output, *torch.autograd.grad(output.sin().sum(), learned)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.exhaustive  # the operator is one, and takes the function as other tensors
def test_compiled_equals_eager() -> None:
    grid = Grid.of(Layout.padded([9, 4], side="left"), causal=True)
    given = inputs(grid, batch=2)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, grid, FIRE, backend="triton")

    learned = [*given, *FIRE.parameters()]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    eager, *others = (
        [output, *torch.autograd.grad(output.sin().sum(), learned)]
        for output in (run(*given), compiled(*given), checkpoint(run, *given, use_reentrant=False))
    )
    for other in others:
        torch.testing.assert_close(other, eager)


def test_refuses_with_the_reason() -> None:
    uneven = Layout.at(torch.tensor([0.0, 1.0, 3.0]))
    for encoding, layout, reason in (
        (FIRE, uneven, "one position apart"),
        (fire(hidden=1024), Layout.sequence(9), "1024 pieces at most"),
    ):
        grid = Grid.of(layout, causal=True)
        with pytest.raises(BackendRefusal, match=reason):
            attend(*inputs(grid), grid, encoding, backend="triton")
