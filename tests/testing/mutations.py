"""Changes of single lines, each of which a check has to notice."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

import pytest

__all__ = ["Check", "Mutation", "mutate"]

Check = Callable[[], None]


@dataclass(frozen=True)
class Mutation:
    """A change of a line of a function, and the check that has to fail by it."""

    function: Callable[..., object]
    old: str
    new: str
    noticed_by: Check

    @property
    def name(self) -> str:
        return f"{self.function.__name__}: {self.old.strip()} → {self.new.strip()}"


def mutate(mutation: Mutation, patch: pytest.MonkeyPatch) -> None:
    """Put the changed code into the function itself, so that every import of it has it."""
    function = mutation.function
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutation.old) >= 1, f"{mutation.old} is no longer in {function.__name__}"
    space = dict(function.__globals__)
    exec(compile(source.replace(mutation.old, mutation.new), "<mutated>", "exec"), space)
    patch.setattr(function, "__code__", space[function.__name__].__code__)
