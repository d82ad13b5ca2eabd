"""Parameters start as in the papers and their code, and layers share what the methods share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posenc import Encoding, Grid, Layout, attend, create, create_layers

DEVIATIONS: list[tuple[str, dict[str, Any], tuple[str, ...], float]] = [
    ("abacus", {"dim": 50, "places": 200}, ("embedding.table",), 1.0),
    ("conv", {"dim": 4096, "axes": 2}, ("embedding.weight",), (2 / 9) ** 0.5),
    # 0.02, cut at two of them
    ("learned", {"dim": 100, "max_length": 100}, ("embedding.table",), 0.0176),
    ("learned2d", {"dim": 100, "special": 50}, ("embedding.table", "embedding.special"), 0.02),
    ("row_column", {"dim": 256}, ("embedding.rows", "embedding.columns"), 12**-0.5),
    ("seqpe", {"dim": 64, "heads": 4}, ("embedding.symbols",), 0.02),
    ("swin", {"heads": 8}, ("score.table",), 0.02),
    ("swin_v2", {"heads": 3}, ("score.input.weight",), 0.02),
    ("t5", {"heads": 64, "dim": 256}, ("score.table",), 256**-0.5),
    ("comrope", {"heads": 8, "head_dim": 64}, ("query_key.matrix",), 1.0),
    ("transformer_xl", {"dim": 64, "heads": 8, "head_dim": 64}, ("score.weight",), 0.02),
    (
        "tupe",
        {"dim": 64, "heads": 8, "head_dim": 8, "max_length": 100},
        ("score.positions", "score.query.weight", "score.key.weight", "score.relative.table"),
        0.02,
    ),
    (
        "floater",
        {"dim": 200, "start": "random"},
        ("embedding.dynamics.first_weight", "embedding.dynamics.second_weight"),
        (2 / 401) ** 0.5,
    ),
]


@pytest.mark.parametrize(("name", "options", "parameters", "deviation"), DEVIATIONS)
def test_standard_deviations(
    name: str, options: dict[str, Any], parameters: tuple[str, ...], deviation: float
) -> None:
    encoding = create(name, **options)
    for parameter in parameters:
        assert encoding.get_parameter(parameter).std().item() == pytest.approx(deviation, rel=0.15)


@pytest.mark.parametrize(
    ("name", "shared", "own"),
    [
        ("floater", "embedding.dynamics", "embedding"),
        ("deberta", "score.relative", "score.query"),
        ("transformer_xl", "score.biases", "score"),
        ("dynamic_bias", "score", None),
        ("tupe", "score", None),
        *((name, None, "score") for name in ("irpe", "swin", "decomposed2d")),
        *((name, None, "query_key") for name in ("fope", "pope")),
    ],
)
def test_what_layers_share(name: str, shared: str | None, own: str | None) -> None:
    layers = create_layers(name, layers=3, dim=16, heads=2, head_dim=8, max_length=9)
    for path, count in ((shared, 1), (own, 3)):
        if path is not None:
            assert len({id(layer.get_submodule(path)) for layer in layers}) == count


@pytest.mark.parametrize("name", ["irpe@on=qkv", "decomposed2d", "cope"])
def test_starts_as_attention_without_positions(name: str) -> None:
    encoding = create(name, heads=2, head_dim=4)
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    layout = Layout.sequence(6) if name == "cope" else Layout.image(2, 3)
    grid = Grid.of(layout, causal=name == "cope")
    torch.testing.assert_close(attend(q, k, v, grid, encoding), attend(q, k, v, grid, Encoding()))
