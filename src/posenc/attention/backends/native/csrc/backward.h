// Gradients of all inputs: weights are recomputed from the lse of the forward pass, p = exp(s - lse),
// and ds = p (dp - delta), with dp = dO · v and delta = dO · O - dlse.
#pragma once
#include "logits.h"
namespace posenc::NUMBER {
// One thread's worker. dq is summed per tile of queries; dk and dv per batch row, over the tiles of
// queries in order; gradients of rows of buckets per head.
class Backward {
 public:
  explicit Backward(const Problem& x) : x_(x), logits_(x, true), registers_(logits_.use_amx) {
    ld_ = round_up(std::min(x.keys, KEY_TILE), PANEL) + 16;
    width_ = round_up(x.depth(), VL), value_width_ = round_up(x.value_dim, VL);
  }
  // Some queries of some batch rows of one head. part, split: where its share of gradients goes, of
  // those by bucket or offset and of those by key.
  void run(index h, Range batch, Range queries, index part, index split) {
    begin_head(h, part);
    const index size = tile_of(x_, logits_.bucket_windows, 128);
    for (index b = batch.begin; b < batch.end; ++b) {
      begin_row(b, split);
      for (index i = queries.begin; i < queries.end; i += size) run_tile(i, std::min(size, queries.end - i));
      end_row();
    }
    end_head();
  }
  void begin_head(index h, index part) { logits_.begin_head(h, part); }
  void end_head() {
    logits_.for_terms([&](auto& term) { term.end_head(logits_); });
  }
  Logits& logits() { return logits_; }
  void begin_row(index b, index split) { logits_.begin_row(b, split); }
  void end_row() {
    logits_.for_terms([&](auto& term) { term.end_row(logits_); });
    logits_.k.end_gradient();
    logits_.v.end_gradient();
    const TokenSums& dk = logits_.k.gradient;
    for (index j = 0; j < x_.keys && x_.rotated; ++j)
      rotate_back(x_, x_.k_rotary, logits_.b, logits_.group, j, dk.data + j * width_);
    dk.write();
    const Operand& factor = x_.terms.key_factor;
    if (factor) {
      const Tokens to = split_of(factor.gradient, factor.part_stride, logits_.split);
      dk.write(head_of(to, logits_.b, logits_.h), x_.dim, factor.features);
    }
    logits_.v.gradient.write();
  }
  void run_tile(index first, index n) {
    logits_.begin_tile(first, n);
    QueryTile& tile = logits_.tile;
    real* s = s_.of(round_up(n, AMX_TILE) * ld_);    // [n, ld]: logits, then weights
    real* ds = ds_.of(round_up(n, AMX_TILE) * ld_);  // [n, ld]: dp, then ds
    logits_.dq = dq_.of(round_up(n, AMX_DEPTH) * width_);
    fill(logits_.dq, 0, n * width_);
    const Factor& d_out = logits_.d_out;
    const Rows out = read_rows(x_.out, logits_.b, logits_.h, first, n, x_.value_dim, 1, out_scratch_);
    delta_ = delta_scratch_.of(n), logits_.levels = lse_ = lse_scratch_.of(n);
    for (index i = 0; i < n; ++i) {
      const index row = logits_.row(i);
      lse_[i] = x_.lse[row] == -INFINITY ? INFINITY : real(x_.lse[row] - logits_.row_shift(i));  // no weight
      delta_[i] = dot(d_out.rows.at(i), out.at(i), value_width_) - (x_.lse_gradient ? real(x_.lse_gradient[row]) : 0);
      if (x_.sinks)  // -inf, as an empty row's lse may then be, has no weight
        x_.sinks_gradient[row] =
            x_.sinks[row] > -INFINITY ? -std::exp(x_.sinks[row] - x_.lse[row]) * delta_[i] : 0;
    }
    const bool carries = x_.pairs.from_last();
    const index first_live_key = carries ? carry_over_tiles(s) : 0;
    tile.for_key_tiles(x_, false, [&] {
      if (tile.j0 < first_live_key) return;
      if (carries) logits_.carry.resume(tile.j0 / KEY_TILE);
      logits_.multiply(s, ld_);
      logits_.v.multiply(tile, d_out, ds, ld_);
      for (index i = 0; i < n; ++i) row_gradients(i, s + i * ld_, ds + i * ld_);
      if (logits_.precomputed.data) logits_.store_precomputed(ds, ld_);
      logits_.for_terms([&](auto& term) { term.collect_tile(logits_, ds, ld_); });
      tile.for_panels([&](index at, index keys, Range m) {
        if (x_.pairs.kind < MIXING) logits_.k.pull_back(tile, at, keys, m, logits_.q, ds + at, ld_, logits_.dq);
        logits_.v.pull_back(tile, at, keys, m, d_out, s + at, ld_, nullptr);
      });
    });
    if (x_.pairs.kind != MIXING) end_tile();
  }
  // dq and dk from ds [n, keys of all tiles] of the last tile of queries: for AllHeads.
  void add_logit_gradients(const real* ds, index ld) {
    QueryTile& tile = logits_.tile;
    tile.for_key_tiles(x_, false, [&] {
      tile.for_panels([&](index at, index keys, Range m) {
        logits_.k.pull_back(tile, at, keys, m, logits_.q, ds + tile.j0 + at, ld, logits_.dq);
      });
    });
    end_tile();
  }

 private:
  void end_tile() {
    const QueryTile& tile = logits_.tile;
    for (index i = 0; i < tile.rows; ++i) scale_range(logits_.dq + i * width_, real(x_.scale), x_.dim);
    logits_.for_terms([&](auto& term) { term.end_tile(logits_); });
    const index b = logits_.b, h = logits_.h;
    for (index i = 0; i < tile.rows; ++i) {
      real* d = logits_.dq + i * width_;
      rotate_back(x_, x_.q_rotary, b, h, tile.i0 + i, d);
      write_row(x_.dq, row_of(x_.dq, b, h, tile.i0 + i), d, 1, x_.dim);
      const Operand& factor = x_.terms.query_factor;
      if (factor) write_row(factor.gradient, row_of(factor.gradient, b, h, tile.i0 + i), d + x_.dim, 1, factor.features);
    }
  }
  // Compute what the logits of every tile take from later keys, from the last tile to the first. Returns
  // the first key whose tile has weights other than 0.
  index carry_over_tiles(real* s) {
    QueryTile& tile = logits_.tile;
    Carry& carry = logits_.carry;
    index first_live_key = 0;
    carry.begin(tile.rows, (x_.keys + KEY_TILE - 1) / KEY_TILE);
    tile.for_key_tiles(x_, true, [&] {
      carry.keep(tile.j0 / KEY_TILE);
      if (!x_.pairs.sums() || !logits_.carried_out()) return logits_.carry_over(s, ld_);
      if (x_.pairs.fades()) first_live_key = std::max(first_live_key, tile.j0 + KEY_TILE);
    });
    for (index i = 0; i < tile.rows && logits_.term<Sticks>().present; ++i) {
      const real remainder = Sticks::remainder(logits_, i);
      if (remainder == 0) continue;
      const index key = Sticks::own_key(logits_, i);
      const real* d_out = logits_.d_out.rows.at(i);
      add_scaled(logits_.v.gradient.data + key * value_width_, d_out, remainder, value_width_);
      carry.d_sums[i] = remainder * dot(d_out, logits_.v.rows.at(key), value_width_);
    }
    return first_live_key;
  }
  // s and dp of row i become p (after dropout) and ds; gradients of its terms are summed.
  void row_gradients(index i, real* s, real* ds) {
    const QueryTile& tile = logits_.tile;
    const Range visible = tile.visible_keys(i), all = tile.panel_keys();
    if (!visible.size()) {
      fill(s + all.begin, 0, all.size());
      return fill(ds + all.begin, 0, all.size());
    }
    if (logits_.term<Sticks>().present) return stick_row(i, s, ds);
    logits_.add_terms(s, i, visible);
    if (logits_.term<ValueBucketTerm>().present) logits_.term<ValueBucketTerm>().add_dp(logits_, i, visible, ds);
    const index from = visible.begin / VL * VL, to = round_up(visible.end, VL);
    const vec lse = splat(lse_[i]), delta = splat(delta_[i]), powers_lse = splat(lse_[i] * PER_LN_2);
    const auto weight = [&](vec x) {
      return logits_.use_amx ? power_of_two(x * PER_LN_2 - powers_lse) : exponential(x - lse);
    };
    // A single key's weight is 1 whatever its logit, but for a sink: dp - delta would leave a rounding error.
    const bool alone = !x_.global_lse && !x_.sinks && !x_.lse_gradient && tile.all_visible_keys(i).size() == 1;
    const ivec single_key = alone ? ~ivec{} : ivec{};
    const uint32_t seed = logits_.dropout.row_seed(logits_.row(i));
    for (index t = from; t < to; t += VL) {
      const vec logits = load(s + t), p = weight(masked(logits, t, visible));
      vec dp = load(ds + t), dropped = p;
      if (x_.dropout > 0) {
        const vec factor = logits_.dropout.at(seed, tile.j0 + t);
        dp *= factor, dropped *= factor;
      }
      const ivec no_gradient = single_key | (p == 0);  // dp of hidden keys may be anything, also NaN
      store(s + t, dropped);
      const vec d = p * (dp - delta);
      store(ds + t, no_gradient ? vec{} : x_.softcap ? d * logits_.cap_slope(logits) : d);
    }
    for (real* x : {s, ds}) {
      fill(x + all.begin, 0, from - all.begin);
      fill(x + to, 0, all.end - to);
    }
    logits_.for_terms([&](auto& term) { term.collect(logits_, i, visible, s, ds); });
  }
  // The same by stick breaking, which has no lse: ds of log p first, then of the logits.
  void stick_row(index i, real* s, real* ds) {
    const QueryTile& tile = logits_.tile;
    Sticks& sticks = logits_.term<Sticks>();
    const Range all = tile.panel_keys(), keys = sticks.weigh(logits_, i, s);
    const uint32_t seed = logits_.dropout.row_seed(logits_.row(i));
    fill(ds + all.begin, 0, keys.begin - all.begin);
    for (index t = keys.begin; t < keys.end; t += VL) {
      const vec weight = load(s + t);
      const vec factor = x_.dropout > 0 ? logits_.dropout.at(seed, tile.j0 + t) : splat(1);
      store(ds + t, weight == 0 ? vec{} : weight * factor * load(ds + t));
      store(s + t, weight * factor);
    }
    fill(ds + keys.end, 0, all.end - keys.end);
    sticks.pull_back(ds, keys, logits_.carry.d_sums[i]);
  }

  const Problem& x_;
  index ld_, width_, value_width_;
  Logits logits_;
  AmxTiles registers_;
  Scratch s_, ds_, dq_, out_scratch_, delta_scratch_, lse_scratch_;
  real *delta_ = nullptr, *lse_ = nullptr;
};
}  // namespace posenc
