// Output and log-sum-exp (lse), by online softmax over tiles of keys.
#pragma once
#include "amx_weights.h"
namespace posenc::NUMBER {
// One thread's worker: a tile of queries after another, each over the tiles of keys visible to it.
class Forward {
 public:
  explicit Forward(const Problem& x) : x_(x), rows_(x), logits_(rows_.logits), by_amx_(x, rows_) {
    ld_ = round_up(std::min(x.keys, KEY_TILE), PANEL) + 16;  // not a power of two, whose rows share cache sets
  }
  // Some queries of some batch rows of one head.
  void run(index h, Range batch, Range queries, index part, index split) {
    begin_head(h, part);
    // Larger tiles share packed keys among more queries; of few queries they leave threads idle.
    const index size = tile_of(x_, logits_.bucket_windows, x_.queries >= 768 ? 256 : 128);
    for (index b = batch.begin; b < batch.end; ++b) {
      begin_row(b, split);
      for (index i = queries.begin; i < queries.end; i += size)
        run_tile(i, std::min(size, queries.end - i));
    }
  }
  // Hooks of a head and of a batch row, with those of Backward: AllHeads calls either's.
  void begin_head(index h, index part) { logits_.begin_head(h, part); }
  void begin_row(index b, index split) {
    logits_.begin_row(b, split);
    by_amx_.begin_row();
  }
  void end_row() {}
  void end_head() {}
  Logits& logits() { return logits_; }
  void run_tile(index first, index n) {
    rows_.begin_tile(first, n);
    QueryTile& tile = logits_.tile;
    real* s = by_amx_.multiplies() ? nullptr : s_.of(round_up(n, AMX_TILE) * ld_);  // [n, ld]: logits, then weights
    tile.for_key_tiles(x_, x_.pairs.from_last(), [&] {
      if (x_.pairs.fades() && logits_.carried_out()) return;
      if (by_amx_.multiplies())
        logits_.begin_keys();
      else
        logits_.multiply(s, ld_);
      if (logits_.use_amx) return by_amx_.add_tile(s, ld_);
      for (index i = 0; i < n; ++i) softmax_row(i, s + i * ld_);
      tile.for_panels([&](index at, index keys, Range m) {
        logits_.v.add_weighted(tile, at, keys, m, s + at, ld_, rows_.output(0));
      });
    });
    rows_.end_tile();
  }

 private:
  // Logits of row i become weights.
  void softmax_row(index i, real* s) {
    const QueryTile& tile = logits_.tile;
    const Range visible = tile.visible_keys(i), all = tile.panel_keys();
    if (!visible.size()) return fill(s + all.begin, 0, all.size());
    if (logits_.term<Sticks>().present) return rows_.stick_row(i, s);
    logits_.add_terms(s, i, visible);
    const index from = visible.begin / VL * VL, to = round_up(visible.end, VL);
    vec m = splat(-INFINITY);
    for (index t = from; t < to; t += VL) {
      const vec v = masked(load(s + t), t, visible);
      store(s + t, v);
      m = larger(v, m);
    }
    rows_.raise_level(i, largest(m));
    const vec level = splat(rows_.finite_level(i));  // -inf - -inf would be NaN
    vec weight_sum{};
    for (index t = from; t < to; t += VL) {
      const vec p = exponential(load(s + t) - level);
      weight_sum += p;
      store(s + t, p);
    }
    rows_.add(i, weight_sum);
    rows_.drop(i, s, {from, to});  // after the sum: weights are normalized before dropout
    fill(s + all.begin, 0, from - all.begin);  // products are over whole panels
    fill(s + to, 0, all.end - to);
    rows_.collect(i, s, visible);
  }

  const Problem& x_;
  RowWeights rows_;
  Logits& logits_;
  AmxWeights by_amx_;
  index ld_;
  Scratch s_;
};
}  // namespace posenc
