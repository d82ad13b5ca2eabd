"""Every method by name."""

from __future__ import annotations

from collections.abc import Mapping

from posenc.arguments import Count, Length, Width, check
from posenc.encoding import Encoding, Part
from posenc.encodings import nope
from posenc.encodings.embedding import (
    abacus,
    complex_order,
    conv,
    floater,
    fourier,
    gaussian_fourier,
    hierarchical,
    learned,
    learned2d,
    multiplicative,
    multiplicative_shared,
    radix,
    recursive,
    row_column,
    seqpe,
    sine2d,
    sinusoidal,
)
from posenc.encodings.query_key import (
    comrope,
    fope,
    grape_contextual,
    grape_multiplicative,
    lierope,
    mrope,
    p_rope,
    pope,
    rope,
    rope2d,
    rope_mixed,
    rope_pp,
    xpos,
)
from posenc.encodings.score import (
    alibi,
    cable,
    contextual,
    cope,
    dape,
    deberta,
    decomposed2d,
    dynamic_bias,
    fire,
    forgetting,
    grape_additive,
    irpe,
    kerple,
    path,
    relative_bias,
    sandwich,
    shaw,
    stick_breaking,
    swin,
    swin_v2,
    t5,
    transformer_xl,
    tupe,
    xlnet,
)
from posenc.entry import CONTEXT, Entry
from posenc.errors import ArgumentError, UnknownNameError

__all__ = ["ENCODINGS", "create", "create_layers"]

ENCODINGS: dict[str, Entry] = {
    "abacus": abacus.ENTRY,
    "alibi": alibi.ENTRY,
    "cable": cable.ENTRY,
    "complex_order": complex_order.ENTRY,
    "comrope": comrope.ENTRY,
    "contextual": contextual.ENTRY,
    "conv": conv.ENTRY,
    "cope": cope.ENTRY,
    "dape": dape.ENTRY,
    "deberta": deberta.ENTRY,
    "decomposed2d": decomposed2d.ENTRY,
    "dynamic_bias": dynamic_bias.ENTRY,
    "fire": fire.ENTRY,
    "floater": floater.ENTRY,
    "fope": fope.ENTRY,
    "forgetting": forgetting.ENTRY,
    "fourier": fourier.ENTRY,
    "gaussian_fourier": gaussian_fourier.ENTRY,
    "grape_additive": grape_additive.ENTRY,
    "grape_contextual": grape_contextual.ENTRY,
    "grape_multiplicative": grape_multiplicative.ENTRY,
    "hierarchical": hierarchical.ENTRY,
    "irpe": irpe.ENTRY,
    "kerple": kerple.ENTRY,
    "learned": learned.ENTRY,
    "learned2d": learned2d.ENTRY,
    "lierope": lierope.ENTRY,
    "mrope": mrope.ENTRY,
    "multiplicative": multiplicative.ENTRY,
    "multiplicative_shared": multiplicative_shared.ENTRY,
    "nope": nope.ENTRY,
    "p_rope": p_rope.ENTRY,
    "path": path.ENTRY,
    "pope": pope.ENTRY,
    "radix": radix.ENTRY,
    "recursive": recursive.ENTRY,
    "relative_bias": relative_bias.ENTRY,
    "rope": rope.ENTRY,
    "rope2d": rope2d.ENTRY,
    "rope_mixed": rope_mixed.ENTRY,
    "rope_pp": rope_pp.ENTRY,
    "row_column": row_column.ENTRY,
    "sandwich": sandwich.ENTRY,
    "seqpe": seqpe.ENTRY,
    "shaw": shaw.ENTRY,
    "sine2d": sine2d.ENTRY,
    "sinusoidal": sinusoidal.ENTRY,
    "stick_breaking": stick_breaking.ENTRY,
    "swin": swin.ENTRY,
    "swin_v2": swin_v2.ENTRY,
    "t5": t5.ENTRY,
    "transformer_xl": transformer_xl.ENTRY,
    "tupe": tupe.ENTRY,
    "xlnet": xlnet.ENTRY,
    "xpos": xpos.ENTRY,
}


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
        name: a key of ``ENCODINGS``, or several joined by ``+`` (``"rope+alibi"``).
        dim: width C of the model.
        heads: query heads H.
        head_dim: width D of a head; ``dim / heads`` where both are given.
        max_length: positions a learned table holds.
        causal: whether queries see the past only, for methods that then differ (T5's buckets).
        **options: the method's own options, as ``posenc show NAME`` lists them. With joined
            names an option goes to the one method that has it.

    Raises:
        UnknownNameError: on a name or option that does not exist, with the close matches.
        ArgumentError: when a dimension the method needs is missing, or an option is out of its
            domain.
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
    check("name", str, name)
    layers = check("layers", Count, layers)
    context: dict[str, int | None] = {
        "dim": check("dim", Width | None, dim),
        "heads": check("heads", Count | None, heads),
        "head_dim": check("head_dim", Width | None, head_dim),
        "max_length": check("max_length", Length | None, max_length),
        "causal": check("causal", bool | None, causal),
    }
    if head_dim is None and dim is not None and heads is not None:
        if dim % heads:
            raise ArgumentError(
                "dim",
                expected=f"a multiple of heads ({heads})",
                got=dim,
                remedy="Change dim or heads, or give head_dim.",
            )
        context["head_dim"] = dim // heads
    names = [part.strip() for part in name.split("+")]
    entries = [(part, _entry(part)) for part in names]
    chosen = _assign(options, entries)
    stacks = [_stack(part, entry, layers, context, chosen[part]) for part, entry in entries]
    joined = stacks[0]
    for stack in stacks[1:]:
        joined = [first + second for first, second in zip(joined, stack, strict=True)]
    return joined


def _entry(name: str) -> Entry:
    if name not in ENCODINGS:
        raise UnknownNameError.of("encoding", name, ENCODINGS)
    return ENCODINGS[name]


def _assign(
    options: Mapping[str, object], entries: list[tuple[str, Entry]]
) -> dict[str, dict[str, object]]:
    """Give each option to the one method among ``entries`` that has it."""
    chosen: dict[str, dict[str, object]] = {name: {} for name, _ in entries}
    if len(chosen) < len(entries):
        raise ArgumentError(
            "encoding",
            expected="each name once",
            got="+".join(name for name, _ in entries),
            remedy="Drop the repeated name.",
        )
    for option, value in options.items():
        owners = [name for name, entry in entries if option in entry.options()]
        if not owners:
            valid = [o for _, entry in entries for o in entry.options()]
            raise UnknownNameError.of(f"option of {'+'.join(chosen)}", option, valid)
        if len(owners) > 1:
            raise ArgumentError(
                option,
                expected="an option of one method",
                got=f"one that {' and '.join(owners)} both have",
                remedy="Create each by itself and add them: create(...) + create(...).",
            )
        chosen[owners[0]][option] = value
    return chosen


def _stack(
    name: str,
    entry: Entry,
    layers: int,
    context: Mapping[str, int | None],
    options: Mapping[str, object],
) -> list[Encoding]:
    arguments = dict(options)
    for parameter, description in entry.parameters().items():
        if parameter in CONTEXT:
            value = context[parameter]
            if value is not None:
                arguments[parameter] = value
        if parameter not in arguments and description.default is description.empty:
            raise ArgumentError(
                parameter,
                expected=f"a value, which {name} needs",
                got="none",
                remedy=f"Pass {parameter}=… to create.",
            )
    if callable(entry.sharing):
        return entry.sharing(layers, arguments)
    if entry.sharing == "layers":
        return [_record(entry.factory(**arguments))] * layers
    return [_record(entry.factory(**arguments)) for _ in range(layers)]


def _record(made: Part | Encoding) -> Encoding:
    return made if isinstance(made, Encoding) else Encoding.of(made)
