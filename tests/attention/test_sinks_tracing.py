"""Sinks and caps under torch.compile, torch.export, torch.func and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from posenc import Encoding, Grid, Layout, attend
from posenc.models import Decoder, DecoderConfig, generate

HEADS, WIDTH, LONG = 4, 8, 600

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def inputs(length: int, batch: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((HEADS, length, WIDTH), (2, length, WIDTH), (2, length, WIDTH))
    return [torch.randn(batch, *x, dtype=torch.float64) for x in shapes] + [
        torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    ]


def both(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options: Any) -> Tensor:
    """The output and the LSE in one tensor."""
    grid = Grid.of(Layout.sequence(q.shape[2]), causal=True)
    output, lse = attend(
        *(q, k, v, grid, Encoding()), sinks=sinks, softcap=1.5, return_lse=True, **options
    )
    return torch.cat([output, lse.unsqueeze(-1)], dim=-1)


@pytest.mark.parametrize(
    ("backend", "length"), [("auto", 20), ("blockwise", 20), ("blockwise", LONG)]
)
def test_derivatives_by_torch_func(backend: str, length: int) -> None:
    """Forward mode and vmap over the batch, as of the definition."""
    given = inputs(length, batch=2)
    direction = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in given]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, dx) for x, dx in zip(given, direction, strict=True)]
        tangent = forward_ad.unpack_dual(both(*duals, backend=backend)).tangent
    leaves = [x.clone().requires_grad_() for x in given]
    gradients = torch.autograd.grad(both(*leaves, backend="reference").sum(), leaves)
    assert tangent is not None
    wanted = sum((g * dx).sum() for g, dx in zip(gradients, direction, strict=True))
    torch.testing.assert_close(tangent.sum(), wanted)

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return both(q[None], k[None], v[None], given[3], backend=backend)[0]

    mapped = torch.vmap(one)(*given[:3])
    torch.testing.assert_close(mapped, both(*given, backend="reference"))


def test_exported() -> None:
    model = decoder().eval()
    tokens = torch.randint(11, (2, 9))
    with torch.no_grad():
        program = torch.export.export(model, (tokens,)).module()
        torch.testing.assert_close(program(tokens), model(tokens))


def decoder() -> Decoder:
    torch.manual_seed(0)
    shape = {"vocabulary": 11, "dim": 16, "heads": 4, "kv_heads": 2, "layers": 2}
    model = Decoder(DecoderConfig(**shape, encoding="rope", sinks=True, softcap=2.0))
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.sinks)
    return model


def test_generation() -> None:
    """With a cache the tokens are those of the whole model, whose sinks and cap matter."""
    model, prompt = decoder().eval(), torch.randint(11, (2, 5))
    found = generate(model, prompt, max_new_tokens=8)
    tokens = prompt
    with torch.no_grad():
        for _ in range(8):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
        whole = model(tokens)
        for block in model.blocks:
            block.attention.softcap = None
        assert not torch.allclose(model(tokens), whole)
        for block in model.blocks:
            block.attention.softcap, block.attention.sinks = 2.0, None
        assert not torch.allclose(model(tokens), whole)
    assert torch.equal(found, tokens)


@pytest.mark.parametrize("backend", ["native", "sdpa", "blockwise"])
def test_autocast(backend: str) -> None:
    *given, sinks = (x.float().requires_grad_() for x in inputs(40))
    grid = Grid.of(Layout.sequence(40), causal=True)
    softcap = None if backend == "sdpa" else 1.5
    options: dict[str, Any] = {"sinks": sinks, "softcap": softcap}
    expected = attend(*given, grid, Encoding(), backend="reference", **options)
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(*given, grid, Encoding(), backend=backend, **options)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)
    (gradient,) = torch.autograd.grad(output.float().square().sum(), sinks)
    (wanted,) = torch.autograd.grad(expected.square().sum(), sinks)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, wanted, atol=5e-2, rtol=5e-2)
