// Logits of a tile of queries against a tile of keys, with all their summands.
#pragma once
#include "blocks.h"
#include "distance.h"
#include "right.h"
#include "sums.h"
namespace posenc::NUMBER {
// Common to forward and backward: the operands of one head, and the logits of a tile.
class Logits {
 public:
  Logits(const Problem& x, bool gradient) : halves(takes_halves(x)), windows(windowed(x)), gradient_(gradient) {
    int exponent;
    exact_ = joined(x) || std::frexp(x.scale, &exponent) == 0.5;
  }
  void begin_head(const Problem& x, index h) {
    set(left_rows, x.left, x, h);
    set(right.rows, x.right, x, h);
    if (x.value_rows)
      value_rows.set(x.value_rows + h * x.value_head, x.map.buckets, x.value_dim, halves, true);
    if (x.bias_by_offset) line_.set(x, x.bias_by_offset_head ? h : 0);
    if (Axes::serves(x)) axes_.set(x);
    if (x.pairs.kind == DISTANCE) distance.begin_head(x.pairs, h);
    if (x.pairs.kind == COUNTS) counts.begin(x.map);
  }
  void begin_row(const Problem& x, index b, index h, real* d_right = nullptr,
                 const RowSums* d_right_rows = nullptr) {
    group = h / (x.heads / x.groups);
    if (!halves || joined(x))
      k = read_factors(x, x.k, x.k_rotary, x.k_factor, b, group, h, 0, x.keys, 1, k_scratch_);
    k_source = joined(x) ? head_of(k) : head_of(x.k, b, group);
    if (halves) k_strips_ = HeadTokens(k_source, 0, 0, 0, x.keys, x.depth()).columns(strips_);
    if (!halves || x.pairs.kind == STICKS) v = read_rows(x.v, b, group, 0, x.keys, x.value_dim, 1, v_scratch_);
    if (!halves) k_panels.begin(k, x.keys, x.depth(), keeps_panels(x));
    if (x.right.rows) right.begin(x, b, h, halves, d_right, d_right_rows);
    if (x.pairs.kind == BLOCKS) blocks.begin_row(x, b, h);
    if (x.column) column.begin(x.column + b * x.column_batch + h * x.column_head, x.keys);
  }
  void begin_tile(const Problem& x, index b, index h, index first, index rows) {
    tile.set(x, b, first, rows);
    if (!halves || gradient_ || joined(x))
      q = read_factors(x, x.q, x.q_rotary, x.q_factor, b, h, h, first, rows, real(x.scale), q_scratch_);
    if (halves && joined(x))
      q_half_ = HeadTokens(head_of(q), 0, 0, 0, rows, x.depth()).rows(half_scratch_);
    else if (halves)
      q_half_ = HeadTokens(x.q, b, h, first, rows, x.dim, exact_ ? real(x.scale) : 1).rows(half_scratch_);
    if (x.pairs.kind == DISTANCE) distance.begin_tile(x, b, h, first, rows);
    if (x.pairs.kind == BLOCKS)
      blocks.begin_tile(x, b, h, first, rows, tile.base, q.data, q.ld, gradient_);
    if (x.left.rows) {
      left_tokens = read_rows(x.left.tokens, b, h, first, rows, x.left.features, 1, left_scratch_);
      left.begin(left_rows, rows, windows);
      if (halves)
        left_half_ = HeadTokens(x.left.tokens, b, h, first, rows, x.left.features).rows(left_half_scratch_);
    }
  }
  // Calls f(block of queries, buckets of its visible pairs) for the chosen tile.
  template <class F>
  void for_blocks(const Problem& x, F f) const {
    for (index n = 0; n < (tile.rows + BLOCK - 1) / BLOCK; ++n) {
      if (!tile.block_offsets[n].size()) continue;
      if (!Axes::serves(x)) {
        f(n, buckets_of(x.map, tile.block_offsets[n]));
        continue;
      }
      const Range queries{tile.i0 + n * BLOCK, tile.i0 + std::min((n + 1) * BLOCK, tile.rows)};
      f(n, axes_.row_buckets(queries, {tile.j0, tile.j0 + tile.width}));
      f(n, axes_.column_buckets(queries));
    }
  }
  // Products and right term of the chosen tile.
  void multiply(const Problem& x, real* s, index ld) {
    if (given.data) return take(s, ld);
    if (x.pairs.kind == BLOCKS) return blocks.products(tile.j0, tile.panels, k_panels.at(tile.j0), s, ld);
    if (halves)
      tile.each_part([&](Range panels, Range m) { tile_columns(m, panels, q_half_, k_strips_, s, ld); });
    const real* keys = halves ? nullptr : k_panels.at(tile.j0);
    for (index p = tile.panels.begin; p < tile.panels.end && !halves; ++p) {
      const Range m = tile.panel_rows[p];
      if (m.size())
        gemm(m.size(), PANEL, x.depth(), {q.at(m.begin), q.ld, 1}, keys + p * PANEL * x.depth(),
             PANEL, s + m.begin * ld + p * PANEL, ld, false);
    }
    if (halves && !exact_)
      for (index i = 0; i < tile.rows; ++i)
        scale_range(s + i * ld + tile.panels.begin * PANEL, real(x.scale),
                    (tile.panels.end - tile.panels.begin) * PANEL);
    if (x.right.rows && tile.offsets.begin < tile.offsets.end) right.add(x, tile, s, ld);
    if (x.left.rows)
      for_blocks(x, [&](index block, Range n) {
        left.multiply(left_rows, {left_tokens.data, left_tokens.ld, 1}, left_half_, block, n);
      });
  }
  // The products of the rows m with the keys of panels, by tiles.
  void tile_columns(Range m, Range panels, HalfRows x, Strips keys, real* to, index ld) const {
    const index first = m.begin / TILE * TILE, rows = round_up(m.end, TILE) - first, from = panels.begin * PANEL;
    half_gemm(rows, panels.size() * PANEL, x.ld, x.at(first), keys.at(0, tile.j0 + from), to + first * ld + from,
              ld, false);
  }
  // Carry the sums of the chosen tile's rows on over its keys.
  void carry_over(const Problem& x, const real* s, index ld) {
    for (index i = 0; i < tile.rows; ++i) {
      const Range see = tile.seen(i);
      real& sum = carry.sums[i];
      if (x.pairs.kind == COUNTS)
        sum = counts.total(s + i * ld, see, sum);
      else
        sum = Sticks::total(s + i * ld, Sticks::before(see, tile.j0, tile.base[i]), sum);
    }
  }
  // Weights of row i by stick breaking; the keys, in whole vectors, outside of which they are zero.
  Range stick_row(real* s, index i) {
    const Range see = Sticks::before(tile.seen(i), tile.j0, tile.base[i]);
    const Range all{tile.panels.begin * PANEL, tile.panels.end * PANEL};
    if (!see.size()) {
      fill(s + all.begin, 0, all.size());
      return {all.begin, all.begin};
    }
    carry.sums[i] = sticks.weigh(s, see, carry.sums[i]);
    const Range whole{see.begin / VL * VL, round_up(see.end, VL)};
    fill(s + all.begin, 0, whole.begin - all.begin);
    fill(s + whole.end, 0, all.end - whole.end);
    return whole;
  }
  index own(index i) const { return -index(tile.base[i]); }
  // What row i's own key has of the stick, when the sums are those of all keys before it.
  real rest(const Problem& x, index i) const {
    if (!x.pairs.sizes[0] || !tile.sees(i, own(i)) || Sticks::none(carry.sums[i])) return 0;
    return std::exp(carry.sums[i]);
  }
  // Whether the sums of all rows are so far that no key before makes a difference to them.
  bool carried_out(const Problem& x) const {
    for (index i = 0; i < tile.rows; ++i)
      if (x.pairs.kind == COUNTS ? !counts.full(carry.sums[i]) : !Sticks::none(carry.sums[i])) return false;
    return true;
  }
  // What the logits of row i are less than those of the problem.
  double level(const Problem& x, index i) const { return x.column ? column.at_end(tile.all_seen(i)) : 0; }
  // The other summands of row i, for the keys [a, b) of the tile. Whole vectors from a on.
  void add_terms(const Problem& x, real* s, index i, Range see) {
    const index j = tile.j0 + see.begin, n = see.size();
    if (x.bias_by_offset) line_.add(x, s, tile.j0, see.begin, see.end, tile.base[i]);
    if (x.pairs.kind == COUNTS)
      carry.sums[i] = counts.add(left.row(i), s, see, carry.sums[i]);
    else if (Axes::serves(x))
      axes_.add(s, left.row(i), tile.i0 + i, tile.j0, see);
    else if (x.left.rows)
      spread<true>(x.map, left.row(i), j + tile.base[i], s + see.begin, n);
    if (x.right.rows) right.add_far(x, tile, s, i, see.begin / VL * VL, see.end);
    if (x.pairs.kind == DISTANCE) distance.add(s + see.begin, i, j + tile.base[i], n);
    if (x.column) column.add(s, tile.j0, see, level(x, i));
  }
  // Products of a tile of queries with all keys, s [rows, ld].
  void all_products(const Problem& x, index b, index h, index first, index rows, real* s, index ld) {
    given = {};
    begin_tile(x, b, h, first, rows);
    tile.each(x, false, [&] { multiply(x, s + tile.j0, ld); });
  }
  // Between the chosen tile and what is given for it.
  void take(real* s, index ld) const {
    const index from = tile.panels.begin * PANEL, n = tile.panels.end * PANEL - from;
    for (index i = 0; i < tile.rows; ++i)
      std::copy_n(given.data + i * given.ld + tile.j0 + from, n, s + i * ld + from);
  }
  void give_back(const real* ds, index ld) const {
    const index from = tile.panels.begin * PANEL, n = tile.panels.end * PANEL - from;
    for (index i = 0; i < tile.rows; ++i)
      std::copy_n(ds + i * ld + from, n, given.data + i * given.ld + tile.j0 + from);
  }
  // Adds gradients of the logits of row i to those of its products with left's buckets.
  void collect_left(const Problem& x, const real* ds, index i, Range see, real* to) const {
    if (Axes::serves(x)) return axes_.collect(ds, to, tile.i0 + i, tile.j0, see);
    collect(x.map, ds + see.begin, tile.j0 + see.begin + tile.base[i], to, see.size());
  }
  // Whether what is packed of all keys is kept: of all heads at once, it may be too much.
  static bool keeps_panels(const Problem& x) {
    return (x.pairs.kind == MIXING ? x.heads : 2) * x.keys * x.depth() <= KEPT;
  }
  struct Given {
    real* data = nullptr;
    index ld = 0;
  };
  Given given;  // logits of a tile of queries and all keys that are there already
  const bool halves;  // products are by tiles of bfloat16
  const bool windows;  // of the buckets of left
  QueryTile tile;
  index group = 0;
  Rows q, k, v, left_tokens;
  Tokens k_source;  // keys as factors of the logits
  Panels k_panels;
  Column column;
  BucketRows left_rows, value_rows;
  BucketTile left;
  RightTerm right;
  Distance distance;
  Blocks blocks;
  Carry carry;
  Counts counts;
  Sticks sticks;

 private:
  void set(BucketRows& rows, const Term& term, const Problem& x, index h) const {
    if (term.rows)
      rows.set(term.rows + h * term.rows_head, x.map.buckets, term.features, halves, gradient_);
  }
  static bool takes_halves(const Problem& x) {
    for (const Tokens* tokens : {&x.q, &x.k, &x.v})
      if (tokens->type != BFLOAT16) return false;
    return x.pairs.kind != BLOCKS && keeps_panels(x) && has_tiles();
  }
  Line line_;
  Axes axes_;
  const bool gradient_;
  bool exact_;  // tokens times the scale need no rounding
  Strips k_strips_;
  HalfRows q_half_, left_half_;
  Scratch half_scratch_, left_half_scratch_, strips_;
  Scratch q_scratch_, k_scratch_, v_scratch_, left_scratch_;
};

// s with -inf for lanes outside [a, b), at t.
inline vec masked(vec s, index t, Range see) {
  if (t >= see.begin && t + VL <= see.end) return s;
  const ivec at = iota() + isplat(lane(t));
  const vec nothing = splat(-INFINITY);
  return (at >= isplat(lane(see.begin))) & (at < isplat(lane(see.end))) ? s : nothing;
}
}  // namespace posenc
