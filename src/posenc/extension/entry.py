"""Entries of the registry of extensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Literal

from torch import nn

from posenc.arguments import domains
from posenc.encoding import Encoding
from posenc.entry import Citation

__all__ = ["CONTEXT", "Extension", "ExtensionClaims"]

CONTEXT = ("factor", "length")
"""Parameters of a method that say how far to stretch; all others are its options."""


@dataclass(frozen=True, kw_only=True)
class ExtensionClaims:
    """Claims of a method, held by tests.

    Args:
        identity_at_one: stretched by 1 it changes nothing.
        decodes_as_whole: one token at a time with a cache, across the trained length, equals one
            pass over the whole.
        short_unchanged: below the trained length nothing changes.
        training: whether it is meant to be followed by fine-tuning: ``"none"``, ``"helps"`` or
            ``"needed"``.
        expect: what to expect past the trained length, in a sentence.
        cost: extra work and memory, in Q, K, D, H.
        transformers: the ``rope_type`` under which transformers knows it; None: it does not.
    """

    identity_at_one: bool = True
    decodes_as_whole: bool = True
    short_unchanged: bool = False
    training: Literal["none", "helps", "needed"]
    expect: str
    cost: str = "none"
    transformers: str | None = None


@dataclass(frozen=True, kw_only=True)
class Extension:
    """A method in the registry of extensions.

    Args:
        function: a trained encoding (or, at the level of the model, a model) to a stretched one;
            all further parameters are keyword-only.
        summary: what it does, in a sentence.
        on: names of the encodings it fits.
        claims, citation: see there.
        sample: arguments that suit 6 trained tokens and heads of 8, for laws that stretch by 2.
        level: what it changes: the encoding of each layer, or the model as a whole.
        advice: with the function's arguments, what to know before it is used as told; may be
            empty.
    """

    function: Callable[..., Encoding] | Callable[..., nn.Module]
    summary: str
    on: tuple[str, ...]
    claims: ExtensionClaims
    citation: Citation | None
    sample: Mapping[str, object] = field(default_factory=dict)
    level: Literal["encoding", "model"] = "encoding"
    advice: Callable[..., tuple[str, ...]] | None = None

    def parameters(self) -> Mapping[str, Parameter]:
        """The function's keyword parameters by name, their annotations resolved."""
        return domains(self.function)

    def options(self) -> dict[str, Parameter]:
        """The method's options: all parameters but ``factor`` and ``length``."""
        return {n: p for n, p in self.parameters().items() if n not in CONTEXT}
