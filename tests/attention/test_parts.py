"""Gradients through parts of the keys, given output and LSE over all keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from posenc import ENCODINGS, Encoding, Grid, Layout, attend, create
from posenc.attention.api import attend_block_backward
from posenc.attention.call import Call
from posenc.attention.problem.problem import GlobalSoftmax
from posenc.errors import ArgumentError, BackendRefusal
from posenc.testing.subject import HEADS, KV_HEADS, Subject, agree, operands, spread

NAMES = ("alibi", "contextual", "deberta", "dape", "fire", "irpe", "kerple", "nope", "rope", "shaw")
NAMES += ("swin_v2", "t5", "transformer_xl", "tupe", "xpos")

BACKEND_NAMES = ("reference", "native", "blockwise")

LAYOUTS = {
    "sequence": Layout.sequence(70),
    "packed": Layout.packed([30, 25, 15]),
    "padded": Layout.padded([70, 41], side="left"),
}


def encoding_of(name: str) -> tuple[Subject, Encoding]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        subject = Subject.of_entry(name, ENCODINGS[name])
        encoding = subject.make()
    spread(encoding)
    return subject, encoding.double()


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_parts_sum_to_those_of_the_whole(name: str, backend: str) -> None:
    subject, encoding = encoding_of(name)
    causal, window = encoding.causal_only or name in ("t5", "tupe"), 40 if name == "rope" else None
    parameters = list(encoding.parameters())
    for layout in LAYOUTS.values():
        layout = subject.place(layout)
        inputs = [x.requires_grad_() for x in operands(70, 70)]
        grid = Grid.of(layout, causal=causal, window=window)
        output, lse = attend(*inputs, grid, encoding, backend="reference", return_lse=True)
        direction = torch.randn_like(output)
        expected = torch.autograd.grad(output, [*inputs, *parameters], direction, allow_unused=True)
        whole = GlobalSoftmax(output.detach(), lse.detach())
        sums: list[Tensor | float] = [0.0] * len(expected)
        for a, b in ((0, 20), (20, 70)):
            q, k, v = inputs[0], *(x[:, :, a:b] for x in inputs[1:])
            part = Grid(layout, layout.slice(a, b), causal, window)
            try:
                found = attend_block_backward(
                    Call(q, k, v, part, encoding, global_softmax=whole), backend
                )
            except BackendRefusal:
                assert backend == "native"
                return
            gradients = torch.autograd.grad(
                found, [*inputs, *parameters], direction, allow_unused=True
            )
            for at, gradient in enumerate(gradients):
                sums[at] = sums[at] + (0.0 if gradient is None else gradient)
        for got, want in zip(sums, expected, strict=True):
            want = torch.tensor(0.0) if want is None else want
            agree(name, torch.as_tensor(got).expand_as(want), want, tolerance=1e-5)


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
