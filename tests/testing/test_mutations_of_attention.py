"""The tests of attention bite: each change of a line, made alone, is caught."""

from __future__ import annotations

from functools import partial

import pytest

from posenc.attention import validation, views
from posenc.attention.backends import sdpa
from posenc.attention.backends.common import definition
from posenc.attention.call import AttentionCall
from posenc.attention.dispatch import preference
from posenc.attention.lowering import is_constant_table, repeat_heads
from tests import test_arguments
from tests.attention import test_api, test_dispatch, test_lse, test_module, test_sdpa, test_strides
from tests.testing.mutations import Check, Mutation, law, require_caught


def equals_reference(encoding: str, grid: str) -> Check:
    return partial(test_sdpa.test_equals_reference, encoding, grid)


def refused(name: str) -> Check:
    return partial(test_api.test_wrong_arguments, test_api.attend, *test_api.BAD[name])


def ordered(name: str) -> Check:
    return partial(test_dispatch.test_rules_on_the_cpu, name)


def no_view_outside(case: int) -> Check:
    """A size, stride and offset that would read outside."""
    size, stride, offset = [
        ((2, 3, 5), (6, 1, 1), 0),
        ((2, 3, 4), (6, 1, 1), 1),
        ((2, 3, 4), (6, 1, 1), -1),
        ((2, 3, 4), (6, -1, 1), 2),
    ][case]
    return partial(test_strides.test_no_view_reads_outside_its_tensor, size, stride, offset)


grouped = law("grouped_heads_are_repeated", "alibi")
joined = partial(test_lse.test_outputs_over_parts_of_the_keys_are_joined_by_it, "rope", "reference")
scaled = test_module.test_head_dim_and_bias_and_scale

MUTATIONS = [
    # Arguments.
    Mutation(
        validation._check_tensors,
        "q.shape[1] % k.shape[1]",
        "q.shape[1] < k.shape[1]",
        refused("groups"),
    ),
    Mutation(
        validation._check_tensors,
        "v.shape[1:3] != k.shape[1:3]",
        "v.shape[1] != k.shape[1]",
        refused("pairs"),
    ),
    Mutation(
        validation._check_tensors,
        "x.shape[0] != q.shape[0]",
        "x.shape[0] < q.shape[0]",
        refused("rows"),
    ),
    Mutation(
        validation._check_grid,
        "side.length != x.shape[2]",
        "side.length > x.shape[2]",
        refused("keys"),
    ),
    Mutation(
        validation._check_grid,
        "side.batch not in (1, x.shape[0])",
        "side.batch < 1",
        refused("layout rows"),
    ),
    Mutation(
        validation.validate, "0.0 <= dropout < 1.0", "0.0 <= dropout <= 1.0", refused("dropout")
    ),
    Mutation(
        validation.validate, "grid.query.axes not in part.axes", "not part.axes", refused("axes")
    ),
    Mutation(
        validation.require_fit,
        "made_for != used_with",
        "made_for < used_with",
        partial(
            test_arguments.test_wrong_sizes_are_refused_before_anything_is_read, "alibi", "heads"
        ),
    ),
    Mutation(
        validation.require_fit,
        "part.causal != causal",
        "part.causal and not causal",
        partial(test_arguments.test_a_part_made_for_one_mask_refuses_the_other, "t5", False),
    ),
    Mutation(
        validation.require_fit,
        "encoding.causal_only and not causal",
        "encoding.causal_only and causal is None",
        test_api.test_causal_only_encodings_need_a_causal_grid,
    ),
    # The form that backends are given.
    Mutation(AttentionCall.logit_scale, "self.scale is not None", "False", scaled),
    Mutation(
        AttentionCall.transformed,
        "repeat_heads(v, k.shape[1])",
        "v",
        law("grouped_heads_are_repeated", "fope"),
    ),
    Mutation(
        repeat_heads,
        "x.repeat_interleave(heads // x.shape[1], dim=1)",
        "x.repeat(1, heads // x.shape[1], 1, 1)",
        grouped,
    ),
    Mutation(
        is_constant_table,
        "term.table.requires_grad",
        "False",
        partial(test_sdpa.test_refuses_with_the_reason, *test_sdpa.REFUSALS[2]),
    ),
    # The choice of a backend.
    Mutation(
        preference,
        "batch * heads * queries * keys",
        "batch * queries * keys",
        ordered("one more head"),
    ),
    Mutation(preference, "if logits <= few:", "if logits < few:", ordered("few")),
    Mutation(
        preference,
        '["tiled"] if logits > SMALL',
        '["tiled"] if logits >= SMALL',
        ordered("one more"),
    ),
    Mutation(preference, "problem.grid.segmented", "False", ordered("packed")),
    Mutation(
        preference, "ranks > problem", "ranks >= problem", ordered("as many columns as features")
    ),
    Mutation(preference, "sum(x.query", "max(x.query", ordered("more columns")),
    Mutation(preference, "keys >= LONG", "keys > LONG", ordered("long table")),
    Mutation(
        preference,
        "not isinstance(term, LowRank)",
        "isinstance(term, LowRank)",
        ordered("long without table"),
    ),
    Mutation(
        preference,
        'device.type != "cpu"',
        "False",
        partial(test_dispatch.test_constant_tables_on_accelerators_go_to_flex, "cuda"),
    ),
    # The definition.
    Mutation(
        definition.attend_by_definition,
        "masked_softmax(logits, visible)",
        "logits.softmax(-1)",
        equals_reference("nope", "causal"),
    ),
    Mutation(
        definition.lse_by_definition,
        "begin, begin + size)",
        "0, size)",
        test_lse.test_sums_are_the_same_one_query_at_a_time,
    ),
    Mutation(definition._masked_lse, "lse.masked_fill(empty, -torch.inf)", "lse", joined),
    Mutation(
        definition._logits,
        "logits = q @ k.mT * problem.scale",
        "logits = q @ k.mT",
        equals_reference("alibi", "dense"),
    ),
    # The fused kernel.
    Mutation(
        sdpa._visible_offsets, "grid.window - 1", "grid.window", equals_reference("alibi", "window")
    ),
    Mutation(
        sdpa._visible_offsets,
        "0 if grid.causal",
        "1 if grid.causal",
        equals_reference("alibi", "causal"),
    ),
    Mutation(
        sdpa._attend_biased,
        "begin + first - shift)",
        "begin + first - shift + 1)",
        equals_reference("nope", "causal window"),
    ),
    Mutation(
        sdpa._attend_biased,
        "end + last - shift)",
        "end + last - shift - 1)",
        equals_reference("nope", "causal window"),
    ),
    Mutation(
        sdpa._attend_biased,
        "queries - end + low)",
        "low)",
        equals_reference("alibi", "several blocks"),
    ),
    Mutation(
        sdpa._attend_biased,
        "Result(_reversed(output)",
        "Result(output",
        equals_reference("alibi", "dense"),
    ),
    Mutation(
        sdpa._nothing,
        "tied.masked_fill(torch.ones_like(tied, dtype=torch.bool), 0.0)",
        "tied",
        equals_reference("alibi", "keys out of the window"),
    ),
    Mutation(
        sdpa._plainly_causal,
        "grid.shift == 0",
        "grid.shift is not None",
        equals_reference("nope", "chunk"),
    ),
    Mutation(
        sdpa._plainly_causal,
        "grid.window is None",
        "True",
        equals_reference("nope", "causal window"),
    ),
    Mutation(
        sdpa._widen, "f.query / problem.scale", "f.query", equals_reference("low rank", "dense")
    ),
    Mutation(
        sdpa._widen,
        "k = k.repeat_interleave(problem.heads // k.shape[1], dim=1)",
        "k = k.repeat(1, problem.heads // k.shape[1], 1, 1)",
        equals_reference("low rank", "dense"),
    ),
    Mutation(
        sdpa._widen,
        "v = v.repeat_interleave(problem.heads // v.shape[1], dim=1)",
        "v = v.repeat(1, problem.heads // v.shape[1], 1, 1)",
        equals_reference("low rank", "dense"),
    ),
    Mutation(
        sdpa._attend, "torch.stack(tables).sum(0)", "tables[0]", test_sdpa.test_two_tables_are_added
    ),
    Mutation(
        sdpa._attend,
        "result.output[..., : problem.v.shape[-1]]",
        "result.output",
        test_sdpa.test_values_of_another_width,
    ),
    Mutation(
        sdpa._drop_negligible,
        "3 * math.log",
        "0.5 * math.log",
        test_sdpa.test_many_small_weights_are_kept,
    ),
    Mutation(
        sdpa._drop_negligible,
        "queries > shift + keys",
        "False",
        test_sdpa.test_queries_without_their_own_position_keep_all,
    ),
    Mutation(
        sdpa._drop_negligible,
        "problem.scale * longest_query",
        "longest_query * 0",
        test_sdpa.test_weights_that_cannot_matter_are_left_out,
    ),
    # Views.
    Mutation(views.strided_view, "(count - 1) * step", "(count - 2) * step", no_view_outside(0)),
    Mutation(views.strided_view, "last = offset", "last = 0", no_view_outside(1)),
    Mutation(views.strided_view, "offset < 0 or", "", no_view_outside(2)),
    Mutation(views.strided_view, " or min(stride) < 0", "", no_view_outside(3)),
]


_small_blocks = test_sdpa._small_blocks


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
