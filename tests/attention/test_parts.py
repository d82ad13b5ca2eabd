"""Gradients through parts of the keys, given output and LSE over all keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from posenc import ENCODINGS, Encoding, Grid, Layout, attend, create
from posenc.attention.api import attend_block_backward
from posenc.attention.call import Call
from posenc.attention.problem.problem import GlobalSoftmax
from posenc.errors import ArgumentError, BackendRefusal
from posenc.extension import extend
from posenc.testing.subject import DIM, HEAD_DIM, HEADS, KV_HEADS, agree, fold, operands, spread

NAMES = ("alibi", "contextual", "deberta", "dape", "fire", "irpe", "kerple", "nope", "rope", "shaw")
NAMES += ("swin_v2", "t5", "transformer_xl", "tupe", "xpos", "bands")

BACKEND_NAMES = ("reference", "native", "blockwise")

LAYOUTS = (Layout.sequence(70), Layout.packed([30, 25, 15]), Layout.padded([70, 41], side="left"))


def encoding_of(name: str) -> Encoding:
    torch.manual_seed(3)
    if name == "bands":
        return extend(create("rope", head_dim=HEAD_DIM), "rerope", length=70, window=12.5)
    sizes: dict[str, Any] = {"dim": DIM, "heads": HEADS, "head_dim": HEAD_DIM, "max_length": 160}
    encoding = create(name, **sizes, causal=True, **ENCODINGS[name].sample)
    spread(encoding)
    return encoding.double()


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_parts_sum_to_those_of_the_whole(name: str, backend: str) -> None:
    """Of Kerple, beside sinks and with a cap."""
    encoding, extras = encoding_of(name), dict[str, Any]()
    if name == "kerple":
        extras = {"sinks": torch.linspace(-1, 2, HEADS, dtype=torch.float64), "softcap": 0.7}
    causal, window = encoding.causal_only or name in ("t5", "tupe"), 40 if name == "rope" else None
    for layout in LAYOUTS:
        layout = fold(layout, 2 if name in ("irpe", "swin_v2") else 1)
        inputs = [x.requires_grad_() for x in operands(70, 70)]
        wanted = [*inputs, *encoding.parameters()]
        grid = Grid.of(layout, causal=causal, window=window)
        options: Any = {"backend": "reference", "return_lse": True, **extras}
        output, lse = attend(*inputs, grid, encoding, **options)
        direction = torch.randn_like(output)
        expected = torch.autograd.grad(output, wanted, direction, materialize_grads=True)
        whole = GlobalSoftmax(output.detach(), lse.detach())
        sums = [torch.zeros_like(x) for x in wanted]
        for a, b in ((0, 20), (20, 70)):
            operands_of_part = (inputs[0], *(x[:, :, a:b] for x in inputs[1:]))
            part = Grid(layout, layout.slice(a, b), causal, window)
            call = Call(*operands_of_part, part, encoding, global_softmax=whole, **extras)
            try:
                found = attend_block_backward(call, backend)
            except BackendRefusal:
                assert backend == "native"
                return
            more = torch.autograd.grad(found, wanted, direction, materialize_grads=True)
            sums = [x + y for x, y in zip(sums, more, strict=True)]
        for got, want in zip(sums, expected, strict=True):
            agree(name, got, want, tolerance=1e-5)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_gradients_through_an_image_beside_another_key(backend: str) -> None:
    """A class token's key adds to the sums of every query and is none of the image's."""
    encoding = create("swin", heads=HEADS, window=(5, 7)).double()
    spread(encoding)
    grid, (table,) = Grid.of(Layout.image(5, 7)), encoding.parameters()
    q, k, v = inputs = [x.requires_grad_() for x in operands(35, 35, rows=1)]
    key, value = (torch.randn(1, HEADS, 1, x.shape[-1], dtype=x.dtype) for x in (k, v))
    keys, values = (
        torch.cat([x.repeat_interleave(HEADS // KV_HEADS, dim=1), extra], dim=2)
        for x, extra in ((k, key), (v, value))
    )
    assert encoding.score is not None
    scale = q.shape[-1] ** -0.5
    logits = scale * q @ keys.mT + pad(encoding.score(q, k, grid, scale=scale), (0, 1))
    output = logits.softmax(-1) @ values
    direction = torch.randn_like(output)
    expected = torch.autograd.grad(output, [*inputs, table], direction)
    whole = GlobalSoftmax(output.detach(), logits.logsumexp(-1).detach())
    found = attend_block_backward(Call(q, k, v, grid, encoding, global_softmax=whole), backend)
    got = list(torch.autograd.grad(found, [*inputs, table], direction))
    weight = logits.detach().softmax(-1)[..., -1:]
    got[0] = got[0] + scale * weight * (direction * (value - whole.output)).sum(-1, True) * key
    for mine, theirs in zip(got, expected, strict=True):
        agree("image", mine, theirs, tolerance=1e-5)


def test_backends_that_know_no_parts_leave_them_to_others() -> None:
    inputs = [x.requires_grad_() for x in operands(5, 5)]
    grid = Grid.of(Layout.sequence(5))
    output, lse = attend(*inputs, grid, Encoding(), return_lse=True)
    whole = GlobalSoftmax(output.detach(), lse)
    found = attend_block_backward(Call(*inputs, grid, Encoding(), global_softmax=whole), "sdpa")
    gradients = (torch.autograd.grad(x.sum(), inputs) for x in (found, output))
    torch.testing.assert_close(*gradients)


def test_weights_that_are_no_softmax_have_no_parts() -> None:
    q, k, v = operands(5, 5)
    whole = GlobalSoftmax(q, q[..., 0])
    grid = Grid.of(Layout.sequence(5), causal=True)
    with pytest.raises(ArgumentError, match="global_softmax: expected none with StickBreaking"):
        attend_block_backward(
            Call(q, k, v, grid, create("stick_breaking"), global_softmax=whole), "auto"
        )
