"""Calls of layouts and grids."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc import Grid, Layout
from tests.testing.wrong.calls import COUNTS, GRID, B, Call, L, sequence
from tests.testing.wrong.values import DEVICE, any_of, indices, not_a, some, truth, whole


def calls_of_layouts() -> tuple[Call, ...]:
    """Constructors and methods of ``Layout`` and ``Grid``."""
    mask = torch.ones(B, L, dtype=torch.bool)
    positions = torch.arange(float(L)).reshape(1, L, 1)
    order = torch.arange(L).reshape(1, L)
    layouts = (
        Call(
            "Layout.sequence",
            Layout.sequence,
            lambda: {"length": L},
            {"length": whole(), "start": whole(-(2**53)), "prefix": whole(0), "device": DEVICE},
        ),
        Call(
            "Layout.packed",
            lambda lengths, device=None: Layout.packed(lengths, device=device),
            lambda: {"lengths": [3, 2]},
            {"lengths": any_of(lambda s: [3, whole()(s)], not_a(but=COUNTS)), "device": DEVICE},
        ),
        Call(
            "Layout.padded",
            Layout.padded,
            lambda: {"lengths": [3, 2]},
            {
                "lengths": any_of(lambda s: [3, whole(0)(s)], not_a(but=COUNTS)),
                "length": whole(3, optional=True),
                "side": any_of(some(("", "rigth", "LEFT")), not_a(but=(str,))),
                "prefix": whole(0),
                "device": DEVICE,
            },
            {"length": ("lengths",), "lengths": ("length",)},
        ),
        Call(
            "Layout.from_attention_mask",
            Layout.from_attention_mask,
            lambda: {"mask": mask.long()},
            {
                "mask": any_of(
                    some(
                        (mask.long() * 2, mask.float() - 0.5, mask[0], mask.to_sparse()),
                        (mask.float() * float("nan"), mask.unsqueeze(0), mask * -1e9),
                    ),
                    not_a(but=(Tensor,)),
                ),
                "special": any_of(
                    some((mask.long(), mask[:, 1:], mask[0], mask.expand(2, B, L), mask[:1, :1])),
                    not_a(optional=True, but=(Tensor,)),
                ),
            },
        ),
        Call(
            "Layout.image",
            Layout.image,
            lambda: {"height": 2, "width": 3},
            {
                "height": whole(),
                "width": whole(),
                "prefix": whole(0),
                "device": DEVICE,
                "valid": any_of(
                    some((torch.ones(1, 2, 3), torch.ones(1, 3, 2, dtype=torch.bool), mask)),
                    not_a(optional=True, but=(Tensor,)),
                ),
            },
        ),
        Call(
            "Layout.cells",
            lambda sizes, **options: Layout.cells(2, sizes, **options),
            lambda: {"sizes": 3},
            {
                "sizes": whole(),
                "coordinates": any_of(some(("centered", ("ends",), ["ends"] * 3)), not_a()),
                "prefix": whole(0),
                "device": DEVICE,
            },
        ),
        Call(
            "Layout.at",
            Layout.at,
            lambda: {"times": torch.arange(6.0)},
            {
                "times": any_of(
                    some(
                        (torch.tensor(3.0), torch.zeros(1, 1, 1, 1), torch.ones(6) * 1j),
                        (torch.full((6,), float("nan")), torch.tensor([0.0, float("inf")])),
                        (torch.tensor([0, 2**53 + 1]), torch.ones(6) > 0, torch.eye(6).to_sparse()),
                        (torch.ones(6).half(), torch.ones(6).bfloat16()),
                    ),
                    not_a(but=(Tensor,)),
                ),
                "valid": any_of(
                    some((mask.long(), mask[:, 1:], mask[0])), not_a(optional=True, but=(Tensor,))
                ),
            },
            {"times": ("positions",)},
        ),
        Call(
            "Layout",
            Layout,
            lambda: {"positions": positions, "order": order},
            {
                "positions": any_of(
                    some(
                        (positions.long(), positions.half(), positions[0], positions * 1j),
                        (positions / 0, positions.to_sparse(), positions[:, 1:]),
                    ),
                    not_a(but=(Tensor,)),
                ),
                "order": any_of(
                    some((order.float(), order[0], order[:, 1:], order.int(), order.to_sparse())),
                    not_a(but=(Tensor,)),
                ),
                "document": any_of(
                    some((order.float(), order[0], order[:, 1:])),
                    not_a(optional=True, but=(Tensor,)),
                ),
                "valid": any_of(
                    some((mask.long(), mask[0], mask[:, 1:])), not_a(optional=True, but=(Tensor,))
                ),
                "special": any_of(
                    some((mask.long(), mask[0], mask[:, 1:])), not_a(optional=True, but=(Tensor,))
                ),
                "signal": any_of(
                    some((torch.ones(1, L), torch.ones(1, L + 1, 2), torch.ones(1, L, 2).long())),
                    not_a(optional=True, but=(Tensor,)),
                ),
                "start": any_of(whole(-(2**53), optional=True), some((7, -1, 1, 2**40))),
                "extent": any_of(
                    some(((2, 3), (1, 6), (6, 1), (0, 6), "23")), not_a(optional=True)
                ),
                "consecutive": truth(),
            },
            {"positions": ("order", "layout"), "order": ("positions", "layout")},
        ),
        Call(
            "Layout with consecutive",
            lambda positions: Layout(positions, order, consecutive=True),
            lambda: {"positions": positions},
            {
                "positions": some(
                    (positions * 2, positions.flip(1), positions + positions.floor() ** 2)
                )
            },
            {"positions": ("consecutive",)},
        ),
        Call(
            "Layout.to",
            lambda device: sequence().to(device),
            lambda: {"device": "cpu"},
            {"device": DEVICE},
        ),
        Call(
            "Layout.slice",
            lambda begin, end: sequence().slice(begin, end),
            lambda: {"begin": 1, "end": 4},
            {name: whole(-(2**53)) for name in ("begin", "end")},
        ),
        Call(
            "Layout.select",
            lambda rows: Layout.padded([3, 2]).select(rows),
            lambda: {"rows": torch.tensor([0])},
            {"rows": indices(2)},
        ),
        Call(
            "Layout.with_positions",
            lambda positions: sequence().with_positions(positions),
            lambda: {"positions": positions},
            {"positions": any_of(some((positions.long(), positions[:, 1:])), not_a(but=(Tensor,)))},
            {"positions": ("order",)},
        ),
        Call(
            "Layout.concat",
            lambda other: Layout.padded([3, 2]).concat(other),
            lambda: {"other": sequence()},
            {"other": any_of(some((Layout.image(2, 3), Layout.padded([1, 2, 3]))), not_a())},
            {"other": ("layout", "signal")},
        ),
    )
    grids = (
        Call(
            "Grid",
            Grid,
            lambda: {"query": sequence(), "key": sequence()},
            {
                "query": any_of(not_a(), lambda source: Layout.image(2, 3)),
                "key": any_of(not_a(), lambda source: Layout.at(torch.zeros(1, L, 3))),
                **GRID,
            },
            {"query": ("grid",), "key": ("grid",)},
        ),
        Call(
            "Grid.of",
            Grid.of,
            lambda: {"layout": sequence()},
            {"layout": not_a(), **GRID},
            {"layout": ("query",)},
        ),
    )
    return (*layouts, *grids)
