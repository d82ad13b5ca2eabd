"""Methods that count tokens between query and key go by the order of keys, not by their place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.registry import ENCODINGS
from posenc.testing.subject import Subject, agree, inputs, operands

NAMES = [name for name, entry in ENCODINGS.items() if entry.claims.causal_only]

MOVED = torch.tensor([4, 0, 8, 2, 1, 7, 3, 6, 5])


def make(name: str) -> Encoding:
    return Subject.of_entry(name, ENCODINGS[name]).layer().encoding


def attended(q: Tensor, k: Tensor, v: Tensor, grid: Grid, encoding: Encoding) -> Tensor:
    """The output, with the LSE of a softmax as its last feature."""
    if encoding.score is not None and encoding.score.replaces_softmax:
        return attend(q, k, v, grid, encoding)
    output, lse = attend(q, k, v, grid, encoding, return_lse=True)
    return torch.cat([output, lse.unsqueeze(-1)], dim=-1)


@pytest.mark.parametrize("name", NAMES)
def test_keys_may_come_in_any_arrangement(name: str) -> None:
    encoding, (q, k, v) = make(name), operands(9, 9)
    layout = encoding.observe(inputs(2, 9), Layout.sequence(9))
    signal = None if layout.signal is None else layout.signal[:, MOVED]
    keys = Layout(layout.positions[:, MOVED], layout.order[:, MOVED], signal=signal)
    got = attended(q, k[:, :, MOVED], v[:, :, MOVED], Grid(layout, keys, causal=True), encoding)
    agree("the output", got, attended(q, k, v, Grid.of(layout, causal=True), encoding))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("documents", [(5, 2), (5, -2)])
def test_documents_with_orders_of_their_own_are_separate(
    name: str, documents: tuple[int, int]
) -> None:
    encoding, (q, k, v), x = make(name), operands(7, 7), inputs(2, 7)
    order = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    document = torch.tensor([documents]).repeat_interleave(torch.tensor([3, 4]), dim=1)
    packed = Layout(order.unsqueeze(-1).float(), order, document=document)
    whole = attended(q, k, v, Grid.of(encoding.observe(x, packed), causal=True), encoding)
    for part in (slice(0, 3), slice(3, 7)):
        layout = encoding.observe(x[:, part], Layout.sequence(part.stop - part.start))
        given = (tensor[:, :, part] for tensor in (q, k, v))
        alone = attended(*given, Grid.of(layout, causal=True), encoding)
        agree(f"document {part}", whole[:, :, part], alone)
