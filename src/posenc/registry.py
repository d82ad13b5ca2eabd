"""Creation of encodings by name."""

from __future__ import annotations

import functools
import operator

from posenc.arguments import Count, Length, Width, check, head_width
from posenc.encoding import Encoding
from posenc.encoding.entry import Entry
from posenc.registration import Registry, assign_options, parse_name, with_context

ENCODINGS: Registry[Entry] = Registry(
    Entry,
    "encoding",
    "posenc.encodings",
    "posenc.encodings.embedding",
    "posenc.encodings.query_key",
    "posenc.encodings.score",
    "posenc.encodings.value",
    group="posenc.encodings",
)
"""All encodings by name, including those of other packages."""


def create(
    name: str,
    *,
    dim: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    max_length: int | None = None,
    causal: bool | None = None,
    **options: object,
) -> Encoding:
    """The encoding called ``name``, for one layer.

    Args:
        name: a key of ``ENCODINGS``, or several joined by ``+`` (``"rope+alibi"``); options may
            follow, each after an ``@`` (``"alibi@learned=true"``).
        dim: width C of the model.
        heads: query heads H.
        head_dim: width D of a head; ``dim / heads`` if both are given.
        max_length: number of positions of a learned table.
        causal: attention has a causal mask, for methods that depend on it (T5's buckets).
        **options: the method's own options, as ``posenc show NAME`` lists them. With joined
            names an option goes to the one method that has it.

    Raises:
        UnknownNameError: for an unknown name or option, with close matches.
        ArgumentError: if a required dimension is missing, or an option is out of range.
    """
    return create_layers(
        name,
        layers=1,
        dim=dim,
        heads=heads,
        head_dim=head_dim,
        max_length=max_length,
        causal=causal,
        **options,
    )[0]


def create_layers(
    name: str,
    *,
    layers: int,
    dim: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    max_length: int | None = None,
    causal: bool | None = None,
    **options: object,
) -> list[Encoding]:
    """The ``layers`` encodings of a model, sharing exactly what the paper shares.

    T5's layers share one table, RoPE's need none of their own, Shaw's each have one. An embedding
    part enters before the first block only (unless ``every_layer``), so it is the first
    encoding's; the others carry the same module.

    Args and Raises: as ``create``; also ArgumentError for ``layers`` below 1.
    """
    parsed = parse_name(ENCODINGS, name)
    layers = check("layers", Count, layers)
    context: dict[str, int | None] = {
        "dim": check("dim", Width | None, dim),
        "heads": check("heads", Count | None, heads),
        "head_dim": check("head_dim", Width | None, head_dim),
        "max_length": check("max_length", Length | None, max_length),
        "causal": check("causal", bool | None, causal),
    }
    if head_dim is None and dim is not None and heads is not None:
        context["head_dim"] = head_width(dim, heads)
    remedy = "Create each by itself and add them: create(...) + create(...)."
    given = parsed.options_with(options)
    chosen = assign_options(given, parsed.entries, context, remedy=remedy)
    stacks = []
    for method, entry in parsed.entries.items():
        arguments = with_context(
            *(chosen[method], entry.parameters(), context, method), remedy="Pass {}=… to create."
        )
        stacks.append(entry.layers(layers, arguments))
    return [functools.reduce(operator.add, parts) for parts in zip(*stacks, strict=True)]
