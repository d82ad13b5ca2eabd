"""What the registry knows of a method: how to make it, what it promises, where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Literal

from posenc.arguments import domains
from posenc.encoding import Encoding, Part

__all__ = ["CONTEXT", "Citation", "Claims", "Entry", "Factory", "Site"]

Site = Literal["embedding", "query_key", "score", "value"]
Factory = Callable[..., Part | Encoding]

CONTEXT = ("dim", "heads", "head_dim", "max_length", "causal")
"""Parameters of a factory that describe the model; all others are the method's options."""


@dataclass(frozen=True, kw_only=True)
class Citation:
    """Where a method was published.

    Args:
        authors: family names, or "Vaswani et al.".
        title, year: of the paper.
        url: a lasting address (arXiv, ACL anthology, DOI).
    """

    authors: str
    title: str
    year: int
    url: str


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What a method promises; the laws in ``posenc.testing`` hold it to this.

    Args:
        sites: the sites of its parts.
        relative: shifting all positions alike changes nothing.
        axes: numbers of position axes it serves; None: any number.
        trainable: it has parameters.
        causal_only: it is meaningless without a causal mask.
        length_dependent: what happens between two tokens depends on how many others there are.
        extrapolates: what to expect past the training length, in a sentence.
        cost: extra work and memory, in Q, K, D, H, N.
        exceptions: laws it does not keep, each with the reason; or parts of laws, by the names in
            ``posenc.testing.PARTIAL``.
    """

    sites: tuple[Site, ...]
    relative: bool
    axes: tuple[int, ...] | None = (1,)
    trainable: bool
    causal_only: bool = False
    length_dependent: bool = False
    extrapolates: str
    cost: str
    exceptions: Mapping[str, str] = field(default_factory=dict)

    def serves(self, axes: int) -> bool:
        """Whether positions may have so many axes."""
        return self.axes is None or axes in self.axes


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method in the registry.

    Args:
        factory: makes the part, or a record of parts; all its parameters are keyword-only.
        summary: what it does, in a sentence.
        claims, citation: see there.
        sample: options of the instance that laws and pictures are made with: a table large enough
            for 160 positions, say.
        sharing: ``"layers"`` when one instance serves all layers of a model, ``"none"`` when
            each layer has its own; or a function ``(layers, arguments) -> list`` where a paper
            shares some of it.
    """

    factory: Factory
    summary: str
    claims: Claims
    citation: Citation | None
    sample: Mapping[str, object] = field(default_factory=dict)
    sharing: Literal["layers", "none"] | Callable[[int, Mapping[str, object]], list[Encoding]] = (
        "none"
    )

    def parameters(self) -> Mapping[str, Parameter]:
        """The factory's parameters by name, their annotations resolved."""
        return domains(self.factory)

    def options(self) -> dict[str, Parameter]:
        """The factory's options: all parameters but those that describe the model."""
        return {n: p for n, p in self.parameters().items() if n not in CONTEXT}
