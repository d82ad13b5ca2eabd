"""Changes of single lines, each of which a check has to notice."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest

from posenc.registry import ENCODINGS
from posenc.testing import LAWS, Subject

__all__ = ["Check", "Mutation", "law", "require_caught"]

Check = Callable[[], None]


def law(name: str, encoding: str) -> Check:
    """A law over an encoding of the registry."""

    def check() -> None:
        LAWS[name](Subject.of_entry(encoding, ENCODINGS[encoding]))

    return check


@dataclass(frozen=True)
class Mutation:
    """A change of a line of a function, and the check that has to fail by it.

    Args:
        function: a function, method, class method or property.
        old, new: the text, once in its source, and what it becomes.
        noticed_by: raises where it notices.
    """

    function: Any
    old: str
    new: str
    noticed_by: Check

    @property
    def name(self) -> str:
        return f"{_plain(self.function).__qualname__}: {self.old.strip()} → {self.new.strip()}"


def require_caught(mutation: Mutation, patch: pytest.MonkeyPatch) -> None:
    """The check passes, and fails once the changed code is put into the function itself.

    Every import of the function has it then.
    """
    mutation.noticed_by()
    function = _plain(mutation.function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutation.old) == 1, f"{mutation.old} is not once in {function.__name__}"
    space = dict(function.__globals__)
    exec(compile(source.replace(mutation.old, mutation.new), "<mutated>", "exec"), space)
    patch.setattr(function, "__code__", _plain(space[function.__name__]).__code__)
    with pytest.raises((Exception, pytest.fail.Exception)) as raised:
        mutation.noticed_by()
    assert not isinstance(raised.value, NameError), raised.value


def _plain(function: Any) -> FunctionType:
    """The function of a method or property, without what wraps it."""
    if isinstance(function, property):
        function = function.fget
    plain = inspect.unwrap(getattr(function, "__func__", function))
    assert isinstance(plain, FunctionType)
    return plain
