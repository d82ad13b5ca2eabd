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
    if (logits_.use_amx) p_ = scratch_of<uint16_t>(p_scratch_, round_up(n, AMX_TILE) * ld_);
    real* row_max = row_max_.of(n);  // [n]: greatest logit so far
    real* row_sum = row_sum_.of(n);  // [n]: sum of exp(logit - row_max) so far
    fill(out, 0, n * width_);
    fill(row_max, -INFINITY, n);
    fill(row_sum, 0, n);
    if (x_.terms.value_rows) weights_by_bucket_.begin(logits_.value_rows, n);
    if (x_.pairs.sums()) logits_.carry.begin(n, 0);
    tile.for_key_tiles(x_, x_.pairs.from_last(), [&] {
      if (x_.pairs.kind == STICKS && logits_.carried_out(x_)) return;
      logits_.multiply(x_, s, ld_);
      if (x_.terms.value_rows) logits_.for_blocks(x_, [&](index block, Range k) { weights_by_bucket_.clear(block, k); });
      for (index i = 0; i < n; ++i) softmax_row(b, h, i, s + i * ld_, row_max[i], row_sum[i], out + i * width_);
      if (logits_.use_amx) return add_values(s, out);
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
      double lse = empty ? -INFINITY : logits_.row_shift(x_, i) + row_max[i] + std::log(double(row_sum[i]));
      real weight = empty ? 0 : 1 / row_sum[i];
      if (x_.sinks) {
        const double of_keys = lse, sink = x_.sinks[row];
        const double greater = std::max(of_keys, sink), less = std::min(of_keys, sink);
        lse = less == -INFINITY ? greater : greater + std::log1p(std::exp(less - greater));
        if (!empty) weight *= real(std::exp(of_keys - lse));
      }
      write_row(x_.out, row_of(x_.out, b, h, first + i), out + i * width_, weight, x_.value_dim);
      x_.lse[row] = lse;
    }
  }

 private:
  // out += s · v by AMX.
  void add_values(const real* s, real* out) {
    const QueryTile& tile = logits_.tile;
    const index from = tile.panels.begin * PANEL, size = tile.panels.end * PANEL - from;
    for (index i = 0; i < tile.rows; ++i)
      store_bf16_row(s + i * ld_ + from, size, p_ + i * ld_ + from);
    tile.for_equal_panels([&](Range panels, Range m) {
      const index first = m.begin / AMX_TILE * AMX_TILE, rows = round_up(m.end, AMX_TILE) - first;
      const index p = panels.begin * PANEL;
      amx_gemm(rows, width_, panels.size() * PANEL, Bf16Rows{p_, ld_}.at(first, p), v_pairs_.at(tile.j0 + p, 0),
                out + first * width_, width_, true);
    });
  }
  // Logits of row i become weights relative to row_max; out and row_sum are rescaled to the new one.
  void softmax_row(index b, index h, index i, real* s, real& row_max, real& row_sum, real* out) {
    const QueryTile& tile = logits_.tile;
    const Range visible = tile.visible_keys(i), all{tile.panels.begin * PANEL, tile.panels.end * PANEL};
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
      m = v > m ? v : m;
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
    if (rescale != 1) {
      scale_range(out, rescale, width_);
      if (x_.terms.value_rows) weights_by_bucket_.scale_row(i, rescale);
    }
    row_max = new_max;
    drop(b, h, i, s, {from, to});  // after row_sum: weights are normalized before dropout
    fill(s + all.begin, 0, from - all.begin);  // products below are over whole panels
    fill(s + to, 0, all.end - to);
    if (x_.terms.value_rows)
      collect(x_.map, s + visible.begin, tile.j0 + visible.begin + tile.base[i], weights_by_bucket_.row(i),
              visible.size());
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
  uint16_t* p_ = nullptr;  // [n, ld] weights of a tile, bfloat16
  Scratch s_, out_, row_max_, row_sum_, p_scratch_, pairs_scratch_;
};
}  // namespace posenc
