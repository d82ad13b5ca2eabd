"""Forward-mode derivatives and ``torch.func`` through every backend: right, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention import dispatch
from posenc.attention.backends.common.definition import attend_by_definition
from posenc.attention.call import Call
from posenc.attention.differentiation import differentiable_twice
from posenc.attention.dispatch import SMALL
from posenc.encoding import ScoreTerm
from posenc.encoding.derivatives import with_definition
from posenc.errors import BackendRefusal, DerivativeError

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated",  # PyTorch's own, at the first forward derivative
    "ignore:There is a performance drop",
)

HEADS, WIDTH = 3, 8

BACKENDS = ("auto", "sdpa", "blockwise", "reference")

LONG = 600
"""Tokens whose logits are more than the definition is preferred for."""

NAMES = ("nope", "rope", "alibi", "kerple", "shaw", "deberta", "cope", "swin")

CASES = [
    *((name, 40, backend) for name in NAMES for backend in BACKENDS),
    *(("shaw", LONG, backend) for backend in ("auto", "blockwise")),
    *(("nope", LONG, backend) for backend in ("auto", "sdpa")),
]


def make(name: str) -> Encoding:
    torch.manual_seed(1)
    options = {"window": (20, 30)} if name == "swin" else {}
    made = posenc.create(
        name,
        dim=HEADS * WIDTH,
        heads=HEADS,
        head_dim=WIDTH,
        max_length=999,
        causal=True,
        **options,  # type: ignore[arg-type]
    ).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def where(name: str, length: int) -> Grid:
    """A causal sequence; for tables of images an image of as many cells."""
    if name == "swin":
        return Grid.of(Layout.image(length // 10, 10))
    return Grid.of(Layout.sequence(length), causal=True)


def draw(length: int, batch: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    size = (batch, HEADS, length, WIDTH)
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(4))


def refused(q: Tensor, k: Tensor, v: Tensor, grid: Grid, encoding: Encoding, way: str) -> bool:
    """Whether a backend refuses the call by a clear error."""
    try:
        attend(q, k, v, grid, encoding, backend=way)
    except BackendRefusal:
        return True
    return False


@pytest.mark.parametrize(("name", "length", "backend"), CASES)
def test_forward_mode_is_the_difference_quotient(name: str, length: int, backend: str) -> None:
    grid, encoding, step = where(name, length), make(name), 1e-5
    q, k, v, tangent = draw(length)

    def run(q: Tensor, way: str = backend) -> Tensor:
        return attend(q, k + q, v * q.sin(), grid, encoding, backend=way)

    ahead, behind = (run(q + sign * step * tangent, "reference") for sign in (1, -1))
    expected = (ahead - behind) / (2 * step)
    with forward_ad.dual_level():
        if backend == "sdpa":
            assert refused(q, k, v, grid, encoding, backend)
            return
        dual = forward_ad.unpack_dual(run(forward_ad.make_dual(q, tangent))).tangent
    torch.testing.assert_close(dual, expected, atol=1e-6, rtol=1e-6)
    got = torch.func.jvp(run, (q,), (tangent,))[1]
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("name", "length", "backend"), CASES)
def test_gradients_of_single_rows(name: str, length: int, backend: str) -> None:
    grid, encoding = where(name, length), make(name)
    tensors = draw(length, batch=2)[:3]

    def loss(q: Tensor, k: Tensor, v: Tensor, way: str) -> Tensor:
        return attend(q[None], k[None], v[None], grid, encoding, backend=way).sin().sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, 0, 0, None))
    if backend == "sdpa" and name not in ("nope", "rope"):
        with pytest.raises(BackendRefusal):
            each(*tensors, backend)
        return
    wanted = [x.requires_grad_() for x in tensors]
    whole = sum((loss(*row, "reference") for row in zip(*wanted, strict=True)), torch.zeros(()))
    expected = torch.autograd.grad(whole, wanted)
    got = each(*(x.detach() for x in tensors), backend)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "t5", "shaw"])
def test_jacobians_of_both_modes_agree(name: str) -> None:
    grid, encoding = where(name, 4), make(name)
    q, k, v, _ = draw(4)

    def run(q: Tensor) -> Tensor:
        return attend(q, k, v, grid, encoding, backend="blockwise")

    forward = torch.func.jacfwd(run)(q)
    backward = torch.autograd.functional.jacobian(run, q)
    torch.testing.assert_close(forward, backward, atol=1e-9, rtol=1e-9)
    second = torch.func.hessian(lambda q: run(q).sin().sum())(q)
    torch.testing.assert_close(second, second.movedim((0, 1, 2, 3), (4, 5, 6, 7)))
    assert second.abs().max() > 0.01


@pytest.mark.parametrize("name", ["kerple", "t5", "shaw"])
def test_derivatives_by_parameters(name: str) -> None:
    """Tables that a transform has wrapped, as ensembles of models have them."""
    grid, encoding = where(name, 40), make(name)
    q, k, v, _ = draw(40)
    given = {key: x.detach() for key, x in encoding.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    tangent = {
        key: torch.randn(x.shape, generator=generator, dtype=x.dtype) for key, x in given.items()
    }

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoding = encoding

        def forward(self, backend: str) -> Tensor:
            return attend(q, k, v, grid, self.encoding, backend=backend).sin().sum()

    module = Loss()

    def loss(parameters: dict[str, Tensor], backend: str) -> Tensor:
        named = {f"encoding.{key}": x for key, x in parameters.items()}
        found: Tensor = torch.func.functional_call(module, named, (backend,))
        return found

    wanted = {key: x.clone().requires_grad_() for key, x in given.items()}
    found = torch.autograd.grad(loss(wanted, "reference"), list(wanted.values()))
    expected = sum((g * t).sum() for g, t in zip(found, tangent.values(), strict=True))
    for backend in ("auto", "blockwise"):
        got = torch.func.jvp(lambda x, way=backend: loss(x, way), (given,), (tangent,))[1]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        stacked = {key: torch.stack([x, x + 1]) for key, x in given.items()}
        rows = torch.func.vmap(lambda x, way=backend: loss(x, way))(stacked)
        alone = (
            loss(given, "reference"),
            loss({key: x + 1 for key, x in given.items()}, "reference"),
        )
        torch.testing.assert_close(rows, torch.stack(alone), atol=1e-5, rtol=1e-5)


def test_explain_says_why() -> None:
    assert HEADS * LONG**2 > SMALL
    grid, encoding = where("shaw", 40), make("shaw")
    q, k, v, _ = draw(40)
    with forward_ad.dual_level():
        told = explain(q, k, v, grid, encoding)
        assert told.backend == "reference"
        assert "no forward-mode derivative" in explain(q, k, v, grid, Encoding()).refusals["sdpa"]
        assert (
            "torch.func can transform" in explain(q, k, v, grid, encoding, backend="blockwise").how
        )


def test_nested_transforms_are_not_for_fused_kernels() -> None:
    """Those have first derivatives only; auto takes what has second ones, however long."""
    grid, encoding = where("rope", 40), make("rope")
    q, k, v, _ = draw(40)

    def curvature(backend: str) -> Tensor:
        def loss(q: Tensor) -> Tensor:
            return attend(q, k, v, grid, encoding, backend=backend).sin().sum()

        return torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(q)

    with pytest.raises(BackendRefusal, match=r"no second derivatives under torch.func"):
        curvature("sdpa")
    torch.testing.assert_close(curvature("auto"), curvature("reference"))


def served(backend: str) -> str:
    """The backend, unless its kernels are not built."""
    if dispatch.BACKENDS[backend].unavailable(torch.device("cpu")):
        pytest.skip("kernels are not built")
    return backend


def test_second_derivatives_with_dropout_are_refused() -> None:
    """In words, also where other terms of a loss have second derivatives."""
    grid, encoding = where("shaw", 40), make("shaw")
    q, k, v, _ = (x.requires_grad_() for x in draw(40))
    backend = served("native")
    output = attend(q, k, v, grid, encoding, backend=backend, dropout=0.5)
    first = torch.autograd.grad(output.sum(), q, create_graph=True)[0]
    with pytest.raises(DerivativeError, match='backend="reference"'):
        torch.autograd.grad((first + q.square()).sum(), q)
    again = attend(q, k, v, grid, encoding, backend=backend, dropout=0.5)
    again.sum().backward()  # type: ignore[no-untyped-call]


def test_other_tensors_of_a_part_are_refused() -> None:
    """Second derivatives by what a part without structured form hides would be left out."""

    class Hidden(ScoreTerm):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [torch.ones((), dtype=torch.float64, requires_grad=True)]

        def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
            return grid.offset[..., 0].unsqueeze(1) * self.hidden[0]

    q, k, v, _ = (x.requires_grad_() for x in draw(8))
    grid, encoding = where("nope", 8), Encoding.of(Hidden())
    problem = Call(q, k, v, grid, encoding).problem().rotated
    output = differentiable_twice(attend_by_definition(problem), problem).output
    with pytest.raises(DerivativeError, match="another tensor"):
        torch.autograd.grad(output.sum(), q, create_graph=True)


def test_gradients_are_the_kernels_without_second_derivatives() -> None:
    """Nothing is computed by the definition in ordinary training."""

    def unreachable(*_: Tensor) -> Tensor:
        raise AssertionError

    x = torch.ones(3, requires_grad=True)
    (output,) = with_definition((x * 2,), unreachable, (x,))
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
