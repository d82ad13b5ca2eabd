"""Methods of extension by name, for one layer and for many."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest

import posenc.extension
from posenc import create, create_layers
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError, UnknownNameError
from posenc.extension import EXTENSIONS, advice, applicable, extend, extend_layers
from posenc.registry import ENCODINGS


def test_names_are_sorted_and_are_those_of_functions() -> None:
    assert list(EXTENSIONS) == sorted(EXTENSIONS)
    for name, method in EXTENSIONS.items():
        function: Callable[..., Any] = getattr(posenc.extension, name)
        assert method.function is function
        assert function.__name__ == name
        assert set(method.on) <= set(ENCODINGS) | {"any"}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_all_but_the_first_parameter_are_named(name: str) -> None:
    first, *others = inspect.signature(EXTENSIONS[name].function).parameters.values()
    assert first.name in ("encoding", "model")
    assert all(each.kind is each.KEYWORD_ONLY for each in others)
    documented = inspect.getdoc(EXTENSIONS[name].function)
    assert documented is not None
    assert all(f"{each.name}:" in documented for each in others)


@pytest.mark.parametrize("on", ["alibi", "learned", "rope", "swin"])
def test_what_is_applicable(on: str) -> None:
    fitting = applicable(create(on, dim=8, heads=2, head_dim=8, max_length=8))
    assert fitting == [name for name, entry in EXTENSIONS.items() if {on, "any"} & set(entry.on)]
    assert {"direct", "log_n", "segments"} < set(fitting)
    assert ("yarn" in fitting) == (on == "rope")
    assert ("hierarchical" in fitting) == (on == "learned")


def test_what_attends_without_softmax_has_no_logits_to_scale() -> None:
    assert "log_n" not in applicable(create("stick_breaking"))


@pytest.mark.parametrize("name", EXTENSIONS)
def test_what_a_method_says_it_fits_it_fits(name: str) -> None:
    context = {"dim": 16, "heads": 2, "max_length": 8}
    for on in EXTENSIONS[name].on:
        for each in ENCODINGS if on == "any" else (on,):
            if each in ("stick_breaking",) and name == "log_n":
                continue
            options = {"digits": (0, 1)} if each == "abacus" else {}
            encoding = create(each, **context, causal=True, **options)
            assert name in applicable(encoding), each


def test_layers_share_what_they_shared() -> None:
    shared = extend_layers(create_layers("rope", layers=3, head_dim=8), "ntk", factor=2)
    assert shared[0] is shared[1]
    assert shared[1] is shared[2]
    own = create_layers("shaw", layers=2, heads=2, head_dim=8)
    longer = extend_layers(own, "log_n", length=8)
    assert longer[0] is not longer[1]


def test_joined_names_are_applied_in_order() -> None:
    rope = create("rope", head_dim=8)
    both = extend(rope, "yarn+log_n", factor=4, length=64, alpha=0.5, beta=4)
    alone = extend(rope, "yarn", factor=4, length=64, alpha=0.5, beta=4)
    assert (
        cast(Rope, cast(Any, both.query_key).inner).divisors == cast(Rope, alone.query_key).divisors
    )


def test_options_follow_a_name() -> None:
    rope = create("rope", head_dim=8)
    named = extend(rope, "yarn@alpha=0.5@beta=4", factor=4, length=64)
    given = extend(rope, "yarn", factor=4, length=64, alpha=0.5, beta=4)
    assert cast(Rope, named.query_key).divisors == cast(Rope, given.query_key).divisors
    notes = advice(rope, "yarn", factor=4, length=64, alpha=0.5, beta=4)
    assert advice(rope, "yarn@alpha=0.5@beta=4", factor=4, length=64) == notes


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("yarn@alhpa=1", {}, UnknownNameError, "Did you mean 'alpha'"),
        ("yarn@alpha=1", {"alpha": 1}, ArgumentError, "alpha: expected one value"),
        ("yarn+yarn", {}, ArgumentError, "each name once"),
        (3, {}, ArgumentError, "method: expected a name"),
        ("yearn", {}, UnknownNameError, "Did you mean 'yarn'"),
        ("yarn", {"alhpa": 1}, UnknownNameError, "Did you mean 'alpha'"),
        ("yarn", {"scaling_factor": 4}, UnknownNameError, "Did you mean 'factor'"),
        ("yarn", {"factor": None}, ArgumentError, "factor: expected a value, which yarn needs"),
        ("yarn", {"length": None}, ArgumentError, "length: expected a value"),
        ("rerope+self_extend", {"window": 3}, ArgumentError, "rerope and self_extend both"),
        ("segments", {}, ArgumentError, "changes how a model is run"),
        ("random_tail", {}, ArgumentError, "a learned table, which random_tail stretches"),
    ],
)
def test_bad_names_and_options(
    name: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        extend(create("rope", head_dim=8), name, **({"factor": 2, "length": 64} | options))


def test_most_methods_need_no_advice() -> None:
    assert advice(create("rope", head_dim=8), "ntk+log_n", factor=2, length=64) == ()
