// Gradients of all inputs: weights are recomputed from the lse of the forward pass, p = exp(s - lse),
// and ds = p (dp - delta), with dp = dO · v and delta = dO · O - dlse.
#pragma once
#include "logits.h"
namespace posenc::NUMBER {
// One thread's worker. dq is summed per tile of queries; dk and dv per batch row, over the tiles of
// queries in order; gradients of rows of buckets per head.
class Backward : public Logits {
 public:
  explicit Backward(const Problem& problem) : Logits(problem, true), registers_(use_amx) {
    ld_ = round_up(std::min(x.keys, KEY_TILE), PANEL) + 16;
    width_ = round_up(x.depth(), VL), value_width_ = round_up(x.value_dim, VL);
  }
  void run_tile(index first, index n) {
    begin_tile(first, n);
    real* s = s_.of(round_up(n, AMX_TILE) * ld_);    // [n, ld]: logits, then weights
    real* ds = ds_.of(round_up(n, AMX_TILE) * ld_);  // [n, ld]: dp, then ds
    dq = dq_.of(round_up(n, AMX_DEPTH) * width_);
    fill(dq, 0, n * width_);
    const Rows out = read_rows(x.out, b, h, first, n, x.value_dim, 1, out_scratch_);
    delta_ = delta_scratch_.of(n), levels = levels_scratch_.of(n);
    for (index i = 0; i < n; ++i) {
      const index at = row(i);
      levels[i] = x.lse[at] == -INFINITY ? INFINITY : real(x.lse[at] - row_shift(i));  // no weight
      delta_[i] = dot(d_out.rows.at(i), out.at(i), value_width_) - (x.lse_gradient ? real(x.lse_gradient[at]) : 0);
      if (x.sinks)  // -inf, as an empty row's lse may then be, has no weight
        x.sinks_gradient[at] =
            x.sinks[at] > -INFINITY ? -std::exp(x.sinks[at] - x.lse[at]) * delta_[i] : 0;
    }
    const bool carries = x.pairs.from_last();
    const index first_live_key = carries ? carry_over_tiles(s) : 0;
    tile.for_key_tiles(x, false, [&] {
      if (tile.j0 < first_live_key) return;
      if (carries) carry.resume(tile.j0 / KEY_TILE);
      multiply(s, ld_);
      v.multiply(tile, d_out, ds, ld_);
      for (index i = 0; i < n; ++i) row_gradients(i, s + i * ld_, ds + i * ld_);
      if (precomputed) copy_tile(ds, ld_, precomputed + tile.j0, precomputed_ld);
      for_terms([&](auto& term) { term.collect_tile(*this, ds, ld_); });
      tile.for_panels([&](index at, index keys, Range m) {
        if (x.pairs.kind < MIXING) k.pull_back(tile, at, keys, m, q, ds + at, ld_, dq);
        v.pull_back(tile, at, keys, m, d_out, s + at, ld_, nullptr);
      });
    });
    if (x.pairs.kind != MIXING) end_tile();
  }
  // dq and dk from ds [n, keys of all tiles] of the last tile of queries: for AllHeads.
  void add_logit_gradients(const real* ds, index ld) {
    tile.for_key_tiles(x, false, [&] {
      tile.for_panels([&](index at, index keys, Range m) {
        k.pull_back(tile, at, keys, m, q, ds + tile.j0 + at, ld, dq);
      });
    });
    end_tile();
  }

 private:
  void end_tile() {
    for (index i = 0; i < tile.rows; ++i) scale_range(dq + i * width_, real(x.scale), x.dim);
    for_terms([&](auto& term) { term.end_tile(*this); });
    for (index i = 0; i < tile.rows; ++i) {
      real* d = dq + i * width_;
      rotate_factor(x, x.q_rotary, b, h, tile.i0 + i, d, -1);
      write_row(x.dq, row_of(x.dq, b, h, tile.i0 + i), d, 1, x.dim);
      const Operand& factor = x.terms.query_factor;
      if (factor) write_row(factor.gradient, row_of(factor.gradient, b, h, tile.i0 + i), d + x.dim, 1, factor.features);
    }
  }
  // Compute what the logits of every tile take from later keys, from the last tile to the first. Returns
  // the first key whose tile has weights other than 0.
  index carry_over_tiles(real* s) {
    index first_live_key = 0;
    carry.begin(tile.rows, (x.keys + KEY_TILE - 1) / KEY_TILE);
    tile.for_key_tiles(x, true, [&] {
      carry.keep(tile.j0 / KEY_TILE);
      if (!x.pairs.sums() || !carried_out()) return carry_over(s, ld_);
      if (x.pairs.fades()) first_live_key = std::max(first_live_key, tile.j0 + KEY_TILE);
    });
    for (index i = 0; i < tile.rows && term<Sticks>().present; ++i) {
      const real remainder = Sticks::remainder(*this, i);
      if (remainder == 0) continue;
      const index key = Sticks::own_key(*this, i);
      add_scaled(v.gradient.data + key * value_width_, d_out.rows.at(i), remainder, value_width_);
      carry.d_sums[i] = remainder * dot(d_out.rows.at(i), v.rows.at(key), value_width_);
    }
    return first_live_key;
  }
  // s and dp of row i become p (after dropout) and ds; gradients of its terms are summed.
  void row_gradients(index i, real* s, real* ds) {
    const Range visible = tile.visible_keys(i), all = tile.panel_keys();
    if (!visible.size()) {
      fill(s + all.begin, 0, all.size());
      return fill(ds + all.begin, 0, all.size());
    }
    if (term<Sticks>().present) return stick_row(i, s, ds);
    add_terms(s, i, visible);
    if (term<ValueBucketTerm>().present) term<ValueBucketTerm>().add_dp(*this, i, visible, ds);
    const index from = visible.begin / VL * VL, to = round_up(visible.end, VL);
    const vec lse = splat(levels[i]), delta = splat(delta_[i]), powers_lse = splat(levels[i] * PER_LN_2);
    const auto weight = [&](vec logits) {
      return use_amx ? power_of_two(logits * PER_LN_2 - powers_lse) : exponential(logits - lse);
    };
    // A single key's weight is 1 whatever its logit, but for a sink: dp - delta would leave a rounding error.
    const bool alone = !x.global_lse && !x.sinks && !x.lse_gradient && tile.all_visible_keys(i).size() == 1;
    const ivec single_key = alone ? ~ivec{} : ivec{};
    const uint32_t seed = dropout.row_seed(row(i));
    for (index t = from; t < to; t += VL) {
      const vec logits = load(s + t), p = weight(masked(logits, t, visible));
      vec dp = load(ds + t), dropped = p;
      if (x.dropout > 0) {
        const vec factor = dropout.at(seed, tile.j0 + t);
        dp *= factor, dropped *= factor;
      }
      const ivec no_gradient = single_key | (p == 0);  // dp of hidden keys may be anything, also NaN
      store(s + t, dropped);
      const vec d = p * (dp - delta);
      store(ds + t, no_gradient ? vec{} : x.softcap ? d * cap_slope(logits) : d);
    }
    fill_outside(s, all, {from, to});
    fill_outside(ds, all, {from, to});
    for_terms([&](auto& term) { term.collect(*this, i, visible, s, ds); });
  }
  // The same by stick breaking, which has no lse: ds of log p first, then of the logits.
  void stick_row(index i, real* s, real* ds) {
    Sticks& sticks = term<Sticks>();
    const Range all = tile.panel_keys(), keys = sticks.weigh(*this, i, s);
    const uint32_t seed = dropout.row_seed(row(i));
    fill_outside(ds, all, keys);
    for (index t = keys.begin; t < keys.end; t += VL) {
      const vec weight = load(s + t);
      const vec factor = x.dropout > 0 ? dropout.at(seed, tile.j0 + t) : splat(1);
      store(ds + t, weight == 0 ? vec{} : weight * factor * load(ds + t));
      store(s + t, weight * factor);
    }
    sticks.pull_back(ds, keys, carry.d_sums[i]);
  }

  index ld_, width_, value_width_;
  AmxTiles registers_;
  Scratch s_, ds_, dq_, out_scratch_, delta_scratch_, levels_scratch_;
  real* delta_ = nullptr;
};
}  // namespace posenc
