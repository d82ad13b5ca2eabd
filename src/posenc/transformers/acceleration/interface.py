"""``attn_implementation="posenc"``: posenc in the attention interface of transformers.

A layer's window (Gemma's, say) comes as a mask function: ``mask`` keeps it instead of writing out
all pairs, and ``attention`` calls ``attend`` with the grid that ``patterns`` reads from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, masking_utils

from posenc.attention import attend
from posenc.encoding import BucketedTerms, LowRank, StructuredScore
from posenc.encoding.prepared import entering
from posenc.errors import ArgumentError
from posenc.grid import FARTHEST, Grid
from posenc.runtime import is_exporting, is_scripted
from posenc.transformers.acceleration.accelerated import (
    AS_IT_WAS,
    CAUSAL_KEYS,
    KEYS,
    NAME,
    settings_of,
    takes_added_masks,
    wants_weights,
)
from posenc.transformers.acceleration.masks import (
    LazyMask,
    VisiblePairs,
    carrying,
    grid_behind,
    grid_of,
    pairs_behind,
    written_out,
)
from posenc.transformers.acceleration.patterns import (
    MaskFunction,
    Pattern,
    Place,
    grid_of_function,
    padded,
)
from posenc.transformers.acceleration.routing import (
    AS_FAST,
    ORIGINAL,
    are_enough,
    attend_all,
    dense_attention,
    may_gain,
    note,
    note_kernel,
    note_plain,
    plain_attention,
)
from posenc.transformers.acceleration.terms import ComputedOnce, encoding_of

REFUSED_OPTIONS = frozenset({"block_indices", "cache", "indices", "sinks"})
"""Options that change attention and are not read. Models hand on all that they are called with,
such as options of losses; what else their layers name says nothing beyond the mask."""

BOUNDARIES = frozenset({"cu_seq_lens_q", "cu_seq_lens_k"})
"""Options in which FlashAttention finds the documents of a row, as collators add them."""

NAMED = REFUSED_OPTIONS | BOUNDARIES


@dataclass(eq=False)
class PositionBias(ComputedOnce):
    """A position bias of transformers in structured form, in place of the ``[1, H, Q, K]`` tensor.

    Models hand it from layer to layer.

    Args:
        terms: its terms; () for a bias of zeros.
        compute: the model's own function, which computes the tensor.
    """

    terms: tuple[BucketedTerms, ...] = ()
    compute: Callable[[], Tensor | None] = lambda: None


def attention(
    module: nn.Module,
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K E"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: PositionBias | Tensor | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "B Q H E"], Tensor | None]:
    """Attention as transformers calls it.

    Args:
        module: the layer.
        attention_mask: from ``mask``; ``[B, 1, Q, K]``, all that may be seen (bool) or what is
            added to the logits; ``[B, K]``, False for padding; or None, where all is seen.
        is_causal: True is refused without a mask; else the mask has it, as in eager attention.
        position_bias: added to the logits.
        softcap: c of ``c · tanh(s / c)``, which logits become before they are masked.
        s_aux: ``[H]``, sinks: logits that only the sum of the softmax sees.
        options: ``output_attentions`` makes the weights; others are not read. ``BOUNDARIES`` need a
            mask that shows the documents that ``position_ids`` pack into a row.

    Returns:
        The output, contiguous, and, if asked for, the weights ``[B, H, Q, K]``.

    Raises:
        ArgumentError: for an option of ``REFUSED_OPTIONS`` that is not None, such as paged caches
            (``cache``); for ``is_causal=True`` without a mask.
    """
    # Norms of queries and keys leave them wider than values under autocast.
    if query.dtype != value.dtype or key.dtype != value.dtype:
        query, key = query.to(value.dtype), key.to(value.dtype)
    changed = position_bias is not None or softcap is not None or s_aux is not None or dropout
    if not changed and NAMED.isdisjoint(options):
        output = _of_one_query(module, query, key, value, attention_mask, scaling, options)
        if output is not None:
            return output, None
    queries, keys = query.shape[2], key.shape[2]
    grid = grid_behind(attention_mask, queries, keys)
    if not NAMED.isdisjoint(options):
        _require_read(options, grid)
    if is_causal and attention_mask is None and queries > 1:
        raise ArgumentError(
            "attention_mask",
            expected="a mask beside is_causal=True, which does not say which tokens queries are",
            got=None,
            remedy="Make one by transformers' create_causal_mask.",
        )
    if attention_mask is None or attention_mask.dim() == 2:
        grid = grid_of(queries, keys, attention_mask, device=query.device)
    settings = settings_of(module)
    with_weights = wants_weights(module, options)
    of_terms = position_bias is None or isinstance(position_bias, PositionBias)
    terms: tuple[StructuredScore, ...] = getattr(position_bias, "terms", ())
    options_of_call: dict[str, Any] = {"dropout": dropout, "scale": scaling}
    if of_terms and grid is not None and not with_weights:
        extras = {"a bias": terms or None, "sinks": s_aux, "a soft cap": softcap}
        changes = [name for name, extra in extras.items() if extra is not None]
        output = None
        plain = not changes and settings.backend == "auto" and settings is not AS_IT_WAS
        enough = are_enough(query, grid, settings.shortest)
        if plain and not (queries > 1 and enough and may_gain(query)):
            output = plain_attention(query, key, value, grid, **options_of_call)
        if output is not None:
            note_plain(module, grid)
        elif enough:
            note_kernel(module, grid, changes)
            if torch.compiler.is_compiling() and softcap is None and grid.band[0] > -FARTHEST:
                grid, terms = _padding_as_term(grid, terms, query)
            options_of_call |= {"backend": settings.backend, "sinks": s_aux, "softcap": softcap}
            with entering(settings.prepared):
                output = attend(query, key, value, grid, encoding_of(*terms), **options_of_call)
        if output is not None:
            return output.transpose(1, 2).contiguous(), None
    reason = "weights are asked for" if with_weights else "a mask of all pairs"
    note(module, ORIGINAL, lambda: reason)
    bias = position_bias.dense if isinstance(position_bias, PositionBias) else position_bias
    mask = _all_pairs(attention_mask, query.dtype)
    options_of_call |= {"with_weights": with_weights, "sinks": s_aux, "softcap": softcap}
    written, weights = dense_attention(query, key, value, bias, mask, **options_of_call)
    return written.transpose(1, 2).contiguous(), weights


def _of_one_query(
    module: nn.Module,
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K E"],
    mask: Tensor | None,
    scale: float | None,
    options: Mapping[str, Any],
) -> Float[Tensor, "B 1 H E"] | None:
    """Attention of one query without padding, as in decoding; None for other calls.

    Where a step has read all weights, each line of Python waits for memory: these are few.
    """
    if type(mask) is not LazyMask or mask.seen_by_one is None or torch.compiler.is_compiling():
        return None
    (begin, end, keys), settings = mask.seen_by_one, settings_of(module)
    if keys != key.shape[2] or settings.backend != "auto" or settings is AS_IT_WAS:
        return None
    if wants_weights(module, options):
        return None
    if end - begin < keys:
        key, value = key[:, :, begin:end], value[:, :, begin:end]
    note(module, ORIGINAL, lambda: f"one query, {AS_FAST}")
    output = attend_all(query, key, value, None, dropout=0.0, scale=scale)
    return output.transpose(1, 2).contiguous()


def _padding_as_term(
    grid: Grid, terms: tuple[StructuredScore, ...], query: Float[Tensor, "B H Q D"]
) -> tuple[Grid, tuple[StructuredScore, ...]]:
    """A grid without its padding, and terms that hide it: in graphs, kernels cannot read it."""
    valid = grid.key.valid
    if valid is None:
        return grid, terms
    lowest = torch.finfo(query.dtype).min / 2  # finite, also with a logit
    added = query.new_zeros(valid.shape).masked_fill(~valid, lowest)[:, None, :, None]
    ones = query.new_ones(1, 1, 1, 1).expand(1, *query.shape[1:3], 1)
    hiding = LowRank(ones, added.expand(-1, query.shape[1], -1, -1))
    return replace(grid, key=replace(grid.key, valid=None)), (*terms, hiding)


def _require_read(options: Mapping[str, Any], grid: Grid | None) -> None:
    """Refuse options that say something about attention and are not read.

    Args:
        grid: of the mask; None for none, or one of all pairs.
    """
    refused = REFUSED_OPTIONS if _says_packed(grid, options) else REFUSED_OPTIONS | BOUNDARIES
    for name, option in options.items():
        if option is None or name not in refused:
            continue
        expected = "None, since posenc's attention does not read it"
        remedy = "Use attn_implementation='eager' for this model."
        if name in BOUNDARIES:
            expected = "None, or boundaries of documents that the mask shows too, as most models'"
            expected += " does by position_ids that begin anew with each"
            remedy = "Put one document into a row."
        raise ArgumentError(name, expected=expected, got=type(option).__name__, remedy=remedy)


def _says_packed(grid: Grid | None, options: Mapping[str, Any]) -> bool:
    """True if a mask shows several documents in a row, or boundaries are of one."""
    if grid is not None and grid.key.document is not None:
        return True
    given = [options[name] for name in BOUNDARIES if options.get(name) is not None]
    return all(len(boundaries) <= 2 for boundaries in given)


def _all_pairs(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask of all pairs, bool or added to logits of this dtype; None if it hides nothing."""
    pairs = pairs_behind(mask)
    if pairs is not None and pairs.hide_nothing:
        return None
    written = written_out(mask)
    if written is not None and written.dim() == 2:
        return written[:, None, None]
    if written is not None and written.is_floating_point():
        return written.to(dtype)  # autocast has made the logits' another
    return written


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *arguments: Any,
    dtype: torch.dtype = torch.float32,
    config: PreTrainedConfig | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Shaped[Tensor, "B 1 Q K"]:
    """The mask that ``attention`` takes, made as transformers makes masks, and never None.

    Models that read it find the one of ``"sdpa"``, or of ``"eager"`` if they lack that. Of one
    query behind a static cache it is written out: ``generate`` gives it to a compiled model.

    Args: as ``pairs_of``, and ``dtype`` and ``config`` of the model.

    Raises:
        ArgumentError: for a model whose attention is not on transformers' attention interface.
    """
    if not takes_added_masks(config):
        dtype = torch.bool
    options |= {"config": config, "device": device}
    pairs = pairs_of(batch_size, q_length, kv_length, *arguments, **options)
    crossing = "allow_is_bidirectional_skip" in options
    if q_length == 1 and not (crossing or options.get("allow_is_causal_skip", True)):
        return pairs.written(dtype)
    shape = batch_size, 1, q_length, kv_length
    return carrying(pairs, shape, dtype, torch.device(device))


def pairs_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Bool[Tensor, "B L"] | None = None,
    *,
    config: PreTrainedConfig | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> VisiblePairs:
    """The pairs that a mask of transformers lets through.

    Their grid follows from the mask's function, since layers and options say otherwise in some
    models. While a graph is made, what a function holds cannot be read: see ``_pattern_in_graph``.
    """

    sizes = batch_size, q_length, kv_length

    def visible() -> Tensor:
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        arguments = (*sizes, q_offset, kv_offset, mask_function, attention_mask)
        made: Any = masking_utils.sdpa_mask(*arguments, device=device, **options | skips)
        return cast(Tensor, made)

    if not (is_scripted() or torch.compiler.is_compiling() or torch.device(device).type == "meta"):
        place = Place(*sizes, int(q_offset), kv_offset, torch.device(device))
        use_vmap = bool(options.get("use_vmap"))
        find = partial(grid_of_function, mask_function, place, attention_mask, use_vmap=use_vmap)
        if not use_vmap:
            return VisiblePairs(find, visible)
        # PyTorch maps no function while an operator reads a mask.
        grid = find()
        if grid is None:
            return _written(visible())
        known_grid, shape = grid, (batch_size, 1, q_length, kv_length)
        return VisiblePairs(lambda: known_grid, lambda: known_grid.visible.expand(shape))
    pattern = None
    if not (is_scripted() or isinstance(q_offset, Tensor)):  # a tensor in static caches
        place = Place(*sizes, q_offset, kv_offset, torch.device(device))
        pattern = _pattern_in_graph(mask_function, place, config, attention_mask, options)
    if pattern is None:
        return _written(visible())
    graph_grid = padded(pattern, place, attention_mask).grid(place)
    return VisiblePairs(lambda: graph_grid, visible)


def _written(pairs: Bool[Tensor, "B 1 Q K"]) -> VisiblePairs:
    return VisiblePairs(lambda: None, lambda: pairs)


def keys_mask(causal: bool) -> Callable[..., Bool[Tensor, "B *pairs"] | None]:
    """Masks for accelerated modules that are causal themselves, or see all keys themselves.

    Returns:
        A function that makes a mask: ``[B, K]``, False for padding, or None without padding, if
        that and ``causal`` is all it says of the last tokens; else ``[B, 1, Q, K]``.
    """

    def made(*arguments: Any, dtype: Any = None, **options: Any) -> Tensor | None:
        pairs = pairs_of(*arguments, **options)
        grid = pairs.grid
        if grid is not None and grid.band == (-FARTHEST, 0 if causal else FARTHEST):
            last = grid.shift == grid.query.length - grid.key.length
            if (last or not causal) and grid.intervals is grid.key.document is None:
                return grid.key.valid
        return cast(Tensor, pairs.dense)

    return made


def register() -> None:
    """Add the implementation ``"posenc"`` to transformers; also done by importing this package.

    A model that names it is computed as after ``accelerate``: calls of fewer than ``SHORTEST`` keys
    are left to PyTorch; ``accelerate(model, shortest=…)`` sets another number.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    for name, causal in ((KEYS, False), (CAUSAL_KEYS, True)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, keys_mask(causal))


register()


def _pattern_in_graph(
    function: MaskFunction,
    place: Place,
    config: Any,
    attended: Bool[Tensor, "B L"] | None,
    options: Mapping[str, Any],
) -> Pattern | None:
    """The pattern of a causal function or a window, also of packed documents; None of others.

    While a graph is made of a model, what a function holds cannot be read, nor the numbers in a
    tensor. Its code and the shape of its result tell functions apart; the options and the config
    that a mask is made with say the window.

    Args:
        config: of the model; None if it is not known.
        attended: False for padding, beside which transformers packs no documents.
        options: further ones of the mask.
    """
    if function is masking_utils.causal_mask_function:
        return Pattern(high=0)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if is_exporting():  # other runtimes have no kernels that skip pairs
        return None
    if options.get("use_vmap") or getattr(function, "__code__", None) is not OF_SEVERAL:
        return None
    window, plain = options.get("local_size"), not _reads_tensors(function, place)
    if window is not None and window != getattr(config, "sliding_window", None):
        return None
    if "allow_is_bidirectional_skip" in options:
        return Pattern(-window, window) if plain and window is not None else None
    band = Pattern(high=0) if window is None else Pattern(1 - window, 0)
    if plain:
        return None if window is None else band
    alike = (place.queries, place.first) == (place.keys, place.start)
    if attended is not None or not alike or getattr(config, "attention_chunk_size", None):
        return None
    return band & Pattern(intervals=_documents(function, place))


def _reads_tensors(function: MaskFunction, place: Place) -> bool:
    """True if a mask function reads tensors by the batch row: no row leaves all in the result."""
    one = torch.zeros(1, dtype=torch.int64, device=place.device)
    return bool(function(None, None, one, one).dim() > 1)


def _documents(function: MaskFunction, place: Place) -> Int[Tensor, "B Q 2"]:
    """Intervals from a query's document on; one begins where a token is not seen by the next."""
    index = place.index
    row = torch.arange(place.batch, device=place.device)[:, None]
    same = function(row, None, index[:, 1:], index[:, :-1]).expand(place.batch, -1)
    begins = torch.nn.functional.pad(index[:, 1:].where(~same, 0), (1, 0)).cummax(-1).values
    return torch.stack([begins, (index + 1).expand_as(begins)], dim=-1)


OF_SEVERAL = masking_utils.and_masks().__code__
"""Code of functions that hold where several do."""
