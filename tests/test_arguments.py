"""Values of arguments: one check by type and domain, wherever they come from."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import posenc
from posenc import Attention, Encoding, Grid, Layout, attend, create
from posenc.arguments import Base, Count, check, checked, domains
from posenc.encodings.query_key.rope import Rope
from posenc.encodings.score.alibi import Alibi
from posenc.encodings.score.t5 import T5, log_boundaries
from posenc.errors import ArgumentError, UnknownNameError
from posenc.registration import parse_options
from posenc.registry import ENCODINGS, create_layers
from tests.testing.option_fuzz import fuzz

SIZES: dict[str, Any] = {"dim": 32, "heads": 4, "head_dim": 8, "max_length": 16}


@pytest.mark.parametrize("heads", [0, -1, 1.5, True, "4", None, float("nan"), 10**12, [4]])
def test_a_count_is_a_whole_number(heads: Any) -> None:
    for make in (lambda: Alibi(heads=heads), lambda: create("alibi", heads=heads)):
        with pytest.raises(ArgumentError, match="heads"):
            make()


@pytest.mark.parametrize("base", [1, 0.5, -3, float("inf"), float("nan"), "abc", True, 1e300])
def test_a_base_is_a_finite_number_above_one(base: Any) -> None:
    with pytest.raises(ArgumentError, match=r"base: expected a finite number, more than 1"):
        Rope(head_dim=8, base=base)


def test_numbers_of_other_libraries_become_plain() -> None:
    rope = Rope(head_dim=np.int64(8), base=np.float32(100))  # type: ignore[arg-type]
    assert (type(rope.head_dim), type(rope.base)) == (int, float)


@pytest.mark.parametrize("sections", ["12", b"12", {1: 2}, 3])
def test_texts_and_mappings_are_no_sequences(sections: Any) -> None:
    with pytest.raises(ArgumentError, match=r"sections: expected a sequence of values, got"):
        check("sections", tuple[Any, ...], sections, None)


def test_texts_are_no_truth_values() -> None:
    with pytest.raises(ArgumentError, match=r"learned: expected True or False, got 'false'"):
        create("alibi", heads=4, learned="false")


def test_names_are_checked_with_the_close_matches() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'adjacent'"):
        create("rope", head_dim=8, pairing="adjacents")


@pytest.mark.parametrize(
    ("name", "options", "largest"),
    [
        ("learned", {"max_length": 10**12}, "max_length"),
        ("shaw", {"max_distance": 2**50}, "max_distance"),
        ("recursive", {"dim": 10**6}, "dim"),
        ("deberta", {"max_distance": 10**11}, "max_distance"),
    ],
)
def test_what_exceeds_memory_is_refused_before_it_is_allocated(
    name: str, options: dict[str, Any], largest: str
) -> None:
    given = {**SIZES, **({"heads": None, "head_dim": None} if "dim" in options else {}), **options}
    with pytest.raises(ArgumentError, match=f"{largest}: expected parameters that fit into .* GiB"):
        create(name, **given)


def test_boundaries_of_buckets_take_no_time() -> None:
    assert len(log_boundaries(32, 2**53)) == 31
    with pytest.raises(ArgumentError, match="max_distance"):
        T5(heads=2, max_distance=float("inf"))  # type: ignore[arg-type]


def test_every_factory_is_checked_and_every_option_reachable() -> None:
    reserved = set(inspect.signature(create_layers).parameters)
    for name, entry in ENCODINGS.items():
        assert domains(entry.factory).keys() == inspect.signature(entry.factory).parameters.keys()
        made = entry.factory.__init__ if inspect.isclass(entry.factory) else entry.factory
        assert hasattr(made, "__wrapped__") or not entry.parameters(), f"{name} is not checked"
        assert not reserved & entry.options().keys(), name


def test_any_function_can_be_checked() -> None:
    @checked
    def make(*, heads: Count, base: Base = 10.0) -> float:
        return heads * base

    assert make(heads=2) == 20.0
    with pytest.raises(ArgumentError, match=r"base: .* The default is 10\.0\."):
        make(heads=2, base=1)


def test_options_written_as_text_are_read_by_their_type() -> None:
    alibi, rope, swin = (ENCODINGS[name].options() for name in ("alibi", "rope", "swin"))
    assert parse_options(["learned=false"], alibi, of="alibi") == {"learned": False}
    assert parse_options(["learned=Yes"], alibi, of="alibi") == {"learned": True}
    read = parse_options(["base=500", "divisors=1,2.5", "pairing=half"], rope, of="rope")
    assert read == {"base": 500.0, "divisors": (1.0, 2.5), "pairing": "half"}
    assert parse_options(["divisors=none"], rope, of="rope") == {"divisors": None}
    assert parse_options(["window=(3, 4)"], swin, of="swin") == {"window": (3, 4)}


@pytest.mark.parametrize(
    ("name", "item", "message"),
    [
        ("alibi", "learned=maybe", "learned: expected True or False, got 'maybe'"),
        ("rope", "base=abc", "base: expected a finite number"),
        ("rope", "fraction=2", "fraction: .*at most 1"),
        ("rope", "pairing=halves", "Did you mean 'half'"),
        ("rope", "learned", "learned: expected NAME=VALUE"),
        ("rope", "bas=3", "Did you mean 'base'"),
        ("swin", "window=3,x", "window"),
        ("t5", "buckets=1.5", "buckets: expected a whole number"),
    ],
)
def test_options_out_of_their_domain(name: str, item: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_options([item], ENCODINGS[name].options(), of=name)


def test_papers_spellings_lead_to_the_name() -> None:
    for written, name in (
        ("RoPE", "rope"),
        ("ALiBi", "alibi"),
        ("Transformer-XL", "transformer_xl"),
    ):
        with pytest.raises(UnknownNameError, match=f"Did you mean '{name}'"):
            create(written)


@pytest.mark.long
def test_random_options_are_served_or_refused_in_words() -> None:
    assert fuzz(800, seed=0) == []


MASKS = [(name, causal) for name in ("t5", "tupe", "conv") for causal in (False, True)]


@pytest.mark.parametrize(("name", "causal"), MASKS)
def test_a_part_made_for_one_mask_refuses_the_other(name: str, causal: bool) -> None:
    encoding = create(name, **SIZES, causal=causal)
    q = torch.randn(1, 4, 5, 8)
    for backend in ("auto", "reference", "blockwise"):
        with pytest.raises(ArgumentError, match=f"Create it with causal={not causal}"):
            attend(
                q, q, q, Grid.of(Layout.sequence(5), causal=not causal), encoding, backend=backend
            )
    with pytest.raises(ArgumentError, match=f"Create it with causal={not causal}"):
        Attention(dim=32, heads=4, encoding=encoding, causal=not causal)
    attend(q, q, q, Grid.of(Layout.sequence(5), causal=causal), encoding)


def made_for() -> list[tuple[str, str]]:
    """Every entry and the sizes that one of its parts states."""
    return [
        (name, size)
        for name, entry in ENCODINGS.items()
        for size in ("heads", "head_dim", "dim")
        if size in entry.parameters() and (name, size) not in INTERNAL
    ]


INTERNAL = {
    *(("t5", "dim"), ("dynamic_bias", "dim"), ("seqpe", "heads"), ("irpe", "heads")),
    *(("deberta", "dim"), ("tupe", "dim")),
}
"""Sizes of initial values, of a network or table of the part's own, or without a meaning for it."""


@pytest.mark.parametrize(("name", "size"), made_for())
def test_wrong_sizes_are_refused_before_anything_is_read(name: str, size: str) -> None:
    entry = ENCODINGS[name]
    causal = entry.claims.causal_only
    encoding = create(name, **{**SIZES, "causal": causal, size: 2 * SIZES[size]})
    with pytest.raises(ArgumentError, match=f"{size}=|heads"):
        Attention(dim=32, heads=4, head_dim=8, encoding=encoding, causal=causal)
    if size == "dim":
        return
    axes = 1 if entry.claims.axes is None else min(entry.claims.axes)
    layout = Layout.sequence(6) if axes == 1 else Layout.image(2, 3)
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    for backend in posenc.attention.BACKENDS:
        with pytest.raises(ArgumentError, match=f"{size}={SIZES[size]}, as it is used with"):
            attend(q, k, k, Grid.of(layout, causal=causal), encoding, backend=backend)


def test_one_head_for_eight_ends_in_words() -> None:
    q = torch.randn(1, 1, 8200, 16)
    grid = Grid.of(Layout.sequence(8200))
    with pytest.raises(ArgumentError, match="Create it with heads=1"):
        attend(q, q, q, grid, create("alibi", heads=8))


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5", "shaw", "cope", "deberta", "path"])
@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
def test_an_empty_batch_gives_an_empty_output(name: str, backend: str) -> None:
    encoding = create(name, **SIZES, causal=True)
    layer = Attention(dim=32, heads=4, encoding=encoding, causal=True)
    x = torch.randn(0, 5, 32, requires_grad=True)
    output = layer(x, Layout.sequence(5))
    assert output.shape == (0, 5, 32)
    output.sum().backward()
    q = torch.randn(0, 4, 5, 8)
    layout = encoding.observe(x.detach(), Layout.sequence(5))
    got = attend(q, q, q, Grid.of(layout, causal=True), encoding, backend=backend)
    assert got.shape == (0, 4, 5, 8)


@pytest.mark.parametrize("shape", [(1, 0, 5, 8), (1, 4, 5, 0)])
def test_no_heads_and_no_width_are_refused(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape)
    with pytest.raises(ArgumentError, match="at least one head and feature"):
        attend(q, q, q, Grid.of(Layout.sequence(5)), Encoding())
