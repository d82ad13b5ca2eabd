"""Claims that are measured: what depends on the length, and memory that explain speaks of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, explain
from posenc.lab.visualization.catalogue import DEVICES, sheet
from posenc.registry import ENCODINGS, create, create_layers
from posenc.testing.subject import LENGTH, Subject, heads_of, inputs, observed, spread
from tests.support.watching import LargestTensor

SMALL, LARGE = (3, 4), (5, 6)
"""Images whose cells are compared."""


def made(name: str) -> Encoding:
    """The method with the options that it has by default."""
    claims = ENCODINGS[name].claims
    torch.manual_seed(0)
    encoding = create(
        name, dim=48, heads=6, head_dim=8, max_length=160, causal=claims.serves(1)
    ).double()
    spread(encoding)
    return encoding.eval()


def alone_and_among_others(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Results of the parts for some tokens alone, and for the same where more tokens come after.

    Embeddings, products of transformed queries and keys, and scores.
    """
    encoding, claims = made(name), ENCODINGS[name].claims
    if claims.serves(1):
        few, many = Layout.sequence(LENGTH), Layout.sequence(3 * LENGTH)
        chosen = torch.arange(LENGTH)
    elif claims.serves(2):
        few, many = Layout.image(*SMALL), Layout.image(*LARGE)
        chosen = torch.tensor([r * LARGE[1] + c for r in range(SMALL[0]) for c in range(SMALL[1])])
    else:
        many = Layout.sequence(3 * LENGTH)
        many = many.with_positions(many.positions.expand(-1, -1, 3))
        few, chosen = many.slice(0, LENGTH), torch.arange(LENGTH)
    x = inputs(1, many.length)
    q, k = (heads_of(6, many.length, seed=seed, rows=1) for seed in (2, 3))
    tokens = torch.arange(many.length).unsqueeze(0) % 5
    results: list[list[Tensor]] = []
    for layout, at in ((few, chosen), (many, torch.arange(many.length))):
        seen = encoding.observe(x[:, at], layout)
        grid = Grid.of(seen, causal=claims.serves(1))
        queries, keys = q[:, :, at], k[:, :, at]
        found = [encoding.embed(x[:, at], layout, tokens=tokens[:, at]).squeeze(0)]
        if encoding.query_key is not None:
            queries, keys = encoding.query_key(queries, keys, grid)
            products = (queries @ keys.mT).masked_fill(~grid.visible, 0)
            found.append(products.permute(2, 3, 0, 1))
        if encoding.score is not None:
            score = encoding.score(queries, keys, grid, scale=0.3).expand(1, 6, -1, -1)
            hidden = score.masked_fill(~grid.visible, 0)
            found.append(hidden.permute(2, 3, 0, 1))
        results.append(found)
    among = [part[chosen] if part.dim() == 2 else part[chosen][:, chosen] for part in results[1]]
    return results[0], among


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_depends_on_the_length_says_so(name: str) -> None:
    alone, among = alone_and_among_others(name)
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(alone, among, strict=True))
    assert same != ENCODINGS[name].claims.length_dependent


@pytest.mark.parametrize(
    "name", [name for name, entry in ENCODINGS.items() if "score" in entry.claims.sites]
)
def test_memory_is_as_explained(name: str) -> None:
    """Of two queries: linear in the keys, unless the explanation says K×K."""
    entry = ENCODINGS[name]
    if name == "deberta":  # a product of each key with each bucket, of which few are to be in reach
        entry = replace(entry, sample={**entry.sample, "max_distance": 8})
    subject = Subject.of_entry(name, entry)
    encoding = subject.layer().encoding.requires_grad_(False)
    sizes = []
    for keys in (32, 128):
        key = observed(subject, encoding, Layout.sequence(keys), rows=1)
        if subject.axes == 2:  # tables of windows: everything in a few cells
            key = key.with_positions(key.positions % 8)
        grid = Grid(key.slice(keys - 2, keys), key, causal=True)
        q, k, v = (
            heads_of(heads, length, seed=heads, rows=1)
            for heads, length in ((6, 2), (3, keys), (3, keys))
        )
        with LargestTensor() as memory:
            attend(q, k, v, grid, encoding, backend="reference")
        sizes.append(memory.most)
        told = str(explain(q, k, v, grid, encoding, backend="reference"))
    assert (sizes[1] > 5 * sizes[0]) == ("K×K" in told)


def test_path_says_where_its_memory_is_not_linear() -> None:
    encoding = create("path", dim=48, heads=6, head_dim=8)
    x = torch.randn(1, 6, 9, 8)
    turned = Layout.at(torch.arange(9.0).flip(0))
    for layout, linear in ((Layout.sequence(9), True), (turned, False)):
        grid = Grid.of(encoding.observe(torch.randn(1, 9, 48), layout), causal=True)
        told = explain(x, x, x, grid, encoding, backend="blockwise")
        assert ("linear" in told.how, "K×K" in told.how) == (linear, not linear)


@pytest.mark.parametrize("name", ["floater", "deberta", "transformer_xl", "t5", "shaw", "rope"])
def test_parameters_of_layers_are_those_of_a_sheet(name: str) -> None:
    told, layers = sheet(name), 3
    encodings = create_layers(
        name, layers=layers, dim=512, heads=8, head_dim=64, max_length=512, causal=True
    )
    found = {id(p): p.numel() for encoding in encodings for p in encoding.parameters()}
    assert sum(found.values()) == told.shared_parameters + layers * told.parameters
    assert told.size.count("layer") == (told.shared_parameters > 0) + (told.parameters > 0)


@pytest.mark.parametrize("name", ["rope", "t5", "dape"])
def test_sheets_do_not_depend_on_the_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sheet(name)
    import posenc.attention.backends.triton as backend

    monkeypatch.setattr(backend, "refuse_machine", lambda device: "Triton is not installed")
    told = sheet.__wrapped__(name)
    assert told.backends == expected.backends
    assert set(told.backends) == set(DEVICES)
    assert ("triton" in told.backends["cuda"]["inference"]) == (name != "dape")
    assert "triton" not in told.backends["cpu"]["inference"]
