"""Masks of ``attn_implementation="posenc"`` against those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from posenc.transformers.acceleration import accelerate, interface, masks
from posenc.transformers.acceleration.interface import attention, keys_mask, mask
from posenc.transformers.acceleration.patterns import Pattern
from posenc.transformers.acceleration.routing import dense_attention
from tests.transformers.acceleration.cases import CASES
from tests.transformers.acceleration.test_interface import SERVED, heads, model_of

pytestmark = pytest.mark.usefixtures("at_all_lengths")

PADDING = torch.ones(2, 12, dtype=torch.bool)
PADDING[0, :3] = False
PADDING[1, 9:] = False
STEADY = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
EDGES = [torch.arange(12).ne(edge).expand(2, -1) for edge in (0, 11)]
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, 1, 1, -1], [3] * 7 + [-1] * 5])
PIECES = torch.tensor([[-1, 0, 0, 0, -1, -1, 0, 0, 0, -1, -1, -1], [-1] * 12])
DOCUMENTS = torch.arange(12).ge(5).long().expand(2, -1)


PACKED = packed_sequence_mask_function(DOCUMENTS)
INTERRUPTED = packed_sequence_mask_function(
    torch.tensor([0, 1, 0]).repeat_interleave(4).expand(2, -1)
)


def windows_of_packed() -> dict[str, Callable[..., Any]]:
    """Windows of 3 positions in packed documents; none where windows are of indices alone."""
    remapped = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    if remapped is None:  # before 5.23
        return {}
    window = sliding_window_causal_mask_function(3)
    steady, apart = (remapped(window, factor * STEADY) for factor in (1, 2))
    again = torch.arange(4).repeat(3).expand(2, -1)
    return {
        "window of packed": and_masks(PACKED, steady),
        "window of packed, the other way": and_masks(steady, PACKED),
        "window of positions apart": and_masks(PACKED, apart),
        "window of a document in pieces": and_masks(INTERRUPTED, remapped(window, again)),
    }


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": causal_mask_function,
    "full": bidirectional_mask_function,
    "window": sliding_window_causal_mask_function(3),
    "packed": and_masks(causal_mask_function, PACKED),
    "packed twice": and_masks(
        *(packed_sequence_mask_function(ids) for ids in (DOCUMENTS, DOCUMENTS.flip(1)))
    ),
    "chunks": chunked_causal_mask_function(5, torch.tensor([0, 3])),
    "two-sided": sliding_window_bidirectional_mask_function(2),
    "images": or_masks(sliding_window_causal_mask_function(3), blockwise_overlay(BLOCKS)),
    "image in pieces": or_masks(causal_mask_function, blockwise_overlay(PIECES)),
    "reaching ahead": lambda b, h, q, k: (k > q - 4) & (k <= q + 2),
    "prefix": or_masks(causal_mask_function, lambda b, h, q, k: k < 5 + b),
    **windows_of_packed(),
    "every other": lambda b, h, q, k: (k % 2 == q % 2) & (k <= q),
}
UNSKIPPED = {"allow_is_causal_skip": False}
UNKNOWN = {"image in pieces", "every other", "window of a document in pieces"}
PLACES = [(12, 12, 0, 0), (1, 12, 11, 0), (4, 12, 8, 0), (5, 12, 3, 0), (3, 8, 9, 4), (12, 7, 0, 0)]
"""Numbers of queries and of keys, and the first of each."""


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(
    "padding", [None, PADDING, *EDGES], ids=["whole", "padded", "first", "last"]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_stand_for_the_pairs_of_their_function(
    name: str, padding: Tensor | None, place: tuple[int, int, int, int]
) -> None:
    call: Any = (2, *place, FUNCTIONS[name], padding)
    expected = sdpa_mask(*call, allow_is_causal_skip=False)
    made = mask(*call)
    pairs = masks.pairs_behind(made)
    assert torch.equal(pairs.dense, expected)
    assert pairs.grid is not None or name in UNKNOWN
    if pairs.grid is not None:
        assert torch.equal(pairs.grid.visible.expand_as(expected), expected)
    queries, keys, first, start = place
    last = first + queries == start + keys
    for causal, known in ((False, name == "full"), (True, name == "causal" and last)):
        short = keys_mask(causal)(*call)
        if short is not None and short.dim() == 4:
            assert not known
            assert torch.equal(short, expected)
        else:  # the keys alone, which is all that the function shows here
            base = causal_mask_function if causal else bidirectional_mask_function
            assert torch.equal(expected, sdpa_mask(2, *place, base, padding, **UNSKIPPED))
            seen = None if padding is None else padding[:, start : start + keys]
            if seen is None or short is None:
                assert short is None
                assert seen is None or bool(seen.all())
            else:
                assert torch.equal(short, seen)


def test_masks_of_one_query_are_broadcast() -> None:
    tensors = heads(5, 12)
    one = mask(2, 1, 12, 0, 0, bidirectional_mask_function, PADDING)
    expected = attention(nn.Identity(), *tensors, PADDING)[0]
    torch.testing.assert_close(attention(nn.Identity(), *tensors, one)[0], expected)


def test_static_caches_give_the_first_query_as_a_tensor() -> None:
    call: Any = (2, 2, 12, torch.tensor(6))
    made = masks.pairs_behind(mask(*call))
    assert made.grid.shift == -6
    assert torch.equal(made.dense, sdpa_mask(*call, allow_is_causal_skip=False))


REACH = 3
"""Size of the window of ``by_global``."""

Function = Callable[..., Any]


def by_default(size: int) -> Function:
    return lambda row, head, query, key, size=size: (key > query - size) & (key <= query)


def by_keyword(size: int) -> Function:
    return lambda row, head, query, key, *, size=size: (key > query - size) & (key <= query)


def by_global(size: int) -> Function:
    return lambda row, head, query, key: (key > query - REACH) & (key <= query)


def by_inner_global(size: int) -> Function:
    return lambda *indices: (lambda *inner: by_global(0)(*inner))(*indices)


@pytest.mark.parametrize("make", [by_default, by_keyword, by_global, by_inner_global])
def test_functions_are_told_apart_by_all_that_they_read(
    make: Callable[[int], Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of one is not that of another with its code."""
    lag = torch.arange(12).unsqueeze(1) - torch.arange(12)
    for size in (3, 5):
        monkeypatch.setitem(globals(), "REACH", size)
        made = masks.pairs_behind(mask(2, 12, 12, 0, 0, make(size)))
        expected = (lag >= 0) & (lag < size)
        assert torch.equal(made.grid.visible.expand(2, 1, 12, 12), expected.expand(2, 1, -1, -1))


def test_masks_that_no_layer_reads_cost_nothing() -> None:
    """A model makes a mask for each kind of layer that its config may have."""
    calls = []

    def function(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        calls.append(len(calls))
        return causal_mask_function(row, head, query, key)

    made = masks.pairs_behind(mask(2, 5, 12, 7, 0, function))
    assert not calls
    assert made.grid is not None
    first = len(calls)
    assert made.grid is made.grid
    assert first == len(calls) > 0


@pytest.mark.parametrize(("padded", "causal"), [(False, False), (True, False), (False, True)])
def test_masks_that_hide_nothing_are_not_added_to_biases(
    padded: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a bias each layer would write one out for all pairs of all rows."""
    read = []

    def recorded(*given: Any, **options: Any) -> Any:
        read.append(given[4])
        return dense_attention(*given, **options)

    monkeypatch.setattr(interface, "dense_attention", recorded)
    function = causal_mask_function if causal else bidirectional_mask_function
    q, k, v = heads(12, 12)
    bias = torch.randn(1, 4, 12, 12)
    given = (2, 12, 12, 0, 0, function, PADDING if padded else None)
    got, _ = attention(nn.Identity(), q, k, v, mask(*given), position_bias=bias)
    assert (read[0] is None) == (not padded and not causal)
    seen = masks.written_out(mask(*given))
    expected, _ = dense_attention(q, k, v, bias, seen, dropout=0.0, scale=None)
    torch.testing.assert_close(got.transpose(1, 2), expected)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float64, "keys"])
@pytest.mark.parametrize("weights", [False, True])
def test_masks_that_models_make_themselves(kind: Any, weights: bool) -> None:
    """Of keys, of pairs, and numbers wider than autocast's queries."""
    q, k, v = (x.bfloat16() for x in heads(5, 12))
    pairs = PADDING[:, None, None].expand(2, 1, 5, 12)
    expected = (q.float() @ k.float().mT / 8**0.5).masked_fill(~pairs, -1e9).softmax(-1)
    seen = PADDING if kind == "keys" else pairs
    if kind in (torch.float32, torch.float64):
        seen = torch.zeros(pairs.shape, dtype=kind).masked_fill(~pairs, torch.finfo(kind).min)
    got, found = attention(nn.Identity(), q, k, v, seen, output_attentions=weights)
    assert got.is_contiguous()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.transpose(1, 2).float(), expected @ v.float(), rtol=0, atol=0.03)
    if weights:
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("lowered", [-torch.inf, torch.finfo(torch.float32).min, -1.0])
def test_keys_that_all_queries_see_alike(lowered: float) -> None:
    """Numbers that lower a logit a little are none of padding."""
    q, k, v = heads(5, 12)
    seen = torch.zeros(2, 1, 5, 12).masked_fill(~PADDING[:, None, None], lowered)
    keys = masks.attended_keys(seen)
    assert (keys.dim() == 2) == (lowered < -1.0)
    got = attention(nn.Identity(), q, k, v, keys)[0].transpose(1, 2)
    expected = (q @ k.mT / 8**0.5 + seen).softmax(-1) @ v
    torch.testing.assert_close(got, expected)


LOWEST = torch.finfo(torch.float32).min


def test_keys_are_read_back_where_all_queries_see_the_same() -> None:
    """Numbers added to all queries' logits hide a key by the lowest alone."""
    pairs = PADDING[:, None, None].expand(2, 1, 12, 12)
    for seen in (pairs, torch.zeros(2, 1, 12, 12).masked_fill(~pairs, LOWEST)):
        assert torch.equal(masks.attended_keys(seen), PADDING)
    assert masks.attended_keys(torch.ones(2, 1, 12, 12, dtype=torch.bool)) is None
    hidden = torch.tensor([0.0, LOWEST, float("-inf")]).expand(1, 1, 3, -1)
    assert torch.equal(masks.attended_keys(hidden), torch.tensor([[True, False, False]]))
    causal = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12)
    row = torch.tensor([0.0, -1.0, -10_000.0, LOWEST, 2.0])
    biases = (row, row[:3], torch.tensor([0.0, -1e-3]), torch.tensor([0.0, 5.0]))
    last_row = torch.stack([torch.ones(1, 12, 12), causal[1]]) > 0
    for kept in (causal, last_row, *(bias.expand(2, 1, len(bias), -1) for bias in biases)):
        assert masks.attended_keys(kept) is kept


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_masks_are_what_a_model_reads(dtype: torch.dtype) -> None:
    """Read or changed by a model, a mask is what PyTorch's or eager attention would have got."""
    visible = sdpa_mask(2, 6, 6, attention_mask=PADDING[:, :6], allow_is_causal_skip=False)
    expected = visible
    if dtype != torch.bool:
        lowest = torch.finfo(dtype).min
        expected = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, lowest)

    def made() -> Tensor:
        pairs = interface.pairs_of(2, 6, 6, attention_mask=PADDING[:, :6])
        return masks.carrying(pairs, (2, 1, 6, 6), dtype, torch.device("cpu"))

    carried = made()
    assert isinstance(carried, masks.LazyMask)
    assert (carried.shape, carried.dtype) == (expected.shape, dtype)
    assert masks.pairs_behind(carried.to("cpu").contiguous()) is not None
    assert torch.equal(torch.cat([carried, carried], -1)[..., :6], expected)
    changed = made()
    changed[:, :, :, 2] = expected[:, :, :1, 5]
    q, k, v = heads(6, 6)
    q, k, v = (x.double() for x in (q, k, v))
    for seen, numbers in (
        (made(), expected),
        (carried, expected),
        (changed, masks.written_out(changed)),
    ):
        logits = q @ k.mT / 8**0.5
        logits = logits.masked_fill(~numbers, -1e300) if dtype == torch.bool else logits + numbers
        got = attention(nn.Identity(), q, k, v, seen)[0].transpose(1, 2)
        rows = visible.any(-1, keepdim=True)
        torch.testing.assert_close(got.where(rows, 0), (logits.softmax(-1) @ v).where(rows, 0))
    assert masks.pairs_behind(changed) is None
    assert not torch.equal(masks.written_out(changed), expected)


def test_masks_in_a_compiled_graph() -> None:
    config = model_of("llama", SERVED["llama"], "eager").config

    def attended(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        seen = mask(2, 12, 12, attention_mask=padding, config=config)
        return attention(nn.Identity(), q, k, v, seen)[0]

    compiled = torch.compile(attended, fullgraph=True, backend="eager")
    tensors = heads(12, 12)
    torch.testing.assert_close(compiled(*tensors, PADDING), attended(*tensors, PADDING))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_padding_in_the_windows_of_a_compiled_graph(softcap: float | None) -> None:
    """Beside a cap, which would lift the lowest logit, padding is hidden after it."""
    config = model_of("mistral", SERVED["mistral"], "eager").config
    window = sliding_window_causal_mask_function(7)

    def attended(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        seen = mask(2, 12, 12, 0, 0, window, padding, config=config, local_size=7)
        return attention(nn.Identity(), q, k, v, seen, softcap=softcap)[0].transpose(1, 2)

    q, k, v = heads(12, 12)
    logits = q @ k.mT / 8**0.5
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    lag = torch.arange(12).unsqueeze(1) - torch.arange(12)
    visible = ((lag >= 0) & (lag < 7)) & PADDING[:, None, None]
    expected = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num() @ v
    torch.compiler.reset()
    found = torch.compile(attended, fullgraph=True, backend="eager")(q, k, v, PADDING)
    torch.testing.assert_close(found.where(visible.any(-1, keepdim=True), 0), expected)


@pytest.mark.parametrize(("key", "reads"), [("wavlm-model", 1), ("funnel-blocks", 3)])
def test_layers_read_their_mask_once(key: str, reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Funnel's anew after each pooling; a layer that reads waits for all before it."""
    case, seen = CASES[key], []

    def counted(attended: Tensor) -> int | None:
        seen.append(attended)
        return fewest(attended)

    model, fewest = case.model(), masks.fewest_attended
    accelerate(model, shortest=0, check=False)
    monkeypatch.setattr(masks, "fewest_attended", counted)
    case.outputs(model)
    assert len(seen) == reads


def test_of_two_intervals_what_both_let_through_is_left() -> None:
    """Packed documents in chunks, say: either may begin later, and either end first."""
    one, other = (
        torch.tensor([[[0, 4], [2, 9], [5, 6]]]),
        torch.tensor([[[1, 3], [0, 7], [4, 9]]]),
    )
    for first, second in ((one, other), (other, one)):
        both = Pattern(intervals=first) & Pattern(intervals=second)
        assert both.intervals is not None
        assert both.intervals.tolist() == [[[1, 3], [2, 7], [5, 6]]]
