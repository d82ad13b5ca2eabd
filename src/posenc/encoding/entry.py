"""Registry entry of a method: factory, claims and citation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any, Literal

from posenc.arguments import domains
from posenc.encoding.encoding import Encoding
from posenc.encoding.parts import Part

Site = Literal["embedding", "query_key", "score", "value"]
Factory = Callable[..., Part | Encoding]

CONTEXT = ("dim", "heads", "head_dim", "max_length", "causal")
"""Factory parameters taken from the model; all others are the method's options."""

REFERENCE = re.compile(r'Reference: (.+?) (\d{4}), "(.+?)", (https://\S+?)[.,;]?(?:\s|$)')


@dataclass(frozen=True, kw_only=True)
class Citation:
    """Publication of a method.

    Args:
        authors: family names, or "Vaswani et al.".
        title, year: of the paper.
        url: arXiv, ACL anthology or DOI.
    """

    authors: str
    title: str
    year: int
    url: str

    @classmethod
    def of(cls, method: object) -> Citation | None:
        """The citation in a docstring, ``Reference: AUTHORS YEAR, "TITLE", URL``, if there is one.

        Args:
            method: a class or function.
        """
        match = REFERENCE.search(" ".join((inspect.getdoc(method) or "").split()))
        if match is None:
            return None
        authors, year, title, url = match.groups()
        return cls(authors=authors, title=title, year=int(year), url=url)


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Properties of a method, which the laws in ``posenc.testing`` verify.

    Args:
        sites: the sites of its parts.
        relative: invariant to a shift of all positions.
        axes: supported numbers of position axes; None: any.
        trainable: has parameters.
        causal_only: requires a causal mask.
        length_dependent: the score of a pair depends on the number of tokens.
        extrapolates: expected behaviour past the training length, in a sentence.
        cost: extra work and memory, in Q, K, D, H, N.
        exceptions: laws that it does not satisfy, or parts of laws as named in
            ``posenc.testing.PARTIAL``, with the reason.

    If the factory is a part's class, ``Entry`` takes sites, axes and causal_only from it.
    """

    sites: tuple[Site, ...] = ()
    relative: bool
    axes: tuple[int, ...] | None = (1,)
    trainable: bool
    causal_only: bool = False
    length_dependent: bool = False
    extrapolates: str
    cost: str
    exceptions: Mapping[str, str] = field(default_factory=dict)

    def serves(self, axes: int) -> bool:
        """True if positions may have this many axes."""
        return self.axes is None or axes in self.axes


@dataclass(frozen=True, kw_only=True)
class Entry(Claims):
    """A method in the registry, with its claims.

    Args:
        factory: makes the part or an encoding; its parameters are keyword-only.
        summary: its effect, in a sentence.
        citation: of the publication; by default that in the factory's docstring.
        sample: options of the instance used by laws and pictures (a table large enough for 160
            positions, for example).
        sharing: ``"layers"`` if all layers share one instance, ``"none"`` if each has its own; or
            a function that makes the parts of all layers share some of their modules.
    """

    factory: Factory
    summary: str
    citation: Citation | None = None
    sample: Mapping[str, object] = field(default_factory=dict)
    sharing: Literal["layers", "none"] | Callable[[Sequence[Any]], None] = "none"

    def __post_init__(self) -> None:
        kind = self.factory
        if self.citation is None:
            object.__setattr__(self, "citation", Citation.of(kind))
        if not (isinstance(kind, type) and issubclass(kind, Part)):
            return
        sites = tuple(site for site, part in Encoding.SITES.items() if issubclass(kind, part))
        object.__setattr__(self, "sites", self.sites or sites)
        object.__setattr__(self, "axes", kind.axes if self.axes == (1,) else self.axes)
        object.__setattr__(self, "causal_only", self.causal_only or kind.causal_only)

    @property
    def claims(self) -> Claims:
        """The claims alone."""
        return self

    def layers(self, count: int, arguments: Mapping[str, object]) -> list[Encoding]:
        """The encodings of ``count`` layers, sharing what the method shares."""
        shared = self.sharing == "layers"
        parts = [self.factory(**arguments) for _ in range(1 if shared else count)]
        if callable(self.sharing):
            self.sharing(parts)
        encodings = [part if isinstance(part, Encoding) else Encoding.of(part) for part in parts]
        return encodings * (count // len(encodings))

    def parameters(self) -> Mapping[str, Parameter]:
        """The factory's parameters by name, with resolved annotations."""
        return domains(self.factory)

    def options(self) -> dict[str, Parameter]:
        """The factory's parameters except those in ``CONTEXT``."""
        return {n: p for n, p in self.parameters().items() if n not in CONTEXT}
