"""The backend of flash-linear-attention's kernels: which problems it takes, and as what."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention import BACKENDS
from posenc.attention.backends import fla
from posenc.attention.backends.common.base import Plan, Refusal
from posenc.attention.call import Call
from posenc.errors import BackendRefusal

HEADS, WIDTH, LENGTH = 2, 16, 130

ABSENT = importlib.util.find_spec("fla") is None


def created(name: str, layout: Layout, *, causal: bool = True) -> tuple[Encoding, Grid]:
    """An encoding with large parameters, and the grid of random tokens."""
    generator = torch.Generator().manual_seed(0)
    encoding = posenc.create(name, dim=HEADS * WIDTH, heads=HEADS, head_dim=WIDTH, causal=True)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    x = torch.randn(2, layout.length, HEADS * WIDTH, generator=generator)
    return encoding, Grid.of(encoding.observe(x, layout), causal=causal)


def inputs(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, HEADS, length, WIDTH, generator=generator) for _ in range(3))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def planned(name: str, layout: Layout, **options: object) -> str:
    """The description of its plan, or the reason why it has none."""
    encoding, grid = created(name, layout)
    call = Call(*inputs(layout.length, torch.bfloat16), grid, encoding)
    problem = call.problem()
    plan = BACKENDS["fla"].plan(replace(problem, **options))  # type: ignore[arg-type]
    return plan.description if isinstance(plan, Plan) else plan.reason


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("forgetting", "fla's forgetting attention"),
        ("cable", "fla's forgetting attention"),
        ("path", "fla's PaTH attention"),
        ("nope", "no number a key"),
        ("alibi", "no number a key"),
        ("cope", "no product of reflections"),
    ],
)
def test_takes_numbers_a_key_and_reflections(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fla, "DEVICE", "cpu")
    assert words in planned(name, Layout.sequence(9))


def test_refuses_what_the_kernels_are_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = Layout.sequence(9)
    assert "on CUDA devices" in planned("forgetting", sequence)
    monkeypatch.setattr(fla, "DEVICE", "cpu")
    assert "whole causal" in planned("forgetting", Layout.packed([4, 5]))
    assert "whole causal" in planned("path", Layout.padded([9, 4]))
    assert "dropout" in planned("path", sequence, dropout=0.1)
    encoding, grid = created("forgetting", sequence)
    q, k, v = inputs(9)
    for dtype, width, words in ((torch.float32, 16, "16 bits"), (torch.bfloat16, 8, "width")):
        given = (x[..., :width].to(dtype) for x in (q, k, v))
        plan = BACKENDS["fla"].plan(Call(*given, grid, encoding).problem().rotated)
        assert isinstance(plan, Refusal)
        assert words in plan.reason


@pytest.mark.skipif(not ABSENT, reason="flash-linear-attention is installed")
def test_says_what_is_missing() -> None:
    encoding, grid = created("forgetting", Layout.sequence(9))
    with pytest.raises(BackendRefusal, match="flash-linear-attention is not installed"):
        attend(*inputs(9), grid, encoding, backend="fla")
    refusals = explain(*inputs(9), grid, encoding).refusals
    assert refusals["fla"] == "flash-linear-attention is not installed"


def test_running_sums_of_decays_are_the_column() -> None:
    """``c_i - c_j`` is the column up to a number a query."""
    column = torch.randn(2, HEADS, 7, dtype=torch.float64).requires_grad_()
    sums = fla.decays(column).mT.cumsum(-1)
    assert torch.allclose(sums, (column[..., :1] - column).float(), atol=1e-5)
    sums[..., -1].sum().backward()
    assert column.grad is not None
    assert column.grad[0, 0].tolist() == pytest.approx([1, 0, 0, 0, 0, 0, -1])


@pytest.mark.skipif(ABSENT, reason="flash-linear-attention is not installed")
@pytest.mark.filterwarnings("ignore")  # of that package, without a device
@pytest.mark.parametrize("name", ["forgetting", "cable", "path"])
def test_their_definitions_are_ours(name: str) -> None:
    encoding, grid = created(name, Layout.sequence(LENGTH))
    q, k, v = inputs(LENGTH)
    scale = encoding.default_scale(WIDTH)
    wanted = attend(q, k, v, grid, encoding, backend="reference")
    rows = (x.transpose(1, 2) for x in (q, k, v))
    assert encoding.score is not None
    if name == "path":
        from fla.ops.path_attn.naive import naive_path_attn

        form = encoding.score.fuse(q, k, grid, scale=scale)
        w, beta = form.reflections()
        got = naive_path_attn(*rows, w.transpose(1, 2), beta.mT, torch.zeros(beta.mT.shape), scale)
    else:
        from fla.ops.forgetting_attn.naive import naive_forgetting_attn

        (term,) = encoding.score.lower(q, k, grid, scale=scale)
        got = naive_forgetting_attn(*rows, fla.decays(term.column), scale=scale)
    assert torch.allclose(got.transpose(1, 2), wanted, atol=5e-5)
