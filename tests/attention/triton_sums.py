"""The Triton kernels that carry sums from key to key, interpreted; run by ``test_triton.py``."""

from __future__ import annotations

import pytest
import torch

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention import trial
from posenc.attention.backends.triton import sums_launch
from posenc.attention.backends.triton.kernels.sums import carries_kernel, sums_forward_kernel
from posenc.attention.backends.triton.kernels.sums_gradients import (
    sums_keys_kernel,
    sums_queries_kernel,
)
from posenc.attention.dispatch import BACKENDS
from posenc.attention.problem.record import (
    Geometry,
    KernelProblem,
    PairTerm,
    RotaryFactors,
    SegmentMask,
    flatten,
)
from posenc.attention.problem.terms import Terms
from posenc.errors import BackendRefusal
from tests.attention.triton_kernels import WIDTH, check, inputs, sequence
from tests.support.exhaustive import in_turn

pytestmark = pytest.mark.usefixtures("poisoned")

HOW = "carry sums from key to key"

BACKWARD = (carries_kernel, sums_queries_kernel, sums_keys_kernel)


def cope(width: int = WIDTH, count: int = 6) -> Encoding:
    torch.manual_seed(3)
    encoding = posenc.create("cope", head_dim=width, max_count=count)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    return encoding.double()


METHODS = {
    "sticks": posenc.create("stick_breaking"),
    "sticks, no rest": posenc.create("stick_breaking", remainder="none"),
    "counts": cope(),
    "counts, far": cope(count=40),
}


PADDED = Layout.padded([5, 20], side="left")

GRIDS = {
    "window": sequence(37, causal=True, window=18),
    "chunk": Grid(Layout.sequence(9, 31), Layout.sequence(40), causal=True),
    "padded": Grid.of(PADDED, causal=True),
}


@pytest.mark.parametrize("method", ["sticks", "counts"])
def test_rows_at_their_limit(method: str) -> None:
    """Sums that no key adds to after a few tiles: of large gates, in tiles that differ by row."""
    grid = sequence(70, causal=True)
    q, k, v = (x.detach() for x in inputs(grid))
    shift = torch.linspace(-1, 30, 70)[:, None]
    given = [q.abs() * shift.abs().sqrt(), k.abs(), v]
    check(METHODS[method], grid, [x.requires_grad_() for x in given])


@pytest.mark.parametrize("method", ["sticks", "counts"])
def test_some_queries_at_a_time(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in long sequences, where gradients of keys are sums over parts of the queries."""
    monkeypatch.setattr(sums_launch, "CARRY_KEYS", 16)
    grid = GRIDS["padded"] if method == "sticks" else sequence(40, causal=True)
    encoding = METHODS[method] if method == "sticks" else cope(1)
    given = inputs(grid, batch=grid.query.batch, width=1, out=1)
    assert grid.query.length > 16
    check(encoding, grid, given)


@pytest.mark.parametrize(
    ("tile", "method"), in_turn(1, {"wide": [32, 16], "high": [16, 32]}, ["sticks", "counts"])
)
def test_tiles_that_are_not_square(
    tile: list[int], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = type(sums_forward_kernel.configs[0])({"block_x": tile[0], "block_y": tile[1]})
    monkeypatch.setattr(sums_forward_kernel, "configs", [chosen])
    grid = GRIDS["window"]
    check(METHODS[method], grid, inputs(grid))


@pytest.mark.parametrize(
    ("blocks", "method"),
    in_turn(1, {"carries": [32, 16, 16], "gradients": [16, 32, 32]}, ["counts", "sticks"]),
)
def test_kernels_of_the_gradients_may_work_in_other_blocks(
    blocks: list[int], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of queries: each kernel's are chosen by times of its own."""
    for kernel, block in zip(BACKWARD, blocks, strict=True):
        chosen = type(kernel.configs[0])({"block_q": block})
        monkeypatch.setattr(kernel, "configs", [chosen])
    grid = sequence(70, causal=True, window=7)
    check(METHODS[method], grid, inputs(grid))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_counts_of_nan_stay_within_the_table() -> None:
    grid, encoding = sequence(33, causal=True), METHODS["counts"]
    q, k, v = (x.detach() for x in inputs(grid))
    plain = attend(q, k, v, grid, encoding, backend="triton")
    q[:, :, 20] = float("nan")
    got = attend(q, k, v, grid, encoding, backend="triton")
    assert got[:, :, 20].isnan().all()
    others = [i for i in range(33) if i != 20]
    assert torch.equal(got[:, :, others], plain[:, :, others])


@torch.no_grad()
def test_one_cached_query() -> None:
    grid = Grid(PADDED.slice(19, 20), PADDED, causal=True)
    given = [x.detach() for x in inputs(grid, batch=2)]
    wide = [x.double() for x in given]
    for method, how in (("sticks", HOW), ("counts", "one query")):
        assert how in str(explain(*given, grid, METHODS[method], backend="triton"))
        got = attend(*given, grid, METHODS[method], backend="triton")
        expected = attend(*wide, grid, METHODS[method], backend="reference")
        torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


def test_the_operator_is_registered_as_it_behaves() -> None:
    q, k, v = inputs(GRIDS["chunk"])
    products = torch.randn(1, 2, 9, 6, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for pairs in (PairTerm("counts", (products,)), PairTerm("sticks_self")):
        record = KernelProblem(
            *(q, k, v, 0.25, Terms(), pairs, Geometry(-31, -40, -1), SegmentMask(), RotaryFactors())
        )
        torch.library.opcheck(
            torch.ops.posenc.triton.default, tuple(flatten(record)), test_utils=checks
        )


@pytest.mark.parametrize("kernels", ["sticks", "counts", "distance"])
def test_trial_of_a_device(kernels: str) -> None:
    found = trial.difference(
        BACKENDS["triton"],
        torch.device("cpu"),
        grid=sequence(20, causal=True),
        dtypes=(torch.float32,),
        kernels=kernels,
    )
    assert found == ""


def test_refuses_with_the_reason() -> None:
    shuffled = Layout(torch.arange(9.0).view(1, 9, 1), torch.arange(9).flip(0).unsqueeze(0))
    value = posenc.create("shaw", head_dim=WIDTH).value
    for encoding, layout, reason in (
        (METHODS["sticks"], shuffled, "in the order in which they are stored"),
        (METHODS["counts"], Layout.at(torch.tensor([0.0, 1.0, 3.0])), "one position apart"),
        (Encoding(score=METHODS["counts"].score, value=value), Layout.sequence(9), "value part"),
        (cope(count=5000), Layout.sequence(9), "count to 4096"),
    ):
        grid = Grid.of(layout, causal=True)
        with pytest.raises(BackendRefusal, match=reason):
            attend(*inputs(grid), grid, encoding, backend="triton")
