// Output and log-sum-exp (lse), by online softmax over tiles of keys.
#pragma once
#include "logits.h"
namespace posenc::NUMBER {
// One thread's worker: a tile of queries after another, each over the tiles of keys visible to it.
class Forward {
 public:
  explicit Forward(const Problem& x)
      : x_(x), dropout_(x.dropout, x.seed), logits_(x, false), registers_(logits_.use_amx) {
    ld_ = round_up(std::min(x.keys, KEY_TILE), PANEL) + 16;  // not a power of two, whose rows share cache sets
    width_ = round_up(x.value_dim, VL);
    some_rows_ = logits_.use_amx && !x.terms.right_rows && x.pairs.kind != MIXING;
    const bool scale_later = Logits::only_products(x);
    product_scale_ = scale_later ? 1 : logits_.remaining_scale(x);
    rate_ = real((scale_later ? logits_.remaining_scale(x) : 1) / LN_2);
  }
  // Some queries of some batch rows of one head.
  void run(index h, Range batch, Range queries, index part, index split) {
    begin_head(h, part);
    // Larger tiles share packed keys among more queries; of few queries they leave threads idle.
    const index size = tile_of(x_, logits_.bucket_windows, x_.queries >= 768 ? 256 : 128);
    for (index b = batch.begin; b < batch.end; ++b) {
      begin_row(b, h, split);
      for (index i = queries.begin; i < queries.end; i += size)
        run_tile(b, h, i, std::min(size, queries.end - i));
    }
  }
  // Hooks of a head and of a batch row, with those of Backward: AllHeads calls either's.
  void begin_head(index h, index) { logits_.begin_head(x_, h); }
  void begin_row(index b, index h, index) {
    logits_.begin_row(x_, b, h);
    if (logits_.use_amx)
      v_pairs_ = HeadTokens(x_.v, b, logits_.group, 0, x_.keys, x_.value_dim).pairs(pairs_scratch_);
  }
  void end_row(index, index, index) {}
  void end_head(index, index) {}
  Logits& logits() { return logits_; }
  void run_tile(index b, index h, index first, index n) {
    logits_.begin_tile(x_, b, h, first, n);
    QueryTile& tile = logits_.tile;
    real* s = s_.of(round_up(n, AMX_TILE) * ld_);         // [n, ld]: logits, then weights
    real* out = out_.of(round_up(n, AMX_TILE) * width_);  // [n, width], not yet divided by row_sum
    real* row_max = row_max_.of(n);  // [n]: greatest logit so far; by AMX, of logits in powers of two
    real* row_sum = row_sum_.of(n);  // [n]: sum of exp(logit - row_max) so far
    fill(out, 0, n * width_);
    fill(row_max, -INFINITY, n);
    fill(row_sum, 0, n);
    if (x_.terms.value_rows) weights_by_bucket_.begin(logits_.value_rows, n);
    if (x_.pairs.sums()) logits_.carry.begin(n, 0);
    logits_.log_gates.set_levels(row_max, logits_.use_amx ? LN_2 : 1);
    tile.for_key_tiles(x_, x_.pairs.from_last(), [&] {
      if (x_.pairs.sums() && x_.pairs.kind != COUNTS && logits_.carried_out(x_)) return;
      if (some_rows_)
        logits_.multiply_buckets(x_);
      else
        logits_.multiply(x_, s, ld_);
      if (x_.terms.value_rows) logits_.for_blocks(x_, [&](index block, Range k) { weights_by_bucket_.clear(block, k); });
      if (logits_.use_amx) return run_key_tile(b, h, s, row_max, row_sum, out);
      for (index i = 0; i < n; ++i) softmax_row(b, h, i, s + i * ld_, row_max[i], row_sum[i], out + i * width_);
      for (index p = tile.panels.begin; p < tile.panels.end; ++p) {
        const Range m = tile.panel_rows[p];
        const index from = p * PANEL, keys = std::min<index>(PANEL, tile.width - from);
        if (m.size())
          gemm(m.size(), width_, keys, {s + m.begin * ld_ + from, ld_, 1},
               logits_.v.at(tile.j0 + from), logits_.v.ld, out + m.begin * width_, width_, true);
      }
    });
    if (x_.pairs.kind == STICKS) add_remainder(b, h, n, out);
    if (x_.terms.value_rows && logits_.use_amx)
      weights_by_bucket_.pull_back(logits_.value_rows, {}, out, nullptr, 0);
    else if (x_.terms.value_rows)
      weights_by_bucket_.times_rows(logits_.value_rows, out, width_);
    for (index i = 0; i < n; ++i) {
      const bool empty = row_sum[i] == 0;
      const index row = (b * x_.heads + h) * x_.queries + first + i;
      const double of_max = logits_.use_amx ? row_max[i] * LN_2 : row_max[i];
      double lse = empty ? -INFINITY : logits_.row_shift(x_, i) + of_max + std::log(double(row_sum[i]));
      real weight = empty ? 0 : 1 / row_sum[i];
      if (x_.sinks) weight *= add_sink(x_.sinks[row], lse);
      write_row(x_.out, row_of(x_.out, b, h, first + i), out + i * width_, weight, x_.value_dim);
      x_.lse[row] = lse;
    }
  }

 private:
  // The selected tile by AMX, a few rows at a time: their logits are still in a near cache when they
  // become weights, in bfloat16 and in the place of the logits.
  void run_key_tile(index b, index h, real* s, real* row_max, real* row_sum, real* out) {
    const QueryTile& tile = logits_.tile;
    for (index first = 0; first < tile.rows; first += NEAR_ROWS) {
      const Range rows{first, std::min(first + NEAR_ROWS, tile.rows)};
      real* at = some_rows_ ? s : s + first * ld_;
      if (some_rows_) logits_.multiply_rows(rows, at, ld_, product_scale_);
      for (index i = rows.begin; i < rows.end; i += ROWS_TOGETHER) {
        const index end = std::min(i + ROWS_TOGETHER, rows.end);
        real greatest[ROWS_TOGETHER];
        for (index j = i; j < end; ++j) greatest[j - i] = greatest_logit(j, at + (j - first) * ld_);
        for (index j = i; j < end; ++j)
          weigh_row(b, h, j, at + (j - first) * ld_, greatest[j - i], row_max[j], row_sum[j], out + j * width_);
      }
      const Bf16Rows weights{reinterpret_cast<const uint16_t*>(at), 2 * ld_};
      tile.for_equal_panels(rows, [&](Range panels, Range m) {
        const index p = panels.begin * PANEL;
        amx_gemm(m.size(), width_, panels.size() * PANEL, weights.at(m.begin - first, p),
                 v_pairs_.at(tile.j0 + p, 0), out + m.begin * width_, width_, true);
      });
    }
  }
  // Completes the logits of row i, those of hidden keys are -inf, and returns the greatest, in powers of two.
  real greatest_logit(index i, real* s) {
    const Range visible = logits_.tile.visible_keys(i);
    if (!visible.size() || x_.pairs.kind == STICKS) return -INFINITY;
    logits_.add_terms(x_, s, i, visible);
    const index from = visible.begin / AMX_DEPTH * AMX_DEPTH, to = round_up(visible.end, AMX_DEPTH);
    for (index edge : {from, to - AMX_DEPTH})
      for (index t = edge; t < edge + AMX_DEPTH; t += VL) store(s + t, masked(load(s + t), t, visible));
    vec m = splat(-INFINITY), n = m;
    for (index t = from; t < to; t += AMX_DEPTH) m = larger(load(s + t), m), n = larger(load(s + t + VL), n);
    return largest(larger(m, n)) * rate_;
  }
  // Logits of row i become weights relative to row_max, in bfloat16; out and row_sum are rescaled to the
  // new one.
  void weigh_row(index b, index h, index i, real* s, real greatest, real& row_max, real& row_sum, real* out) {
    const Range visible = logits_.tile.visible_keys(i), all = logits_.tile.panel_keys();
    uint16_t* to = reinterpret_cast<uint16_t*>(s);
    if (!visible.size()) return clear(to, all);
    if (x_.pairs.kind == STICKS) {
      row_max = 0, row_sum = 1;
      stick_row(b, h, i, s);
      return store_bf16_row(s + all.begin, all.size(), to + all.begin);
    }
    const Range keys{visible.begin / AMX_DEPTH * AMX_DEPTH, round_up(visible.end, AMX_DEPTH)};
    const real new_max = std::max(row_max, greatest);
    const vec finite_max = splat(new_max == -INFINITY ? real(0) : new_max);  // -inf - -inf would be NaN
    const bool at_once = !x_.terms.value_rows && !(x_.dropout > 0);
    vec sums[2] = {};
    for (index t = keys.begin; t < keys.end; t += AMX_DEPTH) {
      const vec p = power_of_two(load(s + t) * rate_ - finite_max);
      const vec q = power_of_two(load(s + t + VL) * rate_ - finite_max);
      sums[0] += p, sums[1] += q;
      if (at_once)
        store_bf16_two(p, q, to + t);
      else
        store(s + t, p), store(s + t + VL, q);
    }
    const real rescale = row_max == new_max ? real(1) : std::exp2(row_max - new_max);
    row_sum = row_sum * rescale + sum(sums[0] + sums[1]);
    rescale_row(i, rescale, out);
    row_max = new_max;
    if (!at_once) {
      drop(b, h, i, s, keys);  // after row_sum: weights are normalized before dropout
      collect_weights(i, s, visible);
      store_bf16_row(s + keys.begin, keys.size(), to + keys.begin);
    }
    clear(to, {all.begin, keys.begin});
    clear(to, {keys.end, all.end});
  }
  static void clear(uint16_t* to, Range keys) { std::memset(to + keys.begin, 0, keys.size() * sizeof(uint16_t)); }
  // Logits of row i become weights relative to row_max; out and row_sum are rescaled to the new one.
  void softmax_row(index b, index h, index i, real* s, real& row_max, real& row_sum, real* out) {
    const QueryTile& tile = logits_.tile;
    const Range visible = tile.visible_keys(i), all = tile.panel_keys();
    if (!visible.size()) return fill(s + all.begin, 0, all.size());
    if (x_.pairs.kind == STICKS) {
      row_max = 0, row_sum = 1;
      return stick_row(b, h, i, s);
    }
    logits_.add_terms(x_, s, i, visible);
    const index from = visible.begin / VL * VL, to = round_up(visible.end, VL);
    vec m = splat(-INFINITY);
    for (index t = from; t < to; t += VL) {
      const vec v = masked(load(s + t), t, visible);
      store(s + t, v);
      m = larger(v, m);
    }
    const real new_max = std::max(row_max, largest(m));
    const vec finite_max = splat(new_max == -INFINITY ? real(0) : new_max);  // -inf - -inf would be NaN
    vec weight_sum{};
    for (index t = from; t < to; t += VL) {
      const vec p = exponential(load(s + t) - finite_max);
      weight_sum += p;
      store(s + t, p);
    }
    const real rescale = row_max == new_max ? real(1) : std::exp(row_max - new_max);
    row_sum = row_sum * rescale + sum(weight_sum);
    rescale_row(i, rescale, out);
    row_max = new_max;
    drop(b, h, i, s, {from, to});  // after row_sum: weights are normalized before dropout
    fill(s + all.begin, 0, from - all.begin);  // products below are over whole panels
    fill(s + to, 0, all.end - to);
    collect_weights(i, s, visible);
  }
  void rescale_row(index i, real by, real* out) {
    if (by == 1) return;
    scale_range(out, by, width_);
    if (x_.terms.value_rows) weights_by_bucket_.scale_row(i, by);
  }
  void collect_weights(index i, const real* s, Range visible) {
    if (x_.terms.value_rows) collect(x_, s, logits_.tile.j0, visible, logits_.tile.base[i], weights_by_bucket_.row(i));
  }
  void drop(index b, index h, index i, real* s, Range keys) const {
    if (!(x_.dropout > 0)) return;
    const uint32_t seed = dropout_.row_seed((b * x_.heads + h) * x_.queries + logits_.tile.i0 + i);
    for (index t = keys.begin; t < keys.end; t += VL)
      store(s + t, load(s + t) * dropout_.at(seed, logits_.tile.j0 + t));
  }
  void stick_row(index b, index h, index i, real* s) {
    const Range keys = logits_.stick_row(s, i);
    drop(b, h, i, s, keys);
  }
  // out += remainder · v of each row's own key: what stick breaking leaves (Logits::remainder).
  void add_remainder(index b, index h, index n, real* out) {
    for (index i = 0; i < n; ++i) {
      real remainder = logits_.remainder(x_, i);
      if (remainder == 0) continue;
      const index self_key = logits_.self_key(i);
      const uint32_t seed = dropout_.row_seed((b * x_.heads + h) * x_.queries + logits_.tile.i0 + i);
      if (x_.dropout > 0) remainder *= dropout_.at(seed, self_key)[0];
      for (index d = 0; d < width_; ++d) out[i * width_ + d] += remainder * logits_.v.at(self_key)[d];
    }
  }

  const Problem& x_;
  Dropout dropout_;
  index ld_, width_;
  Logits logits_;
  AmxTiles registers_;
  BucketTile weights_by_bucket_;
  VnniStrips v_pairs_;
  static constexpr index NEAR_ROWS = 32, ROWS_TOGETHER = 4;  // multiples of AMX_TILE; that overlap in time
  static constexpr double LN_2 = 0.693147180559945309;
  bool some_rows_ = false;  // products are computed for NEAR_ROWS at a time
  real product_scale_, rate_;  // of products to be logits; of these to be exponents of two
  Scratch s_, out_, row_max_, row_sum_, pairs_scratch_;
};
}  // namespace posenc
