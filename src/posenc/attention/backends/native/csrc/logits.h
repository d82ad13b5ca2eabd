// Logits of a tile of queries against a tile of keys, with all their terms.
#pragma once
#include "bias.h"
#include "block_transforms.h"
#include "distance.h"
#include "key_bucket_term.h"
#include "log_gates.h"
namespace posenc::NUMBER {
// Common to forward and backward: the operands of one head, and the logits s [queries, ld] of a tile.
// Products and the key-side term are computed for the tile at once (multiply), the other terms row by
// row while the row is in the first-level cache (add_terms).
class Logits {
 public:
  Logits(const Problem& x, bool gradient)
      : use_amx(can_use_amx(x)), bucket_windows(needs_bucket_windows(x)), gradient_(gradient) {
    int exponent;
    exact_ = transforms_qk(x) || std::frexp(x.scale, &exponent) == 0.5;
  }
  void begin_head(const Problem& x, index h) {
    set(left_rows, x.terms.left_rows, h, gradient_);
    set(key_term.rows, x.terms.right_rows, h, gradient_);
    set(value_rows, x.terms.value_rows, h, true);
    if (x.terms.bias_by_offset) bias_by_offset_.set(x, h);
    if (Axes::serves(x)) axes_.set(x);
    if (x.pairs.kind == DISTANCE) distance.begin_head(x.pairs, h);
    if (x.pairs.kind == COUNTS) counts.begin(x.map);
    if (x.pairs.kind == LOG_GATES) log_gates.begin_head(x.pairs, h);
  }
  void begin_row(const Problem& x, index b, index h, real* d_right = nullptr,
                 const RowSums* d_right_rows = nullptr) {
    group = h / (x.heads / x.groups);
    if (!use_amx || transforms_qk(x))
      k = read_factors(x, x.k, x.k_rotary, x.terms.key_factor, b, group, h, 0, x.keys, 1, k_scratch_);
    k_source = transforms_qk(x) ? head_of(k) : head_of(x.k, b, group);
    if (use_amx) k_strips_ = HeadTokens(k_source, 0, 0, 0, x.keys, x.depth()).columns(strips_);
    if (!use_amx || x.pairs.kind == STICKS) v = read_rows(x.v, b, group, 0, x.keys, x.value_dim, 1, v_scratch_);
    if (!use_amx) k_panels.begin(k, x.keys, x.depth(), keeps_panels(x));
    if (x.terms.right_rows) key_term.begin(x, b, h, use_amx, d_right, d_right_rows);
    if (x.pairs.kind == BLOCKS) blocks.begin_row(x, b, h);
    if (x.pairs.kind == LOG_GATES) log_gates.begin_row(x, b, h, k_source, x.depth());
    if (x.terms.column) column.begin(x.terms.column.of<double>(b, h), x.keys);
  }
  // After begin_row, the gradients that terms of pairs add to.
  void begin_gradient(const Problem& x, index b, index h, index split) {
    if (x.pairs.kind == BLOCKS) blocks.begin_gradient(x, b, h, split);
    if (x.pairs.kind == LOG_GATES) log_gates.begin_gradient(x, b, h, split);
  }
  void begin_tile(const Problem& x, index b, index h, index first, index rows) {
    tile.set(x, b, h, first, rows);
    if (!use_amx || gradient_ || transforms_qk(x) || x.pairs.kind == LOG_GATES)
      q = read_factors(x, x.q, x.q_rotary, x.terms.query_factor, b, h, h, first, rows, real(x.scale), q_scratch_);
    if (use_amx && transforms_qk(x))
      q_bf16_ = HeadTokens(head_of(q), 0, 0, 0, rows, x.depth()).rows(bf16_scratch_);
    else if (use_amx)
      q_bf16_ = HeadTokens(x.q, b, h, first, rows, x.dim, exact_ ? real(x.scale) : 1).rows(bf16_scratch_);
    if (x.terms.column) column.begin_tile(rows, [&](index i) { return tile.all_visible_keys(i); });
    if (x.pairs.kind == DISTANCE) distance.begin_tile(x, b, h, first, rows);
    if (x.pairs.kind == BLOCKS)
      blocks.begin_tile(x, b, h, first, rows, tile.base, q.data, q.ld, gradient_);
    if (x.pairs.kind == LOG_GATES) log_gates.begin_tile(x, first, rows, q);
    if (x.terms.left_rows) {
      const Operand& left = x.terms.left;
      left_tokens = read_rows(left.value, b, h, first, rows, left.features, 1, left_scratch_);
      query_products.begin(left_rows, rows, bucket_windows);
      if (use_amx)
        left_bf16_ = HeadTokens(left.value, b, h, first, rows, left.features).rows(left_bf16_scratch_);
    }
  }
  // Calls f(block of queries, buckets of its visible pairs) for the selected tile.
  template <class F>
  void for_blocks(const Problem& x, F f) const {
    for (index n = 0; n < (tile.rows + BLOCK - 1) / BLOCK; ++n) {
      if (!tile.block_offsets[n].size()) continue;
      if (!Axes::serves(x)) {
        f(n, buckets_of(x, tile.block_offsets[n]));
        continue;
      }
      const Range queries{tile.i0 + n * BLOCK, tile.i0 + std::min((n + 1) * BLOCK, tile.rows)};
      f(n, axes_.row_buckets(queries, {tile.j0, tile.j0 + tile.width}));
      f(n, axes_.column_buckets(queries));
    }
  }
  // q · k and the key-side term of the selected tile, and the products of its queries with buckets.
  void multiply(const Problem& x, real* s, index ld) {
    if (precomputed.data) return load_precomputed(s, ld);
    if (x.pairs.kind == BLOCKS) return blocks.products(tile.j0, tile.panels, k_panels.at(tile.j0), s, ld);
    if (use_amx) {
      const Range keys = tile.panel_keys();
      multiply_rows({0, tile.rows}, keys, s, ld);
      const real by = remaining_scale(x);
      for (index i = 0; i < tile.rows && by != 1; ++i) scale_range(s + i * ld + keys.begin, by, keys.size());
    }
    const real* keys = use_amx ? nullptr : k_panels.at(tile.j0);
    for (index p = tile.panels.begin; p < tile.panels.end && !use_amx; ++p) {
      const Range m = tile.panel_rows[p];
      if (m.size())
        gemm(m.size(), PANEL, x.depth(), {q.at(m.begin), q.ld, 1}, keys + p * PANEL * x.depth(),
             PANEL, s + m.begin * ld + p * PANEL, ld, false);
    }
    if (x.terms.right_rows && tile.offsets.begin < tile.offsets.end) key_term.add(x, tile, s, ld);
    multiply_buckets(x);
  }
  void multiply_buckets(const Problem& x) {
    if (!x.terms.left_rows) return;
    for_blocks(x, [&](index block, Range n) {
      query_products.multiply(left_rows, {left_tokens.data, left_tokens.ld, 1}, left_bf16_, block, n);
    });
  }
  // By AMX, products of some rows with some keys of the selected tile, s from the first row on: logits
  // where remaining_scale is 1.
  void multiply_rows(Range rows, Range keys, real* s, index ld) const {
    amx_products(rows, keys, q_bf16_, k_strips_, s, ld);
  }
  // What AMX' products are still to be multiplied by: q times the scale would have been rounded.
  real remaining_scale(const Problem& x) const { return exact_ ? real(1) : real(x.scale); }
  // By AMX, products of some rows with those of some keys that are visible to any of them, `to` from the
  // first of them on.
  void amx_products(Range rows, Range keys, Bf16Rows x, VnniStrips strips, real* to, index ld) const {
    tile.for_equal_panels(rows, keys, [&](Range panels, Range m) {
      const index from = panels.begin * PANEL;
      amx_gemm(m.size(), panels.size() * PANEL, x.ld, x.at(m.begin), strips.at(0, tile.j0 + from),
               to + (m.begin - rows.begin) * ld + from, ld, false);
    });
  }
  // Carry the sums of the rows on over the keys of the selected tile, whose logits may be computed in s.
  void carry_over(const Problem& x, real* s, index ld) {
    if (x.pairs.kind != LOG_GATES) multiply(x, s, ld);
    for (index i = 0; i < tile.rows; ++i) {
      const Range visible = tile.visible_keys(i);
      double& sum = carry.sums[i];
      if (x.pairs.kind == LOG_GATES)
        sum = log_gates.tile_sum(i, tile, visible, sum);
      else if (x.pairs.kind == COUNTS)
        sum = counts.tile_sum(s + i * ld, visible, sum);
      else
        sum = Sticks::tile_sum(s + i * ld, Sticks::keys_before_query(visible, tile.j0, tile.base[i]), sum);
    }
  }
  // Weights of row i by stick breaking, zero where hidden; returns the keys, in whole vectors, outside
  // of which they all are.
  Range stick_row(real* s, index i) {
    const Range visible = Sticks::keys_before_query(tile.visible_keys(i), tile.j0, tile.base[i]);
    const Range all = tile.panel_keys();
    if (!visible.size()) {
      fill(s + all.begin, 0, all.size());
      return {all.begin, all.begin};
    }
    carry.sums[i] = sticks.weigh(s, visible, carry.sums[i]);
    const Range whole{visible.begin / VL * VL, round_up(visible.end, VL)};
    fill(s + all.begin, 0, whole.begin - all.begin);
    fill(s + whole.end, 0, all.end - whole.end);
    return whole;
  }
  // The biases by offset of row i, from the selected tile's first key on. Images have none in one row.
  const real* bias_at(const Problem& x, index i) const {
    return bias_by_offset_.at(tile.j0 + tile.base[i] - x.terms.first);
  }
  index self_key(index i) const { return -index(tile.base[i]); }
  // The weight that the keys before leave to row i's own key, once the sums are over all of them.
  real remainder(const Problem& x, index i) const {
    if (!x.pairs.sizes[0] || !tile.is_visible(i, self_key(i)) || Sticks::exhausted(carry.sums[i])) return 0;
    return std::exp(carry.sums[i]);
  }
  // Whether the sums of all rows are at their limit, so that earlier keys do not change them or have no
  // weight.
  bool carried_out(const Problem& x) const {
    if (x.pairs.kind == LOG_GATES) return log_gates.all_finished(tile, carry.sums);
    for (index i = 0; i < tile.rows; ++i)
      if (x.pairs.kind == COUNTS ? !counts.full(carry.sums[i]) : !Sticks::exhausted(carry.sums[i])) return false;
    return true;
  }
  // What has to be added to the logits of row i, and to their LSE: see Column. Under a cap they are whole.
  double row_shift(const Problem& x, index i) const { return x.softcap ? 0 : column_shift(x, i); }
  // The other terms of row i for its visible keys. They may add to whole vectors around those, which
  // are masked after this.
  void add_terms(const Problem& x, real* s, index i, Range visible) {
    const index j = tile.j0 + visible.begin, n = visible.size();
    if (x.terms.bias_by_offset) bias_by_offset_.add(x, s, tile.j0, visible.begin, visible.end, tile.base[i]);
    if (x.pairs.kind == COUNTS)
      carry.sums[i] = counts.add(query_products.row(i), s, visible, carry.sums[i]);
    else if (Axes::serves(x))
      axes_.add(s, query_products.row(i), tile.i0 + i, tile.j0, visible);
    else if (x.terms.left_rows)
      spread<true>(x, query_products.row(i), tile.j0, visible, tile.base[i], s);
    if (x.terms.right_rows) key_term.add_far(x, tile, s, i, visible.begin / VL * VL, visible.end);
    if (x.pairs.kind == LOG_GATES && gradient_) log_gates.add<true>(i, tile, s, visible, carry.sums[i]);
    if (x.pairs.kind == LOG_GATES && !gradient_) log_gates.add<false>(i, tile, s, visible, carry.sums[i]);
    if (x.pairs.kind == DISTANCE) distance.add(s + visible.begin, i, j + tile.base[i], n);
    if (x.terms.column) column.add(s, tile.j0, visible, column_shift(x, i));
    if (x.softcap) cap(s, real(x.softcap), splat(real(column_shift(x, i))), visible);
  }
  // Derivative of the capped logits by those without a cap.
  static vec cap_slope(const Problem& x, vec capped) {
    const vec tangent = capped * real(1 / x.softcap);
    return 1 - tangent * tangent;
  }
  // Products of a tile of queries with all keys, s [rows, ld]; terms of rows come later.
  void all_products(const Problem& x, index b, index h, index first, index rows, real* s, index ld) {
    precomputed = {};
    begin_tile(x, b, h, first, rows);
    tile.for_key_tiles(x, false, [&] { multiply(x, s + tile.j0, ld); });
  }
  // Copy the selected tile from the precomputed logits, or its gradients in their place.
  void load_precomputed(real* s, index ld) const {
    const index from = tile.panels.begin * PANEL, n = tile.panels.end * PANEL - from;
    for (index i = 0; i < tile.rows; ++i)
      std::copy_n(precomputed.data + i * precomputed.ld + tile.j0 + from, n, s + i * ld + from);
  }
  void store_precomputed(const real* ds, index ld) const {
    const index from = tile.panels.begin * PANEL, n = tile.panels.end * PANEL - from;
    for (index i = 0; i < tile.rows; ++i)
      std::copy_n(ds + i * ld + from, n, precomputed.data + i * precomputed.ld + tile.j0 + from);
  }
  // to[bucket] += ds of row i: the gradient of its products with buckets.
  void collect_left(const Problem& x, const real* ds, index i, Range visible, real* to) const {
    if (Axes::serves(x)) return axes_.collect(ds, to, tile.i0 + i, tile.j0, visible);
    collect(x, ds, tile.j0, visible, tile.base[i], to);
  }
  // Whether the packed keys of a row are kept: where heads are computed together, that is all heads'.
  static bool keeps_panels(const Problem& x) {
    return (x.pairs.kind == MIXING ? x.heads : 2) * x.keys * x.depth() <= MAX_KEPT;
  }
  struct Precomputed {
    real* data = nullptr;
    index ld = 0;
  };
  Precomputed precomputed;  // products of a tile of queries and all keys, if computed (and mixed) before
  const bool use_amx;         // products are of bfloat16, by AMX
  const bool bucket_windows;  // query_products hold a window of the buckets
  QueryTile tile;
  index group = 0;
  Rows q, k, v, left_tokens;  // q and left_tokens of the tile (q times the scale), k and v of the head
  Tokens k_source;  // keys as factors of the logits
  Panels k_panels;
  Column column;
  BucketRows left_rows, value_rows;
  BucketTile query_products;  // [queries, buckets]: query · row, of the tile
  KeyBucketTerm key_term;
  Distance distance;
  BlockTransforms blocks;
  Carry carry;
  Counts counts;
  Sticks sticks;
  LogGates log_gates;

 private:
  double column_shift(const Problem& x, index i) const { return x.terms.column ? column.shift(i) : 0; }
  // s = c tanh((s + shift) / c)
  static void cap(real* s, real c, vec shift, Range visible) {
    for (index t = visible.begin / VL * VL; t < visible.end; t += VL)
      store(s + t, c * hyperbolic_tangent((load(s + t) + shift) * (1 / c)));
  }
  void set(BucketRows& to, const Operand& rows, index h, bool gradient) const {
    if (rows) to.set(rows.of(0, h), rows.rows, rows.features, use_amx, gradient);
  }
  static bool can_use_amx(const Problem& x) {
    for (const Tokens* tokens : {&x.q, &x.k, &x.v})
      if (tokens->type != BFLOAT16) return false;
    // Tokens given in float32 ask for products in float32, whose rows would be rounded.
    for (const Operand* tokens : {&x.terms.left, &x.terms.right})
      if (*tokens && tokens->value.type != BFLOAT16) return false;
    return x.pairs.kind != BLOCKS && keeps_panels(x) && has_amx();
  }
  BiasByOffset bias_by_offset_;
  Axes axes_;
  const bool gradient_;
  bool exact_;  // the scale is a power of two, so that bfloat16 queries times it are exact
  VnniStrips k_strips_;
  Bf16Rows q_bf16_, left_bf16_;
  Scratch bf16_scratch_, left_bf16_scratch_, strips_;
  Scratch q_scratch_, k_scratch_, v_scratch_, left_scratch_;
};
}  // namespace posenc
