// Output and log-sum-exp (lse), by online softmax over tiles of keys.
#pragma once
#include "amx_weights.h"
namespace posenc::NUMBER {
// One thread's worker: a tile of queries after another, each over the tiles of keys visible to it.
class Forward : public RowWeights {
 public:
  explicit Forward(const Problem& problem) : RowWeights(problem), by_amx_(*this) {
    ld_ = round_up(std::min(x.keys, KEY_TILE), PANEL) + 16;  // not a power of two, whose rows share cache sets
  }
  void run_tile(index first, index n) {
    begin_outputs(first, n);
    real* s = by_amx_.multiplies() ? nullptr : s_.of(round_up(n, AMX_TILE) * ld_);  // [n, ld]: logits, then weights
    tile.for_key_tiles(x, x.pairs.from_last(), [&] {
      if (x.pairs.fades() && carried_out()) return;
      if (by_amx_.multiplies())
        begin_keys();
      else
        multiply(s, ld_);
      if (use_amx) return by_amx_.add_tile(s, ld_);
      for (index i = 0; i < n; ++i) softmax_row(i, s + i * ld_);
      tile.for_panels([&](index at, index keys, Range m) {
        v.add_weighted(tile, at, keys, m, s + at, ld_, output(0));
      });
    });
    end_outputs();
  }

 private:
  // Logits of row i become weights.
  void softmax_row(index i, real* s) {
    const Range visible = tile.visible_keys(i), all = tile.panel_keys();
    if (!visible.size()) return fill(s + all.begin, 0, all.size());
    if (term<Sticks>().present) return stick_row(i, s);
    add_terms(s, i, visible);
    const index from = visible.begin / VL * VL, to = round_up(visible.end, VL);
    vec m = splat(-INFINITY);
    for (index t = from; t < to; t += VL) {
      const vec logits = masked(load(s + t), t, visible);
      store(s + t, logits);
      m = larger(logits, m);
    }
    raise_level(i, largest(m));
    const vec level = splat(finite_level(i));  // -inf - -inf would be NaN
    vec weight_sum{};
    for (index t = from; t < to; t += VL) {
      const vec p = exponential(load(s + t) - level);
      weight_sum += p;
      store(s + t, p);
    }
    add(i, weight_sum);
    drop(i, s, {from, to});  // after the sum: weights are normalized before dropout
    fill_outside(s, all, {from, to});  // products are over whole panels
    collect(i, s, visible);
  }

  AmxWeights by_amx_;
  index ld_;
  Scratch s_;
};
}  // namespace posenc
