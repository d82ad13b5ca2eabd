"""The tests of layouts, grids and caches bite: each change of a line, made alone, is caught."""

from __future__ import annotations

from functools import partial

import pytest

from posenc import Grid, Layout, create
from posenc.attention import Attention, LayerCache, cache
from tests.attention import test_cache
from tests.encoding import test_standalone
from tests.layout import test_layout
from tests.testing.mutations import Check, Mutation, law, require_caught


def visible(name: str) -> Check:
    return partial(test_layout.test_visible, *test_layout.VISIBLE[name])


def dense(queries: int, start: int, causal: bool, window: int | None) -> Check:
    return partial(test_layout.test_dense_says_what_visible_shows, queries, start, causal, window)


def mask_mods() -> None:
    for grid in (
        Grid.of(Layout.padded([9, 4]), causal=True, window=3),
        Grid.of(Layout.packed([4, 5])),
    ):
        test_standalone.test_mask_mods_say_what_is_visible(grid)


def kept_as_given(name: str, *, learned: bool = False) -> Check:
    """Keys of an encoding that the cache may not keep transformed."""
    options = {"learned": True} if learned else {}
    return partial(
        test_cache.test_keys_are_transformed_once_where_that_is_the_same,
        create(name, head_dim=8, **options),
        True,
        False,
    )


kept_transformed = partial(
    test_cache.test_keys_are_transformed_once_where_that_is_the_same,
    create("rope+alibi", heads=4, head_dim=8),
    True,
    True,
)
left_padded = partial(test_layout.test_padded_rows_begin_at_zero, "left")
right_padded = partial(test_layout.test_padded_rows_begin_at_zero, "right")
masked_left = partial(test_standalone.test_layouts_from_attention_masks, "left")
image = test_layout.test_image_is_in_raster_order_after_its_special_tokens
packed = test_layout.test_packed_restarts_positions_but_not_order
sliced = test_layout.test_slices_of_regular_layouts_are_regular
following = test_layout.test_following_goes_on_from_the_last_token
joined = test_cache.test_padding_documents_and_special_tokens_are_kept
special = test_standalone.test_special_tokens_of_texts
selected = test_cache.test_select_reorders_rows_as_beam_search_does
truncated = test_cache.test_truncate_keeps_the_newest_and_drops_the_graph
in_place = test_cache.test_tokens_are_written_in_place_and_copies_do_not_see_them
written_anew = test_cache.test_rows_and_tokens_chosen_are_written_anew
embedded = test_cache.test_what_embedding_looks_back_on_is_chosen_too
regular = test_cache.test_append_keeps_regular_layouts_regular
by_row = test_layout.test_documents_are_those_of_each_row

MUTATIONS = [
    # Layouts.
    Mutation(
        Layout.packed,
        "torch.cat([torch.arange(n, device=device) for n in lengths])",
        "torch.arange(sum(lengths), device=device)",
        packed,
    ),
    Mutation(Layout.padded, "order - (total - real)", "order - (total - real) + 1", left_padded),
    Mutation(Layout.padded, "valid = order >= 0", "valid = order >= -1", left_padded),
    Mutation(Layout.padded, "valid = order < real", "valid = order <= real", right_padded),
    Mutation(
        Layout.from_attention_mask, "(counted.cumsum(1) - 1)", "counted.cumsum(1)", masked_left
    ),
    Mutation(
        Layout.from_attention_mask,
        "order = valid.cumsum(1) - 1",
        "order = valid.cumsum(1)",
        masked_left,
    ),
    Mutation(Layout.from_attention_mask, "valid & ~special", "valid", special),
    Mutation(Layout.from_attention_mask, "mask != 0", "mask == 0", masked_left),
    Mutation(Layout.image, "[rows, columns]", "[columns, rows]", image),
    Mutation(Layout.image, "special=order < prefix", "special=order <= prefix", image),
    Mutation(Layout._after, "Layout(zeros, orders, special=special).concat(self)", "self", special),
    Mutation(Layout.slice, "self.start + begin", "self.start", sliced),
    Mutation(Layout.slice, ", extent=None", "", sliced),
    Mutation(Layout.select, "t[rows]", "t[: len(rows)]", selected),
    Mutation(
        Layout.following, "self.start + self.length", "self.start + self.length - 1", following
    ),
    Mutation(Layout.following, "successors(last.expand(-1, 1, self.axes))", "last", following),
    Mutation(Layout.following, "self.order[:, -1:] + 1", "self.order[:, -1:]", following),
    Mutation(
        Layout.following, "else self.document[:, -1:]", "else self.document[:, :1]", following
    ),
    Mutation(
        Layout.with_positions,
        "start=None, ",
        "",
        test_layout.test_other_positions_are_not_taken_to_be_regular,
    ),
    Mutation(Layout.concat, "other.start != start + self.length", "False", regular),
    Mutation(Layout.concat, '_join_field(self, other, "valid", True)', "None", joined),
    Mutation(Layout.concat, '"valid", True', '"valid", False', joined),
    Mutation(Layout.concat, '_join_field(self, other, "document", 0)', "self.document", joined),
    Mutation(Layout.concat, '"special", False', '"special", True', special),
    # Grids.
    Mutation(Grid.visible, "ahead <= 0", "ahead < 0", visible("causal")),
    Mutation(
        Grid.visible, "ahead.abs() < self.window", "ahead.abs() <= self.window", visible("both")
    ),
    Mutation(Grid.visible, "& query.valid.unsqueeze(2)", "", visible("padded")),
    Mutation(Grid.visible, "& key.valid.unsqueeze(1)", "", visible("padded")),
    Mutation(
        Grid.visible,
        "document is not None or",
        "document is not None and",
        visible("packed after plain"),
    ),
    Mutation(
        Grid.visible, "_documents(query).unsqueeze(2)", "_documents(query)[:1].unsqueeze(2)", by_row
    ),
    Mutation(Grid.mask_mod, "ahead <= 0 if causal", "ahead < 0 if causal", mask_mods),
    Mutation(Grid.mask_mod, "ahead.abs() < window", "ahead.abs() <= window", mask_mods),
    Mutation(Grid.mask_mod, "documents[0](b, i)", "documents[0](b, j)", mask_mods),
    Mutation(Grid.mask_mod, "& query_valid(b, i)", "", mask_mods),
    Mutation(Grid.dense, "last <= 0", "last <= 1", dense(1, 2, True, None)),
    Mutation(Grid.dense, "-limit < first", "-limit <= first", dense(3, 1, False, 3)),
    Mutation(Grid.dense, "last < limit", "last <= limit", dense(1, 0, False, 3)),
    Mutation(
        Grid.distinct_offsets,
        "self.require_shift() - (self.query.length - 1)",
        "self.require_shift() - self.query.length",
        test_layout.test_offsets_are_key_less_query,
    ),
    # Caches.
    Mutation(LayerCache.append, "past.concat(layout)", "layout", regular),
    Mutation(LayerCache._extended, "2 * begin", "begin", in_place),
    Mutation(
        LayerCache._extended,
        "room[:, :, :begin] = past",
        "room[:, :, 1:begin] = past[:, :, 1:]",
        kept_transformed,
    ),
    Mutation(LayerCache.__copy__, ' | {"_room": None}', "", in_place),
    Mutation(LayerCache.select, "self._room = None", "pass", written_anew),
    Mutation(LayerCache.select, "lambda: layout.select(rows)", "lambda: layout", selected),
    Mutation(LayerCache.select, "x[rows], layout.select(rows)", "x, layout", embedded),
    Mutation(LayerCache.truncate, "self._room = None", "pass", written_anew),
    Mutation(
        LayerCache.truncate,
        "self.layout.length - length)",
        "self.layout.length - length - 1)",
        truncated,
    ),
    Mutation(
        LayerCache.truncate,
        "_detached(self.layout.slice(begin, self.layout.length))",
        "_detached(self.layout)",
        truncated,
    ),
    Mutation(
        cache._detached,
        "signal=signal",
        "signal=layout.signal",
        test_cache.test_truncate_forgets_the_graph,
    ),
    Mutation(
        LayerCache.embed,
        "layout.length - lookback)",
        "layout.length - lookback + 1)",
        law("cached_is_full", "conv"),
    ),
    Mutation(
        LayerCache.following,
        "self.layout.start + self.layout.length",
        "self.layout.length",
        test_cache.test_following_goes_on_where_the_past_ends,
    ),
    Mutation(
        Attention._may_keep_transformed,
        "self.causal and transform.tokenwise",
        "self.causal",
        kept_as_given("xpos"),
    ),
    Mutation(
        Attention._may_keep_transformed,
        "next(transform.parameters(), None) is None",
        "True",
        kept_as_given("rope", learned=True),
    ),
    Mutation(
        LayerCache.without_transform,
        "Encoding(score=encoding.score, value=encoding.value)",
        "encoding",
        kept_transformed,
    ),
    Mutation(
        Attention.forward,
        "    scale = encoding.default_scale(self.head_dim) if scale is None else scale",
        "    scale = 1.0",
        kept_transformed,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
