"""Creating encodings by name, and what layers share."""

from __future__ import annotations

import pickle

import pytest

import posenc
from posenc import Encoding, create, create_layers
from posenc.errors import ArgumentError, UnknownNameError


def test_unknown_names_list_close_matches_first_then_all() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'sinusoidal'.*\?.*Valid: .*alibi, "):
        create("sinusoid", dim=8)


def test_unknown_options_list_the_valid() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'base'.*fraction, .*learned"):
        create("rope", head_dim=8, bas=3)


def test_unknown_options_list_the_dimensions() -> None:
    for name in ("alibi", "rope"):
        with pytest.raises(UnknownNameError, match=r"Did you mean 'heads'.*dim, .*max_length"):
            create(name, num_heads=4)


@pytest.mark.parametrize(
    ("name", "missing"), [("rope", "head_dim"), ("learned", "dim"), ("alibi", "heads")]
)
def test_a_missing_dimension_is_named(name: str, missing: str) -> None:
    with pytest.raises(ArgumentError, match=f"{missing}: expected a value, which {name} needs"):
        create(name)


def test_joined_names_put_parts_on_their_sites() -> None:
    encoding = create("rope+alibi", heads=4, head_dim=8, base=100.0)
    assert [type(part).__name__ for part in encoding.parts()] == ["Rope", "Alibi"]
    assert encoding.query_key is not None
    assert encoding.query_key.base == 100.0


def test_joined_names_on_one_site_are_refused() -> None:
    with pytest.raises(ArgumentError, match="one score part"):
        create("t5+alibi", heads=4)
    with pytest.raises(ArgumentError, match="each name once"):
        create("rope+rope", head_dim=8)


def test_options_follow_a_name() -> None:
    """As in the command line."""
    encoding = create("rope+t5@base=100@buckets=8", heads=4, head_dim=8, causal=True)
    assert encoding.query_key is not None
    assert encoding.query_key.given["base"] == 100.0
    assert encoding.score is not None
    assert encoding.score.given["buckets"] == 8
    alibi = create("alibi@learned=true", heads=2)
    assert len(list(alibi.parameters())) == 1
    assert not list(create("alibi@learned=false", heads=2).parameters())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("alibi@lerned=true", {}, "Did you mean 'learned'"),
        ("alibi@learned", {}, "NAME=VALUE"),
        ("alibi@learned=maybe", {}, "learned: expected True or False"),
        ("alibi@", {}, "option of alibi"),
        ("alibi@randomized", {}, "option of alibi"),
        ("alibi@heads=2", {}, "option of alibi"),
        ("alibi@learned=true", {"learned": True}, "learned: expected one value"),
        ("rope+alibi@learned=true", {}, "rope and alibi both have"),
        (["alibi"], {}, "encoding: expected a name"),
        (None, {}, "encoding: expected a name"),
    ],
)
def test_wrong_options_in_a_name(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        create(name, heads=2, head_dim=4, **options)  # type: ignore[arg-type]


def test_names_of_another_kind_are_told() -> None:
    """Rather than encodings that sound like them."""
    import posenc.extension  # noqa: F401

    with pytest.raises(UnknownNameError, match=r"'yarn', a method of posenc.extensions. Valid"):
        create("yarn", head_dim=8)


def test_an_option_of_two_methods_is_refused() -> None:
    with pytest.raises(ArgumentError, match="rope and alibi both have"):
        create("rope+alibi", heads=4, head_dim=8, learned=True)


def test_records_add() -> None:
    both = create("rope", head_dim=8) + create("t5", heads=2)
    assert both.query_key is not None
    assert both.score is not None
    assert (Encoding() + both).parts() == both.parts()
    with pytest.raises(ArgumentError, match="one query_key part"):
        both + create("rope", head_dim=8)


def test_a_part_on_a_site_not_its_own_is_refused() -> None:
    with pytest.raises(ArgumentError, match="QueryKeyTransform"):
        Encoding(query_key=create("alibi", heads=2).score)  # type: ignore[arg-type]


def test_layers_share_what_the_paper_shares() -> None:
    t5 = create_layers("t5", layers=3, heads=2)
    assert len({id(encoding.score) for encoding in t5}) == 1
    shaw = create_layers("shaw", layers=3, head_dim=8)
    assert len({id(encoding.score) for encoding in shaw}) == 3
    joined = create_layers("t5+sinusoidal", layers=2, heads=2, dim=8)
    assert joined[0].embedding is joined[1].embedding


def test_wrong_shapes_of_a_model() -> None:
    with pytest.raises(ArgumentError, match="a multiple of heads"):
        create("rope", dim=10, heads=4)
    with pytest.raises(ArgumentError, match="layers"):
        create_layers("nope", layers=0)


def test_head_dim_follows_from_dim_and_heads() -> None:
    rope = create("rope", dim=32, heads=4).query_key
    assert rope is not None
    assert rope.head_dim == 8


def test_every_option_of_every_method_has_a_default() -> None:
    for name, entry in posenc.ENCODINGS.items():
        for option, parameter in entry.options().items():
            assert parameter.default is not parameter.empty, f"{name}.{option}"


def test_errors_cross_processes() -> None:
    with pytest.raises(UnknownNameError) as caught:
        create("alib", heads=2)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert type(again) is UnknownNameError
