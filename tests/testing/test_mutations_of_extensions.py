"""The tests of extensions bite: each change of a line, made alone, is caught."""

from __future__ import annotations

from functools import partial

import pytest

from posenc import Grid, Layout
from posenc.extension import banded, lengths, resampling
from posenc.extension.banded import BandedRope
from posenc.extension.methods import (
    dual_chunk,
    dynamic_ntk,
    interpolate,
    leaky_rerope,
    log_n,
    longrope,
    ntk,
    ntk_by_parts,
    rerope,
    self_extend,
    string,
    yarn,
)
from posenc.extension.varying import VaryingRope
from tests.extension import test_bands, test_frequencies, test_lengths, test_log_n, test_tables
from tests.testing.mutations import Check, Mutation, require_caught


def banded_loops(method: str) -> Check:
    grid = Grid.of(Layout.sequence(23), causal=True)
    return partial(test_bands.test_equals_loops, method, grid, "reference")


def frequency_loops(method: str) -> Check:
    return partial(test_frequencies.test_equals_loops, method)


def interpolated(align: str) -> Check:
    return partial(test_tables.test_linear_interpolation_in_loops, align)


def own_frequencies(method: str, past: int) -> Check:
    """At ``past`` tokens more than the trained length."""
    length = test_lengths.L + past
    return partial(test_lengths.test_each_length_has_its_own_frequencies, method, length)


by_hand = test_lengths.test_lengths_by_hand
any_order = test_lengths.test_lengths_of_documents_in_any_order
prefix_stays = partial(test_tables.test_prefix_rows_stay_and_the_original_too, "interpolate")
yarn_by_hand = test_frequencies.test_yarn_by_hand

MUTATIONS = [
    # Frequencies.
    Mutation(
        ntk.base_divisors,
        "(pairs - 1)",
        "pairs",
        test_frequencies.test_ntk_ends_where_interpolation_does,
    ),
    Mutation(yarn._bounds, "(beta, alpha)", "(alpha, beta)", yarn_by_hand),
    Mutation(
        yarn._bounds,
        "math.floor(low), math.ceil(high)",
        "math.ceil(low), math.floor(high)",
        yarn_by_hand,
    ),
    Mutation(yarn._kept, "1 - min(", "min(", yarn_by_hand),
    Mutation(
        yarn.yarn,
        "0.1 * math.log(factor) + 1",
        "0.1 * math.log(factor)",
        test_frequencies.test_yarn_scales_the_logits_by_the_square_of_its_temperature,
    ),
    Mutation(
        ntk_by_parts.rotations, "2 * math.pi", "math.pi", test_frequencies.test_by_parts_by_hand
    ),
    Mutation(
        ntk_by_parts.blended,
        "share + (1 - share) / factor",
        "share / factor + (1 - share)",
        test_frequencies.test_by_parts_by_hand,
    ),
    Mutation(
        ntk_by_parts.ntk_by_parts,
        "/ (beta - alpha)",
        "/ beta",
        test_frequencies.test_by_parts_by_hand,
    ),
    Mutation(
        interpolate._interpolated,
        "[by * divisor for divisor in before]",
        "[by for divisor in before]",
        test_frequencies.test_interpolation_twice,
    ),
    # Tables.
    Mutation(
        resampling._corners,
        'return align == "corners"',
        'return align != "corners"',
        interpolated("corners"),
    ),
    Mutation(
        resampling._corners, 'return align == "corners"', "return True", interpolated("centers")
    ),
    Mutation(resampling.longer_count, "prefix + round(", "round(", prefix_stays),
    Mutation(
        interpolate._interpolated,
        "part.table[prefix:]",
        "part.table",
        partial(test_tables.test_factor_one_keeps_the_table, "interpolate", 2),
    ),
    Mutation(
        interpolate.Squeezed.forward,
        "/ self.factor",
        "* self.factor",
        partial(test_tables.test_positions_are_divided, "sinusoidal"),
    ),
    # Lengths.
    Mutation(
        lengths.seen_lengths, "keepdim=True) + 1", "keepdim=True)", own_frequencies("longrope", 1)
    ),
    Mutation(lengths.seen_lengths, '"amax") + 1', '"amax")', by_hand),
    Mutation(lengths.seen_lengths, ".masked_fill(~known, -torch.inf)", "", any_order),
    Mutation(
        lengths._counted,
        "positions.masked_fill(layout.special, -torch.inf)",
        "positions",
        test_lengths.test_special_tokens_do_not_count,
    ),
    Mutation(
        lengths._counted, "positions.masked_fill(~layout.valid, -torch.inf)", "positions", by_hand
    ),
    Mutation(
        longrope.LongRope.divisors,
        "> self.length",
        ">= self.length",
        own_frequencies("longrope", 0),
    ),
    Mutation(
        dynamic_ntk.DynamicNtkRope.divisors,
        "(self.factor - 1)",
        "self.factor",
        own_frequencies("dynamic_ntk", 1),
    ),
    Mutation(
        dynamic_ntk.DynamicNtkRope.divisors,
        "lengths.clamp(min=self.length)",
        "lengths",
        own_frequencies("dynamic_ntk", -1),
    ),
    Mutation(
        VaryingRope.lower,
        "self._angles(*side)",
        "self._angles(side[0], side[1] * 0)",
        own_frequencies("dynamic_ntk", 1),
    ),
    Mutation(
        VaryingRope.forward,
        "self._angles(grid.query, query_lengths)",
        "self._angles(grid.query, query_lengths * 0)",
        partial(test_lengths.test_the_boundary_is_past_the_trained_length, "dynamic_ntk"),
    ),
    Mutation(
        log_n.log_factor,
        "clamp(min=length)",
        "clamp(min=1.0)",
        test_log_n.test_the_factor_is_that_of_the_query,
    ),
    Mutation(
        log_n.log_factor, "positions[..., 0] + 1", "positions[..., 0]", test_log_n.test_by_hand
    ),
    Mutation(
        log_n.log_factor,
        "if grid.causal else",
        "if True else",
        test_log_n.test_two_sided_attention_counts_the_row,
    ),
    Mutation(
        log_n.LogNScore._plain, "(q / factor)", "(q * 1)", test_log_n.test_biases_are_scaled_too
    ),
    # Bands.
    Mutation(
        rerope.Rerope.bands,
        "behind = RotationBand(still + self.window",
        "behind = RotationBand(still + self.window + 1",
        banded_loops("rerope"),
    ),
    Mutation(
        rerope.Rerope.bands,
        "Band(still - self.window",
        "Band(still + self.window",
        partial(test_bands.test_both_sides, "rerope"),
    ),
    Mutation(
        leaky_rerope.LeakyRerope.bands,
        "1 - 1 / self.leak",
        "1 / self.leak",
        banded_loops("leaky_rerope"),
    ),
    Mutation(
        self_extend.SelfExtend.bands,
        "(places / self.group).floor()",
        "(places / self.group)",
        banded_loops("self_extend"),
    ),
    Mutation(
        self_extend.SelfExtend.bands,
        "self.window // self.group",
        "self.window / self.group",
        banded_loops("self_extend"),
    ),
    Mutation(
        self_extend.SelfExtend.bands,
        "grouped - gap",
        "grouped + gap",
        partial(test_bands.test_both_sides, "self_extend"),
    ),
    Mutation(
        self_extend.self_extend,
        "math.ceil(far)",
        "math.floor(far)",
        test_bands.test_groups_are_the_smallest_that_serve_the_length,
    ),
    Mutation(string.String.bands, "+ self.local, keys", ", keys", banded_loops("string")),
    Mutation(dual_chunk.DualChunk.bands, "apart == 1", "apart == 2", banded_loops("dual_chunk")),
    Mutation(dual_chunk.DualChunk.bands, ".clamp(max=self.reach)", "", banded_loops("dual_chunk")),
    Mutation(banded.within, "< window", "<= window", banded_loops("self_extend")),
    Mutation(
        BandedRope.forward,
        "torch.where(band.pairs.unsqueeze(1), product, logits)",
        "torch.where(band.pairs.unsqueeze(1), logits, product)",
        banded_loops("rerope"),
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
