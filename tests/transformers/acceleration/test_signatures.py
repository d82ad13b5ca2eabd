"""Arguments of accelerated modules: bound by the names of transformers' signatures."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from inspect import Parameter, signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from posenc.transformers.acceleration import FAMILIES
from posenc.transformers.acceleration.accelerated import Accelerated
from posenc.transformers.acceleration.families.page import BIASES, PageAttention
from posenc.transformers.calls import CACHE, CACHES, bound, cache_name, caches_in, names_of
from tests.support.caches import given
from tests.transformers.acceleration.cases import CASES
from tests.transformers.acceleration.test_laws import accelerated, put_under

KINDS = [kind for family in FAMILIES.values() for kind in family.classes.values()]
CACHED = ("bloom-lm", "falcon-lm", "inkling-whole", "mpt-lm")
"""Cases of families whose layers take a cache themselves."""


def own_methods(kind: type[nn.Module]) -> set[str]:
    """Methods of a class of transformers that an accelerated class has in their place."""
    classes = [k for k in kind.__mro__ if issubclass(k, Accelerated) and k is not Accelerated]
    names = {name for k in classes for name, x in vars(k).items() if callable(x)}
    return {name for name in names if hasattr(kind.original, name) and name[:2] != "__"}


def collects(method: Callable[..., Any], kind: Any) -> bool:
    return any(x.kind is kind for x in signature(method).parameters.values())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_methods_take_what_those_of_transformers_take(kind: Any) -> None:
    """Names that transformers no longer passes would be defaults for good, without an error."""
    for name in own_methods(kind) - {"forward"}:
        mine, theirs = (names_of(getattr(k, name)) for k in (kind, kind.original))
        if not collects(getattr(kind, name), Parameter.VAR_POSITIONAL):
            assert mine == theirs, name
    if "forward" not in own_methods(kind):
        return
    forward = kind.forward
    served = [k for k in KINDS if k.forward is forward]
    taken = {name for k in served for name in names_of(k.original.forward)}
    taken = {CACHE if name in CACHES else name for name in taken}
    assert set(names_of(forward)) <= taken
    if not collects(forward, Parameter.VAR_KEYWORD):
        assert set(names_of(forward)) == taken


def test_a_cache_is_bound_by_position_and_by_each_of_its_names() -> None:
    for own in CACHES:
        names, cache = ("x", own, "mask"), object()
        for call in [((1, cache), {}), *(((1,), {name: cache}) for name in CACHES)]:
            assert bound(names, *call) == {"x": 1, CACHE: cache}
        assert bound(names, (1,), {own: None, "layer_past": cache})[CACHE] is cache
    assert bound(("x",), (1,), {"cache": 2}) == {"x": 1, "cache": 2}
    with pytest.raises(ValueError, match="zip"):
        bound(("x",), (1, 2), {})


Call = tuple[tuple[Any, ...], dict[str, Any]]


def renamed(call: Call, own: str, name: str) -> Call:
    """A call with its cache under another name."""
    arguments, options = call
    return arguments, {name if key == own else key: x for key, x in options.items()}


def by_position(call: Call, names: tuple[str, ...], own: str) -> Call:
    """A call with all arguments up to the cache by position."""
    arguments, options = call
    first = names[: names.index(own) + 1]
    rest = {name: x for name, x in options.items() if name not in first}
    return (*arguments, *(options.get(name) for name in first[len(arguments) :])), rest


def kept(call: Call) -> Call:
    """A call with a copy of its cache."""
    arguments, options = call
    copied = {name: deepcopy(x) if isinstance(x, Cache) else x for name, x in options.items()}
    return tuple(deepcopy(x) if isinstance(x, Cache) else x for x in arguments), copied


@torch.no_grad()
@pytest.mark.parametrize("shortest", [0, 10**6])
@pytest.mark.parametrize("key", CACHED)
def test_layers_read_a_cache_however_it_is_passed(key: str, shortest: int) -> None:
    """By position, by the name that transformers gives it, and by those of other versions."""
    model: Any = CASES[key].model()
    put_under(model, check=False)
    for module in accelerated(model):
        module.__dict__["_posenc_settings"] = type(module.__dict__["_posenc_settings"])(
            shortest=shortest
        )
    calls: list[tuple[nn.Module, Call]] = []

    def note(module: nn.Module, arguments: Any, options: Any) -> None:
        calls.append((module, kept((arguments, options))))

    def held(module: nn.Module) -> bool:
        return cache_name(names_of(type(module).original.forward)) is not None

    ids = torch.arange(3, 21).unsqueeze(0)
    cache = DynamicCache(config=model.config)
    model(ids[:, :17], **given(model, cache))
    layers = [module for module in accelerated(model) if held(module)]
    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in layers]
    model(ids[:, 17:], **given(model, cache))
    for handle in handles:
        handle.remove()
    assert calls
    for module, call in calls:
        names = names_of(type(module).original.forward)
        own = cache_name(names)
        passed = next(name for name, x in call[1].items() if isinstance(x, Cache))
        ways = [call, by_position(renamed(call, passed, own), names, own)]
        ways += [renamed(call, passed, name) for name in CACHES]
        expected, *others = [output(module, *kept(way)) for way in ways]
        for other in others:
            assert torch.equal(other, expected)


def output(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """The output of a call that adds its tokens to the cache."""
    cache = next(caches_in((*arguments, *options.values())))
    before = [int(layer.get_seq_length()) for layer in cache.layers]
    found = module(*arguments, **options)
    assert sum(int(layer.get_seq_length()) for layer in cache.layers) == sum(before) + 1
    tensor: Tensor = found[0] if isinstance(found, tuple) else found
    return tensor


@pytest.mark.parametrize("kind", [k for k in KINDS if issubclass(k, PageAttention)])
def test_biases_of_pages_are_arguments_of_transformers(kind: Any) -> None:
    assert set(BIASES) & set(kind.parameters_of_forward)
