"""Operands in memory of any strides, which ends where nothing may be read.

Kernels that are given pointers read what is not theirs without a word: wrong strides show as wrong
values, or end the process at the page behind the operand, which may not be read.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention.backends.common.flash_cpu import flash_forward
from posenc.attention.backends.native.build import missing
from posenc.attention.dispatch import rotate
from posenc.errors import ArgumentError
from tests.support.exhaustive import in_turn

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="mprotect is POSIX")

LENGTH, HEADS, WIDTH = 24, 4, 8

Form = Callable[[Tensor], Tensor]


def _steps(x: Tensor, dim: int) -> Tensor:
    """Every second element along ``dim`` of a tensor whose other elements are NaN."""
    spaced = torch.full_like(x, torch.nan).unsqueeze(dim + 1).repeat_interleave(2, dim + 1)
    spaced.select(dim + 1, 0).copy_(x)
    whole = spaced.flatten(dim, dim + 1)
    return whole.narrow(dim, 0, whole.shape[dim] - 1)[
        (slice(None),) * dim + (slice(None, None, 2),)
    ]


def _behind(x: Tensor) -> Tensor:
    """The same after three elements of NaN, so that it is aligned to nothing."""
    room = torch.cat([x.new_full((3,), torch.nan), x.flatten()])
    return room[3:].view(x.shape)


FORMS: dict[str, Form] = {
    "contiguous": lambda x: x.clone(),
    "offset": _behind,
    "transposed": lambda x: x.mT.contiguous().mT,
    "heads after tokens": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "tokens first": lambda x: x.movedim(-2, 0).contiguous().movedim(0, -2),
    "every second feature": lambda x: _steps(x, x.dim() - 1),
    "every second token": lambda x: _steps(x, x.dim() - 2),
    "one feature": lambda x: x[..., :1].clone().expand_as(x),
    "one token": lambda x: x[..., :1, :].clone().expand_as(x),
    "one head": lambda x: x[..., :1, :, :].clone().expand_as(x) if x.dim() > 2 else x,
    "one number": lambda x: x.flatten()[0].clone().expand_as(x),
    "flipped": lambda x: x.mT.contiguous().flip(-1).mT,
    "overlapping": lambda x: (
        x.flatten()[: x.shape[-2] + x.shape[-1] - 1]
        .clone()
        .unfold(0, x.shape[-1], 1)
        .expand(*x.shape)
    ),
    "negated": lambda x: torch._neg_view(x.clone()),
}


def guarded(x: Tensor) -> Tensor:
    """The same values and strides in memory that ends with the last element; not to be resized."""
    if x.is_neg():
        return torch._neg_view(guarded(torch._neg_view(x)))
    steps = [(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    count = sum(steps) + 1
    page, size = mmap.PAGESIZE, count * x.element_size()
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    end = ctypes.c_void_p(begin + pages * page)
    assert libc.mprotect(end, ctypes.c_size_t(page), 0) == 0
    room = torch.frombuffer(memory, dtype=x.dtype, count=count, offset=pages * page - size)
    room.copy_(x.as_strided((count,), (1,)))
    return room.as_strided(x.shape, x.stride(), room.storage_offset())


@contextmanager
def parameters_as(form: Form, encoding: Encoding) -> Iterator[None]:
    """Parameters of two and more dimensions in other memory meanwhile."""
    kept = {name: x.data for name, x in encoding.named_parameters() if x.dim() > 1}
    for name, data in kept.items():
        encoding.get_parameter(name).data = guarded(form(data))
    try:
        yield
    finally:
        for name, data in kept.items():
            encoding.get_parameter(name).data = data


def make(name: str, *, frozen: bool = False, causal: bool = False) -> Encoding:
    torch.manual_seed(1)
    options = {"swin": {"window": (6, 4)}}.get(name, {})
    encoding = posenc.create(
        name,
        dim=HEADS * WIDTH,
        heads=HEADS,
        head_dim=WIDTH,
        max_length=99,
        causal=causal,
        **options,
    ).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return encoding.requires_grad_(not frozen)


NAMES = ("nope", "alibi", "t5", "shaw", "transformer_xl", "deberta", "tupe", "swin")

ENCODINGS = {
    (label, causal): make(label.removeprefix("frozen "), frozen="frozen" in label, causal=causal)
    for label in (*NAMES, "frozen t5", "frozen swin")
    for causal in (False, True)
}

GRIDS = {
    "dense": Grid.of(Layout.sequence(LENGTH)),
    "causal": Grid.of(Layout.sequence(LENGTH), causal=True),
    "image": Grid.of(Layout.image(6, 4)),
}


def run(
    encoding: Encoding, grid: Grid, tensors: list[Tensor], gradient: Tensor, backend: str
) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    output = attend(q, k, v, grid, encoding, backend=backend)
    with torch.no_grad():
        _, lse = attend(q, k, v, grid, encoding, backend=backend, return_lse=True)
    wanted = [q, k, v, *(p for p in encoding.parameters() if p.requires_grad)]
    return (
        output,
        lse,
        *torch.autograd.grad(output, wanted, gradient, allow_unused=True, materialize_grads=True),
    )


def draw() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, HEADS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        for _ in range(4)
    ]


@pytest.mark.parametrize(
    ("name", "form"), in_turn(4, sorted({name for name, _ in ENCODINGS}), list(FORMS))
)
def test_memory_of_any_strides(name: str, form: str) -> None:
    shape = FORMS[form]
    grids = ["image"] if "swin" in name else ["dense", "causal"]
    operands = [guarded(shape(x)) for x in draw()]
    assert all(torch.equal(x, shape(y)) for x, y in zip(operands, draw(), strict=True))
    for where in grids:
        grid, ran = GRIDS[where], 0
        encoding = ENCODINGS[name, grid.causal]
        with parameters_as(_behind if form == "negated" else shape, encoding):
            plain = [x.clone(memory_format=torch.contiguous_format) for x in operands]
            expected = run(encoding, grid, plain[:3], plain[3], "reference")
            refusals = explain(*plain[:3], grid, encoding).refusals
            for backend in ("sdpa", "native", "blockwise", "reference"):
                if backend in refusals:
                    continue
                got = run(encoding, grid, operands[:3], operands[3], backend)
                ran += 1
                for mine, theirs in zip(got, expected, strict=True):
                    torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)
        assert ran >= 2


def test_the_raw_kernel_is_given_what_fits_only() -> None:
    q, k, v = torch.zeros(3, 1, 2, 5, 8)
    mask = torch.zeros(1, 1, 5, 5)
    assert flash_forward(q, k, v, mask)[0].shape == q.shape
    for wrong in (
        (q, k[:, :1], v, None),
        (q, k, v[:, :, :4], None),
        (q, k, v[..., :4], None),
        (q, k, v, torch.zeros(1, 8, 5, 5)),
        (q, k, v, mask[..., :4]),
    ):
        with pytest.raises(ArgumentError, match="operands of one batch size"):
            flash_forward(*wrong)


@pytest.mark.skipif(missing() is not None, reason="needs the compiled kernels")
@pytest.mark.parametrize("name", ["alibi", "rope", "deberta", "cope", "tupe"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 4), (2, 2)])
def test_outputs_and_gradients_lie_as_the_operands(name: str, heads: int, groups: int) -> None:
    """Heads of a token stay side by side: what a linear map makes and takes is not copied.

    Beside TUPE's factors, two heads are as wide as what one has to sum.
    """
    encoding, grid, operands = _of_linear_maps(name, groups, heads=heads)
    apart = [x.detach().contiguous().requires_grad_() for x in operands]
    results = []
    for tensors in (operands, apart):
        output = attend(*tensors, grid, encoding, backend="native")
        weighted = output * torch.arange(300.0)[:, None]
        results.append((output, *torch.autograd.grad(weighted.sum(), tensors)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
        assert expected.is_contiguous()
        assert found.transpose(1, 2).is_contiguous()


@pytest.mark.skipif(missing() is not None, reason="needs the compiled kernels")
@pytest.mark.parametrize("name", ["nope", "alibi", "rope"])
def test_outputs_of_prepared_calls_lie_as_the_values(name: str) -> None:
    encoding, grid, operands = _of_linear_maps(name, HEADS)
    with torch.no_grad():
        expected = attend(*operands, grid, encoding, backend="reference")
        for _ in range(3):  # the second call is prepared
            output = attend(*operands, grid, encoding)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert output.transpose(1, 2).is_contiguous()


@pytest.mark.skipif(missing() is not None, reason="needs the compiled kernels")
def test_rotated_queries_lie_as_they_did() -> None:
    encoding, grid, (q, k, _) = _of_linear_maps("rope", HEADS)
    assert encoding.query_key is not None
    rotation = encoding.query_key.lower(q, k, grid)
    assert rotation is not None
    for rotated, expected in zip(rotate(rotation, q, k), rotation.apply(q, k), strict=True):
        torch.testing.assert_close(rotated, expected)
        assert rotated.transpose(1, 2).is_contiguous()


def _of_linear_maps(
    name: str, groups: int, *, heads: int = HEADS
) -> tuple[Encoding, Grid, list[Tensor]]:
    """An encoding, a causal grid, and operands whose tokens are rows of matrices."""
    torch.manual_seed(0)
    encoding = posenc.create(name, dim=heads * WIDTH, heads=heads, max_length=300, causal=True)
    rows = [torch.randn(2, 300, n, WIDTH, requires_grad=True) for n in (heads, groups, groups)]
    grid = Grid.of(Layout.sequence(300), causal=True)
    return encoding, grid, [x.transpose(1, 2) for x in rows]


@pytest.mark.parametrize("backend", ["native", "blockwise", "sdpa"])
def test_gradients_whose_memory_has_the_other_sign(backend: str) -> None:
    """Such as the imaginary part of a conjugate, whose features are apart but for a single one."""
    operands = [torch.randn(1, 2, 20, 1, requires_grad=True) for _ in range(3)]
    grid = Grid.of(Layout.sequence(20), causal=True)
    output = attend(*operands, grid, Encoding(), backend=backend)
    gradient = torch.randn(1, 2, 20, 1, dtype=torch.complex64).conj().imag
    assert gradient.is_neg()
    got = torch.autograd.grad(output, operands, gradient, retain_graph=True)
    expected = torch.autograd.grad(output, operands, gradient.resolve_neg())
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", ["native", "blockwise", "sdpa"])
def test_gradients_of_the_lse_lie_as_they_like(backend: str) -> None:
    """Such as those of a loss that reads its transpose, in the dtype that kernels take."""
    operands = [torch.randn(2, HEADS, 20, WIDTH, requires_grad=True) for _ in range(3)]
    grid = Grid.of(Layout.sequence(20), causal=True)
    _, lse = attend(*operands, grid, Encoding(), backend=backend, return_lse=True)
    gradient = torch.randn(2, 20, HEADS).transpose(1, 2)
    got = torch.autograd.grad(lse, operands[:2], gradient, retain_graph=True)
    expected = torch.autograd.grad(lse, operands[:2], gradient.contiguous())
    torch.testing.assert_close(got, expected)
