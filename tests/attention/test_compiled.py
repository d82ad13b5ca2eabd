"""Each backend in one compiled graph, and computed again under checkpointing, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc import Grid, Layout, attend, create
from tests.attention.comparing import draw

HEADS, WIDTH, LENGTH = 4, 8, 41

LAYOUTS = {
    "a sequence": None,
    "padded": Layout.padded([LENGTH, 9], side="left"),
    "packed": Layout.packed([20, 21]),
}

CASES = [
    ("native", "shaw", "a sequence", True),
    ("native", "nope", "a sequence", True),
    ("sdpa", "nope", "a sequence", True),
    ("sdpa", "rope", "padded", False),
    pytest.param("sdpa", "rope", "packed", False, marks=pytest.mark.exhaustive),
    ("reference", "rope", "packed", False),
]


@pytest.mark.parametrize(("backend", "name", "where", "with_sinks"), CASES)
def test_compiled_and_checkpointed_equal_eager(
    backend: str, name: str, where: str, with_sinks: bool
) -> None:
    """With sinks beside a cap, where that is served."""
    torch.manual_seed(0)
    encoding = create(name, dim=HEADS * WIDTH, heads=HEADS, head_dim=WIDTH, causal=True)
    options: dict[str, Any] = {"backend": backend, "return_lse": True}
    if with_sinks and backend != "sdpa":
        options["softcap"] = 1.5

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        layout = LAYOUTS[where] or Layout.sequence(q.shape[2])
        grid = Grid.of(layout, causal=True)
        output, lse = attend(q, k, v, grid, encoding, sinks=sinks, **options)
        return torch.cat([output, lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)], dim=-1)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    given = draw(LENGTH, LENGTH, width=WIDTH)
    sinks = torch.linspace(-1, 2, HEADS).requires_grad_() if with_sinks else None
    wanted = [*given, *encoding.parameters(), *([] if sinks is None else [sinks])]
    eager, *others = (
        [output, *torch.autograd.grad(output.sin().sum(), wanted, materialize_grads=True)]
        for output in (
            run(*given, sinks),
            compiled(*given, sinks),
            checkpoint(run, *given, sinks, use_reentrant=False),
        )
    )
    for other in others:
        torch.testing.assert_close(other, eager)
