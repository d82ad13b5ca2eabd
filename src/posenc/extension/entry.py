"""Registry entry of a method of extension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Literal

from torch import nn

from posenc.arguments import domains, typed
from posenc.encoding import Encoding
from posenc.encoding.entry import Citation

CONTEXT = ("factor", "length")
"""Parameters of a method that are not its options."""


@dataclass(frozen=True, kw_only=True)
class ExtensionClaims:
    """Properties of a method, verified by tests.

    Args:
        identity_at_one: a factor of 1 changes nothing.
        decodes_as_whole: decoding with a cache across the trained length equals one pass.
        short_unchanged: nothing changes below the trained length.
        stays_relative: an encoding of offsets alone remains one.
        training: fine-tuning that it is meant for: ``"none"``, ``"helps"`` or ``"needed"``.
        expect: expected behaviour past the trained length, in a sentence.
        cost: extra work and memory, in Q, K, D, H.
        transformers: its ``rope_type`` in transformers, if any.
    """

    identity_at_one: bool = True
    decodes_as_whole: bool = True
    short_unchanged: bool = False
    stays_relative: bool = True
    training: Literal["none", "helps", "needed"]
    expect: str
    cost: str = "none"
    transformers: str | None = None


@dataclass(frozen=True, kw_only=True)
class Extension(ExtensionClaims):
    """A method in the registry of extensions, with its claims.

    Args:
        function: from a trained encoding to an extended one (of level ``"model"``, from a model to
            a model); all other parameters are keyword-only, and checked against their annotations.
        summary: its effect, in a sentence.
        on: names of the encodings it fits, or ``"any"``.
        citation: of the publication; by default that in the function's docstring.
        sample: arguments for laws with 6 trained tokens, heads of 8 and a factor of 2.
        level: changes the encoding of each layer, or the whole model.
        advice: from the function's arguments to notes on its use with them.
        trials: ways to try it on models of a kind where all methods are tried: what follows its
            name, such as ``"@prefix=1"``. Kinds are ``"text_table"``, whose first row is that of
            [CLS], ``"image_table"`` and ``"short"``, of lengths below 1024.
    """

    function: Callable[..., Encoding] | Callable[..., nn.Module]
    summary: str
    on: tuple[str, ...]
    citation: Citation | None = None
    sample: Mapping[str, object] = field(default_factory=dict)
    level: Literal["encoding", "model"] = "encoding"
    advice: Callable[..., tuple[str, ...]] | None = None
    trials: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.citation is None:
            object.__setattr__(self, "citation", Citation.of(self.function))
        object.__setattr__(self, "function", typed(self.function))
        if self.advice is not None:
            object.__setattr__(self, "advice", typed(self.advice))

    @property
    def claims(self) -> ExtensionClaims:
        """The claims alone."""
        return self

    def parameters(self) -> Mapping[str, Parameter]:
        """Keyword parameters of the function, with resolved annotations."""
        return domains(self.function)

    def options(self) -> dict[str, Parameter]:
        """Parameters other than ``factor`` and ``length``."""
        return {n: p for n, p in self.parameters().items() if n not in CONTEXT}
